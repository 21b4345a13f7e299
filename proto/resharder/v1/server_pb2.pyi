from resharder.v1 import publisher_pb2 as _publisher_pb2
from resharder.v1 import resources_pb2 as _resources_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ClaimServerRequest(_message.Message):
    __slots__ = ("server", "model", "fleet", "wait_seconds", "base_server", "boot", "renews")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FLEET_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BASE_SERVER_FIELD_NUMBER: _ClassVar[int]
    BOOT_FIELD_NUMBER: _ClassVar[int]
    RENEWS_FIELD_NUMBER: _ClassVar[int]
    server: str
    model: str
    fleet: str
    wait_seconds: float
    base_server: str
    boot: bool
    renews: bool
    def __init__(self, server: _Optional[str] = ..., model: _Optional[str] = ..., fleet: _Optional[str] = ..., wait_seconds: _Optional[float] = ..., base_server: _Optional[str] = ..., boot: bool = ..., renews: bool = ...) -> None: ...

class Claim(_message.Message):
    __slots__ = ("server", "model", "fleet", "boot_version", "store", "lease_seconds", "attached")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FLEET_FIELD_NUMBER: _ClassVar[int]
    BOOT_VERSION_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    server: str
    model: str
    fleet: str
    boot_version: int
    store: _resources_pb2.StoreAccess
    lease_seconds: float
    attached: bool
    def __init__(self, server: _Optional[str] = ..., model: _Optional[str] = ..., fleet: _Optional[str] = ..., boot_version: _Optional[int] = ..., store: _Optional[_Union[_resources_pb2.StoreAccess, _Mapping]] = ..., lease_seconds: _Optional[float] = ..., attached: bool = ...) -> None: ...

class ControlReport(_message.Message):
    __slots__ = ("server", "control", "world_size", "address", "install", "done", "ok", "error", "pause_seconds", "power", "in_flight", "serving", "timings", "passes_kv", "term", "leaving", "failure", "restarting", "workers_failed")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    CONTROL_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INSTALL_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    OK_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    PAUSE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    POWER_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    SERVING_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    PASSES_KV_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    RESTARTING_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FAILED_FIELD_NUMBER: _ClassVar[int]
    server: str
    control: str
    world_size: int
    address: str
    install: str
    done: Order.Kind
    ok: bool
    error: str
    pause_seconds: float
    power: _resources_pb2.Power
    in_flight: int
    serving: int
    timings: _containers.RepeatedCompositeFieldContainer[_resources_pb2.Timing]
    passes_kv: bool
    term: int
    leaving: bool
    failure: str
    restarting: bool
    workers_failed: bool
    def __init__(self, server: _Optional[str] = ..., control: _Optional[str] = ..., world_size: _Optional[int] = ..., address: _Optional[str] = ..., install: _Optional[str] = ..., done: _Optional[_Union[Order.Kind, str]] = ..., ok: bool = ..., error: _Optional[str] = ..., pause_seconds: _Optional[float] = ..., power: _Optional[_Union[_resources_pb2.Power, str]] = ..., in_flight: _Optional[int] = ..., serving: _Optional[int] = ..., timings: _Optional[_Iterable[_Union[_resources_pb2.Timing, _Mapping]]] = ..., passes_kv: bool = ..., term: _Optional[int] = ..., leaving: bool = ..., failure: _Optional[str] = ..., restarting: bool = ..., workers_failed: bool = ...) -> None: ...

class Order(_message.Message):
    __slots__ = ("kind", "install", "version", "pause_mode", "lease_seconds", "reason", "power", "profile", "ahead_of", "strict_lease", "term", "boots_another", "base_version")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[Order.Kind]
        RENEWED: _ClassVar[Order.Kind]
        LEAD: _ClassVar[Order.Kind]
        STAGE: _ClassVar[Order.Kind]
        APPLY: _ClassVar[Order.Kind]
        RESUME: _ClassVar[Order.Kind]
        CLOSE: _ClassVar[Order.Kind]
        UNSTAGE: _ClassVar[Order.Kind]
        SLEEP: _ClassVar[Order.Kind]
        WAKE: _ClassVar[Order.Kind]
    KIND_UNSPECIFIED: Order.Kind
    RENEWED: Order.Kind
    LEAD: Order.Kind
    STAGE: Order.Kind
    APPLY: Order.Kind
    RESUME: Order.Kind
    CLOSE: Order.Kind
    UNSTAGE: Order.Kind
    SLEEP: Order.Kind
    WAKE: Order.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    INSTALL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PAUSE_MODE_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    POWER_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    AHEAD_OF_FIELD_NUMBER: _ClassVar[int]
    STRICT_LEASE_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    BOOTS_ANOTHER_FIELD_NUMBER: _ClassVar[int]
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    kind: Order.Kind
    install: str
    version: int
    pause_mode: _resources_pb2.PauseMode
    lease_seconds: float
    reason: str
    power: _resources_pb2.Power
    profile: bool
    ahead_of: int
    strict_lease: bool
    term: int
    boots_another: bool
    base_version: int
    def __init__(self, kind: _Optional[_Union[Order.Kind, str]] = ..., install: _Optional[str] = ..., version: _Optional[int] = ..., pause_mode: _Optional[_Union[_resources_pb2.PauseMode, str]] = ..., lease_seconds: _Optional[float] = ..., reason: _Optional[str] = ..., power: _Optional[_Union[_resources_pb2.Power, str]] = ..., profile: bool = ..., ahead_of: _Optional[int] = ..., strict_lease: bool = ..., term: _Optional[int] = ..., boots_another: bool = ..., base_version: _Optional[int] = ...) -> None: ...

class ReportWorkerRequest(_message.Message):
    __slots__ = ("server", "worker")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    server: str
    worker: _resources_pb2.Worker
    def __init__(self, server: _Optional[str] = ..., worker: _Optional[_Union[_resources_pb2.Worker, _Mapping]] = ...) -> None: ...

class PutProfileRequest(_message.Message):
    __slots__ = ("server", "profile")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    server: str
    profile: _resources_pb2.Profile
    def __init__(self, server: _Optional[str] = ..., profile: _Optional[_Union[_resources_pb2.Profile, _Mapping]] = ...) -> None: ...

class PutProfileResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetManifestRequest(_message.Message):
    __slots__ = ("version", "replica")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    version: str
    replica: bool
    def __init__(self, version: _Optional[str] = ..., replica: bool = ...) -> None: ...

class GetNextFilesRequest(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: str
    def __init__(self, version: _Optional[str] = ...) -> None: ...

class NextFiles(_message.Message):
    __slots__ = ("folder",)
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    folder: str
    def __init__(self, folder: _Optional[str] = ...) -> None: ...

class ManifestTensor(_message.Message):
    __slots__ = ("spec", "file", "offset", "digest")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    spec: _resources_pb2.TensorSpec
    file: str
    offset: int
    digest: int
    def __init__(self, spec: _Optional[_Union[_resources_pb2.TensorSpec, _Mapping]] = ..., file: _Optional[str] = ..., offset: _Optional[int] = ..., digest: _Optional[int] = ...) -> None: ...

class Manifest(_message.Message):
    __slots__ = ("version", "tensors", "files", "data_address", "config")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    DATA_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    version: _resources_pb2.Version
    tensors: _containers.RepeatedCompositeFieldContainer[ManifestTensor]
    files: _containers.RepeatedCompositeFieldContainer[ManifestFile]
    data_address: str
    config: bytes
    def __init__(self, version: _Optional[_Union[_resources_pb2.Version, _Mapping]] = ..., tensors: _Optional[_Iterable[_Union[ManifestTensor, _Mapping]]] = ..., files: _Optional[_Iterable[_Union[ManifestFile, _Mapping]]] = ..., data_address: _Optional[str] = ..., config: _Optional[bytes] = ...) -> None: ...

class ManifestFile(_message.Message):
    __slots__ = ("path", "header", "size_bytes")
    PATH_FIELD_NUMBER: _ClassVar[int]
    HEADER_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    path: str
    header: bytes
    size_bytes: int
    def __init__(self, path: _Optional[str] = ..., header: _Optional[bytes] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class BoxesRequest(_message.Message):
    __slots__ = ("version", "tensors", "boxes", "chunk_bytes")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    BOXES_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    version: str
    tensors: _containers.RepeatedScalarFieldContainer[str]
    boxes: _containers.RepeatedCompositeFieldContainer[_resources_pb2.TensorBox]
    chunk_bytes: int
    def __init__(self, version: _Optional[str] = ..., tensors: _Optional[_Iterable[str]] = ..., boxes: _Optional[_Iterable[_Union[_resources_pb2.TensorBox, _Mapping]]] = ..., chunk_bytes: _Optional[int] = ...) -> None: ...

class BoxDigests(_message.Message):
    __slots__ = ("digests",)
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    digests: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, digests: _Optional[_Iterable[int]] = ...) -> None: ...

class GetModelRequest(_message.Message):
    __slots__ = ("model", "fleet", "version")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FLEET_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    model: str
    fleet: str
    version: int
    def __init__(self, model: _Optional[str] = ..., fleet: _Optional[str] = ..., version: _Optional[int] = ...) -> None: ...
