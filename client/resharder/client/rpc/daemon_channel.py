"""Channel to the newest daemon of a registry, which outlives its connections.

New calls use the current connection. It is made anew

- if the files of its certificates have changed: calls in progress continue on the former one;
- if another daemon has taken over from the one that answered (`converters/wire/term.py`): the next address of the endpoint is
  then tried first, and calls in progress on the former connection end with DaemonReplaced.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from resharder.client.errors import DAEMON_REPLACED, DOMAIN, UsageError
from resharder.client.rpc.tls import Tls
from resharder.converters.wire.endpoint import target_of
from resharder.converters.wire.term import NewestTerms, Term, replaced_message, term_of

logger = logging.getLogger("resharder")
_NEWEST = NewestTerms()  # of all channels of this process


class DaemonReplaced(grpc.RpcError):  # type: ignore[misc]
    """An answer of a daemon from which another one has taken over. Callers treat it as a daemon that cannot be reached."""

    def __init__(self, term: Term, newest: Term) -> None:
        super().__init__(replaced_message(term, newest))

    def code(self) -> grpc.StatusCode:
        """Return UNAVAILABLE."""
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        """Return the message."""
        return str(self)

    def initial_metadata(self) -> tuple[()]:
        """Return no metadata."""
        return ()

    def trailing_metadata(self) -> tuple[tuple[str, bytes], ...]:
        """Return the reason, as an answer of the daemon has it."""
        detail = any_pb2.Any()
        detail.Pack(error_details_pb2.ErrorInfo(reason=DAEMON_REPLACED, domain=DOMAIN))
        status = status_pb2.Status(code=grpc.StatusCode.UNAVAILABLE.value[0], message=str(self), details=[detail])
        return (("grpc-status-details-bin", status.SerializeToString()),)


@dataclass(eq=False)
class _Connection:
    """A channel of gRPC. `replaced`: terms of the daemon that answered on it, and of the one that has taken over."""

    channel: grpc.Channel
    replaced: tuple[Term, Term] | None = None


class DaemonChannel(grpc.Channel):  # type: ignore[misc]
    """Channel whose calls name the newest term that this process has seen. Answers of earlier ones raise DaemonReplaced.

    Args:
        endpoint: Address as `host:port`, or several with commas between them.
        tls: TLS settings, whose files may be replaced while the channel is open; None for none.
        options: Options of gRPC.
        newest: Terms that this process has seen.

    Raises:
        UsageError: The files of `tls` are invalid. Later, they are logged, and their previous content stays.
        ValueError: No name in the endpoint resolves.
    """

    def __init__(self, endpoint: str, tls: Tls | None, options: Sequence[tuple[str, Any]], newest: NewestTerms = _NEWEST) -> None:
        self._endpoint, self._tls, self._newest = endpoint, tls, newest
        self._options = [*options, *([("grpc.ssl_target_name_override", tls.name)] if tls and tls.name else [])]
        self._lock = threading.Lock()
        self._registry = ""  # of the last answer
        self._left = 0  # connections to replaced daemons
        self._former: _Connection | None = None
        self._closed = False
        target = target_of(endpoint)
        self._stamp: tuple[object, ...] = ()
        self._token: tuple[tuple[str, str], ...] = ()
        try:
            self._stamp, self._current = tls.stamp() if tls else (), self._open(target)
        except (OSError, ValueError) as error:
            files = ", ".join(map(str, tls.files)) if tls else ""
            raise UsageError(f"cannot load the certificates in {files}: {error}") from error
        try:
            self._token = tls.metadata() if tls else ()
        except (OSError, ValueError) as error:
            raise UsageError(str(error)) from error

    def _open(self, target: str) -> _Connection:
        # Else gRPC finds the connection to the daemon that was left, and takes it.
        options = [*self._options, *([("grpc.use_local_subchannel_pool", 1)] if self._left else [])]
        if self._tls is None:
            return _Connection(grpc.insecure_channel(target, options=options))
        return _Connection(grpc.secure_channel(target, self._tls.credentials(), options=options))

    def now(self) -> _Connection:
        """Return the connection for new calls, made anew if the files have changed. Raises ValueError once it is closed."""
        with self._lock:
            if self._closed:
                raise ValueError("the channel was closed")
            try:
                stamp = self._tls.stamp() if self._tls else ()
                if stamp != self._stamp:
                    self._stamp, made = stamp, self._open(target_of(self._endpoint, self._left))
                    if self._former is not None:
                        self._former.channel.close()
                    self._former, self._current = self._current, made
            except (OSError, ValueError) as error:
                logger.warning("rejected the new certificates; keeping the previous ones: %s", error)
            return self._current

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata that is added to every call: the token, and the newest term."""
        if self._tls is not None:
            try:
                self._token = self._tls.metadata()
            except (OSError, ValueError) as error:
                logger.warning("rejected the new token; keeping the previous one: %s", error)
        newest = self._newest.newest(self._registry)
        return (*self._token, *(newest.metadata() if newest else ()))

    def seen(self, call: Any, connection: _Connection) -> Term | None:
        """Return the term of a call that has been answered; None without one. Raises DaemonReplaced."""
        if connection.replaced is not None:
            raise DaemonReplaced(*connection.replaced)
        if (term := term_of(call.initial_metadata())) is not None:
            self._registry = term.registry
            self.check(term, connection)
        return term

    def check(self, term: Term, connection: _Connection) -> None:
        """Raise DaemonReplaced, and leave the connection, if a later term has been seen."""
        if (newest := self._newest.see(term)).number > term.number:
            self._leave(connection, term, newest)
            raise DaemonReplaced(term, newest)

    def _leave(self, connection: _Connection, term: Term, newest: Term) -> None:
        """Let the next address be the first to be tried."""
        with self._lock:
            if self._closed or connection is not self._current:
                return
            try:
                self._left += 1
                self._current = self._open(target_of(self._endpoint, self._left))
            except (OSError, ValueError) as error:
                logger.warning("another daemon has taken over, and cannot be called: %s", error)
                return
            connection.replaced = term, newest
        # On a thread of its own: gRPC waits for calls in progress, and their callbacks may be what runs here.
        threading.Thread(target=connection.channel.close, name="left", daemon=True).start()

    def unary_unary(self, method: str, *given: Any, **named: Any) -> "_Unary":
        """Return a multi-callable of a unary-unary method."""
        return _Unary(self, lambda channel: channel.unary_unary(method, *given, **named))

    def stream_unary(self, method: str, *given: Any, **named: Any) -> "_Unary":
        """Return a multi-callable of a stream-unary method."""
        return _Unary(self, lambda channel: channel.stream_unary(method, *given, **named))

    def unary_stream(self, method: str, *given: Any, **named: Any) -> "_Stream":
        """Return a multi-callable of a unary-stream method."""
        return _Stream(self, lambda channel: channel.unary_stream(method, *given, **named))

    def stream_stream(self, method: str, *given: Any, **named: Any) -> "_Stream":
        """Return a multi-callable of a stream-stream method."""
        return _Stream(self, lambda channel: channel.stream_stream(method, *given, **named))

    def subscribe(self, callback: Callable[[grpc.ChannelConnectivity], None], try_to_connect: bool = False) -> None:
        """Call `callback` with the connectivity of the current connection; later ones are not covered."""
        self.now().channel.subscribe(callback, try_to_connect)

    def unsubscribe(self, callback: Callable[[grpc.ChannelConnectivity], None]) -> None:
        """Remove a callback of `subscribe` from the current connection."""
        self.now().channel.unsubscribe(callback)

    def close(self) -> None:
        """Close the current connection and the previous one, on which streams may be open."""
        with self._lock:
            self._closed = True
        for connection in (self._former, self._current):
            if connection is not None:
                connection.channel.close()

    def __enter__(self) -> "DaemonChannel":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class _Method:
    """One method of a stub, called on the current connection."""

    def __init__(self, channel: DaemonChannel, make: Callable[[grpc.Channel], Any]) -> None:
        self._channel, self._make = channel, make
        self._made: tuple[_Connection, Any] | None = None

    def _now(self) -> tuple[_Connection, Any]:
        connection, made = self._channel.now(), self._made
        if made is None or made[0] is not connection:
            self._made = made = connection, self._make(connection.channel)
        return made

    def _named(self, named: dict[str, Any]) -> dict[str, Any]:
        return named | {"metadata": (*(named.get("metadata") or ()), *self._channel.metadata())}


class _Unary(_Method):
    """Method with one answer."""

    def __call__(self, request: Any, timeout: float | None = None, **named: Any) -> Any:
        return self.with_call(request, timeout, **named)[0]

    def with_call(self, request: Any, timeout: float | None = None, **named: Any) -> Any:
        connection, method = self._now()
        try:
            answer, call = method.with_call(request, timeout, **self._named(named))
        except grpc.RpcError as error:
            self._channel.seen(error, connection)
            raise
        self._channel.seen(call, connection)
        return answer, call

    def future(self, request: Any, timeout: float | None = None, **named: Any) -> Any:
        connection, method = self._now()
        return _Answer(self._channel, connection, method.future(request, timeout, **self._named(named)))


class _Stream(_Method):
    """Method with a stream of answers."""

    def __call__(self, request: Any, timeout: float | None = None, **named: Any) -> Any:
        connection, method = self._now()
        return _Answers(self._channel, connection, method(request, timeout, **self._named(named)))


class _Answer:
    """Call in progress with one answer; what it lacks is the call's."""

    def __init__(self, channel: DaemonChannel, connection: _Connection, call: Any) -> None:
        self._channel, self._connection, self._call = channel, connection, call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    def result(self, timeout: float | None = None) -> Any:
        try:
            answer = self._call.result(timeout)
        except grpc.RpcError as error:
            self._channel.seen(error, self._connection)
            raise
        self._channel.seen(self._call, self._connection)
        return answer

    def exception(self, timeout: float | None = None) -> Any:
        error = self._call.exception(timeout)
        try:
            self._channel.seen(self._call, self._connection)
        except DaemonReplaced as replaced:
            return replaced
        return error

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._call.add_done_callback(lambda _: callback(self))


class _Answers:
    """Call in progress with a stream of answers, of which each is believed only while no later term has been seen."""

    def __init__(self, channel: DaemonChannel, connection: _Connection, call: Any) -> None:
        self._channel, self._connection, self._call = channel, connection, call
        self._answered = False
        self._term: Term | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            answer = next(self._call)
        except grpc.RpcError as error:
            self._channel.seen(error, self._connection)
            raise
        try:
            if not self._answered:
                self._term, self._answered = self._channel.seen(self._call, self._connection), True
            elif self._term is not None:
                self._channel.check(self._term, self._connection)
        except DaemonReplaced:
            self._call.cancel()
            raise
        return answer
