"""A daemon in this process whose calls need no socket: bytes in, bytes out, through its own interceptors and services.

with inside(store=folder / "store") as (daemon, door):
    stub = PublisherServiceStub(door)          # it is a channel, also for Job and SimulatedServer
    door.call("/resharder.v1.OperatorService/GetDaemon", [b""])
    assert not door.faults                     # what no call may end with: an exception that is not a refusal
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from threading import Event
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import patch

import grpc
from resharder.server.config import Config
from resharder.server.direct import coordinator
from resharder.server.fleets import profiles
from resharder.server.infra import event_log
from resharder.server.ingest import coordinator as ingest_coordinator
from resharder.server.main import Daemon

_LOOKS = 3  # after so many looks whether the caller is still there, it is not
Listener = Callable[[str, bytes], None]  # path, message


class Refused(grpc.RpcError):  # type: ignore[misc]
    def __init__(self, code: grpc.StatusCode, message: str, metadata: tuple[tuple[str, bytes], ...]) -> None:
        super().__init__(f"{code.name}: {message}")
        self._said = code, message, metadata

    def code(self) -> grpc.StatusCode:
        return self._said[0]

    def details(self) -> str:
        return self._said[1]

    def trailing_metadata(self) -> tuple[tuple[str, bytes], ...]:
        return self._said[2]


class _Context:
    def __init__(self, patient: bool) -> None:
        self._left, self._trailing = sys.maxsize if patient else _LOOKS, ()

    def is_active(self) -> bool:
        self._left -= 1
        return self._left >= 0

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def auth_context(self) -> dict[str, list[bytes]]:
        return {}

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def set_trailing_metadata(self, metadata: Any) -> None:
        self._trailing = metadata

    def abort(self, code: grpc.StatusCode, message: str) -> NoReturn:
        if code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN):
            raise RuntimeError(f"{code.name}: {message}") from sys.exception()
        raise Refused(code, message, self._trailing)


class Door:
    """Stands where `grpc.server` is made, and is a channel to it.

    `asked` is told of every request that came by a stub, `answered` of every answer.
    """

    def __init__(self, threads: ThreadPoolExecutor, interceptors: Iterable[Any], options: object) -> None:
        self._interceptors, self._services = list(interceptors), list[Any]()
        self._handlers: dict[str, Any] = {}
        self.faults: list[BaseException] = []
        self.asked: Listener = lambda path, message: None
        self.answered: Listener = lambda path, message: None

    # As a server

    def add_generic_rpc_handlers(self, handlers: Iterable[Any]) -> None:
        self._services += handlers

    def add_registered_method_handlers(self, service: str, handlers: object) -> None:
        pass

    def add_insecure_port(self, listen: str) -> int:
        return 1

    def start(self) -> None:
        pass

    def stop(self, grace: float) -> Event:
        ended = Event()
        ended.set()
        return ended

    def _handler(self, path: str) -> Any:
        if path not in self._handlers:
            details = SimpleNamespace(method=path, invocation_metadata=())
            found = lambda details: next(h for s in self._services if (h := s.service(details)))  # noqa: E731
            for interceptor in reversed(self._interceptors):
                found = partial(interceptor.intercept_service, found)
            self._handlers[path] = found(details)
        return self._handlers[path]

    # As a channel

    def call(self, path: str, requests: Iterable[bytes], patient: bool = False) -> Iterator[bytes]:
        """The answers, to a caller who is gone after a few looks unless `patient`. Raises Refused; other errors are `faults`."""
        handler, context = self._handler(path), _Context(patient)
        request = iter(requests) if handler.request_streaming else next(iter(requests))
        shape = ("stream" if handler.request_streaming else "unary") + "_" + ("stream" if handler.response_streaming else "unary")
        try:
            found = getattr(handler, shape)(request, context)
            for answer in found if handler.response_streaming else [found]:
                packed = (handler.response_serializer or bytes)(answer)
                self.answered(path, packed)
                yield packed
        except (Refused, GeneratorExit):
            raise
        except BaseException as error:
            self.faults.append(error)
            raise

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


class _Answers:
    """A stream of answers. It ends with the requests."""

    def __init__(self, answers: Iterator[Any]) -> None:
        self._answers = answers

    def __iter__(self) -> Iterator[Any]:
        return self._answers

    def cancel(self) -> None:
        pass


@contextmanager
def inside(**options: Any) -> Iterator[tuple[Daemon, Door]]:
    """`options` are the daemon's configuration. Nothing waits for long."""
    with ExitStack() as held:
        for module in (coordinator, event_log, ingest_coordinator, profiles):
            held.enter_context(patch.object(module, "_LOOK", 0.005))
        for name in ("_PAUSE", "_LONGEST_PAUSE"):
            held.enter_context(patch.object(coordinator, name, 0.005))
        with patch.object(grpc, "server", Door):
            daemon = Daemon(Config(**{"caller_rate": 0, "direct_seconds": 0.2, "web_listen": ""} | options))
        daemon.start()
        held.callback(daemon.stop)
        yield daemon, daemon.server
