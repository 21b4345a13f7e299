"""What an operator sees of a daemon: versions, servers, fleets, events. `Operator` adds what changes them."""

import os
import time
from collections.abc import Callable, Iterator
from itertools import takewhile
from types import TracebackType
from typing import Any, Self, TypeVar

from resharder.client.errors import DaemonUnreachable, NotFound, UsageError, WaitTimeout
from resharder.client.operator import waiting
from resharder.client.rpc.channel import Backoff, Channel
from resharder.client.rpc.tls import Tls
from resharder.v1 import operator_pb2, operator_pb2_grpc, resources_pb2

Answer = TypeVar("Answer")

_READY = resources_pb2.Version.READY
_PAGE = 500
_POLL = 0.2
_RESTART = 60.0
"""Seconds that a restart of the daemon may take while something is waited for or followed."""


class Reader:
    """A connection to one daemon. `patience`: seconds to try while it cannot be reached; `timeout`: seconds for one answer;
    `tls`: else what RESHARDER_TLS_* say."""

    def __init__(self, endpoint: str | None = None, patience: float = 3.0, timeout: float = 30.0, tls: Tls | None = None) -> None:
        where = endpoint or os.environ.get("RESHARDER_ENDPOINT")
        if not where:
            raise UsageError("expected the daemon's endpoint, got none: pass --endpoint host:port or set RESHARDER_ENDPOINT")
        self._channel, self._timeout = Channel(where, patience, tls), timeout
        self._stub = operator_pb2_grpc.OperatorServiceStub(self._channel.grpc)

    @property
    def endpoint(self) -> str:
        return self._channel.endpoint

    def daemon(self) -> operator_pb2.Daemon:
        answer: operator_pb2.Daemon = self._call(self._stub.GetDaemon, operator_pb2.GetDaemonRequest())
        return answer

    def clock_difference(self) -> float:
        """Seconds that the daemon's clock is ahead of this host's, known to half a round trip."""
        self.daemon()  # the connection's own time is not a round trip's
        before = time.time()
        there = self.daemon().time
        return float(there.seconds + there.nanos / 1e9 - (before + time.time()) / 2)

    def versions(self, model: str = "") -> list[resources_pb2.Version]:
        """Of one model, or of all."""
        return list(self._pages(self._stub.ListVersions, operator_pb2.ListVersionsRequest(model=model), "versions"))

    def versions_after(self, model: str, number: int) -> list[resources_pb2.Version]:
        """Those of higher numbers, newest first, as the daemon lists them: no page more is asked for than they take."""
        pages = self._pages(self._stub.ListVersions, operator_pb2.ListVersionsRequest(model=model), "versions")
        return list(takewhile(lambda version: version.number > number, pages))

    def version(self, name: str) -> resources_pb2.Version:
        answer: resources_pb2.Version = self._call(self._stub.GetVersion, operator_pb2.GetVersionRequest(version=name))
        return answer

    def servers(self, fleet: str = "") -> list[resources_pb2.Server]:
        return list(self._pages(self._stub.ListServers, operator_pb2.ListServersRequest(fleet=fleet), "servers"))

    def server(self, name: str) -> resources_pb2.Server:
        """By its id, or as servers/{id}. Raises NotFound."""
        servers = {server.name: server for server in self.servers()}
        return one_of(servers, server_name(name), "server")

    def fleets(self) -> list[resources_pb2.Fleet]:
        return list(self._pages(self._stub.ListFleets, operator_pb2.ListFleetsRequest(), "fleets"))

    def fleet(self, name: str = "") -> resources_pb2.Fleet:
        """Raises NotFound, and UsageError for no name where there are several."""
        fleets = {fleet.name: fleet for fleet in self.fleets()}
        if not name and len(fleets) > 1:
            raise UsageError(f"expected a fleet's name, the daemon has {', '.join(fleets)}: pass --fleet")
        return one_of(fleets, name or next(iter(fleets), ""), "fleet")

    def find_version(self, wanted: str, model: str = "") -> resources_pb2.Version:
        """`wanted`: a number, `latest`, or models/{model}/versions/{number}. Raises NotFound, UsageError."""
        if wanted.startswith("models/"):
            return self.version(wanted)
        model = model or self.only_model()
        if wanted.isdigit():
            return self.version(f"models/{model}/versions/{int(wanted)}")
        if wanted != "latest":
            raise UsageError(f"expected a version's number, `latest` or models/MODEL/versions/NUMBER, got {wanted!r}")
        ready = [version for version in self.versions(model) if version.state == _READY]
        if not ready:
            raise NotFound(f"model {model!r} has no READY version yet")
        return max(ready, key=lambda version: version.number)

    def only_model(self) -> str:
        """The daemon's model, where it has just one. Raises UsageError."""
        models = list(self.daemon().models)
        if len(models) != 1:
            raise UsageError(f"expected a model's name, the daemon has {', '.join(models) or 'none'}: pass --model")
        return str(models[0])

    def events(self, *, after: int = 0, last: int = 0, subject: str = "", follow: bool = False) -> Iterator[operator_pb2.Event]:
        """What happened, oldest first: after the event of that id, or the `last` newest (0: 100). `subject` is a resource's
        name. With `follow` it goes on, over restarts of the daemon too."""
        request = operator_pb2.ListEventsRequest(after=after, last=last, subject=subject, follow=follow)
        lost = Backoff(_RESTART)
        while True:
            try:
                for event in self._channel.stream(self._stub.ListEvents(request)):
                    request.after, request.last, lost = event.id, 0, Backoff(_RESTART)
                    yield event
                if not follow:
                    return
            except DaemonUnreachable:
                if not follow:
                    raise
            if not lost.wait():
                raise DaemonUnreachable(f"expected the daemon at {self.endpoint} to be back within {_RESTART:g} s")

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _call(self, method: Callable[..., Any], request: Any, patience: float | None = None) -> Any:
        return self._channel.call(method, request, timeout=self._timeout, patience=patience)

    def _pages(self, method: Callable[..., Any], request: Any, field: str, patience: float | None = None) -> Iterator[Any]:
        request.page_size = _PAGE
        while True:
            answer = self._call(method, request, patience)
            yield from getattr(answer, field)
            if not answer.next_page_token:
                return
            request.page_token = answer.next_page_token

    def _until(
        self, done: waiting.Question, name: str, what: str, progress: waiting.Progress, timeout: float
    ) -> resources_pb2.Fleet:
        end = time.monotonic() + timeout
        while True:
            fleets = self._pages(self._stub.ListFleets, operator_pb2.ListFleetsRequest(), "fleets", _RESTART)
            fleet: resources_pb2.Fleet = one_of({fleet.name: fleet for fleet in fleets}, name, "fleet")
            request = operator_pb2.ListServersRequest(fleet=name)
            servers = list(self._pages(self._stub.ListServers, request, "servers", _RESTART))
            progress(fleet, servers)
            if done(fleet, servers):
                return fleet
            if timeout and time.monotonic() > end:
                raise WaitTimeout(f"fleet {name}: expected {what} within {timeout:g} s; {waiting.why(fleet, servers)}")
            time.sleep(_POLL)


def one_of(found: dict[str, Answer], name: str, kind: str) -> Answer:
    if name not in found:
        raise NotFound(f"expected a {kind}, the daemon has no {name or 'such thing'}: it has {', '.join(found) or 'none'}")
    return found[name]


def server_name(name: str) -> str:
    return f"servers/{name}" if name and not name.startswith("servers/") else name
