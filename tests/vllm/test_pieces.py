"""How pieces get into memory and are proven there, without an engine."""

from types import SimpleNamespace

import pytest
import torch
from resharder.client.vllm import install
from resharder.client.vllm.compat import Host
from resharder.client.vllm.install import Fault

from tests.support.moe_pieces import moe_pieces


@pytest.mark.parametrize("as_device", [False, True])
def test_pieces_lie_where_they_belong_and_their_digests_are_the_stores(monkeypatch: pytest.MonkeyPatch, as_device: bool) -> None:
    """`as_device`: what is done where the memory is a GPU's, done on the CPU."""
    if as_device:
        monkeypatch.setattr(install, "_on_host", lambda tensor: False)
    live, pieces, source, wanted = moe_pieces("cpu")
    host = Host(SimpleNamespace(parallel_config=SimpleNamespace(world_size=1)), torch.device("cpu"), 0)
    for fault, wrong in ((Fault("skip", (pieces[7].tensor,)), {pieces[7].tensor}), (Fault(), set())):
        written = install._write_all(host, live, pieces, source, fault)
        assert {p.tensor for p, found in written if found != source.expected[p.tensor, p.box]} == wrong
    assert torch.equal(live["w13"], wanted)
    assert install._read_all(live, pieces, source.specs) == [source.expected[p.tensor, p.box] for p in pieces]
