"""State of the register of files on nodes, and what follows from it for a version or a node: no method waits or calls a node."""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from secrets import token_hex

from resharder.converters.storage.files import FileLayout
from resharder.server.ingest.homes import FileProof, GatheredBoxes, HomeLost, Readable
from resharder.server.node.home_fetch import HomeSource
from resharder.server.node.part_files import FilesOnNode, PartFile
from resharder.server.node.reports import FileSetOrder, SetState, StateReport
from resharder.server.state.errors import PermissionDenied, ResourceNotFound

_FIRST_ASIDE, _LONGEST_ASIDE = 60.0, 3600.0  # seconds without a version for a node from which the daemon could not fetch one
LAYOUT_SECONDS = 5.0
"""Seconds that a version waits for a node that is laying out its files."""


@dataclass
class ReservedHomes:
    """Files that nodes lay out for the versions of one epoch."""

    publisher: str
    files: tuple[FileLayout, ...]
    homes: dict[str, tuple[FileLayout, ...]]  # by node; none of one on which ranks write boxes alone that others gather
    created: float
    gathered: tuple[GatheredBoxes, ...] = ()
    admitted: dict[str, str] = field(default_factory=dict)  # nodes that the daemon has let read the layout, and their callers
    id: str = field(default_factory=lambda: token_hex(8))
    taken: set[str] = field(default_factory=set)  # sets

    @cached_property
    def nodes(self) -> dict[str, FilesOnNode]:
        """The files of each node."""
        layouts, found = {file.path: file for file in self.files}, dict[str, FilesOnNode]()
        for node, files in self.homes.items():
            paths = {file.path for file in files}
            parts = tuple(PartFile(layouts[each.path], each.boxes) for each in self.gathered if each.node == node)
            found[node] = FilesOnNode(files, parts, tuple(each for each in self.gathered if each.path in paths))
        return found

    @property
    def exchanging(self) -> set[str]:
        """The nodes that gather boxes, and the nodes that have them."""
        return {node for node, found in self.nodes.items() if found.gathered or found.parts}

    @cached_property
    def gatherers(self) -> dict[str, set[str]]:
        """The nodes that gather boxes from each node."""
        found: dict[str, set[str]] = {}
        for home, files in self.nodes.items():
            for each in files.gathered:
                found.setdefault(each.node, set()).add(home)
        return found


@dataclass
class HomeNode:
    """A live node."""

    report: StateReport
    caller: str
    drained: bool
    changed: Callable[[], object]
    """Called when the node's orders change."""


@dataclass
class TakenSet:
    """A set that a version has taken."""

    set: str
    folder: str
    instance: str
    reservation: ReservedHomes
    own: FilesOnNode  # files that the version has there
    closed: tuple[str, ...] = ()  # files that all ranks have closed
    proof: dict[str, FileProof] | None = None
    problem: str = ""


@dataclass
class WrittenVersion:
    """A version in files on nodes."""

    homes: dict[str, TakenSet]  # by node
    gathers: bool = False  # whether nodes fetch boxes from each other
    state: SetState = SetState.UPLOADING


class HomeState:
    """Nodes, reservations and versions. Callers hold the lock, `changed`."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.nodes: dict[str, HomeNode] = {}
        self.reservations: dict[str, ReservedHomes] = {}  # by publisher
        self.versions: dict[str, WrittenVersion] = {}
        self.aside: dict[str, tuple[str, float, float]] = {}  # by node: its instance, seconds, and the time at which they end

    def set_order(self, node: str, set: str, wanted: set[str]) -> FileSetOrder:
        """Return the order for a set that a version has taken."""
        for name, version in self.versions.items():
            if (taken := version.homes.get(node)) is not None and taken.set == set:
                ended = version.state is SetState.READY and name not in wanted
                state = SetState.ENDED if ended else version.state
                closed = taken.closed if state is SetState.UPLOADING else ()
                sources = self.addresses(taken.own.gathered) if state is SetState.VERIFYING else ()
                return FileSetOrder(set, name, state, closed, version.gathers, sources)
        return FileSetOrder(set, "", SetState.ENDED)

    def addresses(self, sources: Iterable[GatheredBoxes]) -> tuple[tuple[str, str], ...]:
        """Return each node from which boxes are gathered, with the address of its data port."""
        found = sorted({each.node for each in sources} & self.nodes.keys())
        return tuple((node, self.nodes[node].report.data_address) for node in found)

    def readers(self, reservation: ReservedHomes, node: str) -> tuple[str, ...]:
        """Return the identities, or certificates, of the nodes that gather boxes from a node."""
        live = sorted(reservation.gatherers.get(node, set()) & self.nodes.keys() & reservation.admitted.keys())
        found = [self.nodes[each] for each in live if self.nodes[each].caller == reservation.admitted[each]]
        names = ((each.caller.rpartition("@")[0], each.report.certificate) for each in found)
        admitted = (certificate if name.startswith("token:") else name for name, certificate in names)
        return tuple(name for name in admitted if name)

    def check_caller(self, node: str, caller: str) -> None:
        """Raise ResourceNotFound (NODE_UNKNOWN) or PermissionDenied (NOT_ALLOWED) unless the caller owns a live node."""
        found = self.nodes.get(node)
        if found is None:
            raise ResourceNotFound("NODE_UNKNOWN", f"node {node!r} is not live")
        if found.caller != caller:
            raise PermissionDenied("NOT_ALLOWED", f"node {node!r} belongs to {found.caller or 'a caller without a name'}")

    def usable(self, publisher: str, node: str, read: Sequence[Readable], now: float) -> StateReport | None:
        """Return the report of a node whose host the ranks are on; None of one that is drained or set aside."""
        found, reservation = self.nodes.get(node), self.reservations.get(publisher)
        if (
            found is None
            or found.drained
            or reservation is None
            or node not in reservation.homes
            or not found.report.data_address
        ):
            return None
        instance, _, until = self.aside.get(node, ("", 0.0, 0.0))
        if instance == found.report.instance and now < until:
            return None
        return found.report if all(reads_nonce(each, found.report) for each in read) else None

    def is_coming(self, publisher: str, node: str, read: Sequence[Readable], now: float) -> bool:
        """Return whether a node is laying out a set for a version of these ranks, or has yet to learn that it should."""
        report = self.usable(publisher, node, read, now)
        if report is None or self.free(publisher, node, read, now) is not None:
            return False
        reservation = self.reservations[publisher]
        known = [each.problem for each in report.reservations if each.id == reservation.id]
        return not any(known) if known else now - reservation.created < LAYOUT_SECONDS  # an earlier release follows none

    def free(self, publisher: str, node: str, read: Sequence[Readable], now: float) -> TakenSet | None:
        """Return a set that no version has taken; None without one, or if the ranks are not on the node's host."""
        if (report := self.usable(publisher, node, read, now)) is None:
            return None
        reservation = self.reservations[publisher]
        for each in report.reservations:
            for id, folder in each.sets if each.id == reservation.id else ():
                if id not in reservation.taken:
                    return TakenSet(id, folder, report.instance, reservation, reservation.nodes[node])
        return None

    def gathers(self, reservation: ReservedHomes, nodes: Iterable[str]) -> bool:
        """Return whether these nodes are all that have boxes for each other, and can fetch them."""
        able = {node for node in nodes if self.nodes[node].report.gathers}
        return bool(reservation.gathered) and {*reservation.exchanging} <= able

    def problem(self, version: WrittenVersion) -> str:
        """Return why a version has lost a home; empty if it has not."""
        if version.state is SetState.READY:
            return ""
        for id, taken in version.homes.items():
            node = self.nodes.get(id)
            if node is None:
                return f"nodes/{id}, into whose files ranks wrote, is gone"
            if node.report.instance != taken.instance:
                return f"nodes/{id}, into whose files ranks wrote, has restarted"
            if taken.problem:
                return f"nodes/{id}: {taken.problem}"
        return ""

    def live(self, version: str) -> WrittenVersion:
        """Return a version that has lost no home. Raises HomeLost."""
        found = self.versions.get(version)
        if found is None:
            raise HomeLost("the version is aborted")
        if problem := self.problem(found):
            raise HomeLost(problem)
        return found

    def sources(self, version: str) -> tuple[str, Mapping[str, HomeSource]]:
        """Return the `ETag` of a version's files on nodes, and where the daemon fetches them, by node. Raises HomeLost."""
        homes = {node: taken for node, taken in self.live(version).homes.items() if taken.own.files}
        tag = next(taken.reservation.id for taken in homes.values())
        address = {node: self.nodes[node].report.data_address for node in homes}
        return tag, {node: HomeSource(address[node], taken.own.files) for node, taken in homes.items()}

    def set_aside(self, node: str, now: float) -> None:
        """Take no files of a node for some time, twice as long each time, until it restarts."""
        if (found := self.nodes.get(node)) is not None:
            instance, seconds, _ = self.aside.get(node, ("", 0.0, 0.0))
            same = instance == found.report.instance
            seconds = min(2 * seconds, _LONGEST_ASIDE) if same else _FIRST_ASIDE
            self.aside[node] = found.report.instance, seconds, now + seconds

    def tell(self, nodes: Iterable[str]) -> None:
        """Notify nodes whose orders change, and all waiters."""
        for node in {*nodes} & self.nodes.keys():
            self.nodes[node].changed()
        self.changed.notify_all()


def reads_nonce(readable: Readable, report: StateReport) -> bool:
    """Return whether a rank has read the present nonce of a node."""
    return bool(report.nonce_file and report.nonce) and readable.get(report.nonce_file) == report.nonce
