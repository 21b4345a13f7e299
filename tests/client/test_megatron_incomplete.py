"""Models that are not what their config says, rank by rank as a trainer registers them with a real daemon: refused by the name of
what is missing or differs, whichever rank should have held it."""

import copy
from typing import Any

import pytest

from tests.support import fakepg
from tests.support.megatron_models import build_model

# isort: split
import torch
from resharder.client.errors import LayoutRejected
from resharder.client.trainer.connect import connect
from resharder.converters.errors import LayoutError

from tests.support.daemon import Daemon
from tests.support.observing import versions
from tests.support.tiny_hf import tiny_config

pytestmark = pytest.mark.compat("refusals")

CONFIG = tiny_config("qwen3", vocab_size=203)
TIED = tiny_config("qwen3_tied", vocab_size=203)


def register(daemon: Daemon, model: str, config: dict[str, Any], ranks: list[list[torch.nn.Module]]) -> str:
    """What the daemon says when all ranks have attached."""
    publishers = [connect(daemon.endpoint, model=model, job="j", rank=rank, world_size=len(ranks)) for rank in range(len(ranks))]
    try:
        for rank, (publisher, chunks) in enumerate(zip(publishers, ranks, strict=True)):
            fakepg.enter(rank, len(ranks))
            build_model(config, pp=len(ranks))  # for the groups of this rank, which its layout asks
            if rank < len(ranks) - 1:
                publisher.attach(chunks, config, wait=False)
        with pytest.raises(LayoutRejected) as refused:
            publishers[-1].attach(ranks[-1], config)
        return str(refused.value)
    finally:
        for publisher in publishers:
            publisher.close()


def build(rank: int, world: int, config: dict[str, Any], **layout: Any) -> list[torch.nn.Module]:
    fakepg.enter(rank, world)
    return build_model(config, pp=world, **layout)


def test_a_pipeline_stage_that_lacks_a_layer_registers_no_smaller_model(daemon: Daemon) -> None:
    ranks = [build(rank, 2, CONFIG) for rank in range(2)]
    stage: Any = ranks[1][0]
    del stage.decoder.layers[1]
    message = register(daemon, "forgotten-layer", CONFIG, ranks)
    assert "model.layers.3.self_attn.q_proj.weight [256, 128] is held by no rank" in message
    assert "and 3 more" in message, "of the layer's eleven tensors eight are shown"
    assert versions(daemon) == {}


def refused_at_once(daemon: Daemon, model: str, config: dict[str, Any], chunks: list[torch.nn.Module]) -> str:
    """The refusal of a rank's own attach, which the daemon hears nothing of."""
    with (
        connect(daemon.endpoint, model=model, job="j", rank=0, world_size=1) as publisher,
        pytest.raises(LayoutError) as refused,
    ):
        publisher.attach(chunks, config)
    return str(refused.value)


def test_a_model_with_fewer_layers_than_its_config_is_refused(daemon: Daemon) -> None:
    fewer = copy.deepcopy(CONFIG) | {"num_hidden_layers": 2, "layer_types": CONFIG["layer_types"][:2]}
    message = refused_at_once(daemon, "fewer-layers", CONFIG, build(0, 1, fewer))
    assert "num_hidden_layers is 4 in the config, the model has num_layers=2" in message


def test_a_tied_model_is_refused_where_the_config_has_a_head_of_its_own(daemon: Daemon) -> None:
    message = refused_at_once(daemon, "tied", CONFIG, build(0, 1, TIED))
    assert "tie_word_embeddings is False in the config" in message
