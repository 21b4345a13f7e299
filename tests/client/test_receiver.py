"""A worker's side of a transfer by itself: the memory that it receives into, and the link after a refusal."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from resharder.client.direct.base import DirectFailed
from resharder.client.direct.transfer import Seconds
from resharder.client.errors import NotFound, Refused
from resharder.client.inference.worker import receiver as module
from resharder.client.inference.worker.receiver import EarlyVersion, Receiver, _check_unchanged
from resharder.client.versions.manifest import NeededDigests, VersionManifest
from resharder.converters.geometry.layout import Layout, Piece, TensorSpec, full_box
from resharder.converters.storage.digest import digest
from resharder.converters.wire import backoff
from resharder.v1 import direct_pb2


def test_tensors_that_a_model_reads_instead_of_those_prepared_are_noticed() -> None:
    prepared = {name: torch.zeros(4) for name in ("a", "b")}
    _check_unchanged(prepared, dict(prepared))
    with pytest.raises(DirectFailed, match=r"1 tensors are not those from before the pause, e\.g\. b"):
        _check_unchanged(prepared, prepared | {"b": torch.zeros(4)})
    with pytest.raises(DirectFailed, match=r"1 tensors are not those from before the pause, e\.g\. c"):
        _check_unchanged(prepared, prepared | {"c": torch.zeros(4)})
    with pytest.raises(DirectFailed, match=r"1 tensors are not those from before the pause, e\.g\. b"):
        _check_unchanged(prepared, {"a": prepared["a"]})


def test_boxes_that_differ_from_the_stores_are_counted_and_one_is_named() -> None:
    specs = {name: TensorSpec(name, "BF16", (4, 2)) for name in "abc"}
    needs = {name: (full_box((4, 2)),) for name in specs}
    manifest = VersionManifest("v/1", 1, "", "", specs, {"a": 1, "b": (1 << 64) - 1, "c": 3}, ())
    unused: Any = None
    stored = NeededDigests(specs, needs).of(unused, manifest)
    assert stored == {("a", needs["a"][0]): 1, ("b", needs["b"][0]): (1 << 64) - 1, ("c", needs["c"][0]): 3}
    for order in ("abc", "cab"):
        pieces = tuple(Piece(name, needs[name][0], "fused", 0, (2, 1)) for name in order)
        found = np.array([manifest.digests[name] for name in order], np.uint64)
        assert module._difference(pieces, found, stored) == ""
        found[order.index("b")] -= np.uint64(1)
        found[order.index("c")] ^= np.uint64(1 << 63)
        said = module._difference(pieces, found, stored)
        assert said == f"2 boxes, e.g. of {'b' if order == 'abc' else 'c'}, differ from the store's digests"
    with pytest.raises(ValueError, match="expected 3 digests, got 2 and 3"):
        module._difference(pieces, found[:2], stored)


def test_a_version_is_compared_soon_after_it_is_ready_and_a_late_one_is_asked_for_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses, manifest = list[float](), VersionManifest("v/1", 1, "", "", {}, {}, ())
    monkeypatch.setattr(backoff.time, "sleep", pauses.append)

    def get_manifest(channel: Any, version: str) -> VersionManifest:
        if len(pauses) < 8:
            raise NotFound("v/1 is UPLOADING")
        return manifest

    monkeypatch.setattr(module, "get_manifest", get_manifest)
    unused: Any = None
    stored = NeededDigests({}, {})
    early, digests = EarlyVersion("v/1", "", (), b""), np.zeros(0, np.uint64)
    found = module.compare_with_store(unused, early, digests, lambda manifest: stored.of(unused, manifest), lambda: True)
    assert found == (manifest, "")
    assert max(pauses) <= 1.0
    assert sum(pauses[:3]) <= 0.7


def test_a_version_that_cannot_be_compared_with_the_stores_differs_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = VersionManifest("v/1", 1, "", "", {}, {}, ())
    monkeypatch.setattr(module, "get_manifest", lambda channel, version: manifest)
    piece = Piece("w", full_box((4,)), "model/w", 0, (1,))
    unused: Any = None
    early, digests = EarlyVersion("v/1", "", (piece,), b""), np.zeros(1, np.uint64)
    found = module.compare_with_store(
        unused, early, digests, lambda manifest: NeededDigests({}, {}).of(unused, manifest), lambda: True
    )
    assert found == (
        manifest,
        "it cannot be compared with the store's version: KeyError: ('w', (Range(start=0, count=4, step=1),))",
    )


class Link:
    """A link to ranks, whose group the daemon has ended or not."""

    id = "g"

    def __init__(self, over: bool) -> None:
        self.over, self.closed = over, False

    def prepare(self, sources: Any, targets: Any) -> None: ...

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("over", [False, True])
def test_a_link_outlives_an_offer_but_not_its_group(over: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[str] = []
    monkeypatch.setattr(module, "finish", lambda channel, member, group, error: errors.append(error))
    refusal = Refused("its offer is over: the publisher waits for 4 s after READY")
    refusal.reason = "NOT_OFFERED"

    def begin(method: Any, request: Any, **options: Any) -> Any:
        return method(request, **options)

    with grpc.insecure_channel("127.0.0.1:1") as unused:
        channel: Any = SimpleNamespace(grpc=unused, begin=begin, error=lambda error: refusal)
        receiver = Receiver(channel, "left", 0, "process", torch.device("cpu"))
    link: Any = Link(over)
    stub: Any = SimpleNamespace(
        StartTransfer=SimpleNamespace(future=lambda request, timeout: SimpleNamespace(exception=grpc.RpcError))
    )
    receiver._link, receiver._stub = link, stub
    memory: Any = SimpleNamespace()
    assert not receiver.receive(memory, {}, "i-1", [])
    assert "waits for 4 s after READY" in receiver.problem
    assert (link.closed, len(errors)) == (over, int(over))


@pytest.mark.parametrize(
    ("path", "closed"), [("nixl", True), ("peer-memory+nixl", True), ("nccl", False), ("peer-memory", False)]
)
def test_a_link_that_has_registered_memory_is_given_up_before_the_memory_is_unmapped(path: str, closed: bool) -> None:
    with grpc.insecure_channel("127.0.0.1:1") as unused:
        receiver = Receiver(SimpleNamespace(grpc=unused), "left", 0, "process", torch.device("cpu"))  # type: ignore[arg-type]
    link: Any = Link(False)
    link.path, receiver._link = path, link
    receiver.let_go()
    assert (link.closed, receiver._link is None) == (closed, closed)


VALUES = torch.arange(8, dtype=torch.float32).reshape(4, 2)
RIGHT = digest(VALUES.numpy().view(np.uint32), full_box((4, 2)), (4, 2))


class Ahead:
    """A receiver of one tensor of a version ahead of READY, and what happens in order. The ranks' digests are the test's."""

    received, frozen_size, path, id, over = 32, 0, "gloo", "g", False
    frozen = frozenset[str]()

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events, self.arrived, self.closed = list[str](), threading.Event(), False
        self.digests = Future[direct_pb2.ReportedDigests]()
        monkeypatch.setattr(
            module, "finish", lambda channel, member, group, error="", **options: self.events.append(error or "ok")
        )
        layout = Layout({"w": TensorSpec("w", "F32", (4, 2))}, (Piece("w", full_box((4, 2)), "model/w", 0, (2, 1)),))
        self.memory: Any = SimpleNamespace(layout=layout, names={"model": frozenset({"w"})})
        self.model = torch.nn.Module()
        self.model.register_parameter("w", torch.nn.Parameter(torch.zeros(4, 2), requires_grad=False))
        with grpc.insecure_channel("127.0.0.1:1") as unused:
            channel: Any = SimpleNamespace(grpc=unused, begin=self.begin, call=self.call, error=lambda error: error)
            self.receiver = Receiver(channel, "left", 0, "process", torch.device("cpu"))
        stub: Any = SimpleNamespace(StartTransfer=SimpleNamespace(future="start"), GetDigests=SimpleNamespace(future="digests"))
        link: Any = self
        self.receiver._stub, self.receiver._link = stub, link
        self.receiver._targets = {"model/w": self.model.get_parameter("w")}

    def call(self, method: Any, request: direct_pb2.GetDigestsRequest, **options: Any) -> direct_pb2.ReportedDigests:
        self.events.append("announced" if request.during_transfer else "asked before the pause")
        return direct_pb2.ReportedDigests(fingerprint="v")

    def begin(self, method: Any, request: Any, **options: Any) -> Any:
        self.events.append(method)
        if method == "digests":
            assert (request.version, request.during_transfer) == ("v/1", False)
            return self.digests
        granted = Future[direct_pb2.StartTransferResponse]()
        granted.set_result(direct_pb2.StartTransferResponse())
        return granted

    def prepare(self, sources: Any, targets: Any) -> None: ...

    def watched(self) -> Any:
        return nullcontext()

    def run(self, follower: Any, meanwhile: Any, kept: bool) -> Seconds:
        self.model.get_parameter("w").copy_(VALUES)
        meanwhile()
        self.events.append("received")
        self.arrived.set()
        return Seconds(0.0, 0.0, 0.0, 0.0)

    def close(self) -> None:
        self.closed = True

    def install(self, models: Any) -> bool:
        early = self.receiver.expect_early(self.memory, "v/1")
        assert (early.fingerprint, early.version) == ("v", "v/1")
        return self.receiver.receive(self.memory, models, "i-1", [])


GONE = Refused("rank 0 is gone")
ENDS: dict[str, Any] = {
    "right": (direct_pb2.ReportedDigests(digests=[RIGHT]), ""),
    "wrong": (direct_pb2.ReportedDigests(digests=[RIGHT ^ 1]), "1 boxes, e.g. of w, differ from the ranks' digests"),
    "none": (direct_pb2.ReportedDigests(), "expected 1 digests, got 0"),
    "a rank is gone": (GONE, "rank 0 is gone"),
}


@pytest.mark.parametrize("kind", ENDS)
def test_what_arrived_ahead_of_ready_counts_once_the_ranks_digests_have_come_and_are_the_same(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "live_now", lambda model, names: {"w": model.get_parameter("w")})
    ahead = Ahead(monkeypatch)
    answer, problem = ENDS[kind]
    with ThreadPoolExecutor(1) as pool:
        installed = pool.submit(ahead.install, {"model": ahead.model})
        assert ahead.arrived.wait(60)
        with pytest.raises(TimeoutError):
            installed.result(0.2)
        assert ahead.events == ["announced", "start", "digests", "received"]
        if isinstance(answer, Exception):
            ahead.digests.set_exception(answer)
        else:
            ahead.digests.set_result(answer)
        assert installed.result(60) == (not problem)
    assert problem in ahead.receiver.problem
    assert ahead.closed == bool(problem)
    if not problem:
        assert ahead.receiver.compared.tolist() == [RIGHT]


def test_a_version_that_nobody_announced_is_compared_with_nothing_and_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "live_now", lambda model, names: {"w": model.get_parameter("w")})
    ahead = Ahead(monkeypatch)
    assert not ahead.receiver.receive(ahead.memory, {"model": ahead.model}, "i-1", [])
    assert ahead.receiver.problem == "there are no digests to compare with"


def test_whatever_fails_while_a_version_is_received_is_the_reason_and_the_store_has_it_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*arguments: Any, **options: Any) -> Seconds:
        raise FileNotFoundError("no compiler for kernels")

    ahead = Ahead(monkeypatch)
    monkeypatch.setattr(ahead, "run", fail)
    assert not ahead.install({"model": ahead.model})
    assert ahead.receiver.problem == "FileNotFoundError: no compiler for kernels"
    assert (ahead.events[-1], ahead.closed) == (ahead.receiver.problem, True)


class Tried:
    """A link, and the daemon's answers to a worker that asks for one to ranks on other hosts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, held: str, answer: str, made: Any = None) -> None:
        self.asked: list[tuple[str, float]] = []
        self.failed: list[tuple[str, str]] = []
        self.closed: list[str] = []
        monkeypatch.setattr(module, "finish", lambda channel, member, group, error: self.failed.append((group, error)))
        monkeypatch.setattr(module, "TransferLink", made or (lambda channel, message, device: self.link(message.group)))
        with grpc.insecure_channel("127.0.0.1:1") as unused:
            channel: Any = SimpleNamespace(grpc=unused, call=self.call)
            self.receiver = Receiver(channel, "left", 0, "process", torch.device("cpu"))
        self.receiver._link, self.answer = self.link(held) if held else None, answer

    def link(self, group: str) -> Any:
        return SimpleNamespace(id=group, tried_seconds=0.25, close=lambda: self.closed.append(group))

    def call(self, method: Any, request: direct_pb2.MeetRanksRequest, **options: Any) -> direct_pb2.DirectLink:
        self.asked.append((request.group, request.seconds))
        return direct_pb2.DirectLink(group=self.answer, trial=bool(self.answer))

    def meet(self) -> tuple[bool, str]:
        memory: Any = SimpleNamespace(fingerprint="memory")
        found = self.receiver.meet(memory)
        link = self.receiver._link
        return found, link.id if link is not None else ""


@pytest.mark.parametrize(
    ("held", "answer", "found", "closed"),
    [
        ("", "", (False, ""), []),
        ("", "new", (True, "new"), []),
        ("old", "old", (False, "old"), []),
        ("old", "new", (True, "new"), ["old"]),
        ("old", "", (False, ""), ["old"]),
    ],
    ids=["none", "first", "kept", "replaced", "over"],
)
def test_a_worker_has_the_link_that_the_daemon_names_and_reports_its_trial(
    held: str, answer: str, found: tuple[bool, str], closed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = Tried(monkeypatch, held, answer)
    assert tried.meet() == found
    assert (tried.asked, tried.closed, tried.failed) == ([(held, 0.25 if held else 0.0)], closed, [])


def test_a_link_that_cannot_be_made_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(channel: Any, message: Any, device: Any) -> Any:
        raise DirectFailed("nobody is there")

    tried = Tried(monkeypatch, "", "new", make)
    assert tried.meet() == (False, "")
    assert tried.failed == [("new", "nobody is there")]


def test_a_link_that_an_install_has_made_meanwhile_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(channel: Any, message: Any, device: Any) -> Any:
        tried.receiver._link = tried.link("of an install")
        return tried.link("new")

    tried = Tried(monkeypatch, "", "new", make)
    assert tried.meet() == (False, "of an install")
    assert tried.closed == ["new"]
