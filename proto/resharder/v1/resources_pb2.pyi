from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PauseMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PAUSE_MODE_UNSPECIFIED: _ClassVar[PauseMode]
    KEEP: _ClassVar[PauseMode]
    WAIT: _ClassVar[PauseMode]
    ABORT: _ClassVar[PauseMode]

class Power(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    POWER_UNSPECIFIED: _ClassVar[Power]
    AWAKE: _ClassVar[Power]
    WEIGHTS_AWAKE: _ClassVar[Power]
    ASLEEP_1: _ClassVar[Power]
    ASLEEP_2: _ClassVar[Power]

class ServeAhead(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SERVE_AHEAD_UNSPECIFIED: _ClassVar[ServeAhead]
    SERVE_AHEAD_AUTO: _ClassVar[ServeAhead]
    SERVE_AHEAD_ON: _ClassVar[ServeAhead]
    SERVE_AHEAD_OFF: _ClassVar[ServeAhead]

class BaseBinding(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BASE_BINDING_UNSPECIFIED: _ClassVar[BaseBinding]
    HOLD: _ClassVar[BaseBinding]
    WARN: _ClassVar[BaseBinding]
PAUSE_MODE_UNSPECIFIED: PauseMode
KEEP: PauseMode
WAIT: PauseMode
ABORT: PauseMode
POWER_UNSPECIFIED: Power
AWAKE: Power
WEIGHTS_AWAKE: Power
ASLEEP_1: Power
ASLEEP_2: Power
SERVE_AHEAD_UNSPECIFIED: ServeAhead
SERVE_AHEAD_AUTO: ServeAhead
SERVE_AHEAD_ON: ServeAhead
SERVE_AHEAD_OFF: ServeAhead
BASE_BINDING_UNSPECIFIED: BaseBinding
HOLD: BaseBinding
WARN: BaseBinding

class Box(_message.Message):
    __slots__ = ("start", "count", "step")
    START_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    start: _containers.RepeatedScalarFieldContainer[int]
    count: _containers.RepeatedScalarFieldContainer[int]
    step: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, start: _Optional[_Iterable[int]] = ..., count: _Optional[_Iterable[int]] = ..., step: _Optional[_Iterable[int]] = ...) -> None: ...

class TensorSpec(_message.Message):
    __slots__ = ("name", "dtype", "shape")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class TensorBox(_message.Message):
    __slots__ = ("tensor", "box", "replica")
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    BOX_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    tensor: int
    box: Box
    replica: bool
    def __init__(self, tensor: _Optional[int] = ..., box: _Optional[_Union[Box, _Mapping]] = ..., replica: bool = ...) -> None: ...

class ModelFile(_message.Message):
    __slots__ = ("path", "content")
    PATH_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    path: str
    content: bytes
    def __init__(self, path: _Optional[str] = ..., content: _Optional[bytes] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("name", "files")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    name: str
    files: _containers.RepeatedCompositeFieldContainer[ModelFile]
    def __init__(self, name: _Optional[str] = ..., files: _Optional[_Iterable[_Union[ModelFile, _Mapping]]] = ...) -> None: ...

class StoreAccess(_message.Message):
    __slots__ = ("nonce_file", "nonce")
    NONCE_FILE_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    nonce_file: str
    nonce: bytes
    def __init__(self, nonce_file: _Optional[str] = ..., nonce: _Optional[bytes] = ...) -> None: ...

class Timing(_message.Message):
    __slots__ = ("phase", "start_time", "seconds")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    START_TIME_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    phase: str
    start_time: _timestamp_pb2.Timestamp
    seconds: float
    def __init__(self, phase: _Optional[str] = ..., start_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., seconds: _Optional[float] = ...) -> None: ...

class Profile(_message.Message):
    __slots__ = ("rank", "install", "trace", "table", "error")
    RANK_FIELD_NUMBER: _ClassVar[int]
    INSTALL_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    rank: int
    install: str
    trace: bytes
    table: str
    error: str
    def __init__(self, rank: _Optional[int] = ..., install: _Optional[str] = ..., trace: _Optional[bytes] = ..., table: _Optional[str] = ..., error: _Optional[str] = ...) -> None: ...

class Publisher(_message.Message):
    __slots__ = ("name", "model", "job", "epoch", "world_size", "state", "reason", "registered_slots", "store", "lease_seconds", "live_ranks", "newest_version", "data_address", "nonce_files", "settled_nonces", "base")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[Publisher.State]
        REGISTERING: _ClassVar[Publisher.State]
        ACTIVE: _ClassVar[Publisher.State]
        REJECTED: _ClassVar[Publisher.State]
        FENCED: _ClassVar[Publisher.State]
        GONE: _ClassVar[Publisher.State]
    STATE_UNSPECIFIED: Publisher.State
    REGISTERING: Publisher.State
    ACTIVE: Publisher.State
    REJECTED: Publisher.State
    FENCED: Publisher.State
    GONE: Publisher.State
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    REGISTERED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LIVE_RANKS_FIELD_NUMBER: _ClassVar[int]
    NEWEST_VERSION_FIELD_NUMBER: _ClassVar[int]
    DATA_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NONCE_FILES_FIELD_NUMBER: _ClassVar[int]
    SETTLED_NONCES_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    name: str
    model: str
    job: str
    epoch: int
    world_size: int
    state: Publisher.State
    reason: str
    registered_slots: int
    store: StoreAccess
    lease_seconds: float
    live_ranks: int
    newest_version: int
    data_address: str
    nonce_files: _containers.RepeatedScalarFieldContainer[str]
    settled_nonces: _containers.RepeatedScalarFieldContainer[str]
    base: str
    def __init__(self, name: _Optional[str] = ..., model: _Optional[str] = ..., job: _Optional[str] = ..., epoch: _Optional[int] = ..., world_size: _Optional[int] = ..., state: _Optional[_Union[Publisher.State, str]] = ..., reason: _Optional[str] = ..., registered_slots: _Optional[int] = ..., store: _Optional[_Union[StoreAccess, _Mapping]] = ..., lease_seconds: _Optional[float] = ..., live_ranks: _Optional[int] = ..., newest_version: _Optional[int] = ..., data_address: _Optional[str] = ..., nonce_files: _Optional[_Iterable[str]] = ..., settled_nonces: _Optional[_Iterable[str]] = ..., base: _Optional[str] = ...) -> None: ...

class Slot(_message.Message):
    __slots__ = ("rank", "state", "size_bytes", "received_bytes")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[Slot.State]
        OPEN: _ClassVar[Slot.State]
        SEALED: _ClassVar[Slot.State]
    STATE_UNSPECIFIED: Slot.State
    OPEN: Slot.State
    SEALED: Slot.State
    RANK_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    rank: int
    state: Slot.State
    size_bytes: int
    received_bytes: int
    def __init__(self, rank: _Optional[int] = ..., state: _Optional[_Union[Slot.State, str]] = ..., size_bytes: _Optional[int] = ..., received_bytes: _Optional[int] = ...) -> None: ...

class Version(_message.Message):
    __slots__ = ("name", "model", "number", "state", "reason", "epoch", "step", "job", "size_bytes", "tensor_count", "create_time", "ready_time", "slots", "folder", "fingerprint", "used_by", "servers_serving", "servers_following", "trace", "skipped", "homes", "warnings", "base", "base_version", "frozen_from", "sent_bytes")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[Version.State]
        UPLOADING: _ClassVar[Version.State]
        READY: _ClassVar[Version.State]
        RETIRED: _ClassVar[Version.State]
        ABORTED: _ClassVar[Version.State]
    STATE_UNSPECIFIED: Version.State
    UPLOADING: Version.State
    READY: Version.State
    RETIRED: Version.State
    ABORTED: Version.State
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TENSOR_COUNT_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    READY_TIME_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    USED_BY_FIELD_NUMBER: _ClassVar[int]
    SERVERS_SERVING_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FOLLOWING_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    HOMES_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    FROZEN_FROM_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    model: str
    number: int
    state: Version.State
    reason: str
    epoch: int
    step: int
    job: str
    size_bytes: int
    tensor_count: int
    create_time: _timestamp_pb2.Timestamp
    ready_time: _timestamp_pb2.Timestamp
    slots: _containers.RepeatedCompositeFieldContainer[Slot]
    folder: str
    fingerprint: str
    used_by: _containers.RepeatedScalarFieldContainer[str]
    servers_serving: int
    servers_following: int
    trace: str
    skipped: bool
    homes: _containers.RepeatedCompositeFieldContainer[VersionHome]
    warnings: _containers.RepeatedScalarFieldContainer[str]
    base: str
    base_version: int
    frozen_from: int
    sent_bytes: int
    def __init__(self, name: _Optional[str] = ..., model: _Optional[str] = ..., number: _Optional[int] = ..., state: _Optional[_Union[Version.State, str]] = ..., reason: _Optional[str] = ..., epoch: _Optional[int] = ..., step: _Optional[int] = ..., job: _Optional[str] = ..., size_bytes: _Optional[int] = ..., tensor_count: _Optional[int] = ..., create_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., ready_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., slots: _Optional[_Iterable[_Union[Slot, _Mapping]]] = ..., folder: _Optional[str] = ..., fingerprint: _Optional[str] = ..., used_by: _Optional[_Iterable[str]] = ..., servers_serving: _Optional[int] = ..., servers_following: _Optional[int] = ..., trace: _Optional[str] = ..., skipped: bool = ..., homes: _Optional[_Iterable[_Union[VersionHome, _Mapping]]] = ..., warnings: _Optional[_Iterable[str]] = ..., base: _Optional[str] = ..., base_version: _Optional[int] = ..., frozen_from: _Optional[int] = ..., sent_bytes: _Optional[int] = ...) -> None: ...

class VersionHome(_message.Message):
    __slots__ = ("node", "folder", "gathers", "shares")
    NODE_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    GATHERS_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    node: str
    folder: str
    gathers: bool
    shares: bool
    def __init__(self, node: _Optional[str] = ..., folder: _Optional[str] = ..., gathers: bool = ..., shares: bool = ...) -> None: ...

class VersionTarget(_message.Message):
    __slots__ = ("kind", "version", "every_seconds")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[VersionTarget.Kind]
        LATEST: _ClassVar[VersionTarget.Kind]
        NUMBER: _ClassVar[VersionTarget.Kind]
        NONE: _ClassVar[VersionTarget.Kind]
    KIND_UNSPECIFIED: VersionTarget.Kind
    LATEST: VersionTarget.Kind
    NUMBER: VersionTarget.Kind
    NONE: VersionTarget.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    EVERY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    kind: VersionTarget.Kind
    version: int
    every_seconds: float
    def __init__(self, kind: _Optional[_Union[VersionTarget.Kind, str]] = ..., version: _Optional[int] = ..., every_seconds: _Optional[float] = ...) -> None: ...

class UpdateStrategy(_message.Message):
    __slots__ = ("kind", "at_a_time", "max_failures", "canaries", "hold_seconds", "approval", "check")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[UpdateStrategy.Kind]
        ALL_AT_ONCE: _ClassVar[UpdateStrategy.Kind]
        ROLLING: _ClassVar[UpdateStrategy.Kind]
        CANARY: _ClassVar[UpdateStrategy.Kind]
        ATOMIC: _ClassVar[UpdateStrategy.Kind]
    KIND_UNSPECIFIED: UpdateStrategy.Kind
    ALL_AT_ONCE: UpdateStrategy.Kind
    ROLLING: UpdateStrategy.Kind
    CANARY: UpdateStrategy.Kind
    ATOMIC: UpdateStrategy.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    AT_A_TIME_FIELD_NUMBER: _ClassVar[int]
    MAX_FAILURES_FIELD_NUMBER: _ClassVar[int]
    CANARIES_FIELD_NUMBER: _ClassVar[int]
    HOLD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    APPROVAL_FIELD_NUMBER: _ClassVar[int]
    CHECK_FIELD_NUMBER: _ClassVar[int]
    kind: UpdateStrategy.Kind
    at_a_time: int
    max_failures: int
    canaries: int
    hold_seconds: float
    approval: bool
    check: str
    def __init__(self, kind: _Optional[_Union[UpdateStrategy.Kind, str]] = ..., at_a_time: _Optional[int] = ..., max_failures: _Optional[int] = ..., canaries: _Optional[int] = ..., hold_seconds: _Optional[float] = ..., approval: bool = ..., check: _Optional[str] = ...) -> None: ...

class Move(_message.Message):
    __slots__ = ("id", "state", "from_version", "to_version", "reason", "strategy", "servers", "failed", "start_time", "end_time")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[Move.State]
        STAGING: _ClassVar[Move.State]
        APPLYING: _ClassVar[Move.State]
        TRYING: _ClassVar[Move.State]
        HOLDING: _ClassVar[Move.State]
        MOVING: _ClassVar[Move.State]
        BACK: _ClassVar[Move.State]
        STOPPED: _ClassVar[Move.State]
        DONE: _ClassVar[Move.State]
        FAILED: _ClassVar[Move.State]
    STATE_UNSPECIFIED: Move.State
    STAGING: Move.State
    APPLYING: Move.State
    TRYING: Move.State
    HOLDING: Move.State
    MOVING: Move.State
    BACK: Move.State
    STOPPED: Move.State
    DONE: Move.State
    FAILED: Move.State
    class FailedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    FROM_VERSION_FIELD_NUMBER: _ClassVar[int]
    TO_VERSION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STRATEGY_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    START_TIME_FIELD_NUMBER: _ClassVar[int]
    END_TIME_FIELD_NUMBER: _ClassVar[int]
    id: int
    state: Move.State
    from_version: int
    to_version: int
    reason: str
    strategy: UpdateStrategy
    servers: _containers.RepeatedScalarFieldContainer[str]
    failed: _containers.ScalarMap[str, str]
    start_time: _timestamp_pb2.Timestamp
    end_time: _timestamp_pb2.Timestamp
    def __init__(self, id: _Optional[int] = ..., state: _Optional[_Union[Move.State, str]] = ..., from_version: _Optional[int] = ..., to_version: _Optional[int] = ..., reason: _Optional[str] = ..., strategy: _Optional[_Union[UpdateStrategy, _Mapping]] = ..., servers: _Optional[_Iterable[str]] = ..., failed: _Optional[_Mapping[str, str]] = ..., start_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., end_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("version", "reason")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    version: int
    reason: str
    def __init__(self, version: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Fleet(_message.Message):
    __slots__ = ("name", "model", "pause_mode", "wanted_version", "servers", "target", "strategy", "max_skew", "settled_version", "move", "refused", "power", "reason", "serve_ahead", "returning", "serve_ahead_setting", "serve_ahead_reason", "base_binding", "base")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PAUSE_MODE_FIELD_NUMBER: _ClassVar[int]
    WANTED_VERSION_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    STRATEGY_FIELD_NUMBER: _ClassVar[int]
    MAX_SKEW_FIELD_NUMBER: _ClassVar[int]
    SETTLED_VERSION_FIELD_NUMBER: _ClassVar[int]
    MOVE_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    POWER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SERVE_AHEAD_FIELD_NUMBER: _ClassVar[int]
    RETURNING_FIELD_NUMBER: _ClassVar[int]
    SERVE_AHEAD_SETTING_FIELD_NUMBER: _ClassVar[int]
    SERVE_AHEAD_REASON_FIELD_NUMBER: _ClassVar[int]
    BASE_BINDING_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    name: str
    model: str
    pause_mode: PauseMode
    wanted_version: int
    servers: _containers.RepeatedScalarFieldContainer[str]
    target: VersionTarget
    strategy: UpdateStrategy
    max_skew: int
    settled_version: int
    move: Move
    refused: _containers.RepeatedCompositeFieldContainer[Refusal]
    power: Power
    reason: str
    serve_ahead: bool
    returning: _containers.RepeatedScalarFieldContainer[str]
    serve_ahead_setting: ServeAhead
    serve_ahead_reason: str
    base_binding: BaseBinding
    base: str
    def __init__(self, name: _Optional[str] = ..., model: _Optional[str] = ..., pause_mode: _Optional[_Union[PauseMode, str]] = ..., wanted_version: _Optional[int] = ..., servers: _Optional[_Iterable[str]] = ..., target: _Optional[_Union[VersionTarget, _Mapping]] = ..., strategy: _Optional[_Union[UpdateStrategy, _Mapping]] = ..., max_skew: _Optional[int] = ..., settled_version: _Optional[int] = ..., move: _Optional[_Union[Move, _Mapping]] = ..., refused: _Optional[_Iterable[_Union[Refusal, _Mapping]]] = ..., power: _Optional[_Union[Power, str]] = ..., reason: _Optional[str] = ..., serve_ahead: bool = ..., returning: _Optional[_Iterable[str]] = ..., serve_ahead_setting: _Optional[_Union[ServeAhead, str]] = ..., serve_ahead_reason: _Optional[str] = ..., base_binding: _Optional[_Union[BaseBinding, str]] = ..., base: _Optional[str] = ...) -> None: ...

class Worker(_message.Message):
    __slots__ = ("rank", "state", "version", "install", "error", "needed_bytes", "transport", "stage_seconds", "apply_seconds", "verified_tensors", "process", "boxed_bytes", "fingerprint", "timings", "direct", "joined", "verification", "altered", "released_bytes", "memory", "path", "transport_reason", "warnings", "host")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[Worker.State]
        BOOTED: _ClassVar[Worker.State]
        STAGED: _ClassVar[Worker.State]
        APPLIED: _ClassVar[Worker.State]
        FAILED: _ClassVar[Worker.State]
        EMPTY: _ClassVar[Worker.State]
    STATE_UNSPECIFIED: Worker.State
    BOOTED: Worker.State
    STAGED: Worker.State
    APPLIED: Worker.State
    FAILED: Worker.State
    EMPTY: Worker.State
    RANK_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    INSTALL_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    NEEDED_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    STAGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    APPLY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_TENSORS_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    BOXED_BYTES_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    DIRECT_FIELD_NUMBER: _ClassVar[int]
    JOINED_FIELD_NUMBER: _ClassVar[int]
    VERIFICATION_FIELD_NUMBER: _ClassVar[int]
    ALTERED_FIELD_NUMBER: _ClassVar[int]
    RELEASED_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_REASON_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    rank: int
    state: Worker.State
    version: int
    install: str
    error: str
    needed_bytes: int
    transport: str
    stage_seconds: float
    apply_seconds: float
    verified_tensors: int
    process: str
    boxed_bytes: int
    fingerprint: str
    timings: _containers.RepeatedCompositeFieldContainer[Timing]
    direct: bool
    joined: bool
    verification: Verification
    altered: bool
    released_bytes: int
    memory: str
    path: str
    transport_reason: str
    warnings: _containers.RepeatedScalarFieldContainer[str]
    host: str
    def __init__(self, rank: _Optional[int] = ..., state: _Optional[_Union[Worker.State, str]] = ..., version: _Optional[int] = ..., install: _Optional[str] = ..., error: _Optional[str] = ..., needed_bytes: _Optional[int] = ..., transport: _Optional[str] = ..., stage_seconds: _Optional[float] = ..., apply_seconds: _Optional[float] = ..., verified_tensors: _Optional[int] = ..., process: _Optional[str] = ..., boxed_bytes: _Optional[int] = ..., fingerprint: _Optional[str] = ..., timings: _Optional[_Iterable[_Union[Timing, _Mapping]]] = ..., direct: bool = ..., joined: bool = ..., verification: _Optional[_Union[Verification, _Mapping]] = ..., altered: bool = ..., released_bytes: _Optional[int] = ..., memory: _Optional[str] = ..., path: _Optional[str] = ..., transport_reason: _Optional[str] = ..., warnings: _Optional[_Iterable[str]] = ..., host: _Optional[str] = ...) -> None: ...

class Verification(_message.Message):
    __slots__ = ("rank", "request", "time", "seconds", "version", "tensors", "covered_bytes", "total_bytes", "different_tensors", "different", "skipped", "digested_bytes", "uncompared")
    RANK_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    COVERED_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    DIFFERENT_TENSORS_FIELD_NUMBER: _ClassVar[int]
    DIFFERENT_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    DIGESTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    UNCOMPARED_FIELD_NUMBER: _ClassVar[int]
    rank: int
    request: str
    time: _timestamp_pb2.Timestamp
    seconds: float
    version: int
    tensors: int
    covered_bytes: int
    total_bytes: int
    different_tensors: int
    different: _containers.RepeatedScalarFieldContainer[str]
    skipped: str
    digested_bytes: int
    uncompared: _containers.RepeatedCompositeFieldContainer[Uncompared]
    def __init__(self, rank: _Optional[int] = ..., request: _Optional[str] = ..., time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., seconds: _Optional[float] = ..., version: _Optional[int] = ..., tensors: _Optional[int] = ..., covered_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ..., different_tensors: _Optional[int] = ..., different: _Optional[_Iterable[str]] = ..., skipped: _Optional[str] = ..., digested_bytes: _Optional[int] = ..., uncompared: _Optional[_Iterable[_Union[Uncompared, _Mapping]]] = ...) -> None: ...

class Uncompared(_message.Message):
    __slots__ = ("reason", "tensors", "bytes", "names")
    REASON_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    reason: str
    tensors: int
    bytes: int
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, reason: _Optional[str] = ..., tensors: _Optional[int] = ..., bytes: _Optional[int] = ..., names: _Optional[_Iterable[str]] = ...) -> None: ...

class Install(_message.Message):
    __slots__ = ("id", "version", "state", "error", "start_time", "end_time", "stage_seconds", "apply_seconds", "pause_seconds")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[Install.State]
        STAGING: _ClassVar[Install.State]
        APPLYING: _ClassVar[Install.State]
        COMMITTED: _ClassVar[Install.State]
        FAILED: _ClassVar[Install.State]
    STATE_UNSPECIFIED: Install.State
    STAGING: Install.State
    APPLYING: Install.State
    COMMITTED: Install.State
    FAILED: Install.State
    ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    START_TIME_FIELD_NUMBER: _ClassVar[int]
    END_TIME_FIELD_NUMBER: _ClassVar[int]
    STAGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    APPLY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PAUSE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    id: str
    version: int
    state: Install.State
    error: str
    start_time: _timestamp_pb2.Timestamp
    end_time: _timestamp_pb2.Timestamp
    stage_seconds: float
    apply_seconds: float
    pause_seconds: float
    def __init__(self, id: _Optional[str] = ..., version: _Optional[int] = ..., state: _Optional[_Union[Install.State, str]] = ..., error: _Optional[str] = ..., start_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., end_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., stage_seconds: _Optional[float] = ..., apply_seconds: _Optional[float] = ..., pause_seconds: _Optional[float] = ...) -> None: ...

class Server(_message.Message):
    __slots__ = ("name", "fleet", "model", "state", "reason", "version", "wanted_version", "workers", "install", "lease_expire_time", "address", "world_size", "control_sides", "power", "wanted_power", "drained", "in_flight", "passes_kv", "ahead", "verify_request", "base_server")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[Server.State]
        BOOTING: _ClassVar[Server.State]
        SERVING: _ClassVar[Server.State]
        STAGING: _ClassVar[Server.State]
        APPLYING: _ClassVar[Server.State]
        FAILED: _ClassVar[Server.State]
        LOST: _ClassVar[Server.State]
        ASLEEP: _ClassVar[Server.State]
        DRAINED: _ClassVar[Server.State]
        WAITING: _ClassVar[Server.State]
    STATE_UNSPECIFIED: Server.State
    BOOTING: Server.State
    SERVING: Server.State
    STAGING: Server.State
    APPLYING: Server.State
    FAILED: Server.State
    LOST: Server.State
    ASLEEP: Server.State
    DRAINED: Server.State
    WAITING: Server.State
    NAME_FIELD_NUMBER: _ClassVar[int]
    FLEET_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WANTED_VERSION_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    INSTALL_FIELD_NUMBER: _ClassVar[int]
    LEASE_EXPIRE_TIME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    CONTROL_SIDES_FIELD_NUMBER: _ClassVar[int]
    POWER_FIELD_NUMBER: _ClassVar[int]
    WANTED_POWER_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    PASSES_KV_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    VERIFY_REQUEST_FIELD_NUMBER: _ClassVar[int]
    BASE_SERVER_FIELD_NUMBER: _ClassVar[int]
    name: str
    fleet: str
    model: str
    state: Server.State
    reason: str
    version: int
    wanted_version: int
    workers: _containers.RepeatedCompositeFieldContainer[Worker]
    install: Install
    lease_expire_time: _timestamp_pb2.Timestamp
    address: str
    world_size: int
    control_sides: int
    power: Power
    wanted_power: Power
    drained: bool
    in_flight: int
    passes_kv: bool
    ahead: bool
    verify_request: str
    base_server: str
    def __init__(self, name: _Optional[str] = ..., fleet: _Optional[str] = ..., model: _Optional[str] = ..., state: _Optional[_Union[Server.State, str]] = ..., reason: _Optional[str] = ..., version: _Optional[int] = ..., wanted_version: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[Worker, _Mapping]]] = ..., install: _Optional[_Union[Install, _Mapping]] = ..., lease_expire_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., address: _Optional[str] = ..., world_size: _Optional[int] = ..., control_sides: _Optional[int] = ..., power: _Optional[_Union[Power, str]] = ..., wanted_power: _Optional[_Union[Power, str]] = ..., drained: bool = ..., in_flight: _Optional[int] = ..., passes_kv: bool = ..., ahead: bool = ..., verify_request: _Optional[str] = ..., base_server: _Optional[str] = ...) -> None: ...

class Node(_message.Message):
    __slots__ = ("name", "state", "data_address", "capacity_bytes", "used_bytes", "transfers", "received_daemon_bytes", "received_peer_bytes", "sent_bytes", "report_time", "copies", "links", "received_engine_bytes")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[Node.State]
        LIVE: _ClassVar[Node.State]
        DRAINED: _ClassVar[Node.State]
        LOST: _ClassVar[Node.State]
    STATE_UNSPECIFIED: Node.State
    LIVE: Node.State
    DRAINED: Node.State
    LOST: Node.State
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    DATA_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_DAEMON_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_PEER_BYTES_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    REPORT_TIME_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_ENGINE_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    state: Node.State
    data_address: str
    capacity_bytes: int
    used_bytes: int
    transfers: int
    received_daemon_bytes: int
    received_peer_bytes: int
    sent_bytes: int
    report_time: _timestamp_pb2.Timestamp
    copies: _containers.RepeatedCompositeFieldContainer[NodeCopy]
    links: _containers.RepeatedCompositeFieldContainer[NodeLink]
    received_engine_bytes: int
    def __init__(self, name: _Optional[str] = ..., state: _Optional[_Union[Node.State, str]] = ..., data_address: _Optional[str] = ..., capacity_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., transfers: _Optional[int] = ..., received_daemon_bytes: _Optional[int] = ..., received_peer_bytes: _Optional[int] = ..., sent_bytes: _Optional[int] = ..., report_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., copies: _Optional[_Iterable[_Union[NodeCopy, _Mapping]]] = ..., links: _Optional[_Iterable[_Union[NodeLink, _Mapping]]] = ..., received_engine_bytes: _Optional[int] = ...) -> None: ...

class NodeLink(_message.Message):
    __slots__ = ("peer", "received_bytes", "seconds", "failures", "problem", "delta_bytes", "delta_part_bytes", "whole_rate", "delta_rate", "delta_failures", "delta_problem")
    PEER_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    DELTA_BYTES_FIELD_NUMBER: _ClassVar[int]
    DELTA_PART_BYTES_FIELD_NUMBER: _ClassVar[int]
    WHOLE_RATE_FIELD_NUMBER: _ClassVar[int]
    DELTA_RATE_FIELD_NUMBER: _ClassVar[int]
    DELTA_FAILURES_FIELD_NUMBER: _ClassVar[int]
    DELTA_PROBLEM_FIELD_NUMBER: _ClassVar[int]
    peer: str
    received_bytes: int
    seconds: float
    failures: int
    problem: str
    delta_bytes: int
    delta_part_bytes: int
    whole_rate: float
    delta_rate: float
    delta_failures: int
    delta_problem: str
    def __init__(self, peer: _Optional[str] = ..., received_bytes: _Optional[int] = ..., seconds: _Optional[float] = ..., failures: _Optional[int] = ..., problem: _Optional[str] = ..., delta_bytes: _Optional[int] = ..., delta_part_bytes: _Optional[int] = ..., whole_rate: _Optional[float] = ..., delta_rate: _Optional[float] = ..., delta_failures: _Optional[int] = ..., delta_problem: _Optional[str] = ...) -> None: ...

class NodeCopy(_message.Message):
    __slots__ = ("version", "held_pieces", "pieces", "wanted", "problem", "servers", "wanted_pieces", "uploading")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    HELD_PIECES_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    WANTED_PIECES_FIELD_NUMBER: _ClassVar[int]
    UPLOADING_FIELD_NUMBER: _ClassVar[int]
    version: str
    held_pieces: int
    pieces: int
    wanted: bool
    problem: str
    servers: _containers.RepeatedScalarFieldContainer[str]
    wanted_pieces: int
    uploading: bool
    def __init__(self, version: _Optional[str] = ..., held_pieces: _Optional[int] = ..., pieces: _Optional[int] = ..., wanted: bool = ..., problem: _Optional[str] = ..., servers: _Optional[_Iterable[str]] = ..., wanted_pieces: _Optional[int] = ..., uploading: bool = ...) -> None: ...
