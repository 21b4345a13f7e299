"""How pieces get into memory and are proven there, without an engine."""

from types import SimpleNamespace

import pytest
import torch
from resharder.client.inference.vllm.host import VLLMHost
from resharder.client.inference.worker import memory
from resharder.client.inference.worker.memory import Fault
from resharder.client.inference.worker.sleep_backup import gaps
from resharder.converters.geometry.layout import Piece, full_box

from tests.support.moe_pieces import moe_pieces


@pytest.mark.parametrize("as_device", [False, True])
def test_pieces_lie_where_they_belong_and_their_digests_are_the_stores(monkeypatch: pytest.MonkeyPatch, as_device: bool) -> None:
    """`as_device`: what is done where the memory is a GPU's, done on the CPU."""
    if as_device:
        monkeypatch.setattr(memory, "_on_host", lambda tensor: False)
    live, pieces, source, wanted = moe_pieces("cpu")
    host = VLLMHost(SimpleNamespace(parallel_config=SimpleNamespace(world_size=1)), torch.device("cpu"), 0)
    for fault, wrong in ((Fault("skip", (pieces[7].tensor,)), {pieces[7].tensor}), (Fault(), set())):
        written = memory.write_all(host, live, pieces, source, fault)
        assert {p.tensor for p, found in written if found != source.expected[p.tensor, p.box]} == wrong
    assert torch.equal(live["w13"], wanted)
    assert memory.read_all(live, pieces, source.specs) == [source.expected[p.tensor, p.box] for p in pieces]


def test_what_pieces_leave_out_of_a_tensor_is_found_as_runs_of_elements() -> None:
    row = full_box((2, 4))
    rows, columns = [Piece("t", row, "p", offset, (4, 1)) for offset in (16, 0)], [Piece("t", row, "p", 0, (6, 1))]
    assert gaps(rows, 24) == [(8, 16)]
    assert gaps(rows, 30) == [(8, 16), (24, 30)]
    assert gaps(rows[1:], 8) == []
    assert gaps(columns, 12) == [(0, 12)], "two rows of four in a tensor with rows of six"
    assert gaps([*columns, Piece("t", full_box((2, 2)), "p", 4, (6, 1))], 12) == []
    assert gaps([], 5) == [(0, 5)]
