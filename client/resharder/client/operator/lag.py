"""How far a server is behind the version that it is to serve: what a readiness probe goes by, as pure functions.

What it is to serve is its own `wanted_version`: a server that waits for its turn in a move is not behind. A server is not behind
either while none of its fleet serves anything nearer to what is wanted: without it clients would get nothing newer.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from resharder.v1 import resources_pb2

_SERVING = resources_pb2.Server.SERVING


class Lag(NamedTuple):
    """`versions`: how many READY ones are between what it serves and what it is to serve. `seconds`: since the first of those was
    READY; where it is to go back, since the fleet's move began."""

    versions: int = 0
    seconds: float = 0.0

    def beyond(self, versions: int, seconds: float) -> bool:
        """Bounds of 0 are none."""
        return bool(self.versions) and (0 < versions < self.versions or 0 < seconds < self.seconds)


def lag(
    server: resources_pb2.Server,
    fleet: resources_pb2.Fleet,
    others: Iterable[resources_pb2.Server],
    versions: Sequence[resources_pb2.Version],
    now: float,
) -> Lag:
    """`others`: the servers of its fleet, itself among them or not. `versions`: of its model, with all that are nearer to what is
    wanted than the one it serves. `now`: seconds since 1970, by the daemon's clock."""
    served, wanted = server.version, server.wanted_version
    if not served or served == wanted or not _anyone_nearer(server, others):
        return Lag()
    low, high = sorted((served, wanted))
    passed = [version for version in versions if low < version.number <= high and version.HasField("ready_time")]
    if wanted < served:
        return Lag(max(1, len(passed)), now - fleet.move.start_time.ToNanoseconds() / 1e9)
    since = min((version.ready_time.ToNanoseconds() / 1e9 for version in passed), default=now)
    return Lag(max(1, len(passed)), now - since)


def _anyone_nearer(server: resources_pb2.Server, others: Iterable[resources_pb2.Server]) -> bool:
    wanted, distance = server.wanted_version, abs(server.wanted_version - server.version)
    return any(one.state == _SERVING and abs(one.version - wanted) < distance for one in others)
