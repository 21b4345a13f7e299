"""Ranks on emulated hosts that train a tiny model which vLLM loads, with values of its config's random weights."""

from collections.abc import Sequence
from typing import ClassVar

import torch

from tests.support.home_rank import Ranks
from tests.support.tiny_hf import tiny_config
from tests.support.weights import random_weights


class ModelRanks(Ranks):
    """The role."""

    preloaded: ClassVar[Sequence[str]] = ("tests.support.model_ranks",)
    config = tiny_config("qwen3_tied", dtype="float32")
    dtype = torch.float32

    @staticmethod
    def weights(name: str, shape: Sequence[int], step: int) -> torch.Tensor:
        """The values of a tensor of a step."""
        found = random_weights(ModelRanks.config, step)[name]
        assert list(found.shape) == list(shape)
        return found
