"""The daemon's register of files on nodes into which ranks write: reservations of epochs, sets of files, and versions in them.

A file's home is a node if ranks on the node's host send all tensors of the file. The home of a tensor of which ranks of several
hosts send parts gathers them after the last seal: each rank writes into a file on its own host. Which home a file may have is
fixed with the layout of an epoch; whether it has that home in one version, when the version begins.

A reservation names the files that nodes lay out for the versions of one epoch. A node reports sets of them. A version takes a set
on each of its homes, once: a set that any version has taken is never given to another. Nodes follow the orders: they verify the
set after the last seal, hold the version in it from READY on, and use its files again, under another id, once it has ended.
"""

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from secrets import token_hex
from types import MappingProxyType
from typing import NamedTuple

from resharder.converters.storage.files import FileLayout
from resharder.converters.wire.ranges import PIECE_BYTES
from resharder.server.holding.part_files import AHEAD, FileProof, FilesOnNode, GatheredBoxes, PartFile, boxes_of_file_to_proto
from resharder.server.nodes.known_node import KnownNode, id_of, notify
from resharder.server.nodes.records import LostNodes, nonce_id
from resharder.server.state.errors import FailedPrecondition, InvalidArgument, PermissionDenied, ResourceNotFound
from resharder.server.state.version import ABORTED, DAEMON, READY, RETIRED, VersionRecord
from resharder.server.store.folder import StoreFolder
from resharder.v1 import node_pb2

_FIRST_SUSPENSION, _LONGEST_SUSPENSION = (
    60.0,
    3600.0,
)  # seconds for a node from which the daemon could not fetch
LAYOUT_SECONDS, ROOM_SECONDS = 5.0, 15.0
"""Seconds that a version waits for a node that is laying out its files, and for one that waits for memory, where it has to."""


Readable = Mapping[str, bytes]
"""Nonce files that a rank has read, and their contents."""


class NodeHome(NamedTuple):
    """A node's files of one UPLOADING version.

    Attributes:
        node: Id of the node.
        folder: Folder of the files on the node's host.
        files: Paths of those of which it is the home. None where ranks write boxes alone that other nodes gather.
        gathers: Whether ranks write boxes of tensors there of which ranks of other hosts send parts.
        shares: Whether ranks may leave boxes of frozen tensors there as they are in the version before.
    """

    node: str
    folder: str
    files: tuple[str, ...]
    gathers: bool = False
    shares: bool = False


class NodeNonces(NamedTuple):
    """Nonces of nodes.

    Attributes:
        files: Paths of the nonce files of live nodes that are not drained.
        settled: SHA-256 of the nonces of live nodes, and of nodes that are gone, as hexadecimal digits: no rank waits for them.
    """

    files: tuple[str, ...]
    settled: tuple[str, ...]


class HomeLost(Exception):
    """A node that cannot verify or send the files that ranks have written. The message has the reason."""


@dataclass
class ReservedHomes:
    """Files that nodes lay out for the versions of one epoch."""

    publisher: str
    files: tuple[FileLayout, ...]
    homes: dict[str, tuple[FileLayout, ...]]  # by node; none of one on which ranks write boxes alone that others gather
    created: float
    gathered: tuple[GatheredBoxes, ...] = ()
    frozen: frozenset[str] = frozenset()  # paths of files that versions may share
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
            gathered = tuple(each for each in self.gathered if each.path in paths)
            found[node] = FilesOnNode(files, parts, gathered, self.frozen & paths)
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
class TakenSet:
    """A set that a version has taken."""

    set: str
    folder: str
    instance: str
    reservation: ReservedHomes
    own: FilesOnNode  # files that the version has there
    base: str = ""  # version of which the node has kept the files that ranks may leave as they are
    unchanged: tuple[GatheredBoxes, ...] = ()  # what they have left so; no boxes of a whole file
    closed: tuple[str, ...] = ()  # files that all ranks have closed
    proof: dict[str, FileProof] | None = None
    problem: str = ""


@dataclass
class WrittenVersion:
    """A version in files on nodes."""

    homes: dict[str, TakenSet]  # by node
    gathers: bool = False  # whether nodes fetch boxes from each other
    state: node_pb2.FileSetOrder.State = node_pb2.FileSetOrder.UPLOADING
    held: bool = False  # whether its homes are to hold it, before READY and afterwards


def reads_nonce(readable: Readable, report: node_pb2.SyncNodeRequest) -> bool:
    """Return whether a rank has read the present nonce of a node."""
    return bool(report.store.nonce_file and report.store.nonce) and readable.get(report.store.nonce_file) == report.store.nonce


class HomeRegister:
    """Reservations, sets and versions of all nodes. Thread-safe; it never calls ingest.

    The lock of `changed` guards `nodes` too, which `NodeRegistry` fills. It is below all others but those of change signals.

    Attributes:
        changed: Notified when something changes for which a version may wait.
        nodes: All nodes by id, also those that are lost.

    Args:
        store: Folder of the store, by whose nonce ranks on the daemon's host are recognised.
        lost: Nodes that are gone; by default kept in memory alone.
        hold: Whether the store holds what nodes have no room for. Otherwise versions wait for room.
    """

    def __init__(
        self,
        store: StoreFolder | None = None,
        lost: LostNodes | None = None,
        hold: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._clock, self._lost, self._hold = store, clock, lost or LostNodes(), hold
        self.changed = threading.Condition()
        self.nodes: dict[str, KnownNode] = {}
        self._reservations: dict[str, ReservedHomes] = {}  # by publisher
        self._versions: dict[str, WrittenVersion] = {}
        self._suspended: dict[str, tuple[str, float, float]] = {}
        """Nodes from which the daemon could not fetch: instance, seconds, and the time at which they end."""

    # Reports of nodes

    def reported(self, node: KnownNode) -> None:
        """Record that a node has reported."""
        with self.changed:
            self.nodes[id_of(node.report)] = node
            self._lost.remove(id_of(node.report), node.report.store.nonce)
            self.changed.notify_all()

    def gone(self, *nodes: KnownNode) -> None:
        """Record that nodes are lost or have left. Their sets are lost with them."""
        with self.changed:
            self._lost.add({id_of(node.report): node.report.store.nonce for node in nodes})
            self.changed.notify_all()

    def orders(self, node: str, wanted: Iterable[str]) -> list[node_pb2.ReservationOrder]:
        """Return the orders for a node, of all reservations that concern it. `wanted`: READY versions that it should hold."""
        wanted = set(wanted)
        with self.changed:
            if (found := self._live(node)) is None:
                return []
            reported = {each.id: each for each in found.report.reservations}
            orders = []
            for reservation in self._reservations.values():
                if node in reservation.homes and not (found.departs and reservation.id not in reported):
                    sets = [each.id for each in reported[reservation.id].sets] if reservation.id in reported else []
                    taken = [self._set_order(node, each, wanted) for each in sets if each in reservation.taken]
                    readers = self._readers(reservation, node)
                    given = {"id": reservation.id, "publisher": reservation.publisher}
                    orders.append(node_pb2.ReservationOrder(**given, sets=taken, readers=readers))
            return orders

    def reserved_bytes(self, node: str) -> int:
        """Return the bytes that a node keeps free for sets, beside the versions that it holds."""
        with self.changed:
            if (found := self._live(node)) is None:
                return 0
            sets = {each.id: len(each.sets) for each in found.report.reservations}
            own = [each for each in self._reservations.values() if node in each.nodes]
            return sum(each.nodes[node].size * max(AHEAD, sets.get(each.id, 0)) for each in own)

    def uploading(self, node: str) -> dict[str, tuple[tuple[FileLayout, ...], tuple[FileLayout, ...]]]:
        """Return the files of UPLOADING versions on a node, and all files of each, by version."""
        with self.changed:
            return {
                name: (version.homes[node].own.files, version.homes[node].reservation.files)
                for name, version in self._versions.items()
                if version.state != node_pb2.FileSetOrder.READY and node in version.homes and version.homes[node].own.files
            }

    def reserved_files(self, publisher: str, reservation: str, node: str, caller: str) -> FilesOnNode:
        """Return the files that a node lays out.

        Raises FailedPrecondition (STALE_EPOCH), ResourceNotFound (NODE_UNKNOWN), PermissionDenied (NOT_ALLOWED).
        """
        with self.changed:
            self._check_caller(node, caller)
            found = self._reservations.get(publisher)
            if found is None or found.id != reservation or node not in found.homes:
                raise FailedPrecondition("STALE_EPOCH", f"{publisher}: its reservation {reservation} on nodes/{node} has ended")
            if found.admitted.get(node) != caller:
                found.admitted[node] = caller
                self._notify(found.homes)  # other nodes admit it
            return found.nodes[node]

    def put_proof(
        self,
        version: str,
        node: str,
        instance: str,
        set: str,
        caller: str,
        problem: str,
        files: Mapping[str, FileProof],
        unreachable: str = "",
    ) -> None:
        """Record what a node has found in the files that ranks have written.

        No version is written for some time on `unreachable`, a node that did not deliver boxes which this one gathers.

        Raises:
            ResourceNotFound: NODE_UNKNOWN: the node is not live.
            PermissionDenied: NOT_ALLOWED: the node belongs to another identity.
            FailedPrecondition: VERSION_CLOSED: the version does not wait for a proof of this set.
            InvalidArgument: NODE: other files, or other numbers of tensors and parts.
        """
        with self.changed:
            self._check_caller(node, caller)
            found = self._versions.get(version)
            taken = found.homes.get(node) if found is not None and found.state == node_pb2.FileSetOrder.VERIFYING else None
            if taken is None or (taken.set, taken.instance) != (set, instance):
                raise FailedPrecondition("VERSION_CLOSED", f"{version} waits for no proof of set {set[:80]!r} on nodes/{node}")
            if not problem:
                _check_proof(taken.own.files, files)
            if taken.proof is None and not taken.problem:
                taken.proof, taken.problem = dict(files), problem
                if problem and unreachable in {each.node for each in taken.own.gathered}:
                    self._suspend(unreachable, self._clock())
            self.changed.notify_all()

    # The daemon

    def written(self, version: str) -> dict[str, tuple[FileLayout, ...]]:
        """Return the files that ranks have written on nodes, by node; none of a version without homes."""
        with self.changed:
            found = self._versions.get(version)
            homes = found.homes.items() if found is not None else ()
            return {node: taken.own.files for node, taken in homes if taken.own.files}

    def not_adopted(self, report: node_pb2.SyncNodeRequest) -> dict[str, tuple[FileLayout, ...]]:
        """Return the verified files of versions that a node holds in sets which it has yet to take over, by version."""
        sets = {found.id for each in report.reservations for found in each.sets}
        with self.changed:
            return {
                name: taken.own.files
                for name, version in self._versions.items()
                if (taken := version.homes.get(id_of(report))) is not None
                and taken.proof
                and taken.set in sets
                and taken.instance == report.instance
            }

    def version_changed(self, record: VersionRecord) -> None:
        """Follow a version's state. Of one that is READY, nodes hold what ranks have written, if it is wanted there."""
        with self.changed:
            found = self._versions.get(record.name)
            if found is None or record.state not in (READY, ABORTED, RETIRED):
                return
            if record.state == READY:
                found.state = node_pb2.FileSetOrder.READY
            else:
                del self._versions[record.name]
            self._notify(found.homes)

    # Ingest

    def nonces(self) -> NodeNonces:
        """Return where ranks find the nonces of nodes, and for which nodes no rank waits."""
        with self.changed:
            live = [node for node in self.nodes.values() if not node.lost]
            files = dict.fromkeys(
                node.report.store.nonce_file for node in live if not node.departs and node.report.store.nonce_file
            )
            return NodeNonces(tuple(files), (*(nonce_id(node.report.store.nonce) for node in live), *self._lost.nonces()))

    def host_of(self, readable: Readable) -> str | None:
        """Return the host of a rank that has read these nonce files: `DAEMON` or the id of a node; None if unknown."""
        store = self._store
        if store is not None and store.shared and readable.get(str(store.nonce_file)) == store.nonce:
            return DAEMON
        with self.changed:
            return next(
                (id for id, node in sorted(self.nodes.items()) if not node.lost and reads_nonce(readable, node.report)), None
            )

    def reserve(
        self,
        publisher: str,
        files: Sequence[FileLayout],
        homes: Mapping[str, str],
        gathered: Sequence[GatheredBoxes] = (),
        frozen: Collection[str] = (),
    ) -> None:
        """Have nodes lay out the files of an epoch, in place of those of the model's earlier epochs.

        Args:
            publisher: Resource name of the publisher.
            files: All files of a version.
            homes: Id of the node of each file whose home is one, by path; none to end the publisher's reservation.
            gathered: Boxes that homes fetch from other nodes.
            frozen: Paths of files that versions may share.
        """
        by_node: dict[str, tuple[FileLayout, ...]] = {each.node: () for each in gathered}
        for file in files:
            if (node := homes.get(file.path)) is not None:
                by_node[node] = (*by_node.get(node, ()), file)
        with self.changed:
            former = self._reservations.pop(publisher, None)
            if by_node:
                found = ReservedHomes(publisher, tuple(files), by_node, self._clock(), tuple(gathered), frozenset(frozen))
                self._reservations[publisher] = found
            self._notify([*(former.homes if former else ()), *by_node])

    def take(self, publisher: str, version: str, ranks: Mapping[str, Sequence[Readable]], base: str = "") -> tuple[NodeHome, ...]:
        """Take a set of files for a version on each node that has one. Blocks for a few seconds while nodes lay them out.

        Nodes gather boxes from each other in a version that has a set of all of these nodes, or none does.

        Args:
            publisher: Resource name of the publisher.
            version: Resource name of the UPLOADING version.
            ranks: For each node, what the ranks that would write there have read last.
            base: The version that `version` shares files with; empty for none.
        """
        deadline = self._clock() + (LAYOUT_SECONDS if self._hold else ROOM_SECONDS)
        with self.changed:
            while any(self._is_coming(publisher, node, read, self._clock()) for node, read in ranks.items()):
                if (left := deadline - self._clock()) <= 0:
                    break
                self.changed.wait(left)
            reservation = self._reservations.get(publisher)
            now = self._clock()
            free = {node: self._free(publisher, node, read, now) for node, read in ranks.items()}
            taken = {node: found for node, found in free.items() if found is not None}
            gathers = reservation is not None and self._gathers(reservation, taken)
            if not gathers:
                taken = {node: replace(each, own=each.own.whole) for node, each in taken.items() if each.own.whole.files}
            if reservation is None or not taken:
                return ()
            for each in taken.values():
                each.proof = None if each.own.files else {}  # nothing to verify
                each.base = base if each.base == base else ""
            reservation.taken |= {each.set for each in taken.values()}
            self._versions[version] = WrittenVersion(taken, gathers)
            self._notify(taken)
            paths = {node: tuple(file.path for file in each.own.files) for node, each in taken.items()}
            return tuple(NodeHome(node, each.folder, paths[node], gathers, bool(each.base)) for node, each in taken.items())

    def problem(self, version: str) -> str:
        """Return why a version cannot complete because it has lost a home; empty if it has not."""
        with self.changed:
            found = self._versions.get(version)
            return self._lost_home(found) if found is not None else ""

    def closed(self, version: str, files: Collection[str]) -> None:
        """Have the version's homes verify some of their files, which all ranks have closed, while ranks still write others."""
        with self.changed:
            found = self._versions.get(version)
            for node, taken in (
                found.homes.items() if found is not None and found.state == node_pb2.FileSetOrder.UPLOADING else ()
            ):
                whole = taken.own.whole.files  # boxes of the others are gathered after the last seal
                if own := [file.path for file in whole if file.path in {*files} - {*taken.closed}]:
                    taken.closed += tuple(own)
                    self._notify([node])

    def verify(self, version: str, unchanged: Mapping[str, Sequence[GatheredBoxes]] = MappingProxyType({})) -> None:
        """Have the version's homes verify their files: all ranks have sealed.

        `unchanged`: for each node, boxes that ranks have left as they are in the version before; no boxes of a whole file.
        """
        with self.changed:
            found = self._versions.get(version)
            if found is not None and found.state == node_pb2.FileSetOrder.UPLOADING:
                found.state = node_pb2.FileSetOrder.VERIFYING
                for node, boxes in unchanged.items():
                    found.homes[node].unchanged = tuple(boxes)
                self._notify(found.homes)

    def hold(self, version: str) -> None:
        """Have the homes of a verified version hold it, before it is READY."""
        with self.changed:
            if (found := self._versions.get(version)) is not None:
                found.held = True
                self._notify(found.homes)

    def proofs(self, version: str, seconds: float) -> Mapping[str, FileProof]:
        """Wait for the proofs of all homes, and return them by file. Raises HomeLost, also after `seconds`."""
        deadline = self._clock() + seconds
        with self.changed:
            while True:
                found = self._intact(version)
                late = sorted(node for node, taken in found.homes.items() if taken.proof is None)
                if not late:
                    return {path: proof for taken in found.homes.values() for path, proof in (taken.proof or {}).items()}
                if (left := deadline - self._clock()) <= 0:
                    raise HomeLost(f"nodes/{late[0]} has not verified its files in {seconds:.0f} s")
                self.changed.wait(min(left, 1.0))

    def suspend(self, node: str) -> None:
        """Take no files of a node for some time, because the daemon could not fetch from it."""
        with self.changed:
            self._suspend(node, self._clock())

    # With the lock; nothing waits or calls a node

    def _live(self, id: str) -> KnownNode | None:
        """Return a node that has a lease; None for any other."""
        found = self.nodes.get(id)
        return None if found is None or found.lost else found

    def _set_order(self, node: str, set: str, wanted: set[str]) -> node_pb2.FileSetOrder:
        """Return the order for a set that a version has taken."""
        for name, version in self._versions.items():
            if (taken := version.homes.get(node)) is not None and taken.set == set:
                state = node_pb2.FileSetOrder.READY if version.held else version.state
                if version.state == node_pb2.FileSetOrder.READY and name not in wanted:
                    state = node_pb2.FileSetOrder.ENDED
                closed = taken.closed if state == node_pb2.FileSetOrder.UPLOADING else ()
                verifies = state == node_pb2.FileSetOrder.VERIFYING
                return node_pb2.FileSetOrder(
                    id=set,
                    version=name,
                    state=state,
                    closed=closed,
                    gathers=version.gathers,
                    sources=self._addresses(taken.own.gathered) if verifies else (),
                    base=taken.base,
                    unchanged=map(boxes_of_file_to_proto, taken.unchanged) if verifies else (),
                )
        return node_pb2.FileSetOrder(id=set, state=node_pb2.FileSetOrder.ENDED)

    def _addresses(self, sources: Iterable[GatheredBoxes]) -> list[node_pb2.PartSource]:
        """Return each node from which boxes are gathered, with the address of its data port."""
        found = {each.node: self._live(each.node) for each in sources}
        return [
            node_pb2.PartSource(node=f"nodes/{id}", data_address=node.report.data_address)
            for id, node in sorted(found.items())
            if node is not None
        ]

    def _readers(self, reservation: ReservedHomes, node: str) -> tuple[str, ...]:
        """Return the identities, or certificates, of the nodes that gather boxes from a node."""
        gatherers = sorted(reservation.gatherers.get(node, set()) & reservation.admitted.keys())
        live = ((self._live(id), reservation.admitted[id]) for id in gatherers)
        found = [each for each, caller in live if each is not None and each.caller == caller]
        names = ((each.caller.rpartition("@")[0], each.report.certificate) for each in found)
        admitted = (certificate if name.startswith("token:") else name for name, certificate in names)
        return tuple(name for name in admitted if name)

    def _check_caller(self, node: str, caller: str) -> None:
        """Raise ResourceNotFound (NODE_UNKNOWN) or PermissionDenied (NOT_ALLOWED) unless the caller owns a live node."""
        if (found := self._live(node)) is None:
            raise ResourceNotFound("NODE_UNKNOWN", f"node {node!r} is not live")
        if found.caller != caller:
            raise PermissionDenied("NOT_ALLOWED", f"node {node!r} belongs to {found.caller or 'a caller without a name'}")

    def _usable(self, publisher: str, node: str, read: Sequence[Readable], now: float) -> node_pb2.SyncNodeRequest | None:
        """Return the report of a node whose host the ranks are on; None of one that is drained or suspended."""
        found, reservation = self._live(node), self._reservations.get(publisher)
        if (
            found is None
            or found.departs
            or reservation is None
            or node not in reservation.homes
            or not found.report.data_address
        ):
            return None
        instance, _, until = self._suspended.get(node, ("", 0.0, 0.0))
        if instance == found.report.instance and now < until:
            return None
        return found.report if all(reads_nonce(each, found.report) for each in read) else None

    def _is_coming(self, publisher: str, node: str, read: Sequence[Readable], now: float) -> bool:
        """Return whether a node is laying out a set for a version of these ranks, or has yet to learn that it should."""
        report = self._usable(publisher, node, read, now)
        if report is None or self._free(publisher, node, read, now) is not None:
            return False
        reservation = self._reservations[publisher]
        known = [each.problem for each in report.reservations if each.id == reservation.id]
        if known:
            return not (self._hold and any(known))
        return now - reservation.created < LAYOUT_SECONDS  # an earlier release follows none

    def _free(self, publisher: str, node: str, read: Sequence[Readable], now: float) -> TakenSet | None:
        """Return a set that no version has taken; None without one, or if the ranks are not on the node's host."""
        if (report := self._usable(publisher, node, read, now)) is None:
            return None
        reservation = self._reservations[publisher]
        for each in report.reservations:
            for found in each.sets if each.id == reservation.id else ():
                if found.id not in reservation.taken:
                    given = found.id, found.folder, report.instance, reservation, reservation.nodes[node]
                    return TakenSet(*given, each.base if reservation.frozen else "")
        return None

    def _gathers(self, reservation: ReservedHomes, nodes: Iterable[str]) -> bool:
        """Return whether these nodes are all that have boxes for each other, and can fetch them."""
        able = {node for node in nodes if self.nodes[node].report.gathers}
        return bool(reservation.gathered) and {*reservation.exchanging} <= able

    def _lost_home(self, version: WrittenVersion) -> str:
        """Return why a version has lost a home; empty if it has not."""
        if version.state == node_pb2.FileSetOrder.READY:
            return ""
        for id, taken in version.homes.items():
            if (node := self._live(id)) is None:
                return f"nodes/{id}, into whose files ranks wrote, is gone"
            if node.report.instance != taken.instance:
                return f"nodes/{id}, into whose files ranks wrote, has restarted"
            if taken.problem:
                return f"nodes/{id}: {taken.problem}"
        return ""

    def _intact(self, version: str) -> WrittenVersion:
        """Return a version that has lost no home. Raises HomeLost."""
        found = self._versions.get(version)
        if found is None:
            raise HomeLost("the version is aborted")
        if problem := self._lost_home(found):
            raise HomeLost(problem)
        return found

    def _suspend(self, node: str, now: float) -> None:
        """Take no files of a node for some time, twice as long each time, until it restarts."""
        if (found := self._live(node)) is not None:
            instance, seconds, _ = self._suspended.get(node, ("", 0.0, 0.0))
            same = instance == found.report.instance
            seconds = min(2 * seconds, _LONGEST_SUSPENSION) if same else _FIRST_SUSPENSION
            self._suspended[node] = found.report.instance, seconds, now + seconds

    def _notify(self, nodes: Iterable[str]) -> None:
        """Notify nodes whose orders change, and all waiters."""
        notify(self.nodes[id] for id in {*nodes} & self.nodes.keys())
        self.changed.notify_all()


def _check_proof(files: Sequence[FileLayout], found: Mapping[str, FileProof]) -> None:
    expected = {file.path: (len(file.tensors), -(-file.size // PIECE_BYTES)) for file in files}
    sizes = {path: (len(proof.digests), len(proof.checksums)) for path, proof in found.items()}
    if sizes != expected:
        raise InvalidArgument("NODE", f"expected digests and checksums of files {expected}, got {sizes}"[:1000])
