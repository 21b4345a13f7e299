"""Keeps models apart: each has a lane of its own among the calls that hold a thread for long, and a full lane stops no other.

A call takes one of its method's places, in the lane of the model that it names, while it runs. A lane may take another as long as
it holds fewer than are free: one model alone gets half of a method's places, the next half of the rest, and as calls end their
shares become equal, with as much left for whoever comes later. What finds no place is refused at once (TOO_MANY_CALLS), never
queued: a queue would hold its bytes, and be everybody's.

Calls that end at once need no place. Renewals among them have threads of their own, each kind: when all workers of a large fleet
report at once, no rank's renewal waits for them.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any

import grpc
from resharder.converters.wire.chunk_frame import unframe
from resharder.server.infra.caller import CALLER
from resharder.server.state.errors import ResourceExhausted, abort

SHORT_THREADS = 16
_LEASE_THREADS = 4
_SPARE = 4  # threads of a method that look whether there is a place

_LEASES = {"RenewLease", "ReportWorker", "Check"}
_WAITS = {
    "Attend",
    "ClaimServer",
    "CreateVersion",
    "GetAssignment",
    "GetDigests",
    "GetGroupKey",
    "JoinTransfer",
    "ListEvents",
    "OfferVersion",
    "ProfileInstall",
    "ServerReflectionInfo",
    "StartTransfer",
    "VerifyServer",
    "WaitVersion",
    "Watch",
}
_TRANSFERS = {
    "ArchiveVersion",
    "DeclareMemory",
    "DigestBoxes",
    "DownloadChunks",
    "ExportVersion",
    "GetManifest",
    "ListArchive",
    "PutProfile",
    "RegisterSlot",
    "RestoreVersion",
    "UploadChunks",
}
LONG = frozenset(_WAITS | _TRANSFERS)


class Lanes:
    """The places of one method's calls, and their threads."""

    def __init__(self, method: str, places: int) -> None:
        self._method, self._places = method, places
        self.threads = ThreadPoolExecutor(places + _SPARE, thread_name_prefix=method)
        self._lock = threading.Lock()
        self._held: Counter[str] = Counter()

    @contextmanager
    def place(self, lane: str) -> Iterator[None]:
        """Raises ResourceExhausted (TOO_MANY_CALLS)."""
        with self._lock:
            held, free = self._held[lane], self._places - self._held.total()
            if held >= free:
                raise ResourceExhausted(
                    "TOO_MANY_CALLS",
                    f"{lane} has {held} {self._method} calls open, of {self._places} places {free} are free: try again later",
                )
            self._held[lane] += 1
        try:
            yield
        finally:
            with self._lock:
                self._held[lane] -= 1
                if not self._held[lane]:
                    del self._held[lane]


class LaneInterceptor(grpc.ServerInterceptor):  # type: ignore[misc]
    """Threads are chosen by what it returns, so it answers its refusals itself.

    `waits`: places of each method that waits for something, `transfers`: of each that moves or computes much. `model_of` says
    which model a server has, if any.
    """

    def __init__(self, waits: int, transfers: int, model_of: Callable[[str], str]) -> None:
        places = dict.fromkeys(_WAITS, waits) | dict.fromkeys(_TRANSFERS, transfers)
        self._long = {method: Lanes(method, count) for method, count in places.items()}
        self._leases = {method: ThreadPoolExecutor(_LEASE_THREADS, thread_name_prefix=method) for method in _LEASES}
        self._model_of = model_of

    def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler | None], details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler | None:
        handler, method = continuation(details), details.method.rpartition("/")[2]
        if handler is None or not (method in _LEASES or method in self._long):
            return handler
        shape = ("stream" if handler.request_streaming else "unary") + "_" + ("stream" if handler.response_streaming else "unary")
        behavior, threads = getattr(handler, shape), self._leases.get(method)
        if lanes := self._long.get(method):
            wrap = self._stream if handler.response_streaming else self._unary
            behavior, threads = wrap(lanes, behavior, handler.request_streaming), lanes.threads
        behavior.experimental_thread_pool = threads
        make = getattr(grpc, f"{shape}_rpc_method_handler")
        return make(behavior, handler.request_deserializer, handler.response_serializer)

    def _unary(self, lanes: Lanes, behavior: Callable[..., Any], streamed: bool) -> Callable[..., Any]:
        def call(request: Any, context: grpc.ServicerContext) -> Any:
            try:
                lane, request = self._lane(lanes, request, context, streamed)
                with lanes.place(lane):
                    return behavior(request, context)
            except ResourceExhausted as error:
                return abort(context, error)

        return call

    def _stream(self, lanes: Lanes, behavior: Callable[..., Iterator[Any]], streamed: bool) -> Callable[..., Iterator[Any]]:
        def call(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
            try:
                lane, request = self._lane(lanes, request, context, streamed)
                with lanes.place(lane):
                    yield from behavior(request, context)
            except ResourceExhausted as error:
                abort(context, error)

        return call

    def _lane(self, lanes: Lanes, request: Any, context: grpc.ServicerContext, streamed: bool) -> tuple[str, Any]:
        """A caller is the lane of what names no model, or any it likes, and of a stream until its first message does. Where
        nobody is known, a connection is a caller."""
        known = CALLER.get()
        caller = known or context.peer()
        if not streamed:
            named = "" if known and hasattr(request, "subject") else self._named(request)
            return named or caller, request
        with lanes.place(caller):
            first = list(islice(request, 1))
        return "".join(map(self._named, first)) or caller, chain(first, request)

    def _named(self, request: Any) -> str:
        """The model of a request, of a chunk, or of a control side's report."""
        if isinstance(request, bytes):
            return _model_of_chunk(request)
        server = getattr(request, "control", "") and request.server.removeprefix("servers/")
        return self._model_of(server) if server else model_of_request(request)


def model_of_request(request: Any) -> str:
    """The model that a request names, by itself or in a resource's name; empty where it names none."""
    names = [getattr(request, field, "") for field in ("version", "publisher", "subject")]
    for _, slash, rest in (name.partition("models/") for name in names):
        if slash:
            return str(rest.partition("/")[0])
    return str(getattr(request, "model", "")).removeprefix("models/")


def _model_of_chunk(message: bytes) -> str:
    try:
        return unframe(message)[2]
    except ValueError:  # the servicer says so
        return ""
