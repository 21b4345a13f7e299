"""The daemon's answers to nodes: which pieces each fetches next, and from which holder.

The daemon sees all rows of the table, so it names the holder of each piece, and knows how much it has asked of whom. A piece that
one node alone holds is named to one node at a time: it leaves its source about once, and the others take it from that node. Other
pieces come from the holder with the least to send, the pieces that will have fewest holders first. A source, into which ranks
write, is named for a piece with other holders only while all of these fail.

A node has as many pieces ahead as it fetches between two of its reports, twice. A holder that fails for it is left alone for a
time that doubles, and its pieces are named elsewhere. A piece that has not arrived for long is named to other nodes as well, and
to the node a second time, elsewhere, once nothing else is missing.

Not thread-safe: callers hold a lock. Nothing here waits or sends.
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from resharder.converters.wire.pieces import Bitmap, unpack
from resharder.server.nodes.pieces import PieceTable, VersionPieces
from resharder.server.state.version import DAEMON

REPORTS = 400
"""Upper bound on the reports a second of all nodes together, except where `LONGEST` forces more."""
SHORTEST, LONGEST = 0.25, 5.0
"""Bounds on the seconds between the reports of a node."""
AHEAD, PER_HOLDER, ALONE = 8, 2, 2
"""Least pieces that are named to a node, of them from one holder, and of them pieces that a holder has alone."""
SENDING, STREAMS = 8, 16
"""Least bounds on the pieces that are named of one holder, and of one that has them alone."""
LATE = 10.0
"""Least seconds after which a piece that has not arrived is late."""
_SLOW = 3.0  # times of a usual piece, after which it is named a second time
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0  # seconds without a piece from a holder that has failed
_DAEMONS_PAUSE = 2.0  # the longest for the daemon: READY waits for it
_WEIGHT, _USUAL_WEIGHT = 0.3, 0.2  # of the newest value in a moving average
Flags = npt.NDArray[np.bool_]


@dataclass
class _Pace:
    """Moving averages of the pieces that a node fetches between two reports; `alone`: those that one holder had alone."""

    pieces: float = 0.0
    alone: float = 0.0


@dataclass
class _NamedPiece:
    """A piece that a node is to fetch: each holder that was named, and since when."""

    alone: bool  # whether one holder had it
    late: bool = False  # whether it has not arrived for long, so that it is named to others as well
    since: dict[str, float] = field(default_factory=dict)


class NamedPieces:
    """The pieces of one version that nodes are to fetch.

    Args:
        pieces: Number of its pieces.
        seed: Seed of the order among equals.
    """

    def __init__(self, pieces: int, seed: int = 0) -> None:
        self._chance = np.random.default_rng(seed)
        self._named: dict[str, dict[int, _NamedPiece]] = {}  # by node
        self._load = Counter[str]()  # pieces that are named of each holder
        self._coming = np.zeros(pieces, np.int64)  # nodes that are to fetch each piece
        self._paces: dict[str, _Pace] = {}
        self._usual = 0.0  # seconds from the name of a piece to the report that has it

    def of(self, node: str) -> dict[str, list[int]]:
        """Return the pieces that a node is to fetch, by holder."""
        found: dict[str, list[int]] = {}
        for piece, named in self._named.get(node, {}).items():
            for holder in named.since:
                found.setdefault(holder, []).append(piece)
        return found

    def renew(self, table: VersionPieces, node: str, held: Bitmap, wanted: Bitmap, resting: Collection[str], now: float) -> None:
        """Name further pieces to a node that has reported.

        Args:
            table: The rows of the version, with the node's own.
            node: The node.
            held: Pieces that it holds.
            wanted: Pieces that it needs.
            resting: Holders that have failed for it, and get no request now.
            now: Seconds of a monotonic clock.
        """
        mine = self._named.setdefault(node, {})
        self._settle(node, held, wanted, resting, now)
        window = self._window(node)
        left = min(window - sum(not named.late for named in mine.values()), 2 * window - len(mine))
        missing = (wanted - held).flags()
        missing[list(mine)] = False
        if left <= 0 or not (missing.any() or mine):
            return
        rows, sources = table.rows[: len(table.nodes)], table.sources
        usable = np.array([holder != node and holder not in resting for holder in table.nodes])
        relays = usable & np.array([holder not in sources for holder in table.nodes])
        relayed = unpack(np.bitwise_or.reduce(rows[relays], axis=0, initial=0), table.count).astype(np.bool_)
        alone = table.copies == 1
        from_source = missing & ~alone & ~relayed  # its other holders fail
        scarce = missing & alone & ((self._coming == 0) | (node == DAEMON))
        left = self._name_scarce(table, node, usable, scarce | from_source, left, now)
        left = self._name_others(table, node, relays, missing & ~alone & relayed, left, now)
        if left > 0 and not missing.any():
            self._repeat(table, node, relays, left, now)

    def remove_node(self, node: str) -> None:
        """Forget a node that is gone: what it is to fetch, and what others are to fetch from it."""
        self._paces.pop(node, None)
        for other, mine in self._named.items():
            for piece, named in list(mine.items()):
                for holder in [holder for holder in named.since if node in (other, holder)]:
                    self._drop(other, piece, holder)
        self._named.pop(node, None)
        self._load.pop(node, None)

    def _window(self, node: str) -> int:
        return max(AHEAD, math.ceil(2 * self._paces.setdefault(node, _Pace()).pieces))

    def _settle(self, node: str, held: Bitmap, wanted: Bitmap, resting: Collection[str], now: float) -> None:
        """Remove the pieces that have arrived, and those that are not to come from their holder, and note the late ones."""
        mine, pace = self._named[node], self._paces.setdefault(node, _Pace())
        done = [named for piece, named in mine.items() if piece in held]
        if mine:
            pace.pieces += _WEIGHT * (len(done) - pace.pieces)
        if any(named.alone for named in mine.values()):
            pace.alone += _WEIGHT * (sum(named.alone for named in done) - pace.alone)
        for named in done:
            self._usual += _USUAL_WEIGHT * (now - min(named.since.values()) - self._usual)
        late = max(LATE, 3 * self._usual)
        for piece, named in list(mine.items()):
            if not named.late and now - min(named.since.values()) > late:
                named.late = True
                self._coming[piece] -= 1
            for holder in list(named.since):
                if piece in held or piece not in wanted or holder in resting:
                    self._drop(node, piece, holder)

    def _name_scarce(self, table: VersionPieces, node: str, usable: Flags, pieces: Flags, left: int, now: float) -> int:
        """Name pieces that one holder alone has, or a source where other holders fail. Returns how many more may be named."""
        most = max(STREAMS, math.ceil(2 * sum(pace.alone for pace in self._paces.values())))
        own = max(ALONE, math.ceil(2 * self._paces[node].alone))
        mine = Counter(holder for named in self._named[node].values() if named.alone for holder in named.since)
        packed = np.packbits(pieces, bitorder="little")
        for row in np.flatnonzero(usable & (table.rows[: len(usable)] & packed).any(axis=1)).tolist():
            holder = table.nodes[row]
            found = np.flatnonzero(unpack(table.rows[row], table.count) & pieces)
            free = min(own - mine[holder], most - self._load[holder], left, len(found))
            for piece in self._chance.choice(found, free, replace=False).tolist() if free > 0 else ():
                self._name(node, piece, holder, now, alone=True)
                pieces[piece] = False
                left -= 1
        return left

    def _name_others(self, table: VersionPieces, node: str, relays: Flags, pieces: Flags, left: int, now: float) -> int:
        """Name pieces with several holders, those that will have fewest first. Returns how many more may be named."""
        candidates = np.flatnonzero(pieces)
        if left <= 0 or not len(candidates):
            return left
        rarity = table.copies[candidates] + self._coming[candidates] + self._chance.random(len(candidates))
        average = sum(map(len, self._named.values())) / len(self._named)
        per_holder, sending = max(PER_HOLDER, self._window(node) // 4), max(SENDING, average)
        load = np.array([self._load[holder] for holder in table.nodes]) + self._chance.random(len(table.nodes)) / 2
        mine = Counter(holder for named in self._named[node].values() for holder in named.since)
        own = np.array([mine[holder] for holder in table.nodes])
        open = relays & (own < per_holder) & (load < sending)
        for piece in candidates[np.argsort(rarity)].tolist():
            if left <= 0 or not open.any():
                break
            rows = np.flatnonzero(_holding(table, piece) & open)
            if len(rows):
                row = int(rows[np.argmin(load[rows])])
                self._name(node, piece, table.nodes[row], now)
                load[row] += 1
                own[row] += 1
                open[row] = own[row] < per_holder and load[row] < sending
                left -= 1
        return left

    def _repeat(self, table: VersionPieces, node: str, relays: Flags, left: int, now: float) -> None:
        """Name slow pieces a second time, elsewhere."""
        slow = _SLOW * self._usual
        for piece, named in list(self._named[node].items()):
            if left > 0 and slow and len(named.since) == 1 and now - min(named.since.values()) > slow:
                rows = np.flatnonzero(_holding(table, piece) & relays).tolist()
                others = [holder for row in rows if (holder := table.nodes[row]) not in named.since]
                if others:
                    self._name(node, piece, min(others, key=lambda holder: self._load[holder]), now)
                    left -= 1

    def _name(self, node: str, piece: int, holder: str, now: float, *, alone: bool = False) -> None:
        mine = self._named[node]
        if piece not in mine:
            mine[piece] = _NamedPiece(alone)
            self._coming[piece] += 1
        mine[piece].since[holder] = now
        self._load[holder] += 1

    def _drop(self, node: str, piece: int, holder: str) -> None:
        """Name a piece of a holder no longer."""
        named = self._named[node][piece]
        del named.since[holder]
        self._load[holder] -= 1
        if not named.since:
            del self._named[node][piece]
            self._coming[piece] -= not named.late


def _holding(table: VersionPieces, piece: int) -> Flags:
    """Return for each row whether it has a piece."""
    column = table.rows[: len(table.nodes), piece >> 3] >> (piece & 7) & 1
    return column.astype(np.bool_)


@dataclass(frozen=True)
class TrackerAnswer:
    """Answer to a report.

    Attributes:
        named: Pieces that the node fetches next, by holder.
        interval: Seconds until the next report.
    """

    named: Mapping[str, Bitmap]
    interval: float


@dataclass
class _Failing:
    """A holder that fails for a node: how often lately, the failures that were reported in all, until when it gets no request."""

    lately: int = 0
    reported: int = 0
    rests_until: float = 0.0


class Tracker:
    """Table and named pieces of all versions.

    Args:
        table: The table; others may read it, and add versions.
    """

    def __init__(self, table: PieceTable) -> None:
        self.table = table
        self._named: dict[str, NamedPieces] = {}
        self._failing: dict[str, dict[str, _Failing]] = {}  # holders, by the node for which they fail

    def report(
        self, version: str, node: str, held: Bitmap, wanted: Bitmap, failures: Mapping[str, int], now: float
    ) -> TrackerAnswer:
        """Record a node's report on a version and answer it.

        Args:
            version: Resource name of the version.
            node: Id of the node.
            held: Checked pieces that it holds.
            wanted: Pieces that it needs.
            failures: Requests to each holder that have failed since its process began.
            now: Seconds of a monotonic clock.

        Raises:
            KeyError: An unknown version.
            ValueError: A bitmap of another one.
        """
        self.table.report(version, node, held)
        found = self.table[version]
        named = self._named.setdefault(version, NamedPieces(found.count))
        named.renew(found, node, held, wanted, self._resting(node, failures, now), now)
        answer = {holder: Bitmap.of(found.count, pieces) for holder, pieces in named.of(node).items()}
        return TrackerAnswer(answer, self._interval(len(found.nodes), len(wanted - held) > 0))

    def drop_version(self, version: str) -> None:
        """Forget a version."""
        self.table.drop_version(version)
        self._named.pop(version, None)

    def remove_node(self, node: str) -> None:
        """Forget a node that is gone."""
        self._failing.pop(node, None)
        for failing in self._failing.values():
            failing.pop(node, None)
        for named in self._named.values():
            named.remove_node(node)
        self.table.remove_node(node)

    def _resting(self, node: str, failures: Mapping[str, int], now: float) -> set[str]:
        """Return the holders that get no request of a node now: after each report of further failures for twice as long."""
        failing, longest = self._failing.setdefault(node, {}), _DAEMONS_PAUSE if node == DAEMON else _LONGEST_PAUSE
        for holder, count in failures.items():
            found = failing.setdefault(holder, _Failing())
            if count > found.reported:
                found.rests_until = now + min(longest, _FIRST_PAUSE * 2 ** min(found.lately, 16))
                found.lately += 1
            elif now > found.rests_until + _LONGEST_PAUSE:
                found.lately = 0
            found.reported = count
        return {holder for holder, found in failing.items() if found.rests_until > now}

    def _interval(self, nodes: int, busy: bool) -> float:
        """Return the seconds until the next report: longer with many nodes, and for nodes that miss nothing."""
        return min(LONGEST, max(SHORTEST, nodes / REPORTS)) if busy else LONGEST
