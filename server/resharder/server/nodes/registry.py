"""The daemon's register of nodes: what each reports, which versions each should hold, and from which nodes it may fetch them.

A version is wanted on a node from the first request of a worker on its host until the version is retired, or until newer ones
need the node's capacity. After a restart of the daemon, nodes report what they hold, and those versions are wanted again.

With more than one replica, or where the daemon's host holds nothing, nodes also hold replicas: before a version is READY, and
afterwards what has become lost. They hold it as they hold what workers need, but it does not make way for other versions while it
is planned.

The register has the lock, the waits, and the calls of the store. What it decides is in `decisions.py`.
"""

import time
from collections.abc import Callable, Iterable, Sequence

from resharder.converters.wire.pieces import Bitmap, PieceNumbering, number_pieces
from resharder.server.holding.held_files import pieces_of
from resharder.server.infra.change_signal import ChangeSignal, Waiting
from resharder.server.infra.event_log import Kind
from resharder.server.infra.medium import medium_errors
from resharder.server.nodes import decisions
from resharder.server.nodes.decisions import HeldVersion, ReplicaPlacement, ReplicaRules, ReplicasShort
from resharder.server.nodes.homes import HomeRegister
from resharder.server.nodes.known_node import (
    KnownNode,
    bitmap_of,
    copies_of,
    failures_of,
    host_copy_of,
    id_of,
    model_of,
    notify,
    peer_of,
    readers_of,
    reading,
    shown,
    wanted_of,
)
from resharder.server.nodes.pieces import PieceTable
from resharder.server.nodes.records import DrainedNodes
from resharder.server.nodes.snapshots import Snapshots
from resharder.server.nodes.tracker import LONGEST, Tracker, TrackerAnswer
from resharder.server.state.errors import DaemonError, PermissionDenied, ResourceNotFound
from resharder.server.state.version import DAEMON, READY, UPLOADING, VersionRecord, parse_name
from resharder.server.store.manifest import Manifest
from resharder.server.store.partial import VerifiedVersion
from resharder.v1 import node_pb2, operator_pb2, resources_pb2

_FAILING_SECONDS = 60.0  # for a node that could not hold a version
_SHORTEST_LOOK, _LONGEST_LOOK = 0.01, 0.25  # seconds between two looks at versions that wait


class NodeRegistry:
    """All nodes. Thread-safe.

    Args:
        manifest: Function that returns the manifest of a READY version, or raises a DaemonError.
        record: Function that returns the record of a version, or raises a DaemonError.
        lease_seconds: Time after its last report at which a node is lost.
        forget_seconds: Time after its last report at which a lost node is forgotten.
        note: Function that adds an event.
        drained: Ids of drained nodes; by default kept in memory alone.
        homes: Register of the files on nodes into which ranks write.
        verified: Function that returns a version that waits for READY or of which the daemon's store lacks pieces, else None.
        lose: Function that ends a version, pieces of which no node can deliver, with the reason. Raises DaemonError.
        replicas: Holders that each piece needs, the daemon among them.
        replica_seconds: Time without a further piece after which a version that waits for its holders fails.
        hold: Whether the daemon's host holds versions.
        snapshots: Snapshots of the registry that nodes keep; None for none.
    """

    def __init__(
        self,
        manifest: Callable[[str, int], Manifest],
        record: Callable[[str, int], VersionRecord],
        *,
        lease_seconds: float,
        forget_seconds: float,
        note: Callable[[Kind, str, str, str], object],
        drained: DrainedNodes | None = None,
        homes: HomeRegister | None = None,
        verified: Callable[[str, int], VerifiedVersion | None] = lambda model, number: None,
        lose: Callable[[str, int, str], object] = lambda model, number, reason: None,
        replicas: int = 1,
        replica_seconds: float = 60.0,
        hold: bool = True,
        snapshots: Snapshots | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._manifest, self._record, self._verified = manifest, record, verified
        self.lease_seconds, self._note = lease_seconds, note
        self._forget_seconds, self._drained, self.homes = forget_seconds, drained or DrainedNodes(), homes or HomeRegister()
        self._clock, self._wall = clock, wall
        self._longest = min(LONGEST, lease_seconds / 3)  # seconds between two reports of a node
        self._lock, self._nodes = self.homes.changed, self.homes.nodes
        self._tracker = Tracker(PieceTable())
        self._numberings: dict[str, PieceNumbering] = {}
        self._readers: dict[str, set[str]] = {}
        self._lose = lose
        self._table = self._tracker.table
        self.replicas, self._replica_seconds, self._hold_all, self._snapshots = replicas, replica_seconds, hold, snapshots
        if snapshots is not None:
            snapshots.changed.connect(self._notify_all)
        self._plans, self._closed = replicas > 1 or not hold, False
        self._settles = clock() + lease_seconds
        """When nodes have reported what they hold: before, no replica of a READY version is made up."""
        self._placements: dict[str, ReplicaPlacement] = {}
        self._failing: dict[tuple[str, str], tuple[float, str, str]] = {}  # by version and node: until, instance, and why
        self._changed = ChangeSignal()
        """Emitted when a holder has reported, or may have more."""

    def start(self, versions: Iterable[str]) -> None:
        """Watch over the replicas of versions that were READY before the daemon's start."""
        for version in versions if self._plans else ():
            self._known(version)

    def close(self) -> None:
        """End the wait for holders. Versions that wait fail."""
        self._closed = True

    # Calls of nodes

    def sync(self, report: node_pb2.SyncNodeRequest, caller: str, seen: int, wait_seconds: float) -> Waiting[node_pb2.NodeOrders]:
        """Record a report, and return the node's orders once their revision differs from `seen` or the time has passed.

        Args:
            report: The report.
            caller: Identity of the caller; empty without security.
            seen: Revision of the orders that the node has.
            wait_seconds: Bound on the wait.

        Raises:
            FailedPrecondition: NODE_REPLACED: a later process has this id.
            PermissionDenied: NOT_ALLOWED: a live node of another identity has this id.
            InvalidArgument: NODE: a bitmap of another number of pieces.
        """
        for copy in report.versions:
            self._known(copy.version)
        node = self._record_report(report, caller, seen)
        until = self._clock() + min(wait_seconds, self._longest)
        while True:
            count = node.changed.count
            if node.report.instance != report.instance:
                raise node.replaced()
            now, orders = self._clock(), self._orders(id_of(report))
            if orders.revision != seen or (left := until - self._clock()) <= 0:
                node.order(orders.revision, now)
                return orders
            yield node.changed.pause(count, left)

    def leave(self, node: str, instance: str) -> None:
        """Remove a node whose process ends."""
        with self._lock:
            found = self._nodes.get(node)
            if found is None or found.report.instance != instance:
                return
            del self._nodes[node]
            self._tracker.remove_node(node)
            self.homes.gone(found)
        if self._snapshots is not None:
            self._snapshots.gone(node)
        found.changed.emit()
        self._note("node", f"nodes/{node}", "left", "")

    def admit(self, version: str, caller: str) -> None:
        """Record that a caller may read a version's model, so that other nodes let it."""
        with self._lock:
            readers = self._readers.setdefault(model_of(version), set())
            if not (name := caller.rpartition("@")[0]) or name in readers:
                return
            readers.add(name)
            changed = list(self._nodes.values())
        notify(changed)

    # Calls of workers

    def host_copy(
        self, version: str, server: str, readable: Iterable[tuple[str, bytes]], needed: bytes = b""
    ) -> node_pb2.HostVersion:
        """Let the node of a worker's host hold pieces of a READY version, and return how far it is.

        Args:
            version: Resource name.
            server: Id of the worker's server.
            readable: Nonce files that the worker can read, and their content.
            needed: Packed bitmap of the pieces that the worker needs; empty for all.

        Raises:
            ResourceNotFound: MODEL_UNKNOWN, VERSION_UNKNOWN, VERSION_GONE.
            InvalidArgument: NODE: a bitmap of another number of pieces.
        """
        numbering = self._known(version)
        if numbering is None or self.waits(version):
            raise ResourceNotFound("VERSION_GONE", f"{version} is not READY")
        pieces = wanted_of(numbering.count, version, needed)
        with self._lock:
            found = reading(self._nodes.values(), dict(readable))
        if isinstance(found, node_pb2.HostVersion):
            return found
        known = found.pieces.get(version, Bitmap(numbering.count))
        if server not in found.wants.get(version, ()) or len(pieces - known):
            with self._lock:
                if version in self._numberings:
                    found.want(version, {server}, pieces)
            found.changed.emit()
        return self._host_copy(found, version, pieces)

    # Versions that wait for holders

    def waits(self, version: str) -> bool:
        """Return whether a known version waits for READY."""
        return self._record(*parse_name(version, "versions")).state == UPLOADING

    def begin(self, versions: Iterable[VerifiedVersion]) -> None:
        """Let holders fetch verified versions. No worker learns of them until they are READY."""
        for each in versions:
            self._hold_written(each.name)
            self.homes.hold(each.name)

    def problem(self, versions: Iterable[VerifiedVersion], stopped: Callable[[], bool]) -> str:
        """Return why versions that wait for holders cannot be READY; empty if they can."""
        if self._closed:
            return "the daemon is shutting down"
        lost = filter(None, (self.homes.problem(each.name) for each in versions))
        return next(lost, "the version is aborted" if stopped() else "")

    def await_holders(self, versions: Sequence[VerifiedVersion], stopped: Callable[[], bool]) -> None:
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
            seen = self._changed.count
            if why := self.problem(versions, stopped):
                raise ReplicasShort(why)
            if failed := next((each.failure for each in versions if each.failure), None):
                raise failed
            self._plan()
            late, why = self._late(names)
            if not late:
                return
            if lacking != (lacking := late):
                since = self._clock()
            elif self._clock() - since >= self._replica_seconds:
                raise ReplicasShort(f"{why}: nothing has changed for {self._replica_seconds:g} s")
            time.sleep(_SHORTEST_LOOK)
            self._changed.wait(seen, _LONGEST_LOOK)

    def shortages(self) -> list[operator_pb2.ReplicaShortage]:
        """Return the versions with pieces of too few holders, by name."""
        with self._lock:
            rules, short = self._rules(), [(name, found) for name, found in self._placements.items() if found.short]
            versions = [(self._held(name), found) for name, found in sorted(short) if name in self._numberings]
            return [
                operator_pb2.ReplicaShortage(
                    version=each.name,
                    short_pieces=found.short,
                    pieces=each.numbering.count,
                    replicas=self.replicas,
                    waits=each.waits,
                    problem=decisions.shortage(each, found, self._nodes, rules),
                )
                for each, found in versions
            ]

    # Operators

    def views(self) -> list[resources_pb2.Node]:
        """Return all nodes by id."""
        with self._lock:
            return [self._view(node) for _, node in sorted(self._nodes.items())]

    def set_drained(self, id: str, drained: bool) -> resources_pb2.Node:
        """Drain a node, or resume it, durably.

        Raises:
            ResourceNotFound: NODE_UNKNOWN.
            ResourceExhausted, Unavailable: STORE_FULL, STORE_FAILED, NO_DESCRIPTORS, and nothing has changed.
        """
        with self._lock, medium_errors():
            node = self._nodes.get(id)
            if node is None:
                raise ResourceNotFound("NODE_UNKNOWN", f"there is no node {id!r}; the daemon has {sorted(self._nodes)}")
            self._drained.change(id, drained)
            node.drained = drained
            self.homes.reported(node)
            view = self._view(node)
        node.changed.emit()
        return view

    # The daemon

    def expire(self) -> None:
        """Note the nodes whose lease has ended, whose pieces count no longer, and forget those lost for long."""
        now, lost = self._clock(), list[tuple[str, KnownNode]]()
        with self._lock:
            for id, node in self._nodes.items():
                if not node.lost and now - node.reported_at > self.lease_seconds:
                    node.lost = True
                    self._tracker.remove_node(id)
                    lost.append((id, node))
            self.homes.gone(*(node for _, node in lost))
            for id in [id for id, node in self._nodes.items() if now - node.reported_at > self._forget_seconds]:
                del self._nodes[id]
        if self._snapshots is not None:
            self._snapshots.gone(*(id for id, _ in lost))
        for id, node in lost:
            node.changed.emit()
            self._note("node", f"nodes/{id}", "lost", f"it has not called for {self.lease_seconds:g} s")
        self.count_own()
        with self._lock:
            live, doubts = {id: node for id, node in self._nodes.items() if not node.lost}, self._table.doubts()
            gone = self._table.settle(now, {id: node.follows for id, node in live.items()}, self.lease_seconds)
            changed = live.values() if self._table.doubts() != doubts else ()
        notify(changed)
        for version, reason in gone:
            self._lose(*parse_name(version, "versions"), reason)
        self._plan()

    def count_own(self) -> None:
        """Record the pieces that the daemon's store holds now."""
        with self._lock:
            versions = self._table.lacking(DAEMON)
        for version in versions:
            found = self._verified(*parse_name(version, "versions"))
            with self._lock:
                if version in self._table:
                    held = found.held() if found is not None else Bitmap.full(self._table[version].count)
                    self._table.report(version, DAEMON, held)
        self._changed.emit()

    def missing(self) -> int:
        """Return the number of pieces of READY versions that the daemon's store is to hold and lacks."""
        if not self._hold_all:
            return 0
        with self._lock:
            return sum(self._table.lacks(version, DAEMON) for version in self._table.lacking(DAEMON))

    def registry_copies(self) -> dict[str, int]:
        """Return how many nodes keep the newest snapshot of each model's registry."""
        return self._snapshots.copies() if self._snapshots is not None else {}

    def own_order(self, found: VerifiedVersion, links: Iterable[resources_pb2.NodeLink]) -> node_pb2.NodeOrder:
        """Return what the daemon fetches next of a version, and from which nodes. `links`: what it has seen of them."""
        order = node_pb2.NodeOrder(version=found.name)
        if self._known(found.name) is None:
            return order
        held, wanted = found.held(), found.wanted()
        with self._lock:
            if found.name in self._table:
                answer = self._tracker.report(found.name, DAEMON, held, wanted, failures_of(links), self._clock())
                order.peers.extend(self._peers(found.name, answer))
        return order

    def holders(self, version: str, piece: int) -> list[node_pb2.NodePeer]:
        """Return the live nodes that hold a piece of a version, the one that sends least first."""
        if (numbering := self._known(version)) is None:
            return []
        with self._lock:
            asked = Bitmap.of(numbering.count, [piece])
            live = [(id, node) for id, node in self._nodes.items() if not node.lost and version in self._table]
            found = [(id, node) for id, node in live if piece in self._table.bitmap(version, id)]
            found.sort(key=lambda each: each[1].report.transfers)
            return [peer_of(id, node, version, asked) for id, node in found]

    def version_changed(self, record: VersionRecord) -> None:
        """Count and retain the pieces that nodes hold of a READY version; forget any other version."""
        if record.state == READY and self.homes.written(record.name):
            self._hold_written(record.name)
        self.homes.version_changed(record)
        if record.state == READY:
            if self._plans or self._verified(record.model, record.number) is not None:
                self._known(record.name)
            return
        with self._lock:
            self._numberings.pop(record.name, None)
            self._tracker.drop_version(record.name)
            changed = [node for node in self._nodes.values() if node.forget(record.name)]
        notify(changed)

    def _hold_written(self, version: str) -> None:
        """Let nodes hold the verified files of a version that their ranks have written."""
        self._known(version)
        with self._lock:
            found = [(self._nodes[id], pieces) for id, pieces in self._written(version).items() if id in self._nodes]
            for node, pieces in found:
                if not node.lost:
                    node.want(version, (), pieces)
        notify(node for node, _ in found)

    def _known(self, version: str) -> PieceNumbering | None:
        """Return the numbering of a READY version's pieces, and add it to the table; None for any other version."""
        with self._lock:
            if (known := self._numberings.get(version)) is not None:
                return known
        try:
            name, number = parse_name(version, "versions")
            found = self._verified(name, number)
            numbering = found.numbering if found is not None else number_pieces(self._manifest(name, number).files)
        except DaemonError:
            return None
        held, awaited = (found.held(), found.nodes) if found is not None else (Bitmap.full(numbering.count), ())
        with self._lock:
            self._numberings[version] = numbering
            self._table.add_version(version, numbering.count, ready=found is not None, awaited=awaited, now=self._clock())
            self._table.add_source(version, DAEMON)
            self._table.report(version, DAEMON, held)
            for id, pieces in self._written(version).items():
                if id in self._nodes and not self._nodes[id].lost:
                    self._table.report(version, id, pieces)
            changed = list(self._nodes.values()) if found is not None else []
        notify(changed)
        if (record := self._record(name, number)).state != READY and not (record.state == UPLOADING and found):
            self.version_changed(record)  # retired in the meantime, perhaps before the table had it
            return None
        return numbering

    def _record_report(self, report: node_pb2.SyncNodeRequest, caller: str, seen: int) -> KnownNode:
        id = id_of(report)
        with self._lock:
            node = self._nodes.get(id)
            joined = node is None or node.lost or node.report.instance != report.instance
            if node is None:
                node = KnownNode(report, caller, 0.0, 0.0, drained=id in self._drained)
            elif report.instance in node.former:
                raise node.replaced()
            elif caller != node.caller and not node.lost:
                raise PermissionDenied(
                    "NOT_ALLOWED",
                    f"node {id!r} belongs to {node.caller or 'a caller without a name'}: choose another --name",
                )
            elif report.instance != node.report.instance:
                node.former.append(node.report.instance)
                self._tracker.remove_node(id)
            self._record_pieces(node, report)
            by_certificate = caller.startswith("token:") and (joined or report.certificate != node.report.certificate)
            changed = list(self._nodes.values()) if by_certificate else []
            node.follow(0 if joined else seen)
            node.report, node.caller, node.lost = report, caller, False
            node.reported_at, node.report_time = self._clock(), self._wall()
            for copy in report.versions if joined else ():
                if copy.folder and (numbering := self._numberings.get(copy.version)) is not None:
                    node.want(copy.version, (), wanted_of(numbering.count, copy.version, copy.wanted))
            self.homes.reported(node)
        if self._snapshots is not None:
            self._snapshots.reported(report)
        notify(changed)
        self._changed.emit()
        if joined:
            node.changed.emit()  # an earlier process of this id may wait
            self._note("node", report.node, "joined", "")
        return node

    def _record_pieces(self, node: KnownNode, report: node_pb2.SyncNodeRequest) -> None:
        """Replace the node's rows of the table. Callers hold the lock. Raises InvalidArgument (NODE)."""
        id, reported, written = id_of(report), {copy.version: copy for copy in report.versions}, self.homes.not_adopted(report)
        for version, numbering in self._numberings.items():
            copy, known = reported.get(version), self._table[version]
            if copy is not None or version in written or id in known.index or id in known.awaited:
                held = bitmap_of(numbering.count, copy) | pieces_of(numbering, written.get(version, ()))
                self._table.report(version, id, held)
                if len(held) and version not in node.wants and self._table.lacks(version, DAEMON):
                    node.want(version, (), held)

    def _notify_all(self) -> None:
        with self._lock:
            found = list(self._nodes.values())
        notify(found)

    def _orders(self, id: str) -> node_pb2.NodeOrders:
        snapshots = self._snapshots.revisions() if self._snapshots is not None else []
        with self._lock:
            node = self._nodes.get(id)
            if node is None:
                return node_pb2.NodeOrders(lease_seconds=self.lease_seconds, report_seconds=self._longest)
            wanted = self._chosen(node)
            answers = [self._copy_order(id, node, version) for version in wanted]
            orders = node_pb2.NodeOrders(
                lease_seconds=self.lease_seconds,
                versions=[order for order, _ in answers],
                drained=node.drained,
                report_seconds=min((self._longest, *(seconds for _, seconds in answers))),
                reservations=self.homes.orders(id, wanted),
                snapshots=snapshots,
            )
            orders.revision = decisions.revision_of(orders, self._table.doubts())
            return orders

    def _chosen(self, node: KnownNode) -> list[str]:
        id = id_of(node.report)
        sources = {name for name in node.wants if self._awaits(name, id) or self._table.has_more(name, id, DAEMON)}
        return decisions.chosen(node, self._numberings, sources, self.homes.reserved_bytes(id))

    def _awaits(self, version: str, id: str) -> bool:
        """Return whether a version cannot be READY without a node, into whose files ranks wrote."""
        return self.waits(version) and id in self.homes.written(version)

    def _copy_order(self, id: str, node: KnownNode, version: str) -> tuple[node_pb2.NodeOrder, float]:
        held, wanted = self._table.bitmap(version, id), node.pieces[version]
        answer = self._tracker.report(version, id, held, wanted, failures_of(node.report.links), self._clock())
        peers = self._peers(version, answer)
        order = node_pb2.NodeOrder(
            version=version,
            wanted=wanted.to_bytes(),
            peers=peers,
            # Nodes of earlier releases take a piece of a source only if it is granted.
            granted=[piece for peer in peers if peer.source for piece in Bitmap.from_bytes(held.count, peer.held)],
            readers=sorted(readers_of(self._readers.get(model_of(version), set()), self._nodes.values())),
            sole_holder=len(held & self._table.scarce(version)) > 0 or self._awaits(version, id),
        )
        return order, answer.interval

    def _peers(self, version: str, answer: TrackerAnswer) -> list[node_pb2.NodePeer]:
        """Return the holders that an answer names, sources first."""
        sources = self._table[version].sources
        named = sorted(answer.named.items(), key=lambda each: each[0] not in sources)
        return [peer_of(id, self._nodes.get(id), version, pieces, id in sources) for id, pieces in named]

    def _host_copy(self, node: KnownNode, version: str, needed: Bitmap) -> node_pb2.HostVersion:
        with self._lock:
            numbering, id = self._numberings.get(version), id_of(node.report)
            wanted = numbering is not None and version in node.wants
            full = wanted and not decisions.has_room(node, self._numberings, version, self.homes.reserved_bytes(id))
            return host_copy_of(node, version, needed, numbering, current=self._nodes.get(id) is node, full=full)

    def _view(self, node: KnownNode) -> resources_pb2.Node:
        state = resources_pb2.Node.LOST if node.lost else resources_pb2.Node.DRAINED if node.drained else resources_pb2.Node.LIVE
        chosen = set(self._chosen(node)) if state != resources_pb2.Node.LOST else set()
        held = {name: len(self._table.bitmap(name, id_of(node.report))) for name in self._numberings}
        copies = [*copies_of(node, chosen, self._numberings, held)]
        for version, (own, files) in self.homes.uploading(id_of(node.report)).items():
            wanted, pieces = number_pieces(own).count, number_pieces(files).count
            copy = resources_pb2.NodeCopy(version=version, wanted_pieces=wanted, pieces=pieces, wanted=True, uploading=True)
            copies.append(copy)
        return shown(node, state, copies)

    # Replicas

    def _plan(self) -> None:
        """Place the replicas of all versions anew, and notify the nodes whose orders change. Takes the lock."""
        if not self._plans:
            return
        changed = []
        with self._lock:
            self._note_problems(self._clock())
            versions = {name: self._held(name) for name in self._numberings}
            reserved = {id: self.homes.reserved_bytes(id) for id in self._nodes}
            self._placements = decisions.place(versions.values(), self._nodes, reserved, self._rules())
            for id, node in self._nodes.items():
                planned = {name: found.pieces[id] for name, found in self._placements.items() if id in found.pieces}
                if planned != node.replicas:
                    node.replicate(planned, {name for name, each in versions.items() if each.waits and id not in each.written})
                    changed.append(node)
        notify(changed)

    def _late(self, versions: Iterable[str]) -> tuple[int, str]:
        """Return how many holders versions lack, and the reason for one. Takes the lock."""
        with self._lock:
            known = [self._held(name) for name in versions if name in self._numberings]
            return decisions.late(known, self._placements, self._nodes, self._rules())

    def _rules(self) -> ReplicaRules:
        failing = {(name, id): why for (name, id), (_, _, why) in self._failing.items()}
        return ReplicaRules(self.replicas, self._hold_all, self._clock() > self._settles, failing)

    def _held(self, version: str) -> HeldVersion:
        """Return who holds what of a version in the table. Callers hold the lock."""
        rows = {id: self._table.bitmap(version, id) for id in self._table[version].nodes}
        readers = frozenset(self._readers.get(model_of(version), ()))
        return HeldVersion(version, self._numberings[version], self.waits(version), rows, self._written(version), readers)

    def _written(self, version: str) -> dict[str, Bitmap]:
        """Return the pieces of a version that ranks have written on nodes, by node."""
        numbering = self._numberings.get(version)
        return {id: pieces_of(numbering, files) for id, files in self.homes.written(version).items()} if numbering else {}

    def _note_problems(self, now: float) -> None:
        """Place further pieces of a version on a node that reports a problem with it last, for some time."""
        for id, node in self._nodes.items():
            for copy in node.report.versions:
                if copy.problem and copy.version in node.replicas and not (node.lost or node.departs):
                    self._failing[copy.version, id] = now + _FAILING_SECONDS, node.report.instance, copy.problem
        self._failing = {
            (name, id): found
            for (name, id), found in self._failing.items()
            if found[0] > now and name in self._numberings and id in self._nodes and found[1] == self._nodes[id].report.instance
        }
