from resharder.v1 import resources_pb2 as _resources_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MemoryLayout(_message.Message):
    __slots__ = ("tensors", "locals", "dimensions", "tensor", "local", "start", "count", "step", "offset", "strides", "plus")
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    LOCALS_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    LOCAL_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    STRIDES_FIELD_NUMBER: _ClassVar[int]
    PLUS_FIELD_NUMBER: _ClassVar[int]
    tensors: _containers.RepeatedCompositeFieldContainer[_resources_pb2.TensorSpec]
    locals: _containers.RepeatedScalarFieldContainer[str]
    dimensions: int
    tensor: bytes
    local: bytes
    start: bytes
    count: bytes
    step: bytes
    offset: bytes
    strides: bytes
    plus: bytes
    def __init__(self, tensors: _Optional[_Iterable[_Union[_resources_pb2.TensorSpec, _Mapping]]] = ..., locals: _Optional[_Iterable[str]] = ..., dimensions: _Optional[int] = ..., tensor: _Optional[bytes] = ..., local: _Optional[bytes] = ..., start: _Optional[bytes] = ..., count: _Optional[bytes] = ..., step: _Optional[bytes] = ..., offset: _Optional[bytes] = ..., strides: _Optional[bytes] = ..., plus: _Optional[bytes] = ...) -> None: ...

class DirectCopies(_message.Message):
    __slots__ = ("source_locals", "target_locals", "dimensions", "source", "target", "source_local", "target_local", "source_offset", "target_offset", "counts", "source_strides", "target_strides", "item", "plus", "frozen")
    SOURCE_LOCALS_FIELD_NUMBER: _ClassVar[int]
    TARGET_LOCALS_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    SOURCE_LOCAL_FIELD_NUMBER: _ClassVar[int]
    TARGET_LOCAL_FIELD_NUMBER: _ClassVar[int]
    SOURCE_OFFSET_FIELD_NUMBER: _ClassVar[int]
    TARGET_OFFSET_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_STRIDES_FIELD_NUMBER: _ClassVar[int]
    TARGET_STRIDES_FIELD_NUMBER: _ClassVar[int]
    ITEM_FIELD_NUMBER: _ClassVar[int]
    PLUS_FIELD_NUMBER: _ClassVar[int]
    FROZEN_FIELD_NUMBER: _ClassVar[int]
    source_locals: _containers.RepeatedScalarFieldContainer[str]
    target_locals: _containers.RepeatedScalarFieldContainer[str]
    dimensions: int
    source: bytes
    target: bytes
    source_local: bytes
    target_local: bytes
    source_offset: bytes
    target_offset: bytes
    counts: bytes
    source_strides: bytes
    target_strides: bytes
    item: bytes
    plus: bytes
    frozen: bytes
    def __init__(self, source_locals: _Optional[_Iterable[str]] = ..., target_locals: _Optional[_Iterable[str]] = ..., dimensions: _Optional[int] = ..., source: _Optional[bytes] = ..., target: _Optional[bytes] = ..., source_local: _Optional[bytes] = ..., target_local: _Optional[bytes] = ..., source_offset: _Optional[bytes] = ..., target_offset: _Optional[bytes] = ..., counts: _Optional[bytes] = ..., source_strides: _Optional[bytes] = ..., target_strides: _Optional[bytes] = ..., item: _Optional[bytes] = ..., plus: _Optional[bytes] = ..., frozen: _Optional[bytes] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("owner", "rank", "process")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    owner: str
    rank: int
    process: str
    def __init__(self, owner: _Optional[str] = ..., rank: _Optional[int] = ..., process: _Optional[str] = ...) -> None: ...

class DeclareMemoryRequest(_message.Message):
    __slots__ = ("member", "fingerprint", "layout", "host", "frozen", "keeps")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    FROZEN_FIELD_NUMBER: _ClassVar[int]
    KEEPS_FIELD_NUMBER: _ClassVar[int]
    member: Member
    fingerprint: str
    layout: MemoryLayout
    host: str
    frozen: _containers.RepeatedScalarFieldContainer[int]
    keeps: bool
    def __init__(self, member: _Optional[_Union[Member, _Mapping]] = ..., fingerprint: _Optional[str] = ..., layout: _Optional[_Union[MemoryLayout, _Mapping]] = ..., host: _Optional[str] = ..., frozen: _Optional[_Iterable[int]] = ..., keeps: bool = ...) -> None: ...

class DeclareMemoryResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class OfferVersionRequest(_message.Message):
    __slots__ = ("member", "version", "memory", "wait_seconds", "servers_sleep", "ahead_only", "host", "elsewhere")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SERVERS_SLEEP_FIELD_NUMBER: _ClassVar[int]
    AHEAD_ONLY_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    ELSEWHERE_FIELD_NUMBER: _ClassVar[int]
    member: Member
    version: str
    memory: str
    wait_seconds: float
    servers_sleep: bool
    ahead_only: bool
    host: str
    elsewhere: bool
    def __init__(self, member: _Optional[_Union[Member, _Mapping]] = ..., version: _Optional[str] = ..., memory: _Optional[str] = ..., wait_seconds: _Optional[float] = ..., servers_sleep: bool = ..., ahead_only: bool = ..., host: _Optional[str] = ..., elsewhere: bool = ...) -> None: ...

class DirectTask(_message.Message):
    __slots__ = ("kind", "group", "link", "sent", "during_transfer", "frozen", "kept")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[DirectTask.Kind]
        LINK: _ClassVar[DirectTask.Kind]
        RUN: _ClassVar[DirectTask.Kind]
        DROP: _ClassVar[DirectTask.Kind]
        DIGEST: _ClassVar[DirectTask.Kind]
    KIND_UNSPECIFIED: DirectTask.Kind
    LINK: DirectTask.Kind
    RUN: DirectTask.Kind
    DROP: DirectTask.Kind
    DIGEST: DirectTask.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    LINK_FIELD_NUMBER: _ClassVar[int]
    SENT_FIELD_NUMBER: _ClassVar[int]
    DURING_TRANSFER_FIELD_NUMBER: _ClassVar[int]
    FROZEN_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    kind: DirectTask.Kind
    group: str
    link: DirectLink
    sent: MemoryLayout
    during_transfer: bool
    frozen: bool
    kept: bool
    def __init__(self, kind: _Optional[_Union[DirectTask.Kind, str]] = ..., group: _Optional[str] = ..., link: _Optional[_Union[DirectLink, _Mapping]] = ..., sent: _Optional[_Union[MemoryLayout, _Mapping]] = ..., during_transfer: bool = ..., frozen: bool = ..., kept: bool = ...) -> None: ...

class DirectLink(_message.Message):
    __slots__ = ("group", "rank", "size", "copies", "most_peers", "most_made", "staging_bytes", "seconds", "nixl", "trial", "frozen")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    MOST_PEERS_FIELD_NUMBER: _ClassVar[int]
    MOST_MADE_FIELD_NUMBER: _ClassVar[int]
    STAGING_BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    NIXL_FIELD_NUMBER: _ClassVar[int]
    TRIAL_FIELD_NUMBER: _ClassVar[int]
    FROZEN_FIELD_NUMBER: _ClassVar[int]
    group: str
    rank: int
    size: int
    copies: DirectCopies
    most_peers: int
    most_made: int
    staging_bytes: int
    seconds: float
    nixl: bool
    trial: bool
    frozen: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, group: _Optional[str] = ..., rank: _Optional[int] = ..., size: _Optional[int] = ..., copies: _Optional[_Union[DirectCopies, _Mapping]] = ..., most_peers: _Optional[int] = ..., most_made: _Optional[int] = ..., staging_bytes: _Optional[int] = ..., seconds: _Optional[float] = ..., nixl: bool = ..., trial: bool = ..., frozen: _Optional[_Iterable[str]] = ...) -> None: ...

class JoinTransferRequest(_message.Message):
    __slots__ = ("member", "version", "install", "memory", "group")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    INSTALL_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    member: Member
    version: str
    install: str
    memory: str
    group: str
    def __init__(self, member: _Optional[_Union[Member, _Mapping]] = ..., version: _Optional[str] = ..., install: _Optional[str] = ..., memory: _Optional[str] = ..., group: _Optional[str] = ...) -> None: ...

class MeetRanksRequest(_message.Message):
    __slots__ = ("member", "memory", "group", "seconds")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    member: Member
    memory: str
    group: str
    seconds: float
    def __init__(self, member: _Optional[_Union[Member, _Mapping]] = ..., memory: _Optional[str] = ..., group: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class TransferRequest(_message.Message):
    __slots__ = ("member", "group", "install", "kept")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    INSTALL_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    member: Member
    group: str
    install: str
    kept: bool
    def __init__(self, member: _Optional[_Union[Member, _Mapping]] = ..., group: _Optional[str] = ..., install: _Optional[str] = ..., kept: bool = ...) -> None: ...

class StartTransferResponse(_message.Message):
    __slots__ = ("kept",)
    KEPT_FIELD_NUMBER: _ClassVar[int]
    kept: bool
    def __init__(self, kept: bool = ...) -> None: ...

class FinishTransferRequest(_message.Message):
    __slots__ = ("member", "group", "ok", "error", "seconds", "size_bytes")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    OK_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    member: Member
    group: str
    ok: bool
    error: str
    seconds: float
    size_bytes: int
    def __init__(self, member: _Optional[_Union[Member, _Mapping]] = ..., group: _Optional[str] = ..., ok: bool = ..., error: _Optional[str] = ..., seconds: _Optional[float] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class FinishTransferResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PutDigestsRequest(_message.Message):
    __slots__ = ("member", "group", "version", "digests", "frozen")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    FROZEN_FIELD_NUMBER: _ClassVar[int]
    member: Member
    group: str
    version: str
    digests: _containers.RepeatedScalarFieldContainer[int]
    frozen: bool
    def __init__(self, member: _Optional[_Union[Member, _Mapping]] = ..., group: _Optional[str] = ..., version: _Optional[str] = ..., digests: _Optional[_Iterable[int]] = ..., frozen: bool = ...) -> None: ...

class PutDigestsResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetDigestsRequest(_message.Message):
    __slots__ = ("member", "group", "version", "during_transfer", "frozen")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DURING_TRANSFER_FIELD_NUMBER: _ClassVar[int]
    FROZEN_FIELD_NUMBER: _ClassVar[int]
    member: Member
    group: str
    version: str
    during_transfer: bool
    frozen: bool
    def __init__(self, member: _Optional[_Union[Member, _Mapping]] = ..., group: _Optional[str] = ..., version: _Optional[str] = ..., during_transfer: bool = ..., frozen: bool = ...) -> None: ...

class ReportedDigests(_message.Message):
    __slots__ = ("digests", "fingerprint", "config", "tensors")
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    digests: _containers.RepeatedScalarFieldContainer[int]
    fingerprint: str
    config: bytes
    tensors: str
    def __init__(self, digests: _Optional[_Iterable[int]] = ..., fingerprint: _Optional[str] = ..., config: _Optional[bytes] = ..., tensors: _Optional[str] = ...) -> None: ...

class SetGroupKeyRequest(_message.Message):
    __slots__ = ("group", "key", "value")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    group: str
    key: str
    value: bytes
    def __init__(self, group: _Optional[str] = ..., key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...

class SetGroupKeyResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetGroupKeyRequest(_message.Message):
    __slots__ = ("group", "key", "wait_seconds")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    group: str
    key: str
    wait_seconds: float
    def __init__(self, group: _Optional[str] = ..., key: _Optional[str] = ..., wait_seconds: _Optional[float] = ...) -> None: ...

class GroupKey(_message.Message):
    __slots__ = ("value",)
    VALUE_FIELD_NUMBER: _ClassVar[int]
    value: bytes
    def __init__(self, value: _Optional[bytes] = ...) -> None: ...
