"""Queries of the daemon's state and of events."""

import time
from collections.abc import Iterator
from itertools import takewhile

from resharder.client.errors import DaemonUnreachable, NotFound, UsageError
from resharder.client.operator.answers import DaemonEvent, FleetStatus, ServerStatus, VersionStatus
from resharder.client.operator.connection import DaemonConnection, one_of, server_name
from resharder.client.operator.convert import answer
from resharder.client.operator.states import VersionState
from resharder.client.rpc.channel import Backoff
from resharder.v1 import operator_pb2

RESTART = 60.0
"""Seconds for which a wait, or a stream of events, survives a restart of the daemon."""


class OperatorQueries(DaemonConnection):
    """Queries, none of which changes the daemon's state."""

    def clock_difference(self) -> float:
        """Return the seconds by which the daemon's clock is ahead of this host's, to within half a round trip."""
        self.daemon()  # connects, so that the round trip below does not include it
        before = time.time()
        there = self.daemon().time
        return (there.timestamp() if there else 0.0) - (before + time.time()) / 2

    def versions(self, model: str = "") -> list[VersionStatus]:
        """Return versions, newest first.

        Args:
            model: Name of the model; empty for all models.
        """
        return list(self._versions(model))

    def versions_after(self, number: int, *, model: str) -> list[VersionStatus]:
        """Return the versions with higher numbers, newest first, without reading further pages.

        Args:
            number: Number of a version.
            model: Name of the model.
        """
        return list(takewhile(lambda version: version.number > number, self._versions(model)))

    def version(self, number: int, *, model: str = "") -> VersionStatus:
        """Return one version.

        Args:
            number: Number of the version.
            model: Name of the model; may be omitted if the daemon has one.

        Raises:
            NotFound: No such version.
            UsageError: `model` is empty, and the daemon does not have exactly one model.
        """
        request = operator_pb2.GetVersionRequest(version=self._version_name(number, model))
        return answer(VersionStatus, self._call(self._stub.GetVersion, request))

    def latest(self, model: str = "") -> VersionStatus:
        """Return the newest READY version.

        Args:
            model: Name of the model; may be omitted if the daemon has one.

        Raises:
            NotFound: No version is READY.
            UsageError: `model` is empty, and the daemon does not have exactly one model.
        """
        model = model or self.only_model()
        ready = [version for version in self.versions(model) if version.state == VersionState.READY]
        if not ready:
            raise NotFound(f"expected a READY version of model {model!r}, found none yet")
        return max(ready, key=lambda version: version.number)

    def servers(self, fleet: str = "") -> list[ServerStatus]:
        """Return servers, sorted by id.

        Args:
            fleet: Name of the fleet; empty for all servers.
        """
        return self._servers(fleet)

    def server(self, name: str) -> ServerStatus:
        """Return one server.

        Args:
            name: Id, or `servers/{id}`.

        Raises:
            NotFound: No such server.
        """
        return one_of({server.name: server for server in self.servers()}, server_name(name), "server")

    def fleets(self) -> list[FleetStatus]:
        """Return all fleets, sorted by name."""
        return self._fleets()

    def fleet(self, name: str = "") -> FleetStatus:
        """Return one fleet.

        Args:
            name: Name of the fleet; may be omitted if the daemon has one.

        Raises:
            NotFound: No such fleet.
            UsageError: The daemon has several fleets.
        """
        fleets = {fleet.name: fleet for fleet in self.fleets()}
        if not name and len(fleets) > 1:
            raise UsageError(f"expected a fleet's name, the daemon has {', '.join(fleets)}: pass --fleet")
        return one_of(fleets, name or next(iter(fleets), ""), "fleet")

    def events(self, *, after: int = 0, last: int = 0, subject: str = "", follow: bool = False) -> Iterator[DaemonEvent]:
        """Yield events, oldest first, up to the newest one; with `follow` also later ones.

        Args:
            after: Id of an event; only later ones are yielded.
            last: Number of the newest events, if `after` is 0; 0 is 100.
            subject: Resource name; only events about it or resources below it are yielded.
            follow: Wait for further events, over restarts of the daemon.

        Raises:
            DaemonUnreachable: The daemon cannot be reached; with `follow`, for a minute.
        """
        request = operator_pb2.ListEventsRequest(after=after, last=last, subject=subject, follow=follow)
        lost = Backoff(RESTART)
        while True:
            try:
                for event in self._channel.stream(self._channel.begin(self._stub.ListEvents, request)):
                    request.after, request.last, lost = event.id, 0, Backoff(RESTART)
                    yield answer(DaemonEvent, event)
                if not follow:
                    return
            except DaemonUnreachable:
                if not follow:
                    raise
            if not lost.wait():
                raise DaemonUnreachable(f"expected the daemon at {self.endpoint} to be reachable again within {RESTART:g} s")

    def _versions(self, model: str) -> Iterator[VersionStatus]:
        request = operator_pb2.ListVersionsRequest(model=model)
        return self._pages(self._stub.ListVersions, request, "versions", VersionStatus)

    def _fleets(self, connect_timeout: float | None = None) -> list[FleetStatus]:
        request = operator_pb2.ListFleetsRequest()
        return list(self._pages(self._stub.ListFleets, request, "fleets", FleetStatus, connect_timeout))

    def _servers(self, fleet: str, connect_timeout: float | None = None) -> list[ServerStatus]:
        request = operator_pb2.ListServersRequest(fleet=fleet)
        return list(self._pages(self._stub.ListServers, request, "servers", ServerStatus, connect_timeout))
