"""Channels to the daemon, and calls over them.

A channel is created at its first use, never at import: processes that fork later must not inherit one.
"""

import importlib.metadata
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, NoReturn, TypeVar

import grpc
import grpc.experimental
from resharder.client.errors import NO_VERSION, TOO_FAST, TOO_MANY_CALLS, ResharderError, UsageError, error_of, reason_of
from resharder.client.rpc.daemon_channel import DaemonChannel
from resharder.client.rpc.tls import Tls
from resharder.client.settings import ENDPOINT
from resharder.converters.wire.backoff import Backoff
from resharder.converters.wire.endpoint import DEFAULT_ENDPOINT, addresses_of, check_endpoint, route_options
from resharder.v1.revision import user_agent

Answer = TypeVar("Answer")

_OPTIONS = (
    ("grpc.max_send_message_length", -1),  # the daemon sets the bound
    ("grpc.max_receive_message_length", -1),
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 10_000),  # bound on one attempt to connect, handshake included; not a pause
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.dns_min_time_between_resolutions_ms", 2_000),  # for a name that becomes that of another host
)
_INTERRUPTIBLE = (
    # Else a second thread polls for streams of answers, and ends the process by SIGSEGV if Ctrl-C arrives within `next` and the
    # channel is closed afterwards (grpcio 1.85): the call then awaits an operation that was never begun, and the thread polls on.
    (grpc.experimental.ChannelOptions.SingleThreadedUnaryStream, 1),
)


def endpoint_or_default(endpoint: str | None) -> str:
    """Return `endpoint`, else RESHARDER_ENDPOINT, else the address on which a daemon listens by default."""
    return endpoint or ENDPOINT.text() or DEFAULT_ENDPOINT


def bound(timeout: float | None) -> float:
    """Return a timeout in seconds as a float; None becomes infinity."""
    return float("inf") if timeout is None else timeout


class _Closed(grpc.Channel):  # type: ignore[misc]
    """Stands in for a closed channel, because grpcio (1.85) ends the process by SIGSEGV where a stub is made of one."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise _closed(self._endpoint)

    unary_unary = unary_stream = stream_unary = stream_stream = subscribe = unsubscribe = _refuse
    __enter__ = __exit__ = _refuse

    def close(self) -> None:
        pass


def _closed(endpoint: str) -> UsageError:
    return UsageError(f"the connection to {endpoint} was closed")


class Channel:
    """Channel to the daemon.

    Every call of this API may be repeated. `call` retries while the daemon cannot be reached.

    Args:
        endpoint: Address as `host:port`; or those of a daemon and its standbys, with commas between them.
        patience: Seconds of retries; None is no bound.
        tls: TLS settings; by default those of the RESHARDER_TLS_* variables, if any.
        interruptible: Whether Ctrl-C may interrupt threads that read its streams. Large streams are slower then.

    Raises:
        UsageError: The endpoint, the TLS settings or RESHARDER_PROXY are invalid.
    """

    _closed = False

    def __init__(
        self, endpoint: str, patience: float | None = 60.0, tls: Tls | None = None, *, interruptible: bool = False
    ) -> None:
        try:
            self.endpoint, route = check_endpoint(endpoint), route_options(endpoint=endpoint)
        except ValueError as error:
            raise UsageError(f"the daemon's endpoint: {error}") from error
        self.patience = bound(patience)
        self.tls = tls or Tls.from_environment()
        if self.tls and not self.tls.name and len(addresses_of(endpoint)) > 1:
            raise UsageError(
                f"the daemon's endpoint: {endpoint} has several addresses, and which name is in their certificates? Set "
                "RESHARDER_TLS_NAME to a name that all of them have"
            )
        agent = ("grpc.primary_user_agent", user_agent(importlib.metadata.version("resharder")))
        options = (*dict((*_OPTIONS, *route)).items(), *(_INTERRUPTIBLE if interruptible else ()), agent)
        try:
            self.grpc: grpc.Channel = DaemonChannel(endpoint, self.tls, options)
        except ValueError as error:
            raise UsageError(f"the daemon's endpoint: {error}") from error

    def call(
        self, method: Callable[..., Answer], request: Any, *, timeout: float | None = 30.0, patience: float | None = None
    ) -> Answer:
        """Return the answer of a unary call.

        Args:
            method: Method of a stub.
            request: Its request message.
            timeout: Bound in seconds on one attempt; None is no bound.
            patience: Seconds of retries; None is the channel's patience.

        Raises the errors of `errors`; UsageError if the channel is closed.
        """
        backoff = Backoff(self.patience if patience is None else patience)
        while True:
            try:
                return self.begin(method, request, timeout=timeout)
            except grpc.RpcError as error:
                if not (unreachable(error) and backoff.wait()):
                    raise self.error(error) from error

    def begin(self, method: Callable[..., Answer], request: Any, **options: Any) -> Answer:
        """Return what a method returns: an answer, or a call in progress.

        Args:
            method: Method of a stub, its `future`, or a multi-callable.
            request: Its request message, or an iterator of them.
            options: Its further arguments, such as `timeout`.

        Raises grpc.RpcError; UsageError if the channel is closed.
        """
        try:
            return method(request, **options)
        except ValueError as error:  # raised by grpcio for a closed channel
            if not self._closed:
                raise
            raise _closed(self.endpoint) from error

    def stream(self, call: Iterator[Answer]) -> Iterator[Answer]:
        """Yield the answers of a server stream. Raises the errors of `errors`; UsageError once the channel is closed."""
        try:
            yield from call
        except grpc.RpcError as error:
            raise self.error(error) from error

    def error(self, error: grpc.RpcError) -> ResharderError:
        """Return the typed form of an error that a call over this channel raised: UsageError if `close` has ended it."""
        if self._closed and error.code() is grpc.StatusCode.CANCELLED:
            return _closed(self.endpoint)
        return error_of(error, self.endpoint)

    def check_open(self) -> None:
        """Raise UsageError if the channel is closed."""
        if self._closed:
            raise _closed(self.endpoint)

    def close(self) -> None:
        """Close the channel. Calls in progress and later ones end with UsageError."""
        if not self._closed:
            self._closed = True
            before, self.grpc = self.grpc, _Closed(self.endpoint)
            before.close()

    def __enter__(self) -> "Channel":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def unreachable(error: grpc.RpcError) -> bool:
    """Return whether the same call may succeed later: the connection or the daemon is gone, shutting down, or too busy to answer.

    NO_VERSION is an answer: the daemon has waited for the requested time.
    """
    code = error.code()
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return not reason_of(error)
    if code is grpc.StatusCode.UNAVAILABLE:
        return reason_of(error) != NO_VERSION
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return reason_of(error) in (TOO_MANY_CALLS, TOO_FAST)
    # A connection that breaks within a message can look like a reset stream.
    return code in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL) and "RST_STREAM" in (error.details() or "")
