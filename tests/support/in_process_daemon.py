"""A daemon in this process whose calls need no socket: bytes in, bytes out, through its own handlers and services.

with inside(store=folder / "store") as (daemon, door):
    stub = PublisherServiceStub(door)          # it is a channel, also for Job and SimulatedServer
    door.call("/resharder.v1.OperatorService/GetDaemon", [b""])
    assert not door.faults                     # what no call may end with: an exception that is not a refusal
"""

import asyncio
import queue
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any
from unittest.mock import patch

import grpc
from resharder.server.config import Config
from resharder.server.direct import direct
from resharder.server.fleets import worker_requests
from resharder.server.infra import event_log
from resharder.server.infra.change_signal import Pause
from resharder.server.ingest import intake
from resharder.server.main import Daemon
from resharder.server.rpc.dispatch import Dispatcher
from resharder.server.rpc.server import RpcServer

_PAUSES = 3  # after so many pauses of a call, an impatient caller is gone
_left: ContextVar[list[int] | None] = ContextVar("left", default=None)  # pauses, of the call that this task serves
_ENDED = object()
Listener = Callable[[str, bytes], None]  # path, message


class Refused(grpc.RpcError):  # type: ignore[misc]
    def __init__(self, code: grpc.StatusCode, message: str, metadata: tuple[tuple[str, bytes], ...]) -> None:
        super().__init__(f"{code.name}: {message}")
        self._status = code, message, metadata

    def code(self) -> grpc.StatusCode:
        return self._status[0]

    def details(self) -> str:
        return self._status[1]

    def trailing_metadata(self) -> tuple[tuple[str, bytes], ...]:
        return self._status[2]


class _Context:
    """As much of `grpc.aio.ServicerContext` as the dispatcher uses."""

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self._write = write

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def auth_context(self) -> dict[str, list[bytes]]:
        return {}

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    async def send_initial_metadata(self, metadata: tuple[tuple[str, str], ...]) -> None: ...

    async def write(self, message: bytes) -> None:
        self._write(message)

    async def abort(self, code: grpc.StatusCode, message: str, metadata: tuple[tuple[str, bytes], ...] = ()) -> None:
        if code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN):
            raise RuntimeError(f"{code.name}: {message}") from sys.exception()
        raise Refused(code, message, metadata)


class InProcessChannel:
    """A channel to a server's handlers.

    `asked` is told of every request that came by a stub, `answered` of every answer.
    """

    def __init__(self, server: RpcServer) -> None:
        self._server = server
        self.faults: list[BaseException] = []
        self.asked: Listener = lambda path, message: None
        self.answered: Listener = lambda path, message: None

    def call(self, path: str, requests: Iterable[bytes], patient: bool = False) -> Iterator[bytes]:
        """The answers, to a caller who is gone after a few pauses unless `patient`. Raises Refused; other errors are `faults`."""
        handler = self._server.handlers[path]
        shape = ("stream" if handler.request_streaming else "unary") + "_" + ("stream" if handler.response_streaming else "unary")
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        request = _Requests(requests) if handler.request_streaming else next(iter(requests))

        async def serve() -> None:
            _left.set(None if patient else [_PAUSES])
            answer = await getattr(handler, shape)(request, _Context(answers.put))
            if not handler.response_streaming:
                answers.put(answer)

        ended: Future[None] = asyncio.run_coroutine_threadsafe(serve(), self._server.loop)
        ended.add_done_callback(lambda _: answers.put(_ENDED))
        try:
            while (answer := answers.get()) is not _ENDED:
                self.answered(path, answer)
                yield answer
            if not ended.cancelled() and (error := ended.exception()) is not None:
                if not isinstance(error, Refused):
                    self.faults.append(error)
                raise error
        finally:
            ended.cancel()

    def _multicallable(self, one: bool, streamed: bool, path: str, request_serializer: Any, response_deserializer: Any) -> Any:
        pack, unpack = request_serializer or bytes, response_deserializer or bytes

        def packed(request: Any) -> bytes:
            message = bytes(pack(request))
            self.asked(path, message)
            return message

        def call(request: Any, **options: object) -> Any:
            answers = map(unpack, self.call(path, map(packed, request if streamed else [request]), patient=True))
            return next(answers) if one else _Answers(answers)

        return call

    def unary_unary(self, path: str, request_serializer: Any = None, response_deserializer: Any = None, **_: object) -> Any:
        return self._multicallable(True, False, path, request_serializer, response_deserializer)

    def stream_unary(self, path: str, request_serializer: Any = None, response_deserializer: Any = None, **_: object) -> Any:
        return self._multicallable(True, True, path, request_serializer, response_deserializer)

    def unary_stream(self, path: str, request_serializer: Any = None, response_deserializer: Any = None, **_: object) -> Any:
        return self._multicallable(False, False, path, request_serializer, response_deserializer)

    def stream_stream(self, path: str, request_serializer: Any = None, response_deserializer: Any = None, **_: object) -> Any:
        return self._multicallable(False, True, path, request_serializer, response_deserializer)


class _Requests:
    """An iterator that may block, read by a thread of its own and not before a request is asked for."""

    def __init__(self, requests: Iterable[bytes]) -> None:
        self._requests = requests

    async def __aiter__(self) -> AsyncIterator[bytes]:
        loop, found = asyncio.get_running_loop(), asyncio.Queue[Any]()

        def read() -> None:
            for request in self._requests:
                loop.call_soon_threadsafe(found.put_nowait, request)
            loop.call_soon_threadsafe(found.put_nowait, _ENDED)

        threading.Thread(target=read, daemon=True).start()
        while (request := await found.get()) is not _ENDED:
            yield request


class _Answers:
    """A stream of answers. It ends with the requests."""

    def __init__(self, answers: Iterator[Any]) -> None:
        self._answers = answers

    def __iter__(self) -> Iterator[Any]:
        return self._answers

    def cancel(self) -> None:
        pass


@contextmanager
def in_process_daemon(**options: Any) -> Iterator[tuple[Daemon, InProcessChannel]]:
    """`options` are the daemon's configuration. Nothing waits for long."""
    wait = Dispatcher.wait

    async def impatient(dispatcher: Dispatcher, pause: Pause) -> None:
        left = _left.get()
        if left is not None:
            left[0] -= 1
            if left[0] < 0:
                raise asyncio.CancelledError
        await wait(dispatcher, Pause(pause.signal, pause.seen, min(pause.seconds, 0.005)))

    with ExitStack() as held:
        for module in (event_log, worker_requests, intake):
            held.enter_context(patch.object(module, "_LOOK", 0.005))
        for name in ("_LOOK", "_PAUSE", "_LONGEST_PAUSE"):
            held.enter_context(patch.object(direct, name, 0.005))
        held.enter_context(patch.object(Dispatcher, "wait", impatient))
        chosen = {"caller_rate": 0, "direct_seconds": 0.2, "web_listen": "", "listen": "127.0.0.1:0"}
        daemon = Daemon(Config(**chosen | options))
        daemon.start()
        held.callback(daemon.stop)
        yield daemon, InProcessChannel(daemon.server)
