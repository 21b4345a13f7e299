"""The daemon's register of nodes: what each reports, which versions each should hold, and from which nodes it may fetch them.

A version is wanted on a node from the first request of a worker on its host until the version is retired, or until newer ones
need the node's capacity. After a restart of the daemon, nodes report what they hold, and those versions are wanted again.
"""

import threading
import time
from collections.abc import Callable, Iterable

from resharder.converters.storage.files import FileLayout
from resharder.converters.wire.pieces import Bitmap, PieceNumbering, number_pieces
from resharder.server.holding.held_files import pieces_of
from resharder.server.holding.sources import PeerOffer
from resharder.server.infra.change_signal import Waiting
from resharder.server.infra.event_log import Kind
from resharder.server.infra.medium import medium_errors
from resharder.server.nodes.homes import HomeRegister
from resharder.server.nodes.known_node import (
    KnownNode,
    bitmap_of,
    chosen_of,
    copies_of,
    host_copy_of,
    id_of,
    model_of,
    notify,
    peer_of,
    readers_of,
    reading,
    revision_of,
    shown,
    wanted_of,
)
from resharder.server.nodes.pieces import PieceTable
from resharder.server.nodes.records import DrainedNodes
from resharder.server.nodes.replication import Replication
from resharder.server.nodes.snapshots import Snapshots
from resharder.server.nodes.tracker import LONGEST, Tracker
from resharder.server.state.errors import DaemonError, PermissionDenied, ResourceNotFound
from resharder.server.state.version import DAEMON, READY, UPLOADING, VersionRecord, parse_name
from resharder.server.store.manifest import Manifest
from resharder.server.store.partial import PartialVersion
from resharder.server.store.reader import VerifiedVersions
from resharder.v1 import node_pb2, resources_pb2


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
        partial: Function that returns what the daemon's store lacks of a READY version; None for a whole one.
        lose: Function that ends a version, pieces of which no node can deliver, with the reason. Raises DaemonError.
        replicas: Holders that each piece needs, the daemon among them.
        replica_seconds: Time that a version waits for them before READY.
        verified: Versions that holders fetch before READY.
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
        partial: Callable[[str, int], PartialVersion | None] = lambda model, number: None,
        lose: Callable[[str, int, str], object] = lambda model, number, reason: None,
        replicas: int = 1,
        replica_seconds: float = 60.0,
        verified: VerifiedVersions | None = None,
        hold: bool = True,
        snapshots: Snapshots | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._manifest, self._record, self._verified = manifest, record, verified or VerifiedVersions()
        self.lease_seconds, self._note = lease_seconds, note
        self._forget_seconds, self._drained, self.homes = forget_seconds, drained or DrainedNodes(), homes or HomeRegister()
        self._clock, self._wall = clock, wall
        self._longest = min(LONGEST, lease_seconds / 3)  # seconds between two reports of a node
        self._lock = threading.Lock()
        self._nodes: dict[str, KnownNode] = {}
        self._tracker = Tracker(PieceTable())
        self._numberings: dict[str, PieceNumbering] = {}
        self._readers: dict[str, set[str]] = {}
        self._partial, self._lose = partial, lose
        self._table = self._tracker.table
        shared = self._nodes, self._numberings, self._readers, self._table, self.homes, self._lock
        self._hold_all, self._snapshots = hold, snapshots
        if snapshots is not None:
            snapshots.changed.connect(self._notify_all)
        self.replication = Replication(
            *shared, replicas, lease_seconds, replica_seconds, self._verified, self._known, hold, clock
        )

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
            self.homes.gone(node)
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
        if numbering is None or self.replication.waits(version):
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
            self.homes.reported(node.report, node.caller, drained or node.report.ending, node.changed.emit)
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
            self.homes.gone(*(id for id, _ in lost))
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
        self.replication.renew()

    def count_own(self) -> None:
        """Record the pieces that the daemon's store holds now."""
        with self._lock:
            versions = self._table.lacking(DAEMON)
        for version in versions:
            partial = self._partial(*parse_name(version, "versions"))
            with self._lock:
                if version in self._table:
                    held = partial.held() if partial is not None else Bitmap.full(self._table[version].count)
                    self._table.report(version, DAEMON, held)
        self.replication.changed.emit()

    def missing(self) -> int:
        """Return the number of pieces of READY versions that the daemon's store is to hold and lacks."""
        if not self._hold_all:
            return 0
        with self._lock:
            return sum(self._table.lacks(version, DAEMON) for version in self._table.lacking(DAEMON))

    def registry_copies(self) -> dict[str, int]:
        """Return how many nodes keep the newest snapshot of each model's registry."""
        return self._snapshots.copies() if self._snapshots is not None else {}

    def own_order(self, version: str) -> node_pb2.NodeOrder:
        """Return the live nodes with pieces that the daemon's store lacks of a version. It may request all of them."""
        if self._known(version) is None:
            return node_pb2.NodeOrder(version=version)
        with self._lock:
            nodes = self._nodes.items()
            live = [(id, node) for id, node in nodes if not node.lost and self._table.has_more(version, id, DAEMON)]
            held = [self._table.bitmap(version, id) for id, _ in live]
            offers = [PeerOffer(id, has, node.report.transfers) for (id, node), has in zip(live, held, strict=True)]
            return node_pb2.NodeOrder(version=version, peers=[self._peer(offer, version) for offer in offers])

    def version_changed(self, record: VersionRecord) -> None:
        """Count and retain the pieces that nodes hold of a READY version; forget any other version."""
        for id, files in self.homes.written(record.name).items() if record.state == READY else ():
            self._hold(record.name, id, files)
        self.homes.version_changed(record)
        if record.state != UPLOADING:
            self.replication.version_changed(record.name)
        if record.state == READY:
            if self.replication.plans or self._partial(record.model, record.number) is not None:
                self._known(record.name)
            return
        with self._lock:
            self._numberings.pop(record.name, None)
            self._tracker.drop_version(record.name)
            changed = [node for node in self._nodes.values() if node.forget(record.name)]
        notify(changed)

    def _hold(self, version: str, id: str, files: Iterable[FileLayout]) -> None:
        """Let a node hold the verified files of a version that its ranks have written."""
        if (numbering := self._known(version)) is None:
            return
        pieces = pieces_of(numbering, files)
        with self._lock:
            node = self._nodes.get(id)
            if node is None or node.lost or version not in self._numberings:
                return
            node.want(version, (), pieces)
        node.changed.emit()

    def _known(self, version: str) -> PieceNumbering | None:
        """Return the numbering of a READY version's pieces, and add it to the table; None for any other version."""
        with self._lock:
            if (known := self._numberings.get(version)) is not None:
                return known
        try:
            name, number = parse_name(version, "versions")
            found = self._verified.get(name, number)
            numbering = number_pieces((found.manifest if found is not None else self._manifest(name, number)).files)
        except DaemonError:
            return None
        partial = self._partial(name, number)
        held = partial.held() if partial is not None else Bitmap.full(numbering.count)
        with self._lock:
            self._numberings[version] = numbering
            awaited = partial.nodes if partial is not None else ()
            self._table.add_version(version, numbering.count, ready=partial is not None, awaited=awaited, now=self._clock())
            self._table.add_source(version, DAEMON)
            self._table.report(version, DAEMON, held)
            for id, files in self.homes.written(version).items():
                if id in self._nodes and not self._nodes[id].lost:
                    self._table.report(version, id, pieces_of(numbering, files))
            changed = list(self._nodes.values()) if partial is not None else []
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
                node = self._nodes[id] = KnownNode(report, caller, 0.0, 0.0, drained=id in self._drained)
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
            self.homes.reported(report, caller, node.drained or report.ending, node.changed.emit)
        if self._snapshots is not None:
            self._snapshots.reported(report)
        notify(changed)
        self.replication.changed.emit()
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
            readers = sorted({name for order, _ in answers for name in order.readers})
            needs = [f"{version} {node.pieces[version].to_bytes().hex()}" for version in sorted(wanted)]
            reservations = self.homes.orders(id, wanted)
            texts = [each.SerializeToString(deterministic=True) for each in reservations]
            texts += [each.SerializeToString(deterministic=True) for each in snapshots]
            return node_pb2.NodeOrders(
                lease_seconds=self.lease_seconds,
                revision=revision_of([node.drained, *needs, *readers, *texts, *self._table.doubts()]),
                versions=[order for order, _ in answers],
                drained=node.drained,
                report_seconds=min((self._longest, *(seconds for _, seconds in answers))),
                reservations=reservations,
                snapshots=snapshots,
            )

    def _chosen(self, node: KnownNode) -> list[str]:
        id = id_of(node.report)

        def is_source(version: str) -> bool:
            return self._awaits(version, id) or self._table.has_more(version, id, DAEMON)

        return chosen_of(node, self._numberings, is_source, self.homes.reserved_bytes(id))

    def _awaits(self, version: str, id: str) -> bool:
        """Return whether a version cannot be READY without a node, into whose files ranks wrote."""
        return self.replication.waits(version) and id in self.homes.written(version)

    def _copy_order(self, id: str, node: KnownNode, version: str) -> tuple[node_pb2.NodeOrder, float]:
        held, wanted = self._table.bitmap(version, id), node.pieces[version]
        answer = self._tracker.report(version, id, held, wanted, node.report.transfers, self._clock())
        order = node_pb2.NodeOrder(
            version=version,
            wanted=wanted.to_bytes(),
            peers=[self._peer(offer, version) for offer in answer.offers],
            scarce=answer.scarce.to_bytes(),
            granted=answer.granted,
            readers=sorted(readers_of(self._readers.get(model_of(version), set()), self._nodes.values())),
            sole_holder=len(held & answer.scarce) > 0 or self._awaits(version, id),
        )
        return order, answer.interval

    def _peer(self, offer: PeerOffer, version: str) -> node_pb2.NodePeer:
        return peer_of(self._nodes[offer.peer].report if offer.peer != DAEMON else None, offer, version)

    def _host_copy(self, node: KnownNode, version: str, needed: Bitmap) -> node_pb2.HostVersion:
        with self._lock:
            return host_copy_of(node, version, needed, self._numberings.get(version), self._nodes.get(id_of(node.report)) is node)

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
