"""A rank's side of the direct path: what it does when, where it cannot take part, and where it waits in vain."""

import queue
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import torch
from resharder.client import tracing
from resharder.client.direct import sender
from resharder.client.direct.base import DirectFailed, reason_of
from resharder.client.direct.links import TransferLink, TransferLinks
from resharder.client.direct.transfer import Seconds
from resharder.client.errors import Refused
from resharder.client.rpc.channel import Channel
from resharder.client.trainer.delivery import Delivery
from resharder.client.transport.base import AssignedSlot
from resharder.converters.geometry.layout import Layout, Piece, TensorSpec, full_box
from resharder.converters.geometry.piece_arrays import pack
from resharder.converters.wire.direct import layout_to_proto
from resharder.v1 import direct_pb2, resources_pb2

from tests.support.daemon import Daemon
from tests.support.observing import wait_until
from tests.support.publishing import Job, whole


def test_a_rank_without_memory_for_packing_says_so_and_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    finished: list[tuple[str, str]] = []
    monkeypatch.setattr(sender, "finish", lambda channel, member, group, error: finished.append((group, error)))
    monkeypatch.setattr(
        sender, "TransferLink", lambda channel, message, device, sources, memory, nixl: memory(message.staging_bytes)
    )
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


LAYOUT = Layout({"w": TensorSpec("w", "F32", (4,))}, (Piece("w", full_box((4,)), "w", 0, (1,)),))


class Stream:
    """Tasks, those of a queue until None."""

    def __init__(self, tasks: "list[direct_pb2.DirectTask] | queue.Queue[direct_pb2.DirectTask | None]") -> None:
        self._tasks = tasks

    def __iter__(self) -> Iterator[direct_pb2.DirectTask]:
        if isinstance(self._tasks, list):
            return iter(self._tasks)
        return iter(self._tasks.get, None)  # type: ignore[arg-type]

    def cancel(self) -> None: ...


class Rank:
    """A rank whose tasks are given, and what it does of them in order."""

    shares_device, fails = True, False

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, refused: bool = False) -> None:
        self.done: list[str] = []
        self.refused = refused
        monkeypatch.setattr(sender, "finish", self.finish)
        unused = grpc.insecure_channel("127.0.0.1:1")
        channel: Any = SimpleNamespace(grpc=unused, begin=self.begin, stream=iter, call=self.call)
        self.sender = sender.Sender(channel, 0, LAYOUT, {"w": torch.arange(4.0)})
        self.sender._links = links = SimpleNamespace(  # type: ignore[assignment]
            get=lambda group: self, prepare=lambda failed: None, drop=lambda group: self.done.append("drop")
        )
        self.links = links
        self.tasks: Any = []

    def offered(self, **options: Any) -> "tuple[queue.Queue[direct_pb2.DirectTask | None], threading.Event]":
        """Offer a version and deliver it. Return its tasks, and what is set when the delivery has begun."""
        self.tasks, self.done = queue.Queue(), []
        offering, begun = (
            self.sender.offer("p", "v/2", 2.0, **{"ahead_only": True, **options}),
            threading.Event(),
        )

        def deliver() -> None:
            offering.hold.wait()
            self.done.append("delivery")
            begun.set()

        threading.Thread(target=deliver, daemon=True).start()
        return self.tasks, begun

    def serve(self, version: str, *tasks: direct_pb2.DirectTask) -> list[str]:
        self.tasks, self.done = list(tasks), []
        request = direct_pb2.OfferVersionRequest(member=direct_pb2.Member(owner="p", process="x"), version=version)
        self.sender.serve(request, [], sender.Hold())
        return self.done

    def begin(self, method: Any, request: Any) -> Any:
        return Stream(self.tasks)

    def run(self, meanwhile: Any, kept: bool) -> Seconds:
        if self.fails:
            raise DirectFailed("a worker is gone")
        self.done.append("posted")
        if meanwhile is not None:
            meanwhile()
        self.done.append("sent")
        return Seconds(0.0, 0.0, 0.0, 0.0)

    def call(self, method: Any, request: direct_pb2.PutDigestsRequest, **options: Any) -> None:
        self.done.append(f"digests of {request.version}: {len(request.digests)}")
        if self.refused:
            raise Refused("group g is over")

    def finish(self, channel: Any, member: Any, group: str, error: str = "", **options: Any) -> None:
        self.done.append(f"failed: {error}" if error else "finished")


SENT = layout_to_proto(pack({0: LAYOUT}))
RUN = direct_pb2.DirectTask(kind=direct_pb2.DirectTask.RUN, group="g")
DIGEST = direct_pb2.DirectTask(kind=direct_pb2.DirectTask.DIGEST, group="g", during_transfer=True)
AT_ONCE = direct_pb2.DirectTask(kind=direct_pb2.DirectTask.DIGEST, group="g")
FIRST = direct_pb2.DirectTask(kind=direct_pb2.DirectTask.DIGEST, group="g", during_transfer=True, sent=SENT)


def test_digests_are_reported_once_the_boxes_are_posted_and_before_the_transfer_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch)
    assert rank.serve("v/1", FIRST, RUN) == ["posted", "digests of v/1: 1", "sent", "finished"]
    assert rank.serve("v/2", DIGEST, RUN, RUN) == [
        "posted",
        "digests of v/2: 1",
        "sent",
        "finished",
        "posted",
        "sent",
        "finished",
    ]
    assert rank.serve("v/3", DIGEST) == [], "no transfer has begun"
    assert rank.serve("v/4", RUN) == ["posted", "sent", "finished"], "nobody has asked for those of this version"


def test_a_daemon_that_does_not_say_during_the_transfer_gets_digests_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = direct_pb2.DirectTask(kind=direct_pb2.DirectTask.DIGEST, group="g", sent=SENT)
    done = Rank(monkeypatch).serve("v/1", at_once, RUN)
    assert done == ["digests of v/1: 1", "posted", "sent", "finished"]


def test_a_transfer_whose_digests_cannot_be_reported_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch, refused=True)
    assert rank.serve("v/1", FIRST, RUN) == [
        "posted", "digests of v/1: 1", "drop", "failed: the digests of v/1 could not be reported: group g is over",
    ]  # fmt: skip


def test_boxes_that_are_not_in_memory_are_noticed_before_the_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch)
    rank.sender._tensors = {"w": torch.zeros(2)}
    done = rank.serve("v/1", FIRST)
    assert done[0] == "drop"
    assert "a box ends outside of w" in done[1]


class NoCompiler:
    """Digests whose kernels do not compile."""

    def prepare(self, tensors: object) -> None:
        raise FileNotFoundError("no compiler for kernels")

    digests = prepare


@pytest.mark.parametrize("tasks", [(DIGEST, RUN), (AT_ONCE, RUN)], ids=["with the transfer", "at once"])
def test_whatever_fails_in_a_task_is_the_reason_and_the_offer_goes_on(
    tasks: tuple[direct_pb2.DirectTask, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(monkeypatch)
    rank.sender._sent["g"] = NoCompiler()  # type: ignore[assignment]
    done = rank.serve("v/1", *tasks)
    assert done == ["drop", "failed: FileNotFoundError: no compiler for kernels", "posted", "sent", "finished"]


def test_whatever_fails_while_a_link_is_made_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    links, failed = TransferLinks({}, torch.device("cpu")), queue.Queue[tuple[str, Exception]]()

    def make() -> TransferLink:
        raise FileNotFoundError("no compiler for kernels")

    links.meet("g", make, lambda group, error: failed.put((group, error)))
    group, error = failed.get(timeout=60)
    assert (group, reason_of(error)) == ("g", "FileNotFoundError: no compiler for kernels")
    with pytest.raises(DirectFailed, match="no link of group g"):
        links.get("g")


DROP = direct_pb2.DirectTask(kind=direct_pb2.DirectTask.DROP, group="g")
ENDS = {"the worker has it": RUN, "the transfer fails": RUN, "the group ends": DROP, "nobody takes it": None}


@pytest.mark.parametrize("end", ENDS)
def test_the_delivery_begins_when_the_worker_on_this_device_has_the_version_or_will_not_take_it(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "_HELD", 600.0)
    rank = Rank(monkeypatch)
    rank.serve("v/1", FIRST, RUN)
    rank.sender._took = {"g": 300.0}
    tasks, begun = rank.offered()
    tasks.put(DIGEST)
    assert not begun.wait(0.2)
    rank.fails = end == "the transfer fails"
    tasks.put(ENDS[end])
    assert begun.wait(60)
    assert rank.done[: rank.done.index("delivery")] in (
        ["posted", "digests of v/2: 1", "sent"], ["posted", "digests of v/2: 1", "sent", "finished"], ["drop"],
        ["drop", "failed: a worker is gone"], [],
    )  # fmt: skip
    tasks.put(None)


def test_the_delivery_is_held_no_longer_than_twice_the_time_that_the_last_version_took(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch)
    rank.serve("v/1", FIRST, RUN)
    assert 0 < rank.sender._took["g"] < 60
    for took, bound in ((0.1, 0.2), (100.0, sender._HELD)):
        hold = sender.Hold({"g": took})
        began = time.monotonic()
        hold.wait()
        assert bound <= time.monotonic() - began < bound + 1


NOT_HELD: dict[str, tuple[dict[str, Any], tuple[direct_pb2.DirectTask, ...], bool]] = {
    "the worker is on another GPU": ({}, (FIRST, RUN), False),
    "it took the last version once it was READY": ({}, (RUN,), True),
    "there was no transfer": ({}, (), True),
    "servers of READY versions are waited for": ({"ahead_only": False}, (FIRST, RUN), True),
    "servers sleep until it is delivered": ({"servers_sleep": True}, (FIRST, RUN), True),
}


@pytest.mark.parametrize("why", NOT_HELD)
def test_the_delivery_is_not_held(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "_HELD", 600.0)
    options, before, rank = *NOT_HELD[why][:2], Rank(monkeypatch)
    rank.shares_device = NOT_HELD[why][2]
    rank.serve("v/1", *before)
    rank.sender._took = dict.fromkeys(rank.sender._took, 300.0)
    tasks, begun = rank.offered(**options)
    assert begun.wait(60)
    tasks.put(None)


def test_a_delivery_waits_for_the_hold_and_reports_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "_HELD", 600.0)
    hold, sent, phases = sender.Hold({"g": 300.0}), threading.Event(), list[str]()
    version = resources_pb2.Version(name="models/policy/versions/2", state=resources_pb2.Version.UPLOADING)
    slot = AssignedSlot(0, (full_box((4,)),), (LAYOUT.tensors["w"],), 1 << 20)
    offering = SimpleNamespace(hold=hold, wait=lambda seconds: None, give_up=lambda: None)
    session: Any = SimpleNamespace(
        assignment=lambda: (slot, [0]),
        registration=SimpleNamespace(name="p"),
        identity=SimpleNamespace(rank=0, skipped=False),
        after=lambda step: 0,
        begun=lambda step, version: None,
    )
    rank: Any = SimpleNamespace(offer=lambda *arguments, **options: offering)
    with grpc.insecure_channel("127.0.0.1:1") as unused:
        channel: Any = SimpleNamespace(grpc=unused, call=lambda method, request: version)
        unused_transports: Any = SimpleNamespace(stop_preparation=lambda: None)
        delivery = Delivery(channel, session, unused_transports, rank, staging_timeout=60, direct_wait=None)

    def send(slot: Any, version: Any, read: Any, timings: tracing.Timings, handle: Any) -> None:
        phases.extend(timing.phase for timing in timings)
        sent.set()

    monkeypatch.setattr(delivery, "_send", send)
    threading.Thread(target=delivery.deliver, args=(1, lambda positions: (), []), kwargs={"direct": True, "once": False}).start()
    assert not sent.wait(0.2)
    hold.end(["another"])
    assert not sent.wait(0.2)
    hold.end(["g"])
    assert sent.wait(60)
    assert phases == ["create", "hold"]
