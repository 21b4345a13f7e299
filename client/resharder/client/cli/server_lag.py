"""Lag of one server behind its own `wanted_version`, for readiness probes: pure functions.

A server that waits for its turn in a move is not behind, nor is one while no server of its fleet serves a version nearer to the
wanted one: without it clients would get nothing newer. The lag of a fleet is the daemon's own metric (docs/metrics.md).
"""

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import NamedTuple

from resharder.client.operator.answers import FleetStatus, ServerStatus, VersionStatus
from resharder.client.operator.states import ServerState


class ServerLag(NamedTuple):
    """`versions`: how many READY ones are between what it serves and what it is to serve. `seconds`: since the first of those was
    READY; where it is to go back, since the fleet's move began."""

    versions: int = 0
    seconds: float = 0.0

    def beyond(self, versions: int, seconds: float) -> bool:
        """Bounds of 0 are none."""
        return bool(self.versions) and (0 < versions < self.versions or 0 < seconds < self.seconds)


def server_lag(
    server: ServerStatus,
    fleet: FleetStatus,
    others: Iterable[ServerStatus],
    versions: Sequence[VersionStatus],
    now: datetime | None,
) -> ServerLag:
    """`others`: the servers of its fleet, itself among them or not. `versions`: of its model, with all that are nearer to what is
    wanted than the one it serves. `now`: by the daemon's clock."""
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
