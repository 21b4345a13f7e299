"""An operator's connection to one daemon: single calls and pages of lists."""

import os
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self, TypeVar

from resharder.client.errors import NotFound, UsageError
from resharder.client.operator.answers import DaemonStatus
from resharder.client.operator.convert import answer
from resharder.client.rpc.channel import Channel
from resharder.client.rpc.tls import Tls
from resharder.converters.failpoints import failpoint
from resharder.v1 import operator_pb2, operator_pb2_grpc

Found = TypeVar("Found")
_PAGE = 500


class DaemonConnection:
    """A connection to one daemon.

    Args:
        endpoint: `host:port`; by default RESHARDER_ENDPOINT.
        timeout: Seconds that one answer may take; None: no bound.
        connect_timeout: Seconds for which a call is repeated while the daemon cannot be reached; None: no bound.
        tls: By default what RESHARDER_TLS_* specify.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        timeout: float | None = 30.0,
        connect_timeout: float | None = 3.0,
        tls: Tls | None = None,
    ) -> None:
        where = endpoint or os.environ.get("RESHARDER_ENDPOINT")
        if not where:
            raise UsageError("expected the daemon's endpoint, got none: pass --endpoint host:port or set RESHARDER_ENDPOINT")
        self._channel, self._timeout = Channel(where, connect_timeout, tls), timeout
        self._stub = operator_pb2_grpc.OperatorServiceStub(self._channel.grpc)

    @property
    def endpoint(self) -> str:
        return self._channel.endpoint

    def daemon(self) -> DaemonStatus:
        """Return the daemon's state: release, store, models, publishers."""
        return answer(DaemonStatus, self._call(self._stub.GetDaemon, operator_pb2.GetDaemonRequest()))

    def only_model(self) -> str:
        """Return the daemon's model. Raises UsageError unless there is exactly one."""
        models = self.daemon().models
        if len(models) != 1:
            raise UsageError(f"expected a model's name, the daemon has {', '.join(models) or 'none'}: pass --model")
        return models[0]

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _call(self, method: Callable[..., Any], request: Any, connect_timeout: float | None = None) -> Any:
        """`connect_timeout`: in place of the connection's own."""
        failpoint("operator.call")
        return self._channel.call(method, request, timeout=self._timeout, patience=connect_timeout)

    def _pages(
        self, method: Callable[..., Any], request: Any, field: str, kind: type[Found], connect_timeout: float | None = None
    ) -> Iterator[Found]:
        request.page_size = _PAGE
        while True:
            page = self._call(method, request, connect_timeout)
            yield from (answer(kind, one) for one in getattr(page, field))
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    def _version_name(self, number: int, model: str) -> str:
        return f"models/{model or self.only_model()}/versions/{number}"


def one_of(found: dict[str, Found], name: str, kind: str) -> Found:
    """Raises NotFound."""
    if name not in found:
        raise NotFound(f"expected a {kind}, the daemon has no {name or 'such thing'}: it has {', '.join(found) or 'none'}")
    return found[name]


def server_name(name: str) -> str:
    return f"servers/{name}" if name and not name.startswith("servers/") else name
