"""Layouts that ranks and workers have declared, and the plans between them."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import structlog
from resharder.converters.geometry.copy_table import Copies, copies_of
from resharder.converters.geometry.piece_arrays import Pieces, join
from resharder.converters.geometry.plan import Plan, plan_pieces
from resharder.server.state.errors import FailedPrecondition

_log = structlog.get_logger("resharder.direct")
_PLANS = 8
Digests = npt.NDArray[np.uint64]


class Member(NamedTuple):
    """Rank of a publisher or worker of a server, in one lifetime of its process.

    `owner` is the resource name of the publisher or server, `process` a nonce.
    """

    owner: str
    rank: int
    process: str


class Planned(NamedTuple):
    """Plan between the ranks of a publisher and the workers of a server, and the copies that it takes.

    Digests of workers' boxes are derived from those that ranks report: they are additive over boxes
    (`converters/storage/digest.py`), and a plan fills every element of a worker's box once.
    """

    copies: Copies
    senders: tuple[int, ...]  # ranks, in the order of the group
    plan: Plan[int, int]  # between numbers of ranks and of workers
    frozen: tuple[str, ...] = ()  # tensors that a transfer may leave out

    def sent_by(self, source: int) -> Pieces[int]:
        """Return the pieces that a process sends, at their places in its memory, in the plan's order."""
        which, sources = self._of(source), self.plan.sources
        have = self.plan.have[which]
        offsets, strides = self.plan.source_views
        return Pieces(
            sources.specs,
            (sources.processes[source],),
            sources.locals,
            sources.tensor[have],
            np.zeros(len(which), np.int64),
            sources.local[have],
            self.plan.boxes.take(which),
            offsets[which],
            strides[which],
            sources.plus[have] - self.plan.targets.plus[self.plan.want[which]],
        )

    def sent_count(self, source: int, *, frozen: bool = False) -> int:
        """Return the number of pieces that a process sends, which is the number of digests that it reports.

        `frozen`: of frozen tensors alone.
        """
        return len(self._of(source, frozen=frozen))

    def held_by(self, target: int, reported: Mapping[int, Digests], *, frozen: bool = False) -> list[int]:
        """Return the digest of each piece of one target, or of frozen ones alone, from the reported digests of every source."""
        totals = np.zeros(len(self.plan.targets), np.uint64)
        for source, digests in reported.items():
            np.add.at(totals, self.plan.want[self._of(source, frozen=frozen)], digests)
        own = self.plan.targets.process == target
        still = _named(self.plan.targets, self.frozen) if frozen else np.True_
        found: list[int] = totals[own & still].tolist()
        return found

    def _of(self, source: int, *, frozen: bool = False) -> npt.NDArray[np.int64]:
        sent = self.plan.sources.process[self.plan.have] == source
        return np.flatnonzero(sent & self.copies.frozen if frozen else sent).astype(np.int64)


def _named(pieces: Pieces[int], tensors: Collection[str]) -> npt.NDArray[np.bool_]:
    """Return the flag of each piece: whether it is of one of these tensors."""
    return np.array([spec.name in tensors for spec in pieces.specs], np.bool_)[pieces.tensor]


Side = Mapping[int, tuple[Member, str]]  # members by rank, each with the fingerprint of its layout


class Declared(NamedTuple):
    """Properties that a member declares with its layout.

    Attributes:
        host: Of a rank that offers versions to servers on other hosts too, by default.
        frozen: Tensors that a rank does not expect to change.
        keeps: Whether it is a worker that can receive a version without them.
    """

    host: str = ""
    frozen: frozenset[str] = frozenset()
    keeps: bool = False


PLAIN = Declared()


class _Memory(NamedTuple):
    process: str
    fingerprint: str
    pieces: Pieces[int]
    declared: Declared


class Plans:
    """Declared layouts of members, and a cache of plans between them. Thread-safe; no other lock is taken under its own."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._known: dict[tuple[str, int], _Memory] = {}
        self._plans: OrderedDict[tuple[Hashable, int], Planned] = OrderedDict()  # by sides, and part of the replicas

    def declare(
        self, member: Member, fingerprint: str, pieces: Pieces[int], publishers: Collection[str] = (), declared: Declared = PLAIN
    ) -> None:
        """Replace a member's declared layout.

        A rank's declaration removes the layouts of its model's other publishers, except those of `publishers`.
        """
        model, is_rank, _ = member.owner.partition("/publishers/")
        with self._lock:
            if is_rank:
                kept = {member.owner, *publishers}
                gone = [key for key in self._known if key[0].startswith(f"{model}/publishers/") and key[0] not in kept]
                for key in gone:
                    del self._known[key]
            self._known[member.owner, member.rank] = _Memory(member.process, fingerprint, pieces, declared)

    def owners(self) -> frozenset[str]:
        """Return the publishers and servers that have declared a layout."""
        with self._lock:
            return frozenset(owner for owner, _ in self._known)

    def offering_elsewhere(self, model: str) -> tuple[str, frozenset[str]]:
        """Return the newest publisher of a model, and the hosts of its ranks that have declared one; empty without any."""
        with self._lock:
            of = [
                (name, each.declared.host)
                for (name, _), each in self._known.items()
                if name.startswith(f"models/{model}/publishers/")
            ]
        newest = max((name for name, _ in of), key=lambda name: int(name.rpartition("/")[2]), default="")
        return newest, frozenset(host for name, host in of if name == newest and host)

    def current(self, members: Collection[Member]) -> bool:
        """Return whether no newer process of any of these members has declared a layout."""
        with self._lock:
            known = (self._known.get((member.owner, member.rank)) for member in members)
            return all(each is not None and each.process == member.process for each, member in zip(known, members, strict=True))

    def forget(self, owners: Collection[str]) -> None:
        """Remove the layouts of all members of these owners. Cached plans remain."""
        with self._lock:
            self._known = {key: memory for key, memory in self._known.items() if key[0] not in owners}

    def check(self, member: Member, fingerprint: str) -> None:
        """Raise FailedPrecondition (MEMORY_UNKNOWN) unless a member has declared this layout."""
        with self._lock:
            self._find(member, fingerprint)

    def _find(self, member: Member, fingerprint: str) -> _Memory:
        known = self._known.get((member.owner, member.rank))
        if known is None or (known.process, known.fingerprint) != (member.process, fingerprint):
            raise FailedPrecondition("MEMORY_UNKNOWN", f"{member.owner}, rank {member.rank}: declare its memory first")
        return known

    def _notes(self, member: Member) -> tuple[frozenset[str], bool]:
        """Return what a member has declared of frozen tensors: a plan for the same layouts differs by it."""
        known = self._known.get((member.owner, member.rank))
        return (known.declared.frozen, known.declared.keeps) if known is not None else (PLAIN.frozen, PLAIN.keeps)

    def plan(self, ranks: Side, workers: Side, number: int) -> Planned:
        """Return the plan for a server, from a cache of the last few.

        Args:
            ranks: Ranks of the publisher with their memories.
            workers: Workers of the server with their memories.
            number: Number of the server among the servers that the ranks send to.

        Raises:
            LayoutError: the layouts do not fit.
            ValueError: the staging memory does not suffice.
            FailedPrecondition: MEMORY_UNKNOWN, if a newer publisher has replaced a memory.
        """
        with self._lock:
            members = tuple(
                tuple((rank, memory, self._notes(member)) for rank, (member, memory) in sorted(side.items()))
                for side in (ranks, workers)
            )
            for (known, of), planned in self._plans.items():
                if known == members and of == number % planned.plan.parts:
                    self._plans.move_to_end((known, of))
                    return planned
            sides = [[self._find(*found) for _, found in sorted(side.items())] for side in (ranks, workers)]
        began = self._clock()
        have, want = (join([each.pieces for each in side]) for side in sides)
        found, frozen = plan_pieces(have, want, number), _frozen_by_all(*sides)
        sending = sorted({int(p) for p in set(found.sources.process[found.have].tolist())})
        order = {process: i for i, process in enumerate(sending)}
        copies = copies_of(
            found,
            [order.get(process, -1) for process in range(len(ranks))],
            [len(sending) + i for i in range(len(workers))],
            _named(found.targets, frozen)[found.want],
        )
        planned = Planned(copies, tuple(sorted(ranks)[process] for process in sending), found, tuple(sorted(frozen)))
        _log.info("direct_planned", ranks=len(ranks), workers=len(workers), copies=len(copies), seconds=self._clock() - began)
        with self._lock:
            self._plans[members, number % found.parts] = planned
            while len(self._plans) > _PLANS:
                self._plans.popitem(last=False)
        return planned


def _frozen_by_all(ranks: Sequence[_Memory], workers: Sequence[_Memory]) -> set[str]:
    """Return the tensors that no rank expects to change; none unless all workers can receive a version without them."""
    names = [
        ({rank.pieces.specs[number].name for number in np.unique(rank.pieces.tensor)}, rank.declared.frozen) for rank in ranks
    ]
    changing = set[str]().union(*(held - frozen for held, frozen in names))
    return set[str]().union(*(held for held, _ in names)) - changing if all(each.declared.keeps for each in workers) else set()
