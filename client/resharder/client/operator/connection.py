"""Connection of an operator to one daemon: single calls and paged lists."""

from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self, TypeVar

from resharder.client.errors import NotFound, UsageError
from resharder.client.operator.answers import DaemonStatus
from resharder.client.operator.convert import answer
from resharder.client.rpc.channel import Channel, endpoint_or_default
from resharder.client.rpc.tls import Tls
from resharder.converters.failpoints import failpoint
from resharder.v1 import operator_pb2, operator_pb2_grpc

Found = TypeVar("Found")
_PAGE = 500


class DaemonConnection:
    """Connection to one daemon.

    Args:
        endpoint: Address as `host:port`; by default RESHARDER_ENDPOINT, else 127.0.0.1:7677.
        timeout: Bound on one answer in seconds; None is no bound.
        connect_timeout: Seconds for which calls are retried while the daemon cannot be reached; None is no bound.
        tls: TLS settings; by default those of the RESHARDER_TLS_* variables.

    Raises:
        UsageError: The endpoint or the TLS settings are invalid.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        timeout: float | None = 30.0,
        connect_timeout: float | None = 2.0,
        tls: Tls | None = None,
    ) -> None:
        self._channel = Channel(endpoint_or_default(endpoint), connect_timeout, tls, interruptible=True)
        self._timeout = timeout
        self._stub = operator_pb2_grpc.OperatorServiceStub(self._channel.grpc)

    @property
    def endpoint(self) -> str:
        """Address of the daemon, `host:port`."""
        return self._channel.endpoint

    def daemon(self) -> DaemonStatus:
        """Return the daemon's state: release, store, models and publishers."""
        return answer(DaemonStatus, self._call(self._stub.GetDaemon, operator_pb2.GetDaemonRequest()))

    def only_model(self) -> str:
        """Return the name of the daemon's model. Raises UsageError unless there is exactly one."""
        models = self.daemon().models
        if len(models) != 1:
            raise UsageError(f"expected a model's name, the daemon has {', '.join(models) or 'none'}: pass --model")
        return models[0]

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _call(self, method: Callable[..., Any], request: Any, connect_timeout: float | None = None) -> Any:
        """Return the answer of a call. `connect_timeout` replaces the connection's own."""
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
    """Return the resource with this name. Raises NotFound, with the names that exist."""
    if name not in found:
        raise NotFound(f"expected a {kind}, the daemon has no {name or 'such thing'}: it has {', '.join(found) or 'none'}")
    return found[name]


def server_name(name: str) -> str:
    """Return the resource name of a server, `servers/{id}`, from its id or its resource name; empty for an empty one."""
    return f"servers/{name}" if name and not name.startswith("servers/") else name
