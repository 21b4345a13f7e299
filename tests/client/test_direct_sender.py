"""A rank's side of the direct path where it cannot take part, or waits in vain."""

import threading

import pytest
import torch
from resharder.client.direct import sender
from resharder.client.rpc.channel import Channel
from resharder.converters.geometry.layout import Layout, Piece, TensorSpec, full_box
from resharder.v1 import direct_pb2

from tests.support.daemon import Daemon
from tests.support.observing import wait_until
from tests.support.publishing import Job, whole


def test_a_rank_without_memory_for_packing_says_so_and_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    finished: list[tuple[str, str]] = []
    monkeypatch.setattr(sender, "finish", lambda channel, member, group, error: finished.append((group, error)))
    monkeypatch.setattr(sender, "TransferLink", lambda channel, message, device, sources, memory: memory(message.staging_bytes))
    layout = Layout({"w": TensorSpec("w", "F32", (4,))}, (Piece("w", full_box((4,)), "w", 0, (1,)),))
    with Channel("127.0.0.1:1") as channel:
        rank = sender.Sender(channel, 0, layout, {"w": torch.zeros(4)})
        rank._meet(direct_pb2.Member(owner="p", process="x"), direct_pb2.DirectLink(group="g", size=2, staging_bytes=1 << 60))
        wait_until(lambda: finished, "it is said")
    ((group, error),) = finished
    assert group == "g"
    assert "memory" in error


def test_an_offer_of_a_version_that_another_rank_never_delivers_ends_in_bounded_time() -> None:
    specs = [TensorSpec("w", "F32", (4,)), TensorSpec("v", "F32", (4,))]
    layout = Layout({"w": specs[0]}, (Piece("w", full_box((4,)), "w", 0, (1,)),))
    with Daemon() as daemon, Channel(daemon.endpoint) as channel:
        job = Job(daemon.channel, specs, [whole(specs[:1]), whole(specs[1:])]).connect()
        version = job.begin(1)
        rank = sender.Sender(channel, 0, layout, {"w": torch.zeros(4)})
        rank.declare(job.name)
        offering = rank.offer(job.name, version.name, 1.0)
        waiting = threading.Thread(target=offering.wait, args=(2.0,), daemon=True)
        waiting.start()
        waiting.join(60)
        assert not waiting.is_alive()
        assert job.wait(version.name, 0).state == version.UPLOADING
        rank.close()
