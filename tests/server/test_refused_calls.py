"""A refused call frees what it held at once, without the garbage collector."""

import gc
import weakref
from collections.abc import Callable, Generator, Iterator
from types import SimpleNamespace
from typing import Any, NoReturn

import grpc
import pytest
from resharder.server.infra.change_signal import ChangeSignal, Pause
from resharder.server.state.errors import FailedPrecondition
from resharder.v1 import server_pb2
from resharder.v1.server_pb2_grpc import ServerServiceServicer, ServerServiceStub, add_ServerServiceServicer_to_server

from tests.support.observing import wait_until
from tests.support.serving import serving

Answers = Generator[Pause, None, Any]


class Held:
    """An object in a frame of a call."""


class Refusing(ServerServiceServicer):
    """Refuses every call after it has made an object, of which `held` has a weak reference."""

    held: "weakref.ref[Held] | None" = None

    def _refuse(self) -> NoReturn:
        held = Held()
        self.held = weakref.ref(held)
        raise FailedPrecondition("NOT_OFFERED", "refused")

    def GetModel(self, request: Any, call: Any) -> Any:
        self._refuse()

    def ClaimServer(self, request: Any, call: Any) -> Answers:
        yield Pause(ChangeSignal(), 0, 0.01)
        self._refuse()

    def DownloadChunks(self, request: Any, call: Any) -> Answers:
        yield Pause(ChangeSignal(), 0, 0.01)
        self._refuse()

    def Attend(self, call: Any) -> Any:
        return SimpleNamespace(receive=lambda message: self._refuse(), end=lambda: None, close=lambda: None)


@pytest.fixture
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize(
    "call",
    [
        lambda stub: stub.GetModel(server_pb2.GetModelRequest(), timeout=60),
        lambda stub: stub.ClaimServer(server_pb2.ClaimServerRequest(), timeout=60),
        lambda stub: next(stub.DownloadChunks(server_pb2.BoxesRequest(), timeout=60)),
        lambda stub: next(stub.Attend(iter([server_pb2.ControlReport()]), timeout=60)),
    ],
    ids=["unary", "waiting", "server stream", "both streams"],
)
def test_a_refused_call_leaves_no_garbage(call: Callable[[ServerServiceStub], object], uncollected: None) -> None:
    service = Refusing()
    world = SimpleNamespace(model_of=lambda server: "")
    with (
        serving({service: add_ServerServiceServicer_to_server}, world) as address,
        grpc.insecure_channel(address) as channel,
    ):
        with pytest.raises(grpc.RpcError) as refused:
            call(ServerServiceStub(channel))
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert service.held is not None
        wait_until(lambda: service.held is not None and service.held() is None)
