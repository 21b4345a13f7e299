"""In front of every call: who calls, and whether they may, before a message is parsed and before anything is read or changed."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from resharder.server.infra.caller import CALLER
from resharder.server.security.access import Access, Caller
from resharder.server.state.errors import DaemonError, InvalidArgument, abort

_LOOK_AGAIN = 1.0  # seconds; a stream ends when its caller is not known any more


class AccessInterceptor(grpc.ServerInterceptor):  # type: ignore[misc]
    """The outermost one. `long`: names of the calls that wait or carry much, of which a caller may have so many open."""

    def __init__(self, access: Access, long: frozenset[str]) -> None:
        self._access, self._long = access, long
        self._handlers: dict[str, grpc.RpcMethodHandler] = {}

    def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler | None], details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler | None:
        """Each method's handler is made once: one thread does this for all calls, and it was a fifth of what the daemon did."""
        if details.method not in self._handlers:
            handler = continuation(details)
            if handler is None:
                return None
            self._handlers[details.method] = self._guarded(handler, details)
        return self._handlers[details.method]

    def _guarded(self, handler: grpc.RpcMethodHandler, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        shape = ("stream" if handler.request_streaming else "unary") + "_" + ("stream" if handler.response_streaming else "unary")
        behavior, call = getattr(handler, shape), _Call(self._access, details.method, handler, self._long)
        wrapped: Any = _wrap_stream(call, behavior) if handler.response_streaming else _wrap_unary(call, behavior)
        if threads := getattr(behavior, "experimental_thread_pool", None):
            wrapped.experimental_thread_pool = threads
        return getattr(grpc, f"{shape}_rpc_method_handler")(wrapped, None, handler.response_serializer)


class _Call:
    """One method, as its requests come: bytes first, messages when their caller may send them."""

    def __init__(self, access: Access, method: str, handler: grpc.RpcMethodHandler, long: frozenset[str]) -> None:
        self.access, self.method = access, method
        self._streamed, self._parse = handler.request_streaming, handler.request_deserializer
        self._long = method.rpartition("/")[2] in long

    def enter(self, request: Any, context: grpc.ServicerContext, held: ExitStack) -> tuple[Caller, Any]:
        """The caller, and what the service may read. Raises DaemonError."""
        caller = self.access.admit(self.method, context)
        CALLER.set(caller.name if caller.grants is not None else "")
        if self._long:
            held.enter_context(self.access.open(caller))
        if self._streamed:
            return caller, self._messages(caller, request, context)
        message = self._parsed(request)
        self.access.judge(caller, self.method, message)
        return caller, message

    def _messages(self, caller: Caller, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[Any]:
        """A stream is about what its first message names. Its caller is looked at again while it lasts."""
        resource, looked = None, 0.0
        for request in requests:
            message = self._parsed(request)
            if resource is None:
                resource, looked = self.access.judge(caller, self.method, message), time.monotonic()
            elif time.monotonic() > looked + _LOOK_AGAIN:
                self.access.decide(self.access.caller(context), self.method, resource)
                looked = time.monotonic()
            yield message

    def _parsed(self, request: bytes) -> Any:
        """Raises ResourceExhausted (MESSAGE_TOO_LARGE), InvalidArgument (MESSAGE)."""
        self.access.check_size(self.method, len(request))
        try:
            return self._parse(request) if self._parse else request
        except DecodeError as error:
            raise InvalidArgument("MESSAGE", "expected a message of this call, got bytes that are none") from error

    def refuse(self, context: grpc.ServicerContext, error: Exception) -> Any:
        """Always raises."""
        if isinstance(error, DaemonError):
            self.access.note(self.method, context.peer(), error)
        return abort(context, error)


def _wrap_unary(call: _Call, behavior: Callable[..., Any]) -> Callable[..., Any]:
    def answer(request: Any, context: grpc.ServicerContext) -> Any:
        with ExitStack() as held:
            try:
                caller, request = call.enter(request, context, held)
            except Exception as error:
                return call.refuse(context, error)
            try:
                found = behavior(request, context)
            except DaemonError as error:  # of the first message of a stream, which nothing in between has read
                return call.refuse(context, error)
            call.access.narrow(caller, found)
            return found

    return answer


def _wrap_stream(call: _Call, behavior: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    def answer(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        with ExitStack() as held:
            try:
                _, request = call.enter(request, context, held)
            except Exception as error:
                call.refuse(context, error)
            try:
                yield from behavior(request, context)
            except DaemonError as error:
                call.refuse(context, error)

    return answer
