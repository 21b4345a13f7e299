"""A worker's side of a transfer by itself: the memory that it receives into, and the link after a refusal."""

from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from resharder.client.direct.base import DirectFailed
from resharder.client.errors import Refused
from resharder.client.inference.worker import receiver as module
from resharder.client.inference.worker.receiver import EarlyVersion, Receiver, _check_unchanged
from resharder.client.versions.manifest import NeededDigests, VersionManifest
from resharder.converters.geometry.layout import Piece, TensorSpec, full_box


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
        assert module._difference(EarlyVersion("v/1", "", pieces, found, b""), stored) == ""
        found[order.index("b")] -= np.uint64(1)
        found[order.index("c")] ^= np.uint64(1 << 63)
        said = module._difference(EarlyVersion("v/1", "", pieces, found, b""), stored)
        assert said == f"2 boxes, e.g. of {'b' if order == 'abc' else 'c'}, differ from the store's digests"
    with pytest.raises(ValueError, match="expected 3 digests, got 2 and 3"):
        module._difference(EarlyVersion("v/1", "", pieces, found[:2], b""), stored)


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
