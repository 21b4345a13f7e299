"""Channel that believes only the newest daemon of a registry (`converters/wire/term.py`)."""

from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from resharder.client.errors import DAEMON_REPLACED, DOMAIN
from resharder.converters.wire.term import NewestTerms, Term, replaced_message, term_of

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


class TermChannel(grpc.Channel):  # type: ignore[misc]
    """Channel whose calls name the newest term that this process has seen. Answers of earlier ones raise DaemonReplaced."""

    def __init__(self, channel: grpc.Channel, newest: NewestTerms = _NEWEST) -> None:
        self._channel, self._newest = channel, newest
        self._registry = ""  # of the last answer

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata that is added to every call."""
        newest = self._newest.newest(self._registry)
        return newest.metadata() if newest else ()

    def seen(self, call: Any) -> Term | None:
        """Return the term of a call that has been answered; None without one. Raises DaemonReplaced."""
        if (term := term_of(call.initial_metadata())) is not None:
            self._registry = term.registry
            self.check(term)
        return term

    def check(self, term: Term) -> None:
        """Raise DaemonReplaced if a later term has been seen."""
        if (newest := self._newest.see(term)).number > term.number:
            raise DaemonReplaced(term, newest)

    def unary_unary(self, method: str, *given: Any, **named: Any) -> "_Unary":
        """Return a multi-callable of a unary-unary method."""
        return _Unary(self, self._channel.unary_unary(method, *given, **named))

    def stream_unary(self, method: str, *given: Any, **named: Any) -> "_Unary":
        """Return a multi-callable of a stream-unary method."""
        return _Unary(self, self._channel.stream_unary(method, *given, **named))

    def unary_stream(self, method: str, *given: Any, **named: Any) -> "_Stream":
        """Return a multi-callable of a unary-stream method."""
        return _Stream(self, self._channel.unary_stream(method, *given, **named))

    def stream_stream(self, method: str, *given: Any, **named: Any) -> "_Stream":
        """Return a multi-callable of a stream-stream method."""
        return _Stream(self, self._channel.stream_stream(method, *given, **named))

    def subscribe(self, callback: Callable[[grpc.ChannelConnectivity], None], try_to_connect: bool = False) -> None:
        """Call `callback` with the channel's connectivity."""
        self._channel.subscribe(callback, try_to_connect)

    def unsubscribe(self, callback: Callable[[grpc.ChannelConnectivity], None]) -> None:
        """Remove a callback of `subscribe`."""
        self._channel.unsubscribe(callback)

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()

    def __enter__(self) -> "TermChannel":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class _Method:
    def __init__(self, channel: TermChannel, method: Any) -> None:
        self._channel, self._method = channel, method

    def _named(self, named: dict[str, Any]) -> dict[str, Any]:
        return named | {"metadata": (*(named.get("metadata") or ()), *self._channel.metadata())}


class _Unary(_Method):
    """Method with one answer."""

    def __call__(self, request: Any, timeout: float | None = None, **named: Any) -> Any:
        return self.with_call(request, timeout, **named)[0]

    def with_call(self, request: Any, timeout: float | None = None, **named: Any) -> Any:
        try:
            answer, call = self._method.with_call(request, timeout, **self._named(named))
        except grpc.RpcError as error:
            self._channel.seen(error)
            raise
        self._channel.seen(call)
        return answer, call

    def future(self, request: Any, timeout: float | None = None, **named: Any) -> Any:
        return _Answer(self._channel, self._method.future(request, timeout, **self._named(named)))


class _Stream(_Method):
    """Method with a stream of answers."""

    def __call__(self, request: Any, timeout: float | None = None, **named: Any) -> Any:
        return _Answers(self._channel, self._method(request, timeout, **self._named(named)))


class _Answer:
    """Call in progress with one answer; what it lacks is the call's."""

    def __init__(self, channel: TermChannel, call: Any) -> None:
        self._channel, self._call = channel, call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    def result(self, timeout: float | None = None) -> Any:
        try:
            answer = self._call.result(timeout)
        except grpc.RpcError as error:
            self._channel.seen(error)
            raise
        self._channel.seen(self._call)
        return answer

    def exception(self, timeout: float | None = None) -> Any:
        error = self._call.exception(timeout)
        try:
            self._channel.seen(self._call)
        except DaemonReplaced as replaced:
            return replaced
        return error

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._call.add_done_callback(lambda _: callback(self))


class _Answers:
    """Call in progress with a stream of answers, of which each is believed only while no later term has been seen."""

    def __init__(self, channel: TermChannel, call: Any) -> None:
        self._channel, self._call = channel, call
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
            self._channel.seen(error)
            raise
        try:
            if not self._answered:
                self._term, self._answered = self._channel.seen(self._call), True
            elif self._term is not None:
                self._channel.check(self._term)
        except DaemonReplaced:
            self._call.cancel()
            raise
        return answer
