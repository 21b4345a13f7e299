"""A node as the daemon's register has it: its last report, what workers on its host need, and views of it for operators."""

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf

from google.protobuf.timestamp_pb2 import Timestamp
from resharder.converters.wire.pieces import Bitmap, PieceNumbering
from resharder.server.infra.change_signal import ChangeSignal
from resharder.server.state.errors import FailedPrecondition, InvalidArgument
from resharder.server.state.version import DAEMON, host_name
from resharder.v1 import node_pb2, resources_pb2


@dataclass
class KnownNode:
    """The last report of a node, and what workers on its host need."""

    report: node_pb2.SyncNodeRequest
    caller: str
    reported_at: float
    report_time: float
    drained: bool = False
    lost: bool = False
    former: deque[str] = field(default_factory=lambda: deque(maxlen=64))
    """Earlier processes of this id."""
    wants: dict[str, set[str]] = field(default_factory=dict)
    """Ids of the servers that asked for each version; versions in the order of their last new request."""
    pieces: dict[str, Bitmap] = field(default_factory=dict)
    """Pieces of each of these versions that workers on the host need."""
    replicas: dict[str, Bitmap] = field(default_factory=dict)
    """Pieces of versions that the node holds as a replica, among `pieces`: other versions do not take their memory."""
    changed: ChangeSignal = field(default_factory=ChangeSignal)
    ordered: tuple[int, float] = (0, -inf)
    """Revision of the last orders that this process was sent, and the time at which this revision was sent first."""
    follows: float = -inf
    """Time of orders that the last report is later than, because the node had them when it reported."""

    @property
    def departs(self) -> bool:
        """Whether it gets no further versions: it is drained, or its process ends."""
        return self.drained or self.report.ending

    def want(self, version: str, servers: Iterable[str], pieces: Bitmap) -> None:
        """Add the servers and pieces of a request for a version, which becomes the last requested one."""
        self.wants[version] = self.wants.pop(version, set()).union(servers)
        self.pieces[version] = self.pieces.get(version, Bitmap(pieces.count)) | pieces

    def forget(self, version: str) -> bool:
        """Forget what is needed of a version, and return whether anything was."""
        self.pieces.pop(version, None)
        self.replicas.pop(version, None)
        return self.wants.pop(version, None) is not None

    def replicate(self, planned: Mapping[str, Bitmap], unread: Collection[str]) -> None:
        """Replace the planned replicas. Former ones stay wanted, except those of `unread` versions that no server asked for."""
        for version in self.replicas.keys() - planned.keys():
            if version in unread and not self.wants.get(version):
                self.forget(version)
        for version, pieces in planned.items():
            if len(pieces - self.pieces.get(version, Bitmap(pieces.count))):
                self.want(version, (), pieces)
        self.replicas = dict(planned)

    def replaced(self) -> FailedPrecondition:
        """Return the error for a former process of this id."""
        return FailedPrecondition(
            "NODE_REPLACED", f"another process has become node {id_of(self.report)!r}: this one ends. Give each its own --name"
        )

    def order(self, revision: int, now: float) -> None:
        """Record the revision of orders that are sent to this process."""
        if revision != self.ordered[0]:
            self.ordered = revision, now

    def follow(self, seen: int) -> None:
        """Record the revision of the orders that the process had when it reported; 0 for a new process."""
        if not seen:
            self.ordered, self.follows = (0, -inf), -inf
        elif seen == self.ordered[0]:
            self.follows = self.ordered[1]


def id_of(report: node_pb2.SyncNodeRequest) -> str:
    """Return the id of the node that reports."""
    return report.node.removeprefix("nodes/")


def wanted_of(count: int, version: str, pieces: bytes) -> Bitmap:
    """Return the pieces that are needed, all if there is no bitmap. Raises InvalidArgument (NODE) for one of another length."""
    return bitmap_of(count, node_pb2.NodeVersion(version=version, held=pieces)) if pieces else Bitmap.full(count)


def bitmap_of(count: int, copy: node_pb2.NodeVersion | None) -> Bitmap:
    """Return the pieces of a report. Raises InvalidArgument (NODE) for a bitmap of another length."""
    try:
        return Bitmap.from_bytes(count, copy.held) if copy is not None and copy.held else Bitmap(count)
    except ValueError as error:
        raise InvalidArgument("NODE", f"{copy.version if copy else ''}: {error}") from None


def peer_of(id: str, node: KnownNode | None, version: str, pieces: Bitmap, is_source: bool = False) -> node_pb2.NodePeer:
    """Return pieces of a version on a holder, and where they are fetched; `node` is None for the daemon."""
    report = node.report if node is not None else node_pb2.SyncNodeRequest()
    copies = report.versions if report.session else ()
    return node_pb2.NodePeer(
        node=host_name(id),
        data_address=report.data_address,
        held=pieces.to_bytes(),
        transfers=report.transfers,
        source=is_source,
        session=report.session,
        addresses=next((copy.addresses for copy in copies if copy.version == version), ()),
    )


def failures_of(links: Iterable[resources_pb2.NodeLink]) -> dict[str, int]:
    """Return how many requests have failed, by the id of the peer."""
    return {DAEMON if link.peer == host_name(DAEMON) else link.peer.removeprefix("nodes/"): link.failures for link in links}


def host_copy_of(
    node: KnownNode, version: str, needed: Bitmap, numbering: PieceNumbering | None, *, current: bool, full: bool
) -> node_pb2.HostVersion:
    """Return how much of a version the node of a worker's host holds.

    Args:
        node: The node.
        version: Resource name.
        needed: Pieces that the worker needs.
        numbering: Numbers of its pieces; None if it is no longer READY.
        current: Whether the node is still in the register.
        full: Whether replicas of other versions leave no room for it.
    """
    copy = next((copy for copy in node.report.versions if copy.version == version), None)
    held = bitmap_of(needed.count, copy)
    whole = copy is not None and not len(needed - held)
    reasons = (
        (numbering is None, f"{version} is no longer READY"),
        (node.lost or not current, "it is lost"),
        (node.drained, "it is drained"),
        (full and not whole, "replicas of other versions leave no room for it"),
        (copy is not None and not whole, copy.problem if copy is not None else ""),
    )
    problem = next((why for holds, why in reasons if holds), "")
    name = node.report.node
    if problem or copy is None or numbering is None:
        return node_pb2.HostVersion(node=name, problem=f"{name}: {problem}" if problem else "")
    return node_pb2.HostVersion(node=name, folder=copy.folder, whole=whole, held_bytes=len(held) * numbering.piece_bytes)


def copies_of(
    node: KnownNode, chosen: Collection[str], numberings: Mapping[str, PieceNumbering], held: Mapping[str, int]
) -> Iterator[resources_pb2.NodeCopy]:
    """Yield the versions that a node holds or should hold, for display.

    Args:
        node: The node.
        chosen: Versions that it should hold.
        numberings: Numbering of the pieces of each READY version.
        held: Pieces of each of these that it has reported.
    """
    reported = {copy.version: copy for copy in node.report.versions}
    for version in sorted({*reported, *node.wants}):
        yield resources_pb2.NodeCopy(
            version=version,
            held_pieces=held.get(version, 0),
            wanted_pieces=len(node.pieces.get(version, ())),
            pieces=numberings[version].count if version in numberings else 0,
            wanted=version in chosen,
            problem=reported[version].problem if version in reported else "",
            servers=sorted(node.wants.get(version, ())),
        )


def shown(node: KnownNode, state: resources_pb2.Node.State, copies: Iterable[resources_pb2.NodeCopy]) -> resources_pb2.Node:
    """Return a node for display."""
    report, time = node.report, Timestamp()
    time.FromNanoseconds(int(node.report_time * 1e9))
    return resources_pb2.Node(
        name=report.node,
        state=state,
        data_address=report.data_address,
        capacity_bytes=report.capacity_bytes,
        used_bytes=report.used_bytes,
        transfers=report.transfers,
        received_daemon_bytes=report.received_daemon_bytes,
        received_peer_bytes=report.received_peer_bytes,
        received_engine_bytes=report.received_engine_bytes,
        sent_bytes=report.sent_bytes,
        report_time=time,
        copies=copies,
        links=report.links,
    )


def notify(nodes: Iterable[KnownNode]) -> None:
    """Let nodes that wait for a change of their orders look again."""
    for node in nodes:
        node.changed.emit()


def model_of(version: str) -> str:
    """Return the model in `models/{model}/versions/{number}`."""
    return version.split("/")[1]


def readers_of(names: set[str], nodes: Iterable[KnownNode]) -> set[str]:
    """Return the identities that nodes admit of the callers that may read a model; nodes with tokens by their certificates."""
    tokens = {name for name in names if name.startswith("token:")}
    callers = [node for node in nodes if node.caller.rpartition("@")[0] in tokens]
    return (names - tokens) | {node.report.certificate for node in callers if node.report.certificate}


def reading(nodes: Iterable[KnownNode], readable: Mapping[str, bytes]) -> KnownNode | node_pb2.HostVersion:
    """Return the node whose nonce a caller has read; without one, the files that it should try to read."""
    live = [node for node in nodes if not node.lost and node.report.store.nonce_file]
    for node in live:
        if readable.get(node.report.store.nonce_file) == node.report.store.nonce:
            return node
    return node_pb2.HostVersion(nonce_files=dict.fromkeys(node.report.store.nonce_file for node in live))
