"""A node's calls of the daemon, and the checksums of pieces that they return."""

import importlib.metadata
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import grpc
from google.rpc import error_details_pb2, status_pb2
from resharder.converters.storage.files import FileLayout, parse_header
from resharder.converters.wire.endpoint import answering_address, route_options, target_of
from resharder.converters.wire.pieces import PieceSpan
from resharder.converters.wire.ranges import PIECE_BYTES
from resharder.converters.wire.term import NewestTerms, replaced_message, term_of
from resharder.server.data.checksums import PieceChecksums
from resharder.server.holding.held_files import HeldFiles
from resharder.server.holding.part_files import FileProof, FilesOnNode, files_from_proto
from resharder.server.holding.tls import NodeTls
from resharder.v1 import node_pb2, node_pb2_grpc, server_pb2, server_pb2_grpc
from resharder.v1.revision import user_agent

_BATCH_BYTES = 64 * PIECE_BYTES  # pieces whose checksums one call returns
_SECONDS = 10.0
_CHECKSUM_SECONDS = 60.0
_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.dns_min_time_between_resolutions_ms", 2_000),
    ("grpc.use_local_subchannel_pool", 1),
)


@dataclass(frozen=True)
class RemoteVersion:
    """A READY version of the daemon. `data_address` is empty if the daemon has no data port; `digests` are those of tensors."""

    name: str
    fingerprint: str
    files: tuple[FileLayout, ...]
    data_address: str
    digests: Mapping[str, int] = field(default_factory=dict)


def reason_of(error: grpc.RpcError) -> str:
    """Return the daemon's reason of an error; empty for an error that has none."""
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            detail = error_details_pb2.ErrorInfo()
            return next((detail.reason for each in status_pb2.Status.FromString(value).details if each.Unpack(detail)), "")
    return ""


class _OpenChannel(NamedTuple):
    """A channel, and its stubs: grpcio (1.85) ends the process by SIGSEGV where one is made of a closed channel."""

    channel: grpc.Channel
    nodes: node_pb2_grpc.NodeServiceStub
    servers: server_pb2_grpc.ServerServiceStub


class DaemonClient:
    """Channel to the daemon. Thread-safe.

    Every call raises grpc.RpcError, and OSError once it is closed or for certificates that cannot be read.
    """

    def __init__(self, endpoint: str, tls: NodeTls | None = None) -> None:
        self.endpoint, self._tls = endpoint, tls
        self._lock = threading.Lock()
        self._stamp: tuple[object, ...] = ()
        self._current: _OpenChannel | None = None
        self._closed = False
        self._terms, self._registry = NewestTerms(), ""

    def sync(self, request: node_pb2.SyncNodeRequest) -> node_pb2.NodeOrders:
        """Report the node's state, and return its orders."""
        orders: node_pb2.NodeOrders = self._call(self._opened().nodes.SyncNode, request, _SECONDS + request.wait_seconds)
        return orders

    def version(self, name: str) -> RemoteVersion:
        """Return a READY version, or one that nodes replicate before it is READY."""
        request = server_pb2.GetManifestRequest(version=name, replica=True)
        found = self._call(self._opened().servers.GetManifest, request, _CHECKSUM_SECONDS)
        files = tuple(parse_header(Path(file.path).name, file.header, file.size_bytes) for file in found.files)
        address: str = found.data_address
        if address.startswith(":"):
            address = f"{answering_address(self.endpoint).rpartition(':')[0]}{address}"
        digests = {tensor.spec.name: tensor.digest for tensor in found.tensors}
        return RemoteVersion(found.version.name, found.version.fingerprint, files, address, digests)

    def checksums(self, version: str, file: str, start: int, end: int) -> list[int]:
        """Return the checksums of the pieces from `start` to `end` of a file."""
        request = node_pb2.GetPieceChecksumsRequest(version=version, file=file, start=start, end=end)
        return list(self._call(self._opened().nodes.GetPieceChecksums, request, _CHECKSUM_SECONDS).checksums)

    def reserved_files(self, publisher: str, reservation: str, node: str) -> FilesOnNode:
        """Return the files that a node lays out under a reservation. Raises ValueError for names or headers that are no files."""
        request = node_pb2.GetReservedFilesRequest(publisher=publisher, reservation=reservation, node=f"nodes/{node}")
        return files_from_proto(self._call(self._opened().nodes.GetReservedFiles, request, _CHECKSUM_SECONDS))

    def put_proof(
        self,
        version: str,
        node: str,
        instance: str,
        set: str,
        problem: str,
        files: Mapping[str, FileProof],
        unreachable: str = "",
    ) -> None:
        """Report what was found in the files of a set. `unreachable`: id of the node that did not deliver its boxes."""
        proofs = [node_pb2.FileProof(path=path, digests=p.digests, checksums=p.checksums) for path, p in files.items()]
        request = node_pb2.PutFileProofRequest(
            version=version,
            node=f"nodes/{node}",
            instance=instance,
            set=set,
            problem=problem,
            files=proofs,
            unreachable=f"nodes/{unreachable}" if unreachable else "",
        )
        self._call(self._opened().nodes.PutFileProof, request, _CHECKSUM_SECONDS)

    def snapshot(self, node: str, model: str, known: list[bytes]) -> node_pb2.GetSnapshotResponse:
        """Return the newest snapshot of a model's registry, and some of the blocks that are not known."""
        request = node_pb2.GetSnapshotRequest(node=f"nodes/{node}", model=model, known=known)
        answer: node_pb2.GetSnapshotResponse = self._call(self._opened().nodes.GetSnapshot, request, _CHECKSUM_SECONDS)
        return answer

    def put_snapshots(self, node: str, snapshots: list[node_pb2.Snapshot], blocks: list[bytes]) -> list[bytes]:
        """Return snapshots to a daemon without a registry, and the hashes of blocks that it wants."""
        request = node_pb2.PutSnapshotsRequest(node=f"nodes/{node}", snapshots=snapshots, blocks=blocks)
        return list(self._call(self._opened().nodes.PutSnapshots, request, _CHECKSUM_SECONDS).wanted)

    def certificate(self) -> str:
        """Return `sha256:HEX` of the node's certificate; empty without one. Raises OSError."""
        try:
            return self._tls.fingerprint() if self._tls is not None else ""
        except ValueError as error:
            raise OSError(str(error)) from error

    def _call(self, method: grpc.UnaryUnaryMultiCallable, request: Any, timeout: float) -> Any:
        newest = self._terms.newest(self._registry)
        headers = tuple(self._tls.headers().items()) if self._tls is not None else ()
        try:
            answer, call = method.with_call(request, timeout, (*headers, *(newest.metadata() if newest else ())))
        except grpc.RpcError as error:
            self._see(error)
            raise
        except ValueError as error:  # raised by grpcio for a closed channel
            if not self._closed:
                raise
            raise self._refusal() from error
        self._see(call)
        return answer

    def _see(self, call: Any) -> None:
        """Raise OSError for an answer of a daemon from which another one has taken over."""
        if (term := term_of(call.initial_metadata())) is not None:
            self._registry, newest = term.registry, self._terms.see(term)
            if newest.replaces(term):
                raise OSError(replaced_message(term, newest))

    def _opened(self) -> _OpenChannel:
        """Return the channel, opened anew if the certificates have changed. Calls on the former one go on."""
        stamp = self._tls.stamp() if self._tls else ()
        with self._lock:
            if self._closed:
                raise self._refusal()
            if self._current is None or stamp != self._stamp:
                channel = self._open()
                stubs = node_pb2_grpc.NodeServiceStub(channel), server_pb2_grpc.ServerServiceStub(channel)
                self._stamp, self._current = stamp, _OpenChannel(channel, *stubs)
            return self._current

    def _refusal(self) -> OSError:
        return OSError(f"the connection to {self.endpoint} was closed")

    def _open(self) -> grpc.Channel:
        options: list[tuple[str, Any]] = [
            *dict((*_OPTIONS, *route_options(endpoint=self.endpoint))).items(),
            ("grpc.primary_user_agent", user_agent(importlib.metadata.version("resharder"))),
        ]
        if self._tls is None:
            return grpc.insecure_channel(self._target(), options=options)
        pems = (path.read_bytes() for path in (self._tls.ca, self._tls.key, self._tls.certificate))
        if self._tls.daemon_name:
            options.append(("grpc.ssl_target_name_override", self._tls.daemon_name))
        return grpc.secure_channel(self._target(), grpc.ssl_channel_credentials(*pems), options=options)

    def _target(self) -> str:
        try:
            return target_of(self.endpoint)
        except ValueError as error:
            raise OSError(str(error)) from error

    def close(self) -> None:
        """Close the channel. Later calls raise OSError."""
        with self._lock:
            self._closed = True
            if self._current is not None:
                self._current.channel.close()


class CheckedPieces:
    """The daemon's checksums of pieces, fetched in batches when first needed. Thread-safe. The data port shares `known`."""

    def __init__(self, daemon: DaemonClient) -> None:
        self._daemon, self.known = daemon, PieceChecksums()

    def of(self, version: HeldFiles, part: PieceSpan) -> int:
        """Return the checksum of a part. Raises grpc.RpcError, OSError."""
        return self.known.get((version.fingerprint, part.file, part.start), lambda: self._fetch(version, part))

    def _fetch(self, version: HeldFiles, part: PieceSpan) -> int:
        begin = part.start - part.start % _BATCH_BYTES
        end = min(begin + _BATCH_BYTES, version.sizes[part.file])
        found = self._daemon.checksums(version.name, part.file, begin, end)
        for start, checksum in zip(range(begin, end, PIECE_BYTES), found, strict=True):
            self.known.put((version.fingerprint, part.file, start), checksum)
        return found[(part.start - begin) // PIECE_BYTES]
