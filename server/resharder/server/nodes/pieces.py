"""The daemon's table: which node holds which piece of which version. The daemon itself is a node in it, `DAEMON`.

Nodes report the pieces that they hold and have checked. The table keeps one row of packed bits for each node and version, and how
many nodes hold each piece. A daemon that restarts has no rows: it adds its READY versions with the nodes that it awaits, and no
piece is lost until they have reported.

A piece without a holder is lost once every node that is expected to hold it has reported, or its lease has ended. A report may be
older than the piece. A version is therefore in doubt first, which changes the orders of all nodes, so that they report at once;
it is lost once all live nodes have reported after these orders, and none has the piece.

Not thread-safe: callers hold a lock.
"""

from collections.abc import Iterable, Mapping

import numpy as np
from resharder.converters.wire.pieces import Bitmap, Bits, bytes_of, unpack


class VersionPieces:
    """Rows of one version.

    Attributes:
        count: Number of its pieces.
        nodes: Nodes with a row, in the order of the rows.
        index: Row of each node.
        rows: Packed bits, at least one row for each node; rows beyond are free.
        copies: Nodes that hold each piece.
        seen: Flag for each piece: held by a node at some time.
        awaited: Nodes that held pieces before the daemon restarted and have not reported since.
        sources: Nodes that the version's ranks write into.
        known_at: Time at which the version was added.
        lost_at: Time since which a piece has no holder: the version is in doubt; None if it is not.
    """

    def __init__(self, count: int, seen: bool, awaited: Iterable[str], now: float) -> None:
        self.count, self.known_at = count, now
        self.lost_at: float | None = None
        self.nodes: list[str] = []
        self.index: dict[str, int] = {}
        self.rows: Bits = np.zeros((4, bytes_of(count)), np.uint8)
        self.copies = np.zeros(count, np.int32)
        self.seen = np.full(count, seen)
        self.awaited = set(awaited)
        self.sources: set[str] = set()

    def row_of(self, node: str) -> int:
        """Return the row of a node, a new one for a new node."""
        if node not in self.index:
            if len(self.nodes) == len(self.rows):
                self.rows = np.concatenate([self.rows, np.zeros_like(self.rows)])
            self.index[node] = len(self.nodes)
            self.nodes.append(node)
        return self.index[node]

    def set_row(self, node: str, bits: Bits) -> None:
        """Replace the pieces of a node."""
        row = self.row_of(node)
        change = unpack(bits, self.count).astype(np.int32) - unpack(self.rows[row], self.count)
        self.copies += change
        self.seen |= change > 0
        self.rows[row] = bits

    def remove(self, node: str) -> None:
        """Remove the row of a node; the last row takes its place."""
        self.awaited.discard(node)
        if node in self.index:
            self.set_row(node, np.zeros(self.rows.shape[1], np.uint8))
            row, last = self.index.pop(node), self.nodes.pop()
            end = len(self.nodes)
            if last != node:
                self.nodes[row], self.index[last] = last, row
                self.rows[row] = self.rows[end]
            self.rows[end] = 0
        self.sources.discard(node)


class PieceTable:
    """Pieces of all versions on all nodes. Methods other than `add_version` raise KeyError for an unknown version."""

    def __init__(self) -> None:
        self._versions: dict[str, VersionPieces] = {}

    def __contains__(self, version: str) -> bool:
        return version in self._versions

    def __getitem__(self, version: str) -> VersionPieces:
        return self._versions[version]

    @property
    def nbytes(self) -> int:
        """Bytes of all rows and counts: of a version about an eighth of a byte for each piece and node."""
        return sum(v.rows.nbytes + v.copies.nbytes + v.seen.nbytes for v in self._versions.values())

    def add_version(
        self, version: str, pieces: int, *, ready: bool = False, awaited: Iterable[str] = (), now: float = 0.0
    ) -> None:
        """Add a version. A no-op if it is there.

        Args:
            version: Resource name, `models/{model}/versions/{number}`.
            pieces: Number of its pieces.
            ready: Whether it was READY before the daemon restarted: then a piece that no node holds is unknown or lost.
            awaited: Nodes that held pieces of it before the daemon restarted.
            now: Seconds of a monotonic clock.
        """
        if version not in self._versions:
            self._versions[version] = VersionPieces(pieces, ready, awaited, now)

    def drop_version(self, version: str) -> None:
        """Remove a version and what nodes hold of it. A no-op if it is not there."""
        self._versions.pop(version, None)

    def add_source(self, version: str, node: str) -> None:
        """Mark a node as one that the version's ranks write into."""
        self._versions[version].sources.add(node)

    def report(self, version: str, node: str, held: Bitmap) -> None:
        """Replace the pieces of a node. Raises ValueError for a bitmap of another number of pieces."""
        found = self._versions[version]
        if held.count != found.count:
            raise ValueError(f"expected a bitmap of the {found.count} pieces of {version}, got one of {held.count}")
        found.set_row(node, held.bits)
        found.awaited.discard(node)

    def remove_node(self, node: str) -> None:
        """Remove all pieces of a node that is gone."""
        for version in self._versions.values():
            version.remove(node)

    def bitmap(self, version: str, node: str) -> Bitmap:
        """Return the pieces that a node holds."""
        found = self._versions[version]
        row = found.index.get(node)
        return Bitmap(found.count, None if row is None else found.rows[row].copy())

    def scarce(self, version: str) -> Bitmap:
        """Return the pieces that one node alone holds."""
        found = self._versions[version]
        return Bitmap(found.count, np.packbits(found.copies == 1, bitorder="little"))

    def lacks(self, version: str, node: str) -> int:
        """Return the number of pieces that a node does not hold."""
        return self._versions[version].count - len(self.bitmap(version, node))

    def has_more(self, version: str, node: str, other: str) -> bool:
        """Return whether a node holds pieces that another one does not."""
        return len(self.bitmap(version, node) - self.bitmap(version, other)) > 0

    def lacking(self, node: str) -> list[str]:
        """Return the versions of which a node does not hold all pieces."""
        return [version for version in self._versions if self.lacks(version, node)]

    def orphans(self, version: str) -> Bitmap:
        """Return the pieces that no node holds, although one did: lost, unless an awaited node has them."""
        found = self._versions[version]
        return Bitmap(found.count, np.packbits(found.seen & (found.copies == 0), bitorder="little"))

    def doubts(self) -> list[tuple[str, float]]:
        """Return the versions in doubt, and since when each is."""
        return [(name, version.lost_at) for name, version in self._versions.items() if version.lost_at is not None]

    def settle(self, now: float, live: Mapping[str, float], lease_seconds: float) -> list[tuple[str, str]]:
        """Record which versions are in doubt, and return those that have lost pieces for good, and why.

        Args:
            now: Seconds of a monotonic clock.
            live: Nodes that have reported to this daemon and have a lease, and the time of orders that each has reported after.
            lease_seconds: Time for which awaited nodes may be silent after a version has become known.
        """
        found = []
        for name, version in self._versions.items():
            if now - version.known_at > lease_seconds:
                for node in [node for node in version.awaited if node not in live]:
                    version.remove(node)
            lost = len(self.orphans(name)) if not version.awaited else 0
            version.lost_at = None if not lost else now if version.lost_at is None else version.lost_at
            if version.lost_at is not None and all(follows > version.lost_at for follows in live.values()):
                found.append((name, f"neither the daemon nor a node holds {lost} of {version.count} pieces"))
        return found
