"""Replicas of versions, for a daemon whose `replicas` is above 1: made before READY, and made up again afterwards.

A piece needs `replicas` holders: the daemon, the node into whose files ranks wrote it, and further nodes. Nodes hold replicas as
they hold what workers need, but a replica does not make way for other versions while it is planned. What the daemon fetches needs
no further node.

`place` chooses the nodes, as a pure function of what live nodes hold and of their free memory. Pieces that nodes hold already
count first, so little moves. Pieces that too few nodes hold are then placed on further nodes, those with the most free memory
first. Newer versions are placed before older ones.
"""

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from resharder.converters.wire.pieces import Bitmap, PieceNumbering
from resharder.server.holding.held_files import pieces_of
from resharder.server.infra.change_signal import ChangeSignal
from resharder.server.nodes.homes import HomeRegister
from resharder.server.nodes.known_node import KnownNode, bitmap_of, model_of
from resharder.server.nodes.pieces import PieceTable
from resharder.server.state.version import DAEMON
from resharder.server.store.partial import VerifiedVersion
from resharder.server.store.reader import VerifiedVersions
from resharder.v1 import operator_pb2

Counts = npt.NDArray[np.int64]


class ReplicasShort(Exception):
    """Too few nodes hold a version. The message has the reason."""


@dataclass(frozen=True)
class ReplicaNeed:
    """Pieces of a version that nodes have to hold.

    Attributes:
        version: Resource name.
        numbering: Numbers of its pieces.
        holders: Holders that each piece lacks apart from live nodes.
        coming: Pieces that the daemon will hold, which it fetches.
        held: Pieces of the nodes that hold any.
        written: Pieces that ranks have written on nodes, which count in `holders`.
        former: Nodes on which the last plan has placed pieces.
        failing: Nodes that could not hold the version shortly before, and get further pieces last.
        barred: Nodes on which no further piece may be placed.
        readers: Nodes that have read a version of the model, and so may.
    """

    version: str
    numbering: PieceNumbering
    holders: Counts
    coming: Bitmap
    held: Mapping[str, Bitmap]
    written: Mapping[str, Bitmap] = field(default_factory=dict)
    former: Collection[str] = ()
    failing: Collection[str] = ()
    barred: Collection[str] = ()
    readers: Collection[str] = ()


@dataclass(frozen=True)
class ReplicaPlacement:
    """Nodes that should hold pieces of a version.

    Attributes:
        pieces: Pieces of each node, held ones included.
        short: Pieces that too few nodes hold now.
        lacking: Holders that these pieces lack, in all.
        unplaced: Pieces that too few nodes would hold: there is no further node for them.
    """

    pieces: Mapping[str, Bitmap] = field(default_factory=dict)
    short: int = 0
    lacking: int = 0
    unplaced: int = 0


def place(needs: Sequence[ReplicaNeed], free: Mapping[str, int]) -> dict[str, ReplicaPlacement]:
    """Return the placement of each version.

    Args:
        needs: The versions; memory goes to earlier ones first.
        free: Bytes that versions may take on each node.
    """
    left = dict(free)
    return {need.version: _place(need, left) for need in needs}


def _place(need: ReplicaNeed, left: dict[str, int]) -> ReplicaPlacement:
    lacking, sizes, count = need.holders.copy(), need.numbering.sizes, need.numbering.count
    placed = {id: np.zeros(count, np.bool_) for id in left}

    def take(id: str, pieces: npt.NDArray[np.bool_]) -> None:
        fits = pieces & (np.cumsum(np.where(pieces, sizes, 0)) <= left[id])
        left[id] -= int(sizes[fits].sum())
        lacking[fits] -= 1
        placed[id] |= fits

    def rank(id: str) -> tuple[bool, bool, int, bool, int, str]:
        return id in need.failing, id not in need.former, -len(need.held.get(id, ())), id not in need.readers, -left[id], id

    order = sorted(left, key=rank)
    for id in order:
        if (held := need.held.get(id)) is not None:
            take(id, held.flags() & (lacking > 0))
    short, missing = int((lacking > 0).sum()), int(lacking[lacking > 0].sum())
    lacking -= need.coming.flags()
    for id in order if short else ():
        if id not in need.barred:
            own = need.written[id].flags() if id in need.written else False
            take(id, (lacking > 0) & ~placed[id] & ~np.asarray(own))
    found = {id: Bitmap(count, np.packbits(flags, bitorder="little")) for id, flags in placed.items() if flags.any()}
    return ReplicaPlacement(found, short, missing, int((lacking > 0).sum()))


_FAILING_SECONDS = 60.0  # for a node that could not hold a version
_SHORTEST_LOOK, _LONGEST_LOOK = 0.01, 0.25  # seconds between two looks at versions that wait


class Replication:
    """Plans of replicas. Thread-safe: public methods take the register's lock where they need it.

    Args:
        nodes: All nodes by id, of the register.
        numberings: Numbers of the pieces of all known versions, of the register.
        readers: Identities that have read a model's versions, of the register.
        table: The piece table.
        homes: The register of files into which ranks write.
        lock: The register's lock, which guards all of these.
        replicas: Holders that each piece needs; with 1, nothing is planned here if the daemon's host holds versions.
        lease_seconds: Time after the daemon's start at which nodes have reported what they hold: before, no replica of a READY
            version is made up.
        patience: Seconds without a further piece after which a version that waits for replicas fails.
        verified: Versions that nodes may read before READY.
        known: Function that adds a version to the register.
        hold: Whether the daemon's host holds versions.
    """

    def __init__(
        self,
        nodes: Mapping[str, KnownNode],
        numberings: Mapping[str, PieceNumbering],
        readers: Mapping[str, set[str]],
        table: PieceTable,
        homes: HomeRegister,
        lock: threading.Lock,
        replicas: int,
        lease_seconds: float,
        patience: float,
        verified: VerifiedVersions,
        known: Callable[[str], object],
        hold: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._nodes, self._numberings, self._readers, self._table, self._homes = nodes, numberings, readers, table, homes
        self._lock, self.replicas, self._patience, self._verified = lock, replicas, patience, verified
        self._known, self._clock, self._settles = known, clock, clock() + lease_seconds
        self._closed, self._hold, self.plans = False, hold, replicas > 1 or not hold
        self.changed = ChangeSignal()
        """Emitted when a holder has reported, or may have more."""
        self._placements: dict[str, ReplicaPlacement] = {}
        self._failing: dict[tuple[str, str, str], tuple[float, str]] = {}  # by version, node and instance: until, and why

    def start(self, versions: Iterable[str]) -> None:
        """Watch over versions that were READY before the daemon's start."""
        for version in versions if self.plans else ():
            self._known(version)

    def close(self) -> None:
        """End the wait for replicas. Versions that wait fail."""
        self._closed = True

    def waits(self, version: str) -> bool:
        """Return whether a version is withheld from READY."""
        return version in self._verified

    def begin(self, versions: Iterable[VerifiedVersion]) -> None:
        """Let holders fetch verified versions. No worker learns of them until they are READY."""
        for each in versions:
            self._verified.add(each)
            self._known(each.name)
            with self._lock:
                for id, pieces in self._written(each.name).items():
                    if id in self._nodes:
                        self._nodes[id].want(each.name, (), pieces)
            self._homes.hold(each.name)

    def problem(self, versions: Iterable[VerifiedVersion], stopped: Callable[[], bool]) -> str:
        """Return why versions that wait for holders cannot be READY; empty if they can."""
        if self._closed:
            return "the daemon is shutting down"
        lost = filter(None, (self._homes.problem(each.name) for each in versions))
        return next(lost, "the version is aborted" if stopped() else "")

    def replicate(self, versions: Sequence[VerifiedVersion], stopped: Callable[[], bool]) -> None:
        """Have nodes hold verified versions, and wait until each piece has its holders, which have reported it.

        Args:
            versions: The versions, after `begin`.
            stopped: Returns whether one of the versions is aborted.

        Raises:
            ReplicasShort: Too few nodes hold a version and no further piece arrives, or one of its homes is gone.
            OSError: The daemon's store cannot hold a piece.
        """
        names, lacking, since = {each.name for each in versions}, 0, self._clock()
        while True:
            seen = self.changed.count
            if why := self.problem(versions, stopped):
                raise ReplicasShort(why)
            if failed := next((each.partial.failure for each in versions if each.partial and each.partial.failure), None):
                raise failed
            self.renew()
            (holders, why), silent = self._late(names), self._silent(names)
            if not holders and not silent:
                return
            if lacking != (lacking := holders + len(silent)):
                since = self._clock()
            elif self._clock() - since >= self._patience:
                why = why or f"nodes/{silent[0]} does not hold what ranks have written there"
                raise ReplicasShort(f"{why}: nothing has changed for {self._patience:g} s")
            time.sleep(_SHORTEST_LOOK)
            self.changed.wait(seen, _LONGEST_LOOK)

    def version_changed(self, version: str) -> None:
        """Withhold a version no longer: it is READY, or has ended."""
        self._verified.remove(version)

    def renew(self) -> None:
        """Plan all replicas anew, and notify the nodes whose orders change. Takes the lock."""
        if not self.plans:
            return
        with self._lock:
            changed = self._update()
        for node in changed:
            node.changed.emit()

    def shortages(self) -> list[operator_pb2.ReplicaShortage]:
        """Return the versions with pieces of too few holders, by name. Takes the lock."""
        with self._lock:
            return [
                operator_pb2.ReplicaShortage(
                    version=name,
                    short_pieces=found.short,
                    pieces=self._numberings[name].count,
                    replicas=self.replicas,
                    waits=name in self._verified,
                    problem=self._problem(name, found),
                )
                for name, found in sorted(self._placements.items())
                if found.short and name in self._numberings
            ]

    def _late(self, versions: Iterable[str]) -> tuple[int, str]:
        """Return how many holders pieces of versions lack, and why; 0 and an empty text if they lack none. Takes the lock."""
        with self._lock:
            short = [(name, found) for name in versions if (found := self._placements.get(name)) is not None and found.short]
            problem = self._problem(*short[0]) if short and short[0][0] in self._numberings else ""
            return sum(found.lacking for _, found in short), problem

    def _problem(self, version: str, found: ReplicaPlacement) -> str:
        count = self._numberings[version].count
        text = f"{found.short} of {count} pieces have fewer than {self.replicas} holders"
        if not found.unplaced:
            return text
        live = sorted(id for id, node in self._nodes.items() if not node.lost)
        why = {id: "drained" for id in live if self._nodes[id].drained}
        why |= {id: reason for (name, id, _), (_, reason) in self._failing.items() if name == version and id in live}
        reasons = "".join(f"; nodes/{id}: {reason}" for id, reason in sorted(why.items())[:8])
        return f"{text}, and no node is left for {found.unplaced} of them among {len(live)} live ones{reasons}"

    def _silent(self, versions: Iterable[str]) -> list[str]:
        """Return the homes of versions that have not reported yet that they hold what ranks have written. Takes the lock."""
        with self._lock:
            return [
                id for name in versions for id, pieces in self._written(name).items() if not self._has_reported(id, name, pieces)
            ]

    # With the lock

    def _has_reported(self, id: str, version: str, pieces: Bitmap) -> bool:
        copies = self._nodes[id].report.versions if id in self._nodes else ()
        return any(copy.version == version and not len(pieces - bitmap_of(pieces.count, copy)) for copy in copies)

    def _written(self, version: str) -> dict[str, Bitmap]:
        """Return the pieces of a version that ranks have written on nodes, by node."""
        numbering = self._numberings.get(version)
        return {id: pieces_of(numbering, files) for id, files in self._homes.written(version).items()} if numbering else {}

    def _update(self) -> Iterable[KnownNode]:
        now = self._clock()
        staying = {id: node for id, node in self._nodes.items() if not (node.lost or node.drained or node.report.ending)}
        live = {id: node for id, node in staying.items() if node.report.data_address}
        self._note_problems(live, now)
        order = sorted(self._numberings, key=lambda name: (name not in self._verified, -int(name.rpartition("/")[2]), name))
        needs = [self._need(name, live, now > self._settles) for name in order]
        free = {id: node.report.capacity_bytes - self._homes.reserved_bytes(id) for id, node in live.items()}
        self._placements = place(needs, free)
        changed = []
        for id, node in self._nodes.items():
            wanted = {name: found.pieces[id] for name, found in self._placements.items() if id in found.pieces}
            if wanted != node.replicas:
                for name in node.replicas.keys() - wanted.keys():
                    if name in self._verified and not node.wants.get(name) and id not in self._homes.written(name):
                        node.forget(name)
                for name, pieces in wanted.items():
                    if len(pieces - node.pieces.get(name, Bitmap(pieces.count))):
                        node.want(name, (), pieces)
                node.replicas = wanted
                changed.append(node)
        return changed

    def _note_problems(self, live: Mapping[str, KnownNode], now: float) -> None:
        """Place further pieces of a version on a node that reports a problem with it last, for some time."""
        for id, node in live.items():
            for copy in node.report.versions:
                if copy.problem and copy.version in node.replicas:
                    self._failing[copy.version, id, node.report.instance] = now + _FAILING_SECONDS, copy.problem
        self._failing = {key: found for key, found in self._failing.items() if found[0] > now and key[0] in self._numberings}

    def _need(self, version: str, live: Mapping[str, KnownNode], settled: bool) -> ReplicaNeed:
        numbering, waits = self._numberings[version], version in self._verified
        own = self._table.bitmap(version, DAEMON)
        holders: Counts = self.replicas - own.flags().astype(np.int64)
        written = self._written(version) if waits else {}
        for pieces in written.values():
            holders -= pieces.flags()
        rows = {id: self._table.bitmap(version, id) - written.get(id, Bitmap(numbering.count)) for id in live}
        failing = {id for id, node in live.items() if (version, id, node.report.instance) in self._failing}
        names = self._readers.get(model_of(version), set())
        return ReplicaNeed(
            version,
            numbering,
            holders,
            (Bitmap.full(numbering.count) if self._hold else own) - own,
            {id: held for id, held in rows.items() if len(held)},
            written,
            [id for id, node in live.items() if version in node.replicas],
            failing,
            live.keys() if not settled and not waits else (),
            [id for id, node in live.items() if node.caller.rpartition("@")[0] in names],
        )
