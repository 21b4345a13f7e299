"""NodeService: calls of nodes, and of workers on their hosts."""

import re
from collections.abc import Callable, Iterable

from resharder.converters.wire.pieces import PieceSpan
from resharder.converters.wire.ranges import PIECE_BYTES, is_piece
from resharder.server.data.checksums import PieceChecksums
from resharder.server.data.versions import ServedVersions
from resharder.server.holding.part_files import FileProof, files_to_proto
from resharder.server.holding.piece_fetcher import MOST_LINKS, bounded_link
from resharder.server.infra.caller import CALLER
from resharder.server.infra.change_signal import Waiting
from resharder.server.infra.checksums import checksum_of
from resharder.server.infra.medium import medium_errors
from resharder.server.nodes.known_node import id_of
from resharder.server.nodes.registry import NodeRegistry
from resharder.server.nodes.snapshots import Snapshots
from resharder.server.rpc.convert import node_id, seconds
from resharder.server.rpc.dispatch import Call
from resharder.server.state.errors import InvalidArgument, ResourceNotFound
from resharder.server.state.version import parse_name
from resharder.v1 import node_pb2

_MOST_PIECES = 256
_MOST_COPIES = 1024
_MOST_WAIT = 10.0  # seconds
_COUNTS = (
    "capacity_bytes",
    "used_bytes",
    "transfers",
    "received_daemon_bytes",
    "received_peer_bytes",
    "received_engine_bytes",
    "sent_bytes",
)
_CERTIFICATE = re.compile(r"sha256:[0-9a-f]{64}")


class NodeService:
    """Methods of `NodeService`. Errors are those of the parts that each method calls.

    Args:
        nodes: The register.
        versions: READY versions of the store.
        checksums: Known checksums of pieces, which the data port shares.
        certificate: Function that returns `sha256:HEX` of the certificate by which nodes admit the daemon; empty without one.
        snapshots: Snapshots of the registry; None for none.
    """

    def __init__(
        self,
        nodes: NodeRegistry,
        versions: ServedVersions,
        checksums: PieceChecksums,
        certificate: Callable[[], str] = lambda: "",
        snapshots: Snapshots | None = None,
    ) -> None:
        self._nodes, self._versions, self._checksums, self._certificate = nodes, versions, checksums, certificate
        self._snapshots = snapshots

    def SyncNode(self, request: node_pb2.SyncNodeRequest, call: Call) -> Waiting[node_pb2.NodeOrders]:
        """Record a node's report, and return its orders."""
        report = _bounded(request)
        if report.leaving:
            self._nodes.leave(id_of(report), report.instance)
            return node_pb2.NodeOrders()
        orders = yield from self._nodes.sync(report, CALLER.get(), report.seen, min(seconds(report.wait_seconds), _MOST_WAIT))
        orders.daemon_certificate = self._certificate()
        return orders

    @medium_errors()
    def GetPieceChecksums(self, request: node_pb2.GetPieceChecksumsRequest, call: Call) -> node_pb2.PieceChecksums:
        """Return the checksums of consecutive pieces of a file. The caller may fetch them from other nodes from then on."""
        with self._versions.pinned(*parse_name(request.version, "versions"), replicates=True) as served:
            size = served.sizes.get(request.file)
            if size is None:
                raise ResourceNotFound("VERSION_UNKNOWN", f"{served.name} has no safetensors file {request.file[:200]!r}")
            pieces = _pieces(request.start, request.end, size)
            with open(served.folder / request.file, "rb", buffering=0) as file:
                found = [
                    served.checksum_of(PieceSpan(request.file, start, end))
                    if served.checksum_of is not None
                    else self._checksums.get((served.fingerprint, request.file, start), _reading(file.fileno(), start, end))
                    for start, end in pieces
                ]
        self._nodes.admit(request.version, CALLER.get())
        return node_pb2.PieceChecksums(checksums=found)

    def GetHostVersion(self, request: node_pb2.GetHostVersionRequest, call: Call) -> node_pb2.HostVersion:
        """Let the node on the caller's host hold pieces of a READY version, and return how far it is."""
        parse_name(request.version, "versions")
        readable = [(access.nonce_file, access.nonce) for access in request.readable]
        return self._nodes.host_copy(request.version, request.server.removeprefix("servers/"), readable, request.needed)

    def GetReservedFiles(self, request: node_pb2.GetReservedFilesRequest, call: Call) -> node_pb2.ReservedFiles:
        """Return the files that a node lays out for versions of an epoch."""
        parse_name(request.publisher, "publishers")
        node, caller = node_id(request.node), CALLER.get()
        files = self._nodes.homes.reserved_files(request.publisher, request.reservation, node, caller)
        return files_to_proto(files)

    def PutFileProof(self, request: node_pb2.PutFileProofRequest, call: Call) -> node_pb2.PutFileProofResponse:
        """Record what a node has found in the files that ranks have written."""
        parse_name(request.version, "versions")
        files = {file.path: FileProof(tuple(file.digests), tuple(file.checksums)) for file in request.files}
        problem = request.problem[:500]
        if not problem and not files:
            raise InvalidArgument("NODE", "the report has neither files of a set nor a problem")
        given = request.version, node_id(request.node), request.instance, request.set
        unreachable = node_id(request.unreachable) if request.unreachable else ""
        self._nodes.homes.put_proof(*given, CALLER.get(), problem, files, unreachable)
        return node_pb2.PutFileProofResponse()

    def GetSnapshot(self, request: node_pb2.GetSnapshotRequest, call: Call) -> node_pb2.GetSnapshotResponse:
        """Return the newest snapshot of a model's registry, and blocks of it."""
        node_id(request.node)
        if self._snapshots is None:
            raise ResourceNotFound("MODEL_UNKNOWN", "this daemon makes no snapshots of its registry")
        return self._snapshots.get(request.model, request.known)

    def PutSnapshots(self, request: node_pb2.PutSnapshotsRequest, call: Call) -> node_pb2.PutSnapshotsResponse:
        """Want nothing: this daemon has its registry."""
        node_id(request.node)
        return node_pb2.PutSnapshotsResponse()


def _bounded(report: node_pb2.SyncNodeRequest) -> node_pb2.SyncNodeRequest:
    """Return a report with its values cut to their bounds. Raises InvalidArgument (NODE)."""
    node_id(report.node)
    if not report.instance or len(report.versions) > _MOST_COPIES:
        raise InvalidArgument("NODE", f"expected an instance and at most {_MOST_COPIES} versions, got {len(report.versions)}")
    if report.certificate and not _CERTIFICATE.fullmatch(report.certificate):
        raise InvalidArgument("NODE", f"expected sha256: and 64 hexadecimal digits, got {report.certificate[:100]!r}")
    report.instance, report.data_address, report.session = report.instance[:64], report.data_address[:300], report.session[:300]
    report.store.nonce_file, report.store.nonce = report.store.nonce_file[:4096], report.store.nonce[:64]
    for name in _COUNTS:
        setattr(report, name, max(0, getattr(report, name)))
    for copy in report.versions:
        copy.folder, copy.problem = copy.folder[:4096], copy.problem[:500]
    links = [bounded_link(link) for link in report.links[:MOST_LINKS]]
    del report.links[:], report.reservations[_MOST_COPIES:], report.snapshots[_MOST_COPIES:]
    report.links.extend(links)
    for reservation in report.reservations:
        reservation.id, reservation.problem = reservation.id[:64], reservation.problem[:500]
        for found in reservation.sets:
            found.id, found.folder = found.id[:64], found.folder[:4096]
    return report


def _pieces(start: int, end: int, size: int) -> Iterable[tuple[int, int]]:
    """Return the pieces from `start` to `end` of a file. Raises InvalidArgument (NODE) unless both are borders of pieces."""
    bounds = [(at, min(at + PIECE_BYTES, end)) for at in range(start, min(end, start + _MOST_PIECES * PIECE_BYTES), PIECE_BYTES)]
    if start < 0 or not bounds or bounds[-1][1] != end or not all(is_piece(*bound, size) for bound in bounds):
        raise InvalidArgument(
            "NODE", f"expected 1 to {_MOST_PIECES} whole pieces of a file of {size} bytes, got {start} to {end}"
        )
    return bounds


def _reading(descriptor: int, start: int, end: int) -> Callable[[], int]:
    return lambda: checksum_of(descriptor, start, end)
