"""A rank's side of the direct path where it cannot take part."""

import pytest
import torch
from resharder.client.channel import Channel
from resharder.client.direct import sender
from resharder.converters.layout import Layout, Piece, TensorSpec, full_box
from resharder.v1 import direct_pb2


def test_a_rank_without_memory_for_packing_says_so_and_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[str, str]] = []
    monkeypatch.setattr(sender, "finish", lambda channel, member, group, error: said.append((group, error)))
    layout = Layout({"w": TensorSpec("w", "F32", (4,))}, (Piece("w", full_box((4,)), "w", 0, (1,)),))
    with Channel("127.0.0.1:1") as channel:
        rank = sender.Sender(channel, 0, layout, {"w": torch.zeros(4)})
        rank._meet(direct_pb2.Member(owner="p", process="x"), direct_pb2.DirectLink(group="g", size=2, staging_bytes=1 << 60))
    ((group, error),) = said
    assert group == "g"
    assert "memory" in error
