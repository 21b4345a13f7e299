from resharder.v1 import resources_pb2 as _resources_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SyncNodeRequest(_message.Message):
    __slots__ = ("node", "instance", "data_address", "store", "capacity_bytes", "used_bytes", "transfers", "versions", "received_daemon_bytes", "received_peer_bytes", "sent_bytes", "seen", "wait_seconds", "leaving", "links", "session", "received_engine_bytes", "certificate", "reservations", "ending", "gathers", "keeps_snapshots", "snapshots")
    NODE_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    DATA_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_DAEMON_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_PEER_BYTES_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_ENGINE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    RESERVATIONS_FIELD_NUMBER: _ClassVar[int]
    ENDING_FIELD_NUMBER: _ClassVar[int]
    GATHERS_FIELD_NUMBER: _ClassVar[int]
    KEEPS_SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    node: str
    instance: str
    data_address: str
    store: _resources_pb2.StoreAccess
    capacity_bytes: int
    used_bytes: int
    transfers: int
    versions: _containers.RepeatedCompositeFieldContainer[NodeVersion]
    received_daemon_bytes: int
    received_peer_bytes: int
    sent_bytes: int
    seen: int
    wait_seconds: float
    leaving: bool
    links: _containers.RepeatedCompositeFieldContainer[_resources_pb2.NodeLink]
    session: str
    received_engine_bytes: int
    certificate: str
    reservations: _containers.RepeatedCompositeFieldContainer[NodeReservation]
    ending: bool
    gathers: bool
    keeps_snapshots: bool
    snapshots: _containers.RepeatedCompositeFieldContainer[SnapshotRevision]
    def __init__(self, node: _Optional[str] = ..., instance: _Optional[str] = ..., data_address: _Optional[str] = ..., store: _Optional[_Union[_resources_pb2.StoreAccess, _Mapping]] = ..., capacity_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., transfers: _Optional[int] = ..., versions: _Optional[_Iterable[_Union[NodeVersion, _Mapping]]] = ..., received_daemon_bytes: _Optional[int] = ..., received_peer_bytes: _Optional[int] = ..., sent_bytes: _Optional[int] = ..., seen: _Optional[int] = ..., wait_seconds: _Optional[float] = ..., leaving: bool = ..., links: _Optional[_Iterable[_Union[_resources_pb2.NodeLink, _Mapping]]] = ..., session: _Optional[str] = ..., received_engine_bytes: _Optional[int] = ..., certificate: _Optional[str] = ..., reservations: _Optional[_Iterable[_Union[NodeReservation, _Mapping]]] = ..., ending: bool = ..., gathers: bool = ..., keeps_snapshots: bool = ..., snapshots: _Optional[_Iterable[_Union[SnapshotRevision, _Mapping]]] = ...) -> None: ...

class NodeReservation(_message.Message):
    __slots__ = ("id", "sets", "problem", "base")
    ID_FIELD_NUMBER: _ClassVar[int]
    SETS_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    id: str
    sets: _containers.RepeatedCompositeFieldContainer[FileSet]
    problem: str
    base: str
    def __init__(self, id: _Optional[str] = ..., sets: _Optional[_Iterable[_Union[FileSet, _Mapping]]] = ..., problem: _Optional[str] = ..., base: _Optional[str] = ...) -> None: ...

class FileSet(_message.Message):
    __slots__ = ("id", "folder")
    ID_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    id: str
    folder: str
    def __init__(self, id: _Optional[str] = ..., folder: _Optional[str] = ...) -> None: ...

class NodeVersion(_message.Message):
    __slots__ = ("version", "folder", "held", "problem", "wanted", "addresses")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    version: str
    folder: str
    held: bytes
    problem: str
    wanted: bytes
    addresses: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, version: _Optional[str] = ..., folder: _Optional[str] = ..., held: _Optional[bytes] = ..., problem: _Optional[str] = ..., wanted: _Optional[bytes] = ..., addresses: _Optional[_Iterable[int]] = ...) -> None: ...

class NodeOrders(_message.Message):
    __slots__ = ("lease_seconds", "revision", "versions", "drained", "report_seconds", "reservations", "daemon_certificate", "snapshots")
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    REPORT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RESERVATIONS_FIELD_NUMBER: _ClassVar[int]
    DAEMON_CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    lease_seconds: float
    revision: int
    versions: _containers.RepeatedCompositeFieldContainer[NodeOrder]
    drained: bool
    report_seconds: float
    reservations: _containers.RepeatedCompositeFieldContainer[ReservationOrder]
    daemon_certificate: str
    snapshots: _containers.RepeatedCompositeFieldContainer[SnapshotRevision]
    def __init__(self, lease_seconds: _Optional[float] = ..., revision: _Optional[int] = ..., versions: _Optional[_Iterable[_Union[NodeOrder, _Mapping]]] = ..., drained: bool = ..., report_seconds: _Optional[float] = ..., reservations: _Optional[_Iterable[_Union[ReservationOrder, _Mapping]]] = ..., daemon_certificate: _Optional[str] = ..., snapshots: _Optional[_Iterable[_Union[SnapshotRevision, _Mapping]]] = ...) -> None: ...

class ReservationOrder(_message.Message):
    __slots__ = ("id", "publisher", "sets", "readers")
    ID_FIELD_NUMBER: _ClassVar[int]
    PUBLISHER_FIELD_NUMBER: _ClassVar[int]
    SETS_FIELD_NUMBER: _ClassVar[int]
    READERS_FIELD_NUMBER: _ClassVar[int]
    id: str
    publisher: str
    sets: _containers.RepeatedCompositeFieldContainer[FileSetOrder]
    readers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, id: _Optional[str] = ..., publisher: _Optional[str] = ..., sets: _Optional[_Iterable[_Union[FileSetOrder, _Mapping]]] = ..., readers: _Optional[_Iterable[str]] = ...) -> None: ...

class FileSetOrder(_message.Message):
    __slots__ = ("id", "version", "state", "closed", "gathers", "sources", "base", "unchanged")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[FileSetOrder.State]
        UPLOADING: _ClassVar[FileSetOrder.State]
        VERIFYING: _ClassVar[FileSetOrder.State]
        READY: _ClassVar[FileSetOrder.State]
        ENDED: _ClassVar[FileSetOrder.State]
    STATE_UNSPECIFIED: FileSetOrder.State
    UPLOADING: FileSetOrder.State
    VERIFYING: FileSetOrder.State
    READY: FileSetOrder.State
    ENDED: FileSetOrder.State
    ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    GATHERS_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    UNCHANGED_FIELD_NUMBER: _ClassVar[int]
    id: str
    version: str
    state: FileSetOrder.State
    closed: _containers.RepeatedScalarFieldContainer[str]
    gathers: bool
    sources: _containers.RepeatedCompositeFieldContainer[PartSource]
    base: str
    unchanged: _containers.RepeatedCompositeFieldContainer[GatheredBoxes]
    def __init__(self, id: _Optional[str] = ..., version: _Optional[str] = ..., state: _Optional[_Union[FileSetOrder.State, str]] = ..., closed: _Optional[_Iterable[str]] = ..., gathers: bool = ..., sources: _Optional[_Iterable[_Union[PartSource, _Mapping]]] = ..., base: _Optional[str] = ..., unchanged: _Optional[_Iterable[_Union[GatheredBoxes, _Mapping]]] = ...) -> None: ...

class PartSource(_message.Message):
    __slots__ = ("node", "data_address")
    NODE_FIELD_NUMBER: _ClassVar[int]
    DATA_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    node: str
    data_address: str
    def __init__(self, node: _Optional[str] = ..., data_address: _Optional[str] = ...) -> None: ...

class NodeOrder(_message.Message):
    __slots__ = ("version", "peers", "scarce", "granted", "readers", "wanted", "sole_holder")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    SCARCE_FIELD_NUMBER: _ClassVar[int]
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    READERS_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    SOLE_HOLDER_FIELD_NUMBER: _ClassVar[int]
    version: str
    peers: _containers.RepeatedCompositeFieldContainer[NodePeer]
    scarce: bytes
    granted: _containers.RepeatedScalarFieldContainer[int]
    readers: _containers.RepeatedScalarFieldContainer[str]
    wanted: bytes
    sole_holder: bool
    def __init__(self, version: _Optional[str] = ..., peers: _Optional[_Iterable[_Union[NodePeer, _Mapping]]] = ..., scarce: _Optional[bytes] = ..., granted: _Optional[_Iterable[int]] = ..., readers: _Optional[_Iterable[str]] = ..., wanted: _Optional[bytes] = ..., sole_holder: bool = ...) -> None: ...

class NodePeer(_message.Message):
    __slots__ = ("node", "data_address", "held", "transfers", "source", "session", "addresses")
    NODE_FIELD_NUMBER: _ClassVar[int]
    DATA_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    node: str
    data_address: str
    held: bytes
    transfers: int
    source: bool
    session: str
    addresses: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, node: _Optional[str] = ..., data_address: _Optional[str] = ..., held: _Optional[bytes] = ..., transfers: _Optional[int] = ..., source: bool = ..., session: _Optional[str] = ..., addresses: _Optional[_Iterable[int]] = ...) -> None: ...

class GetPieceChecksumsRequest(_message.Message):
    __slots__ = ("version", "file", "start", "end")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    version: str
    file: str
    start: int
    end: int
    def __init__(self, version: _Optional[str] = ..., file: _Optional[str] = ..., start: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class PieceChecksums(_message.Message):
    __slots__ = ("checksums",)
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    checksums: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, checksums: _Optional[_Iterable[int]] = ...) -> None: ...

class GetHostVersionRequest(_message.Message):
    __slots__ = ("version", "server", "readable", "needed")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    READABLE_FIELD_NUMBER: _ClassVar[int]
    NEEDED_FIELD_NUMBER: _ClassVar[int]
    version: str
    server: str
    readable: _containers.RepeatedCompositeFieldContainer[_resources_pb2.StoreAccess]
    needed: bytes
    def __init__(self, version: _Optional[str] = ..., server: _Optional[str] = ..., readable: _Optional[_Iterable[_Union[_resources_pb2.StoreAccess, _Mapping]]] = ..., needed: _Optional[bytes] = ...) -> None: ...

class HostVersion(_message.Message):
    __slots__ = ("node", "folder", "held_bytes", "whole", "problem", "nonce_files")
    NODE_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    HELD_BYTES_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    NONCE_FILES_FIELD_NUMBER: _ClassVar[int]
    node: str
    folder: str
    held_bytes: int
    whole: bool
    problem: str
    nonce_files: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, node: _Optional[str] = ..., folder: _Optional[str] = ..., held_bytes: _Optional[int] = ..., whole: bool = ..., problem: _Optional[str] = ..., nonce_files: _Optional[_Iterable[str]] = ...) -> None: ...

class GetReservedFilesRequest(_message.Message):
    __slots__ = ("publisher", "reservation", "node")
    PUBLISHER_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    publisher: str
    reservation: str
    node: str
    def __init__(self, publisher: _Optional[str] = ..., reservation: _Optional[str] = ..., node: _Optional[str] = ...) -> None: ...

class ReservedFiles(_message.Message):
    __slots__ = ("files", "parts", "gathered", "frozen")
    FILES_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    GATHERED_FIELD_NUMBER: _ClassVar[int]
    FROZEN_FIELD_NUMBER: _ClassVar[int]
    files: _containers.RepeatedCompositeFieldContainer[ReservedFile]
    parts: _containers.RepeatedCompositeFieldContainer[ReservedFile]
    gathered: _containers.RepeatedCompositeFieldContainer[GatheredBoxes]
    frozen: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, files: _Optional[_Iterable[_Union[ReservedFile, _Mapping]]] = ..., parts: _Optional[_Iterable[_Union[ReservedFile, _Mapping]]] = ..., gathered: _Optional[_Iterable[_Union[GatheredBoxes, _Mapping]]] = ..., frozen: _Optional[_Iterable[str]] = ...) -> None: ...

class GatheredBoxes(_message.Message):
    __slots__ = ("path", "node", "tensors", "boxes")
    PATH_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    BOXES_FIELD_NUMBER: _ClassVar[int]
    path: str
    node: str
    tensors: _containers.RepeatedScalarFieldContainer[str]
    boxes: _containers.RepeatedCompositeFieldContainer[_resources_pb2.TensorBox]
    def __init__(self, path: _Optional[str] = ..., node: _Optional[str] = ..., tensors: _Optional[_Iterable[str]] = ..., boxes: _Optional[_Iterable[_Union[_resources_pb2.TensorBox, _Mapping]]] = ...) -> None: ...

class ReservedFile(_message.Message):
    __slots__ = ("path", "header", "size_bytes")
    PATH_FIELD_NUMBER: _ClassVar[int]
    HEADER_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    path: str
    header: bytes
    size_bytes: int
    def __init__(self, path: _Optional[str] = ..., header: _Optional[bytes] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class PutFileProofRequest(_message.Message):
    __slots__ = ("version", "node", "instance", "set", "problem", "files", "unreachable")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    SET_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    UNREACHABLE_FIELD_NUMBER: _ClassVar[int]
    version: str
    node: str
    instance: str
    set: str
    problem: str
    files: _containers.RepeatedCompositeFieldContainer[FileProof]
    unreachable: str
    def __init__(self, version: _Optional[str] = ..., node: _Optional[str] = ..., instance: _Optional[str] = ..., set: _Optional[str] = ..., problem: _Optional[str] = ..., files: _Optional[_Iterable[_Union[FileProof, _Mapping]]] = ..., unreachable: _Optional[str] = ...) -> None: ...

class FileProof(_message.Message):
    __slots__ = ("path", "digests", "checksums")
    PATH_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    path: str
    digests: _containers.RepeatedScalarFieldContainer[int]
    checksums: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, path: _Optional[str] = ..., digests: _Optional[_Iterable[int]] = ..., checksums: _Optional[_Iterable[int]] = ...) -> None: ...

class PutFileProofResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SnapshotRevision(_message.Message):
    __slots__ = ("model", "revision", "registry", "term")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    REGISTRY_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    model: str
    revision: int
    registry: str
    term: int
    def __init__(self, model: _Optional[str] = ..., revision: _Optional[int] = ..., registry: _Optional[str] = ..., term: _Optional[int] = ...) -> None: ...

class Snapshot(_message.Message):
    __slots__ = ("model", "registry", "term", "revision", "files", "seal")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REGISTRY_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    SEAL_FIELD_NUMBER: _ClassVar[int]
    model: str
    registry: str
    term: int
    revision: int
    files: _containers.RepeatedCompositeFieldContainer[SnapshotFile]
    seal: bytes
    def __init__(self, model: _Optional[str] = ..., registry: _Optional[str] = ..., term: _Optional[int] = ..., revision: _Optional[int] = ..., files: _Optional[_Iterable[_Union[SnapshotFile, _Mapping]]] = ..., seal: _Optional[bytes] = ...) -> None: ...

class SnapshotFile(_message.Message):
    __slots__ = ("path", "size_bytes", "blocks")
    PATH_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    path: str
    size_bytes: int
    blocks: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, path: _Optional[str] = ..., size_bytes: _Optional[int] = ..., blocks: _Optional[_Iterable[bytes]] = ...) -> None: ...

class GetSnapshotRequest(_message.Message):
    __slots__ = ("node", "model", "known")
    NODE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    node: str
    model: str
    known: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, node: _Optional[str] = ..., model: _Optional[str] = ..., known: _Optional[_Iterable[bytes]] = ...) -> None: ...

class GetSnapshotResponse(_message.Message):
    __slots__ = ("snapshot", "blocks")
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    snapshot: Snapshot
    blocks: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, snapshot: _Optional[_Union[Snapshot, _Mapping]] = ..., blocks: _Optional[_Iterable[bytes]] = ...) -> None: ...

class PutSnapshotsRequest(_message.Message):
    __slots__ = ("node", "snapshots", "blocks")
    NODE_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    node: str
    snapshots: _containers.RepeatedCompositeFieldContainer[Snapshot]
    blocks: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, node: _Optional[str] = ..., snapshots: _Optional[_Iterable[_Union[Snapshot, _Mapping]]] = ..., blocks: _Optional[_Iterable[bytes]] = ...) -> None: ...

class PutSnapshotsResponse(_message.Message):
    __slots__ = ("wanted",)
    WANTED_FIELD_NUMBER: _ClassVar[int]
    wanted: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, wanted: _Optional[_Iterable[bytes]] = ...) -> None: ...
