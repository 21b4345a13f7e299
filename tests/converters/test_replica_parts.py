"""Of real Megatron layouts each server takes from ranks that no other server takes from, as long as there are replicas."""

import pytest

from tests.support import megatron_shim, tiny_hf  # noqa: F401

# isort: split
import torch
from resharder.converters.geometry.copy_table import with_fewer_pairs
from resharder.converters.geometry.piece_arrays import pack
from resharder.converters.geometry.plan import plan_pieces
from resharder.converters.models.megatron.worlds import Parallel, world_layouts

pytestmark = pytest.mark.compat("layouts")


@pytest.mark.parametrize(
    ("family", "trainer", "parts"),
    [
        ("qwen3_tied", Parallel(8, tp=2, pp=2), 2),  # the first and the last stage hold the embedding
        ("qwen3", Parallel(8, tp=2), 4),
        ("qwen3_moe", Parallel(8, ep=4), 2),  # eight ranks hold what is dense, two each expert
        ("qwen3_moe", Parallel(16, tp=2, pp=2, ep=2), 4),
        ("qwen3_moe", Parallel(8, ep=8), 1),
        ("half_dense", Parallel(16, pp=2, ep=2), 4),  # eight ranks hold all of the first stage, four each expert of the second
    ],
)
def test_servers_have_ranks_of_their_own(family: str, trainer: Parallel, parts: int) -> None:
    half = {"mlp_only_layers": [0, 1]} if family == "half_dense" else {}
    config = tiny_hf.tiny_config("qwen3_moe" if half else family, **half)
    sources, server = (pack(dict(world_layouts(config, of, dtype=torch.bfloat16))) for of in (trainer, Parallel(1)))
    plans = [plan_pieces(sources, server, number) for number in range(parts + 1)]
    senders = [set(found.sources.process[with_fewer_pairs(found).have].tolist()) for found in plans]
    assert [found.parts for found in plans] == [parts] * (parts + 1)
    assert senders[0] == senders[-1]
    assert sum(map(len, senders[:-1])) == len(set().union(*senders)) == trainer.world
    assert {int(found.received.sum()) for found in plans} == {int(plan_pieces(sources, server).received.sum())}
