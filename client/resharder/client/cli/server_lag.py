"""Lag of one server behind its own target, for readiness probes: pure functions.

A server that waits for its turn in a move does not lag, nor does one while no server of its fleet serves a version closer to the
target: without it, clients would get nothing newer. The lag of a fleet is the daemon's metric (docs/metrics.md).
"""

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import NamedTuple

from resharder.client.operator.answers import FleetStatus, ServerState, ServerStatus, VersionStatus


class ServerLag(NamedTuple):
    """Lag of a server. `versions`: READY ones between its version and its target. `seconds`: since the
    first of those became READY; for a move back, since the fleet's move began.
    """

    versions: int = 0
    seconds: float = 0.0

    def beyond(self, versions: int, seconds: float) -> bool:
        """Return whether the lag exceeds bounds; 0: no bound."""
        return bool(self.versions) and (0 < versions < self.versions or 0 < seconds < self.seconds)


def server_lag(
    server: ServerStatus,
    fleet: FleetStatus,
    others: Iterable[ServerStatus],
    versions: Sequence[VersionStatus],
    now: datetime | None,
) -> ServerLag:
    """Return a server's lag.

    Args:
        server: The server.
        others: Servers of its fleet, with or without itself.
        versions: Versions of its model, including all that are closer to the target than its own.
        now: Time by the daemon's clock.
    """
    served, wanted = server.version, server.wanted_version
    if not served or served == wanted or not _anyone_nearer(server, others):
        return ServerLag()
    low, high = sorted((served, wanted))
    passed = [version for version in versions if low < version.number <= high and version.ready_time]
    if wanted < served:
        return ServerLag(max(1, len(passed)), _seconds(fleet.move.start_time if fleet.move else None, now))
    since = min((version.ready_time for version in passed if version.ready_time), default=now)
    return ServerLag(max(1, len(passed)), _seconds(since, now))


def _seconds(since: datetime | None, now: datetime | None) -> float:
    return (now - since).total_seconds() if now and since else 0.0


def _anyone_nearer(server: ServerStatus, others: Iterable[ServerStatus]) -> bool:
    wanted, distance = server.wanted_version, abs(server.wanted_version - server.version)
    return any(one.state == ServerState.SERVING and abs(one.version - wanted) < distance for one in others)
