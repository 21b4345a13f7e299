"""State of the direct path: groups, offers and the tasks of their ranks."""

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from resharder.converters.geometry.copy_table import Copies
from resharder.converters.geometry.piece_arrays import Pieces
from resharder.server.direct.plans import Digests, Member, Planned
from resharder.server.infra.change_signal import ChangeSignal
from resharder.v1 import direct_pb2


@dataclass(frozen=True)
class Link:
    """One member's side of a group."""

    group: str
    rank: int
    size: int
    copies: Copies
    most_peers: int
    most_made: int
    trial: bool  # its members try how long a version takes over it
    frozen: tuple[str, ...] = ()  # tensors that a transfer may leave out


class Task(NamedTuple):
    """Task of one rank in a group."""

    kind: direct_pb2.DirectTask.Kind
    group: str
    link: Link | None = None
    sent: Pieces[int] | None = None  # pieces to digest, in the first DIGEST task of a group
    during_transfer: bool = False  # of a DIGEST task: it is for the time of the group's next RUN
    frozen: bool = False  # of a DIGEST task: of frozen boxes alone
    kept: bool = False  # of a RUN task: without frozen boxes


@dataclass
class Reports:
    """Digests that ranks report of the boxes of one version."""

    of: int = 0  # version of the last DIGEST tasks
    found: dict[int, Digests] = field(default_factory=dict)  # by rank


@dataclass(eq=False)
class Group:
    """One server's workers and the ranks that send to them. Guarded by the lock of `Direct`."""

    id: str
    server: str
    key: Hashable  # processes and memories of all members
    members: tuple[Member, ...]  # in the group's order, senders first
    senders: int
    planned: Planned
    install: str = ""  # the install that the workers have started last
    started: set[int] = field(default_factory=set)  # workers
    finished: set[Member] = field(default_factory=set)
    linked: set[Member] = field(default_factory=set)  # members that have a link
    received: int = 0  # bytes, by workers
    granted: str = ""  # the install whose turn it is or was
    began: float = 0.0
    error: str = ""
    keys: dict[str, bytes] = field(default_factory=dict)
    reports: dict[bool, Reports] = field(
        default_factory=lambda: {False: Reports(), True: Reports()}
    )  # of all boxes; of frozen ones
    keeping: set[int] = field(default_factory=set)  # of `started`, workers that have the frozen boxes of the version
    kept: bool = False  # whether the install whose turn it is leaves them out
    has_sent: bool = False  # ranks have the boxes of their DIGEST tasks
    trial: bool = False  # made to be tried, while no install needs it
    tried: dict[int, float] = field(default_factory=dict)  # seconds that a version would take, by worker

    @property
    def proven(self) -> bool:
        """Whether every worker has tried it."""
        return self.trial and not self.error and len(self.tried) == len(self.members) - self.senders

    @property
    def starting(self) -> bool:
        """Whether a worker waits for the begin of the transfer."""
        return bool(self.started) and self.granted != self.install and not self.error

    @property
    def ranks(self) -> frozenset[Member]:
        """Members that send."""
        return frozenset(self.members[: self.senders])

    def link(self, member: Member) -> Link:
        """Return a member's link, and record that it has one."""
        rank = self.members.index(member)
        copies = self.planned.copies
        self.linked.add(member)
        return Link(
            self.id,
            rank,
            len(self.members),
            copies.of(rank),
            copies.most_peers,
            copies.most_made,
            self.trial,
            self.planned.frozen,
        )


@dataclass
class Offer:
    """Version that ranks of a publisher have in memory. `ranks` has each rank's member, layout fingerprint and queue of tasks."""

    model: str
    number: int
    publisher: str
    world_size: int
    wait_seconds: float
    changed: ChangeSignal
    ranks: dict[int, tuple[Member, str, deque[Task | None]]] = field(default_factory=dict)
    turns: deque[Group] = field(default_factory=deque)
    running: dict[str, Group] = field(default_factory=dict)
    ready_at: float | None = None
    served: set[str] = field(default_factory=set)  # servers that have installed it
    over: str = ""  # why it has ended; empty while it lasts
    look_at: float = 0.0  # time of the next check whether it is over
    servers_sleep: bool = False  # it does not end before a server was awaited
    ahead_only: bool = False  # for servers that take it before it is READY
    hosts: set[str] = field(default_factory=set)  # of the ranks, if it is not for all servers
    elsewhere: bool = False  # also for servers on other hosts that are linked to the ranks
    held_since: float | None = None  # of one that is `ahead_only`: when the first rank had sealed its slot
    joined: set[str] = field(default_factory=set)  # servers whose workers have asked for their link

    @property
    def ended(self) -> bool:
        """Whether memory may change."""
        return bool(self.over)

    @property
    def complete(self) -> bool:
        """Whether every rank of the publisher offers the version."""
        return len(self.ranks) == self.world_size

    def has_room(self, group: Group) -> bool:
        """Return whether none of a group's ranks is sending."""
        return all(group.ranks.isdisjoint(other.ranks) for other in self.running.values())

    def queue_task(self, group: Group, kind: direct_pb2.DirectTask.Kind, *, link: bool = False) -> None:
        """Queue a task for each rank of a group that still offers the version; with `link`, including the rank's link."""
        for member in group.members[: group.senders]:
            there = self.ranks.get(member.rank)
            if there is not None and there[0] == member:
                there[2].append(Task(kind, group.id, group.link(member) if link else None, kept=group.kept))
        self.changed.emit()

    def queue_digests(self, group: Group, *, during_transfer: bool, frozen: bool = False) -> None:
        """Queue a DIGEST task of this version for each rank of a group."""
        group.reports[frozen] = Reports(self.number)
        for member in group.members[: group.senders]:
            sent = None if group.has_sent else group.planned.sent_by(member.rank)
            there = self.ranks.get(member.rank)
            if there is not None and there[0] == member:
                task = Task(direct_pb2.DirectTask.DIGEST, group.id, None, sent, during_transfer, frozen)
                there[2].append(task)
        group.has_sent = True
        self.changed.emit()

    def end(self, why: str) -> None:
        """End the offer: each rank's queue of tasks ends, after which its memory may change."""
        self.over = self.over or why
        for _, _, tasks in self.ranks.values():
            tasks.append(None)
        self.changed.emit()
