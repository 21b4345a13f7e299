"""Channel over TLS that outlives its certificates: new calls use the current files, open streams continue on their channel."""

import logging
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import grpc
from resharder.client.errors import UsageError
from resharder.client.rpc.tls import Tls

logger = logging.getLogger("resharder")


class SecureChannel(grpc.Channel):  # type: ignore[misc]
    """Channel over TLS whose certificates and token may be replaced while it is open.

    Raises UsageError for invalid files when it is created. Later it logs invalid files and keeps their previous content.
    """

    def __init__(self, endpoint: str, tls: Tls, options: Sequence[tuple[str, Any]]) -> None:
        self._endpoint, self._tls = endpoint, tls
        self._options = [*options, *([("grpc.ssl_target_name_override", tls.name)] if tls.name else [])]
        self._lock = threading.Lock()
        self._former: grpc.Channel | None = None
        self._closed = False
        try:
            self._stamp, self._current = tls.stamp(), self._open()
        except (OSError, ValueError) as error:
            raise UsageError(f"cannot load the certificates in {', '.join(map(str, tls.files))}: {error}") from error
        try:
            self._metadata = tls.metadata()
        except (OSError, ValueError) as error:
            raise UsageError(str(error)) from error

    def _open(self) -> grpc.Channel:
        return grpc.secure_channel(self._endpoint, self._tls.credentials(), options=self._options)

    def now(self) -> grpc.Channel:
        """Return the channel for new calls, opened anew if the files have changed. Raises ValueError once it is closed."""
        with self._lock:
            if self._closed:
                raise ValueError("the channel was closed")
            try:
                stamp = self._tls.stamp()
                if stamp != self._stamp:
                    self._stamp, made = stamp, self._open()
                    if self._former is not None:
                        self._former.close()
                    self._former, self._current = self._current, made
            except (OSError, ValueError) as error:
                logger.warning("rejected the new certificates; keeping the previous ones: %s", error)
            return self._current

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata that is added to every call: the token."""
        try:
            self._metadata = self._tls.metadata()
        except (OSError, ValueError) as error:
            logger.warning("rejected the new token; keeping the previous one: %s", error)
        return self._metadata

    def unary_unary(self, method: str, *given: Any, **named: Any) -> "_Method":
        """Return a multi-callable of a unary-unary method, of which each call uses the current channel."""
        return _Method(self, lambda channel: channel.unary_unary(method, *given, **named))

    def unary_stream(self, method: str, *given: Any, **named: Any) -> "_Method":
        """Return a multi-callable of a unary-stream method, of which each call uses the current channel."""
        return _Method(self, lambda channel: channel.unary_stream(method, *given, **named))

    def stream_unary(self, method: str, *given: Any, **named: Any) -> "_Method":
        """Return a multi-callable of a stream-unary method, of which each call uses the current channel."""
        return _Method(self, lambda channel: channel.stream_unary(method, *given, **named))

    def stream_stream(self, method: str, *given: Any, **named: Any) -> "_Method":
        """Return a multi-callable of a stream-stream method, of which each call uses the current channel."""
        return _Method(self, lambda channel: channel.stream_stream(method, *given, **named))

    def subscribe(self, callback: Callable[[grpc.ChannelConnectivity], None], try_to_connect: bool = False) -> None:
        """Call `callback` with the connectivity of the current channel; channels opened later are not covered."""
        self.now().subscribe(callback, try_to_connect)

    def unsubscribe(self, callback: Callable[[grpc.ChannelConnectivity], None]) -> None:
        """Remove a callback of `subscribe` from the current channel."""
        self.now().unsubscribe(callback)

    def close(self) -> None:
        """Close the current channel and the previous one, on which streams may be open."""
        with self._lock:
            self._closed = True
        for channel in (self._former, self._current):
            if channel is not None:
                channel.close()

    def __enter__(self) -> "SecureChannel":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class _Method:
    """One method of a stub, called on the current channel."""

    def __init__(self, channel: SecureChannel, make: Callable[[grpc.Channel], Any]) -> None:
        self._channel, self._make = channel, make
        self._made: tuple[grpc.Channel, Any] | None = None

    def _now(self) -> Any:
        channel, made = self._channel.now(), self._made
        if made is None or made[0] is not channel:
            self._made = made = channel, self._make(channel)
        return made[1]

    def _all(self, named: dict[str, Any]) -> dict[str, Any]:
        return named | {"metadata": (*(named.get("metadata") or ()), *self._channel.metadata())}

    def __call__(self, request: Any, timeout: float | None = None, **named: Any) -> Any:
        return self._now()(request, timeout, **self._all(named))

    def with_call(self, request: Any, timeout: float | None = None, **named: Any) -> Any:
        return self._now().with_call(request, timeout, **self._all(named))

    def future(self, request: Any, timeout: float | None = None, **named: Any) -> Any:
        return self._now().future(request, timeout, **self._all(named))
