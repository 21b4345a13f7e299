"""The daemon's answers to nodes: reports go into the table, and answers name peers and granted pieces.

The peers of a node are few of all nodes, each the peer of as many, and change over time. Nodes stand in a ring. The peers of a
node are at some distances from it, the same distances for all nodes. They are random, so a piece reaches all nodes in few steps,
and a part of them is drawn again each period, so no node is cut off for long.

Grants name the node that takes a piece which one node alone holds, so that each piece leaves its source about once. A source is
a node that a version's ranks write into; at first it alone holds its pieces. The daemon grants each of them to one node; all
others take it from that node, and so on. Few nodes have grants at a time: with `streams` of them a source's link is full, and
they take turns, so that the pieces to pass on are spread over all nodes. Nodes that use up their grants get more. Once all pieces
are granted, unused grants pass to other nodes.

Not thread-safe: callers hold a lock. Nothing here waits or sends.
"""

import math
import random
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from resharder.converters.wire.pieces import Bitmap, Bits, unpack
from resharder.server.holding.sources import PeerOffer
from resharder.server.nodes.pieces import PieceTable, VersionPieces

PEERS = 24
"""Upper bound on the peers of a node."""
_GROUPS = 4  # one of them is drawn again each period


def distances(nodes: int, limit: int, period: int) -> list[int]:
    """Return the distinct distances from 1 to `nodes - 1` of a period, at most `limit`."""
    if nodes - 1 <= limit:
        return list(range(1, nodes))
    chosen: dict[int, None] = {}
    for group in range(_GROUPS):
        drawn = random.Random(hash((nodes, group, (period + group) // _GROUPS)))
        size = (limit + group) // _GROUPS
        while size > 0:
            distance = drawn.randrange(1, nodes)
            if distance not in chosen:
                chosen[distance] = None
                size -= 1
    return list(chosen)


def neighbours(row: int, nodes: int, period: int, limit: int = PEERS) -> list[int]:
    """Return the rows of the peers of a node.

    Args:
        row: Row of the node.
        nodes: Number of rows.
        period: Number of the period; a quarter of the result changes with it.
        limit: Upper bound on the result.
    """
    return [(row + distance) % nodes for distance in distances(nodes, limit, period)]


STREAMS = 16
LEAST = 2  # grants of a node
LATE = 5.0  # seconds; lower bound on the time after which an unused grant passes to another node
_WEIGHT = 0.2  # of the newest value in a moving average


class _Grant(NamedTuple):
    node: str
    since: float


class SourceGrants:
    """Grants of one version.

    Args:
        streams: Nodes that have grants at a time, for each source.
        seed: Seed of the order of the pieces.
    """

    def __init__(self, streams: int = STREAMS, seed: int = 0) -> None:
        self._streams = streams
        self._chance = random.Random(seed)
        self._granted: dict[int, _Grant] = {}
        self._used = self._usual = 0.0  # moving averages: grants used between two reports of a node, seconds until one is used

    def give(
        self, node: str, now: float, held: Bitmap, wanted: Bitmap, copies: npt.NDArray[np.int32], sources: int = 1
    ) -> list[int]:
        """Return the pieces with one holder that a node may take now, earlier grants included.

        Args:
            node: The node.
            now: Seconds of a monotonic clock.
            held: Pieces that the node holds.
            wanted: Pieces that the node needs.
            copies: Nodes that hold each piece.
            sources: Number of sources, each of which has `streams`.
        """
        mine = self._settle(node, now, held, copies)
        window = max(LEAST, math.ceil(2 * self._used))
        others = len({grant.node for grant in self._granted.values()} - {node})
        streams = self._streams * sources
        if others < streams and (not mine or (others < streams // 2 and len(mine) <= window // 2)):
            scarce = np.flatnonzero((wanted - held).flags() & (copies == 1)).tolist()
            free = [piece for piece in scarce if piece not in self._granted]
            if not free:
                late = max(LATE, 3 * self._usual)
                free = [piece for piece in scarce if piece not in mine and now - self._granted[piece].since > late]
            for piece in self._chance.sample(free, min(window - len(mine), len(free))):
                self._granted[piece] = _Grant(node, now)
                mine.append(piece)
        return mine

    def forget(self, node: str) -> None:
        """Free the grants of a node that is gone."""
        self._granted = {piece: grant for piece, grant in self._granted.items() if grant.node != node}

    def _settle(self, node: str, now: float, held: Bitmap, copies: npt.NDArray[np.int32]) -> list[int]:
        """Remove used grants, note how many and how soon, and return the pieces that the node still may take."""
        mine = [piece for piece, grant in self._granted.items() if grant.node == node]
        used = [piece for piece in mine if piece in held]
        if mine:
            self._used += _WEIGHT * (len(used) - self._used)
        for piece in used:
            self._usual += _WEIGHT * (now - self._granted[piece].since - self._usual)
        for piece in [piece for piece in self._granted if copies[piece] != 1 or piece in used]:
            del self._granted[piece]
        return [piece for piece in mine if piece in self._granted]


REPORTS = 400
"""Upper bound on the reports a second of all nodes together, except where `LONGEST` forces more."""
SHORTEST, LONGEST = 0.25, 5.0
"""Bounds on the seconds between the reports of a node."""
_PERIOD = 10.0  # seconds after which a quarter of a node's peers changes
_ENOUGH = 6  # peers that need a piece too: one of them will have it soon
_MORE = 8  # further peers that hold pieces which too few peers need


@dataclass(frozen=True)
class TrackerAnswer:
    """Answer to a report.

    Attributes:
        offers: Pieces of the peers that hold any piece which the node misses.
        scarce: Pieces that one node alone holds.
        granted: Pieces of these that the node may take.
        interval: Seconds until the next report.
    """

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
        self._grants: dict[str, SourceGrants] = {}
        self._load: dict[str, int] = {}

    def report(self, version: str, node: str, held: Bitmap, wanted: Bitmap, load: int, now: float) -> TrackerAnswer:
        """Record a node's report on a version and answer it.

        Args:
            version: Resource name of the version.
            node: Id of the node.
            held: Checked pieces that it holds.
            wanted: Pieces that it needs.
            load: Requests of other nodes that it is answering.
            now: Seconds of a monotonic clock.

        Raises:
            KeyError: An unknown version.
            ValueError: A bitmap of another one.
        """
        self.table.report(version, node, held)
        self.table.want(version, node, wanted)
        self._load[node] = load
        found, scarce = self.table[version], self.table.scarce(version)
        grants = self._grants.setdefault(version, SourceGrants())
        granted = grants.give(node, now, held, wanted, found.copies, max(1, len(found.sources)))
        missing = wanted - held
        offers = self._offers(found, node, missing, missing - scarce, granted, now) if len(missing) else ()
        return TrackerAnswer(offers, scarce, tuple(granted), self._interval(len(found.nodes), len(missing) > 0))

    def drop_version(self, version: str) -> None:
        """Forget a version."""
        self.table.drop_version(version)
        self._grants.pop(version, None)

    def remove_node(self, node: str) -> None:
        """Forget a node that is gone."""
        self._load.pop(node, None)
        for grants in self._grants.values():
            grants.forget(node)
        self.table.remove_node(node)

    def _offers(
        self, version: VersionPieces, node: str, missing: Bitmap, spread: Bitmap, granted: list[int], now: float
    ) -> tuple[PeerOffer, ...]:
        row = version.index[node]
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
                name in version.sources,
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
    relays = [peer for peer in peers if version.nodes[peer] not in version.sources]
    held = np.bitwise_or.reduce(version.rows[relays], axis=0, initial=0)
    left: Bits = spread.bits & ~held
    if not left.any():
        return []
    needed = unpack(version.wanted[relays], version.count).sum(axis=0)
    left &= np.packbits(needed < _ENOUGH, bitorder="little")
    holders = np.flatnonzero((version.rows[: len(version.nodes)] & left).any(axis=1))
    found: list[int] = []
    for holder in np.roll(holders, -int(np.searchsorted(holders, row))).tolist():
        if len(found) < _MORE and version.nodes[holder] not in version.sources and (version.rows[holder] & left).any():
            found.append(holder)
            left &= ~version.rows[holder]
    return found
