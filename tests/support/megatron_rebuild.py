"""A checkpoint through the ranks of a world and back, in one process."""

from collections.abc import Callable
from typing import Any

from tests.support import fakepg, tiny_hf
from tests.support.megatron_models import build_model, fill_from_hf
from tests.support.weights import random_weights

# isort: split
import torch
from resharder.converters.models.megatron.layout import local_pieces

Checkpoint = dict[str, torch.Tensor]
Chunks = list[torch.nn.Module]
Model = tuple[dict[str, Any], Checkpoint]
"""A config and the weights of its checkpoint."""


def model_of(family: str, **changes: Any) -> Model:
    """A tiny model of a family, with random weights."""
    config = tiny_hf.tiny_config(family, **changes)
    return config, random_weights(config, 1)


def rebuild(
    model: Model, world: int, change: Callable[[Chunks], Chunks] = lambda chunks: chunks, **layout: Any
) -> tuple[Checkpoint, dict[str, torch.Tensor]]:
    """The checkpoint as all ranks' pieces give it, and how often each element was given. Padding holds NaN."""
    config, checkpoint = model
    full = {name: torch.zeros_like(tensor) for name, tensor in checkpoint.items()}
    times = {name: torch.zeros(tensor.shape, dtype=torch.int32) for name, tensor in checkpoint.items()}
    for rank in range(world):
        fakepg.enter(rank, world)
        chunks = change(build_model(config, **layout))
        fill_from_hf(chunks, config, checkpoint, padding=float("nan"))
        for name, index, tensor in local_pieces(chunks, config):
            full[name][index] = tensor
            times[name][index] += 1
    return full, times


def assert_rebuilt(model: Model, result: tuple[Checkpoint, dict[str, torch.Tensor]], dtype: torch.dtype = torch.float32) -> None:
    full, times = result
    assert [name for name, count in times.items() if not bool((count == 1).all())] == []
    assert [name for name, tensor in model[1].items() if not torch.equal(full[name], tensor.to(dtype).to(tensor.dtype))] == []
