"""Ranks and workers of the direct path's coordinator, which stands still but for its calls and a clock of the test's own."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from resharder.converters.geometry.layout import Layout, Piece, Range, TensorSpec
from resharder.converters.geometry.piece_arrays import Pieces, pack
from resharder.server.direct.direct import Cause, Direct
from resharder.server.direct.offered_versions import OfferedVersions
from resharder.server.direct.plans import Member
from resharder.server.direct.state import Task
from resharder.server.infra.change_signal import Pause
from resharder.server.state.server import Reach
from resharder.v1 import direct_pb2

from tests.support.waits import completed

PUBLISHER = "models/policy/publishers/1"
LONG = 60.0


def share_of_rows(rank: int, of: int = 2, rows: int = 8) -> Pieces[int]:
    """Some of the rows of the one tensor that there is."""
    share = rows // of
    piece = Piece("w", (Range(rank * share, share), Range(0, 4)), "w", 0, (4, 1))
    return pack({rank: Layout({"w": TensorSpec("w", "BF16", (rows, 4))}, (piece,))})


@dataclass
class Site:
    """`wanting`: servers that are to install whatever is READY. `taking`: those that would take it before."""

    wanting: set[str] = field(default_factory=set)
    taking: set[str] = field(default_factory=set)
    hosts: dict[str, str] = field(default_factory=dict)  # of servers, "here" by default
    known: dict[str, dict[int, str]] = field(default_factory=dict)
    now: float = 0.0
    ranks: int = 2  # two hold one replica
    offered: OfferedVersions = field(default_factory=OfferedVersions)
    causes: list[Cause | None] = field(default_factory=list)
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(16))

    def __post_init__(self) -> None:
        self.direct = Direct(
            self.awaiting,
            self.processes,
            taking=lambda model, number, reach: frozenset(filter(partial(self.reached, reach), self.taking)),
            hosts=lambda server: frozenset({self.hosts.get(server, "here")}),
            model_of=lambda server: "policy",
            open_network=True,
            offered=self.offered,
            seconds=10.0,
            clock=lambda: self.now,
        )
        self.direct.transferred.connect(self.transferred)

    def reached(self, reach: Reach, server: str) -> bool:
        there = reach.hosts in (frozenset(), {self.hosts.get(server, "here")})
        return there or (reach.links or {}).get(server) == ""

    def transferred(self, seconds: float, cause: Cause | None) -> None:
        self.causes.append(cause)

    def awaiting(self, model: str, number: int) -> frozenset[str]:
        return frozenset(self.wanting)

    def processes(self, server: str) -> dict[int, str]:
        return self.known.get(server, {})

    # Ranks and workers

    def rank(self, rank: int) -> Member:
        return Member(PUBLISHER, rank, f"rank-{rank}")

    def worker(self, server: str, rank: int) -> Member:
        return Member(f"servers/{server}", rank, f"{server}-{rank}")

    def declare(self, *servers: str) -> None:
        for rank in range(self.ranks):
            self.direct.declare(self.rank(rank), "memory", share_of_rows(rank % 2))
        for server in servers:
            self.known[server] = {rank: f"{server}-{rank}" for rank in range(2)}
            self.wanting.add(server)
            for rank in range(2):
                self.direct.declare(self.worker(server, rank), "memory", share_of_rows(rank))

    def offer(self, number: int = 1, wait: float = 100.0, **options: Any) -> list["Rank"]:
        return [Rank(self, rank, number, wait, **options) for rank in range(self.ranks)]

    def begin(self, act: Callable[..., object], *arguments: object) -> "Future[object]":
        return self.pool.submit(completed, act, *arguments)

    def join(self, server: str, number: int = 1, install: str = "i-1") -> list["Future[object]"]:
        return [self.begin(self.direct.join, self.worker(server, rank), "memory", "policy", number, install) for rank in range(2)]

    def start(self, server: str, group: str, install: str = "i-1") -> list["Future[object]"]:
        return [self.begin(self.direct.start, self.worker(server, rank), group, install) for rank in range(2)]

    def finish(self, member: Member, group: str, error: str = "") -> None:
        self.direct.finish(member, group, not error, error, 32)


class Rank:
    def __init__(self, site: Site, rank: int, number: int, wait: float, **options: Any) -> None:
        self.site, self.rank, self.member, self.sealed = site, rank, site.rank(rank), False
        self.offer = site.direct.offer(self.member, "memory", "policy", number, site.ranks, wait, **options)

    def task(self, state: str = "READY") -> Task | None:
        """The next one; None where the offer is over."""
        self.offer.look_at = 0.0  # the site's clock stands still
        for item in self.site.direct.tasks(self.offer, self.rank, lambda: state, lambda: self.sealed):
            if not isinstance(item, Pause):
                return item
            item.signal.wait(item.seen, item.seconds)
            self.offer.look_at = 0.0
        return None

    def look(self, state: str = "READY") -> None:
        """Have the coordinator look whether the offer is over; no task is due."""
        self.offer.look_at = 0.0
        assert isinstance(next(self.site.direct.tasks(self.offer, self.rank, lambda: state, lambda: self.sealed)), Pause)


def linked(site: Site, server: str, ranks: list[Rank], number: int = 1, install: str = "i-1") -> str:
    """The group's id, once everybody has the link. What a rank still has of the one before it is told to drop."""
    links = [future.result(LONG) for future in site.join(server, number, install)]
    tasks = [rank.task() for rank in ranks]
    if tasks[0] and tasks[0].kind == direct_pb2.DirectTask.DROP:
        tasks = [rank.task() for rank in ranks]
    assert [task.kind for task in tasks if task] == [direct_pb2.DirectTask.LINK] * 2
    (group,) = {link.group for link in links} | {task.group for task in tasks if task}  # type: ignore[attr-defined]
    return str(group)


def after_drops(ranks: list[Rank], dropped: str) -> list[Task]:
    """The next task of each rank that does not have it drop this group."""
    found = []
    for rank in ranks:
        task = rank.task()
        while task == Task(direct_pb2.DirectTask.DROP, dropped):
            task = rank.task()
        assert task is not None
        found.append(task)
    return found
