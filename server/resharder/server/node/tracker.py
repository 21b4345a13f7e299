"""The daemon's answers to nodes: reports go into the table, and answers name peers and granted pieces.

Not thread-safe: callers hold a lock. Nothing here waits or sends.
"""

from dataclasses import dataclass

import numpy as np
from resharder.converters.wire.pieces import Bitmap, Bits, unpack
from resharder.server.node.grants import OriginGrants
from resharder.server.node.peers import PEERS, neighbours
from resharder.server.node.piece_table import PieceTable, VersionPieces
from resharder.server.node.sources import PeerOffer

REPORTS = 400
"""Upper bound on the reports a second of all nodes together, except where `LONGEST` forces more."""
SHORTEST, LONGEST = 0.25, 5.0
"""Bounds on the seconds between the reports of a node."""
_PERIOD = 10.0  # seconds after which a quarter of a node's peers changes
_ENOUGH = 6  # peers that need a piece too: one of them will have it soon
_MORE = 8  # further peers that hold pieces which too few peers need


@dataclass(frozen=True)
class NodeReport:
    """Report of a node on one version.

    Attributes:
        node: Id of the node.
        version: Resource name of the version.
        gained: Checked pieces since the last recorded report; with `whole`, all that it holds.
        whole: Whether `gained` replaces earlier reports.
        wanted: Pieces that it needs; None for all.
        load: Requests of other nodes that it is answering.
    """

    node: str
    version: str
    gained: Bitmap
    whole: bool = False
    wanted: Bitmap | None = None
    load: int = 0


@dataclass(frozen=True)
class TrackerAnswer:
    """Answer to a report.

    Attributes:
        recorded: Whether the report was recorded; otherwise the node reports the whole next.
        offers: Pieces of the peers that hold any piece which the node misses.
        scarce: Pieces that one node alone holds.
        granted: Pieces of these that the node may take.
        interval: Seconds until the next report.
    """

    recorded: bool
    offers: tuple[PeerOffer, ...]
    scarce: Bitmap
    granted: tuple[int, ...]
    interval: float


class Tracker:
    """Table, grants and peers of all versions.

    Args:
        table: The table; others may read it, and add versions.
        peers: Upper bound on the peers of a node, apart from holders of granted pieces.
    """

    def __init__(self, table: PieceTable, peers: int = PEERS) -> None:
        self.table = table
        self._peers = peers
        self._grants: dict[str, OriginGrants] = {}
        self._load: dict[str, int] = {}

    def report(self, report: NodeReport, now: float) -> TrackerAnswer:
        """Record a report and answer it. Raises KeyError for an unknown version, ValueError for a bitmap of another one.

        Args:
            report: The report.
            now: Seconds of a monotonic clock.
        """
        recorded = self.table.report(report.version, report.node, report.gained, whole=report.whole)
        self._load[report.node] = report.load
        version = self.table[report.version]
        scarce = self.table.scarce(report.version)
        if not recorded:
            return TrackerAnswer(False, (), scarce, (), SHORTEST)
        held = self.table.bitmap(report.version, report.node)
        wanted = report.wanted or Bitmap.full(version.count)
        grants = self._grants.setdefault(report.version, OriginGrants())
        self.table.want(report.version, report.node, wanted)
        granted = grants.give(report.node, now, held, wanted, version.copies, max(1, len(version.origins)))
        missing = wanted - held
        offers = self._offers(version, report, missing, missing - scarce, granted, now) if len(missing) else ()
        interval = self._interval(len(version.nodes), len(missing) > 0)
        return TrackerAnswer(True, offers, scarce, tuple(granted), interval)

    def drop_version(self, version: str) -> None:
        """Forget a version."""
        self.table.drop_version(version)
        self._grants.pop(version, None)

    def remove_node(self, node: str) -> list[str]:
        """Forget a node that is gone. Returns the versions that have lost pieces by it."""
        self._load.pop(node, None)
        for grants in self._grants.values():
            grants.forget(node)
        return self.table.remove_node(node)

    def _offers(
        self, version: VersionPieces, report: NodeReport, missing: Bitmap, spread: Bitmap, granted: list[int], now: float
    ) -> tuple[PeerOffer, ...]:
        row = version.index[report.node]
        rows = dict.fromkeys(neighbours(row, len(version.nodes), int(now // _PERIOD), self._peers))
        for piece in granted:
            holders = np.flatnonzero(version.rows[: len(version.nodes), piece >> 3] >> (piece & 7) & 1)
            rows.update(dict.fromkeys(holders[:1].tolist()))
        rows.update(dict.fromkeys(_further(version, row, list(rows), spread)))
        rows.pop(row, None)
        found = list(rows)
        useful = [bool(row.any()) for row in version.rows[found] & missing.bits]
        return tuple(
            PeerOffer(
                name := version.nodes[row],
                Bitmap(version.count, version.rows[row].copy()),
                self._load.get(name, 0),
                name in version.origins,
            )
            for row, keep in zip(found, useful, strict=True)
            if keep
        )

    def _interval(self, nodes: int, busy: bool) -> float:
        """Return the seconds until the next report: longer with many nodes, and for nodes that miss nothing."""
        return min(LONGEST, max(SHORTEST, nodes / REPORTS)) if busy else LONGEST


def _further(version: VersionPieces, row: int, peers: list[int], spread: Bitmap) -> list[int]:
    """Return rows of further peers of a node, for pieces that few nodes need, as experts do under expert parallelism.

    The peers of a node are random. Where all nodes need a piece, one of them soon has it; where few do, none may ever.

    Args:
        version: The table.
        row: Row of the node.
        peers: Rows of its peers.
        spread: Pieces that it misses, and that more than one node holds.
    """
    relays = [peer for peer in peers if version.nodes[peer] not in version.origins]
    held = np.bitwise_or.reduce(version.rows[relays], axis=0, initial=0)
    left: Bits = spread.bits & ~held
    if not left.any():
        return []
    needed = unpack(version.wanted[relays], version.count).sum(axis=0)
    left &= np.packbits(needed < _ENOUGH, bitorder="little")
    holders = np.flatnonzero((version.rows[: len(version.nodes)] & left).any(axis=1))
    found: list[int] = []
    for holder in np.roll(holders, -int(np.searchsorted(holders, row))).tolist():
        if len(found) < _MORE and version.nodes[holder] not in version.origins and (version.rows[holder] & left).any():
            found.append(holder)
            left &= ~version.rows[holder]
    return found
