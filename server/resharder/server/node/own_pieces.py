"""The daemon's own row of the piece table: all pieces of most READY versions, and what the store holds so far of the others.

A piece without a holder is lost once every node that is expected to hold it has reported, or its lease has ended. A report may be
older than the piece. A version is therefore in doubt first, which changes the orders of all nodes, so that they report at once;
it is lost once all live nodes have reported after these orders, and none has the piece.
"""

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from resharder.converters.wire.pieces import Bitmap
from resharder.server.node.piece_table import PieceTable
from resharder.server.state.version import parse_name
from resharder.server.store.partial import PartialVersion

DAEMON = "@daemon"
"""Id of the daemon's own row in the table, which no node can have."""


@dataclass
class _Partial:
    known_at: float
    lost_at: float | None = None
    """Time since which a piece has no holder: the version is in doubt."""


class OwnPieces:
    """READY versions as the daemon's store holds them. Callers of methods other than `update` and `missing` hold the lock.

    Args:
        table: The table, in which this has the row `DAEMON`.
        lock: The register's lock, which guards the table.
        partial: Function that returns what the store lacks of a READY version; None for a whole one.
        lease_seconds: Time for which the nodes that hold pieces of a version may be silent after it has become known.
    """

    def __init__(
        self,
        table: PieceTable,
        lock: threading.Lock,
        partial: Callable[[str, int], PartialVersion | None],
        lease_seconds: float,
    ) -> None:
        self._table, self._lock, self._partial, self._lease = table, lock, partial, lease_seconds
        self._partials: dict[str, _Partial] = {}

    def __contains__(self, version: str) -> bool:
        return version in self._partials

    def partials(self) -> list[str]:
        """Return the versions of which the store lacks pieces."""
        return list(self._partials)

    def add(self, version: str, pieces: int, partial: PartialVersion | None, held: Bitmap, now: float) -> bool:
        """Add a READY version with the pieces that the store holds, and return whether it is new and lacks some."""
        self._table.add_version(version, pieces, ready=partial is not None, awaited=partial.nodes if partial is not None else ())
        self._table.add_origin(version, DAEMON)
        self._table.report(version, DAEMON, held, whole=True)
        if partial is None or version in self._partials:
            return False
        self._partials[version] = _Partial(now)
        return True

    def update(self) -> None:
        """Record the pieces that the store holds now. Takes the lock."""
        with self._lock:
            versions = list(self._partials)
        for version in versions:
            found = self._partial(*parse_name(version, "versions"))
            held = found.held() if found is not None else None
            with self._lock:
                if version in self._partials:
                    pieces = held if held is not None else Bitmap.full(self._table[version].count)
                    self._table.report(version, DAEMON, pieces, whole=True)
                    if held is None:
                        del self._partials[version]

    def drop(self, version: str) -> None:
        """Forget a version that is no longer READY."""
        self._partials.pop(version, None)

    def is_source(self, node: str, version: str) -> bool:
        """Return whether a node holds pieces that the store lacks."""
        return version in self._partials and len(self._table.bitmap(version, node) - self._table.bitmap(version, DAEMON)) > 0

    def is_sole_holder(self, node: str, version: str) -> bool:
        """Return whether a node holds pieces that neither the store nor another node has."""
        held = self._table.bitmap(version, node)
        return version in self._partials and len(held & self._table.scarce(version)) > 0

    def missing(self) -> int:
        """Return the number of pieces of READY versions that the store lacks. Takes the lock."""
        with self._lock:
            return sum(self._table[version].count - len(self._table.bitmap(version, DAEMON)) for version in self._partials)

    def doubts(self) -> list[tuple[str, float]]:
        """Return the versions in doubt, and since when each is."""
        found = [(version, partial.lost_at) for version, partial in self._partials.items()]
        return [(version, since) for version, since in found if since is not None]

    def lost(self, now: float, live: Mapping[str, float]) -> Iterable[tuple[str, str]]:
        """Yield the versions that have lost pieces for good, and why.

        Args:
            now: Seconds of a monotonic clock, the one of `add`.
            live: Nodes that have reported to this daemon and have a lease, and the time of orders that each has reported after.
        """
        for version, partial in self._partials.items():
            pieces = self._table[version]
            if now - partial.known_at > self._lease:
                for node in [node for node in pieces.awaited if node not in live]:
                    pieces.remove(node)
            lost = self._table.counts(version).lost
            partial.lost_at = (now if partial.lost_at is None else partial.lost_at) if lost else None
            if partial.lost_at is not None and all(follows > partial.lost_at for follows in live.values()):
                yield version, f"neither the daemon nor a node holds {lost} of {pieces.count} pieces"
