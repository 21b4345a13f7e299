from google.protobuf import field_mask_pb2 as _field_mask_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from resharder.v1 import resources_pb2 as _resources_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetDaemonRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Daemon(_message.Message):
    __slots__ = ("release", "time", "start_time", "store", "store_folder", "store_limit_bytes", "store_used_bytes", "models", "publishers")
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    START_TIME_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    STORE_FOLDER_FIELD_NUMBER: _ClassVar[int]
    STORE_LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    STORE_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    PUBLISHERS_FIELD_NUMBER: _ClassVar[int]
    release: str
    time: _timestamp_pb2.Timestamp
    start_time: _timestamp_pb2.Timestamp
    store: _resources_pb2.StoreAccess
    store_folder: str
    store_limit_bytes: int
    store_used_bytes: int
    models: _containers.RepeatedScalarFieldContainer[str]
    publishers: _containers.RepeatedCompositeFieldContainer[_resources_pb2.Publisher]
    def __init__(self, release: _Optional[str] = ..., time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., start_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., store: _Optional[_Union[_resources_pb2.StoreAccess, _Mapping]] = ..., store_folder: _Optional[str] = ..., store_limit_bytes: _Optional[int] = ..., store_used_bytes: _Optional[int] = ..., models: _Optional[_Iterable[str]] = ..., publishers: _Optional[_Iterable[_Union[_resources_pb2.Publisher, _Mapping]]] = ...) -> None: ...

class ListVersionsRequest(_message.Message):
    __slots__ = ("model", "page_size", "page_token")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    model: str
    page_size: int
    page_token: str
    def __init__(self, model: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListVersionsResponse(_message.Message):
    __slots__ = ("versions", "next_page_token")
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    versions: _containers.RepeatedCompositeFieldContainer[_resources_pb2.Version]
    next_page_token: str
    def __init__(self, versions: _Optional[_Iterable[_Union[_resources_pb2.Version, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class GetVersionRequest(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: str
    def __init__(self, version: _Optional[str] = ...) -> None: ...

class ListServersRequest(_message.Message):
    __slots__ = ("fleet", "page_size", "page_token")
    FLEET_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    fleet: str
    page_size: int
    page_token: str
    def __init__(self, fleet: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListServersResponse(_message.Message):
    __slots__ = ("servers", "next_page_token")
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    servers: _containers.RepeatedCompositeFieldContainer[_resources_pb2.Server]
    next_page_token: str
    def __init__(self, servers: _Optional[_Iterable[_Union[_resources_pb2.Server, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class ListFleetsRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListFleetsResponse(_message.Message):
    __slots__ = ("fleets", "next_page_token")
    FLEETS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    fleets: _containers.RepeatedCompositeFieldContainer[_resources_pb2.Fleet]
    next_page_token: str
    def __init__(self, fleets: _Optional[_Iterable[_Union[_resources_pb2.Fleet, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class ListNodesRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListNodesResponse(_message.Message):
    __slots__ = ("nodes", "next_page_token", "shortages")
    NODES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    SHORTAGES_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedCompositeFieldContainer[_resources_pb2.Node]
    next_page_token: str
    shortages: _containers.RepeatedCompositeFieldContainer[ReplicaShortage]
    def __init__(self, nodes: _Optional[_Iterable[_Union[_resources_pb2.Node, _Mapping]]] = ..., next_page_token: _Optional[str] = ..., shortages: _Optional[_Iterable[_Union[ReplicaShortage, _Mapping]]] = ...) -> None: ...

class ReplicaShortage(_message.Message):
    __slots__ = ("version", "short_pieces", "pieces", "replicas", "waits", "problem")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SHORT_PIECES_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    version: str
    short_pieces: int
    pieces: int
    replicas: int
    waits: bool
    problem: str
    def __init__(self, version: _Optional[str] = ..., short_pieces: _Optional[int] = ..., pieces: _Optional[int] = ..., replicas: _Optional[int] = ..., waits: bool = ..., problem: _Optional[str] = ...) -> None: ...

class SetNodeDrainedRequest(_message.Message):
    __slots__ = ("node", "drained")
    NODE_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    node: str
    drained: bool
    def __init__(self, node: _Optional[str] = ..., drained: bool = ...) -> None: ...

class ExportVersionRequest(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: str
    def __init__(self, version: _Optional[str] = ...) -> None: ...

class FilePart(_message.Message):
    __slots__ = ("path", "offset", "size_bytes", "data", "checksum")
    PATH_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    path: str
    offset: int
    size_bytes: int
    data: bytes
    checksum: int
    def __init__(self, path: _Optional[str] = ..., offset: _Optional[int] = ..., size_bytes: _Optional[int] = ..., data: _Optional[bytes] = ..., checksum: _Optional[int] = ...) -> None: ...

class UpdateFleetRequest(_message.Message):
    __slots__ = ("fleet", "update_mask", "accept_refused")
    FLEET_FIELD_NUMBER: _ClassVar[int]
    UPDATE_MASK_FIELD_NUMBER: _ClassVar[int]
    ACCEPT_REFUSED_FIELD_NUMBER: _ClassVar[int]
    fleet: _resources_pb2.Fleet
    update_mask: _field_mask_pb2.FieldMask
    accept_refused: bool
    def __init__(self, fleet: _Optional[_Union[_resources_pb2.Fleet, _Mapping]] = ..., update_mask: _Optional[_Union[_field_mask_pb2.FieldMask, _Mapping]] = ..., accept_refused: bool = ...) -> None: ...

class RollBackFleetRequest(_message.Message):
    __slots__ = ("fleet", "version", "reason", "request_id")
    FLEET_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    fleet: str
    version: int
    reason: str
    request_id: str
    def __init__(self, fleet: _Optional[str] = ..., version: _Optional[int] = ..., reason: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class DecideMoveRequest(_message.Message):
    __slots__ = ("fleet", "move", "go_on", "reason")
    FLEET_FIELD_NUMBER: _ClassVar[int]
    MOVE_FIELD_NUMBER: _ClassVar[int]
    GO_ON_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    fleet: str
    move: int
    go_on: bool
    reason: str
    def __init__(self, fleet: _Optional[str] = ..., move: _Optional[int] = ..., go_on: bool = ..., reason: _Optional[str] = ...) -> None: ...

class SetPowerRequest(_message.Message):
    __slots__ = ("fleet", "server", "power")
    FLEET_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    POWER_FIELD_NUMBER: _ClassVar[int]
    fleet: str
    server: str
    power: _resources_pb2.Power
    def __init__(self, fleet: _Optional[str] = ..., server: _Optional[str] = ..., power: _Optional[_Union[_resources_pb2.Power, str]] = ...) -> None: ...

class SetDrainedRequest(_message.Message):
    __slots__ = ("fleet", "server", "drained")
    FLEET_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    fleet: str
    server: str
    drained: bool
    def __init__(self, fleet: _Optional[str] = ..., server: _Optional[str] = ..., drained: bool = ...) -> None: ...

class DeleteFleetRequest(_message.Message):
    __slots__ = ("fleet",)
    FLEET_FIELD_NUMBER: _ClassVar[int]
    fleet: str
    def __init__(self, fleet: _Optional[str] = ...) -> None: ...

class DeleteFleetResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ForgetServerRequest(_message.Message):
    __slots__ = ("server",)
    SERVER_FIELD_NUMBER: _ClassVar[int]
    server: str
    def __init__(self, server: _Optional[str] = ...) -> None: ...

class ForgetServerResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RetireVersionsRequest(_message.Message):
    __slots__ = ("model", "versions", "keep", "dry_run")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    model: str
    versions: _containers.RepeatedScalarFieldContainer[int]
    keep: int
    dry_run: bool
    def __init__(self, model: _Optional[str] = ..., versions: _Optional[_Iterable[int]] = ..., keep: _Optional[int] = ..., dry_run: bool = ...) -> None: ...

class RetireVersionsResponse(_message.Message):
    __slots__ = ("retired", "kept", "freed_bytes")
    RETIRED_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    FREED_BYTES_FIELD_NUMBER: _ClassVar[int]
    retired: _containers.RepeatedCompositeFieldContainer[_resources_pb2.Version]
    kept: _containers.RepeatedCompositeFieldContainer[_resources_pb2.Version]
    freed_bytes: int
    def __init__(self, retired: _Optional[_Iterable[_Union[_resources_pb2.Version, _Mapping]]] = ..., kept: _Optional[_Iterable[_Union[_resources_pb2.Version, _Mapping]]] = ..., freed_bytes: _Optional[int] = ...) -> None: ...

class ProfileInstallRequest(_message.Message):
    __slots__ = ("server", "wait_seconds")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    server: str
    wait_seconds: float
    def __init__(self, server: _Optional[str] = ..., wait_seconds: _Optional[float] = ...) -> None: ...

class VerifyServerRequest(_message.Message):
    __slots__ = ("server", "wait_seconds")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    server: str
    wait_seconds: float
    def __init__(self, server: _Optional[str] = ..., wait_seconds: _Optional[float] = ...) -> None: ...

class VerifyServerResponse(_message.Message):
    __slots__ = ("verifications",)
    VERIFICATIONS_FIELD_NUMBER: _ClassVar[int]
    verifications: _containers.RepeatedCompositeFieldContainer[_resources_pb2.Verification]
    def __init__(self, verifications: _Optional[_Iterable[_Union[_resources_pb2.Verification, _Mapping]]] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("id", "time", "kind", "subject", "what", "reason", "details")
    class DetailsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    id: int
    time: _timestamp_pb2.Timestamp
    kind: str
    subject: str
    what: str
    reason: str
    details: _containers.ScalarMap[str, str]
    def __init__(self, id: _Optional[int] = ..., time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., kind: _Optional[str] = ..., subject: _Optional[str] = ..., what: _Optional[str] = ..., reason: _Optional[str] = ..., details: _Optional[_Mapping[str, str]] = ...) -> None: ...

class ListEventsRequest(_message.Message):
    __slots__ = ("after", "last", "subject", "follow")
    AFTER_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    after: int
    last: int
    subject: str
    follow: bool
    def __init__(self, after: _Optional[int] = ..., last: _Optional[int] = ..., subject: _Optional[str] = ..., follow: bool = ...) -> None: ...

class ArchiveVersionRequest(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: str
    def __init__(self, version: _Optional[str] = ...) -> None: ...

class ArchivedVersion(_message.Message):
    __slots__ = ("version", "url", "size_bytes", "fingerprint", "archive_time")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    ARCHIVE_TIME_FIELD_NUMBER: _ClassVar[int]
    version: str
    url: str
    size_bytes: int
    fingerprint: str
    archive_time: _timestamp_pb2.Timestamp
    def __init__(self, version: _Optional[str] = ..., url: _Optional[str] = ..., size_bytes: _Optional[int] = ..., fingerprint: _Optional[str] = ..., archive_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class ListArchiveRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class ListArchiveResponse(_message.Message):
    __slots__ = ("versions",)
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    versions: _containers.RepeatedCompositeFieldContainer[ArchivedVersion]
    def __init__(self, versions: _Optional[_Iterable[_Union[ArchivedVersion, _Mapping]]] = ...) -> None: ...

class RestoreVersionRequest(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: str
    def __init__(self, version: _Optional[str] = ...) -> None: ...
