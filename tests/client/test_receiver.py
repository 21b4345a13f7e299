"""A worker's side of a transfer by itself: the memory that it receives into, and the link after a refusal."""

from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import torch
from resharder.client.direct.base import DirectFailed
from resharder.client.errors import Refused
from resharder.client.inference.worker import receiver as module
from resharder.client.inference.worker.receiver import Receiver, _check_unchanged


def test_tensors_that_a_model_reads_instead_of_those_prepared_are_noticed() -> None:
    prepared = {name: torch.zeros(4) for name in ("a", "b")}
    _check_unchanged(prepared, dict(prepared))
    with pytest.raises(DirectFailed, match=r"1 tensors are not those from before the pause, e\.g\. b"):
        _check_unchanged(prepared, prepared | {"b": torch.zeros(4)})
    with pytest.raises(DirectFailed, match=r"1 tensors are not those from before the pause, e\.g\. c"):
        _check_unchanged(prepared, prepared | {"c": torch.zeros(4)})
    with pytest.raises(DirectFailed, match=r"1 tensors are not those from before the pause, e\.g\. b"):
        _check_unchanged(prepared, {"a": prepared["a"]})


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
