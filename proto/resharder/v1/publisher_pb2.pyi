from resharder.v1 import resources_pb2 as _resources_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CreatePublisherRequest(_message.Message):
    __slots__ = ("model", "job", "world_size", "together", "base")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    TOGETHER_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    model: _resources_pb2.Model
    job: str
    world_size: int
    together: _containers.RepeatedScalarFieldContainer[str]
    base: str
    def __init__(self, model: _Optional[_Union[_resources_pb2.Model, _Mapping]] = ..., job: _Optional[str] = ..., world_size: _Optional[int] = ..., together: _Optional[_Iterable[str]] = ..., base: _Optional[str] = ...) -> None: ...

class RegisterSlotRequest(_message.Message):
    __slots__ = ("publisher", "rank", "tensors", "boxes", "process", "contributed", "received", "readable", "gathers", "warnings", "frozen")
    PUBLISHER_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    BOXES_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTED_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    READABLE_FIELD_NUMBER: _ClassVar[int]
    GATHERS_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    FROZEN_FIELD_NUMBER: _ClassVar[int]
    publisher: str
    rank: int
    tensors: _containers.RepeatedCompositeFieldContainer[_resources_pb2.TensorSpec]
    boxes: _containers.RepeatedCompositeFieldContainer[_resources_pb2.TensorBox]
    process: str
    contributed: _containers.RepeatedCompositeFieldContainer[SharedBlocks]
    received: _containers.RepeatedCompositeFieldContainer[SharedBlocks]
    readable: _containers.RepeatedCompositeFieldContainer[_resources_pb2.StoreAccess]
    gathers: bool
    warnings: _containers.RepeatedScalarFieldContainer[str]
    frozen: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, publisher: _Optional[str] = ..., rank: _Optional[int] = ..., tensors: _Optional[_Iterable[_Union[_resources_pb2.TensorSpec, _Mapping]]] = ..., boxes: _Optional[_Iterable[_Union[_resources_pb2.TensorBox, _Mapping]]] = ..., process: _Optional[str] = ..., contributed: _Optional[_Iterable[_Union[SharedBlocks, _Mapping]]] = ..., received: _Optional[_Iterable[_Union[SharedBlocks, _Mapping]]] = ..., readable: _Optional[_Iterable[_Union[_resources_pb2.StoreAccess, _Mapping]]] = ..., gathers: bool = ..., warnings: _Optional[_Iterable[str]] = ..., frozen: _Optional[_Iterable[int]] = ...) -> None: ...

class SharedBlocks(_message.Message):
    __slots__ = ("tensor", "blocks")
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    tensor: int
    blocks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, tensor: _Optional[int] = ..., blocks: _Optional[_Iterable[int]] = ...) -> None: ...

class GetAssignmentRequest(_message.Message):
    __slots__ = ("publisher", "rank", "wait_seconds")
    PUBLISHER_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    publisher: str
    rank: int
    wait_seconds: float
    def __init__(self, publisher: _Optional[str] = ..., rank: _Optional[int] = ..., wait_seconds: _Optional[float] = ...) -> None: ...

class Assignment(_message.Message):
    __slots__ = ("publisher", "boxes", "chunk_bytes", "node", "node_boxes", "gathered_boxes", "frozen_boxes")
    PUBLISHER_FIELD_NUMBER: _ClassVar[int]
    BOXES_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    NODE_BOXES_FIELD_NUMBER: _ClassVar[int]
    GATHERED_BOXES_FIELD_NUMBER: _ClassVar[int]
    FROZEN_BOXES_FIELD_NUMBER: _ClassVar[int]
    publisher: _resources_pb2.Publisher
    boxes: _containers.RepeatedScalarFieldContainer[int]
    chunk_bytes: int
    node: str
    node_boxes: _containers.RepeatedScalarFieldContainer[int]
    gathered_boxes: _containers.RepeatedScalarFieldContainer[int]
    frozen_boxes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, publisher: _Optional[_Union[_resources_pb2.Publisher, _Mapping]] = ..., boxes: _Optional[_Iterable[int]] = ..., chunk_bytes: _Optional[int] = ..., node: _Optional[str] = ..., node_boxes: _Optional[_Iterable[int]] = ..., gathered_boxes: _Optional[_Iterable[int]] = ..., frozen_boxes: _Optional[_Iterable[int]] = ...) -> None: ...

class RenewLeaseRequest(_message.Message):
    __slots__ = ("publisher", "rank", "readable")
    PUBLISHER_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    READABLE_FIELD_NUMBER: _ClassVar[int]
    publisher: str
    rank: int
    readable: _containers.RepeatedCompositeFieldContainer[_resources_pb2.StoreAccess]
    def __init__(self, publisher: _Optional[str] = ..., rank: _Optional[int] = ..., readable: _Optional[_Iterable[_Union[_resources_pb2.StoreAccess, _Mapping]]] = ...) -> None: ...

class CreateVersionRequest(_message.Message):
    __slots__ = ("publisher", "rank", "step", "withheld", "after", "skipped", "base_version")
    PUBLISHER_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    WITHHELD_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    publisher: str
    rank: int
    step: int
    withheld: bool
    after: int
    skipped: bool
    base_version: int
    def __init__(self, publisher: _Optional[str] = ..., rank: _Optional[int] = ..., step: _Optional[int] = ..., withheld: bool = ..., after: _Optional[int] = ..., skipped: bool = ..., base_version: _Optional[int] = ...) -> None: ...

class ExchangeMaximaRequest(_message.Message):
    __slots__ = ("version", "epoch", "rank", "maxima", "wait_seconds")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    MAXIMA_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    version: str
    epoch: int
    rank: int
    maxima: _containers.RepeatedScalarFieldContainer[float]
    wait_seconds: float
    def __init__(self, version: _Optional[str] = ..., epoch: _Optional[int] = ..., rank: _Optional[int] = ..., maxima: _Optional[_Iterable[float]] = ..., wait_seconds: _Optional[float] = ...) -> None: ...

class Maxima(_message.Message):
    __slots__ = ("maxima",)
    MAXIMA_FIELD_NUMBER: _ClassVar[int]
    maxima: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, maxima: _Optional[_Iterable[float]] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("version", "epoch", "rank", "index", "checksum", "data", "model")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    version: int
    epoch: int
    rank: int
    index: int
    checksum: int
    data: bytes
    model: str
    def __init__(self, version: _Optional[int] = ..., epoch: _Optional[int] = ..., rank: _Optional[int] = ..., index: _Optional[int] = ..., checksum: _Optional[int] = ..., data: _Optional[bytes] = ..., model: _Optional[str] = ...) -> None: ...

class UploadSummary(_message.Message):
    __slots__ = ("received_chunks", "received_bytes")
    RECEIVED_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    received_chunks: int
    received_bytes: int
    def __init__(self, received_chunks: _Optional[int] = ..., received_bytes: _Optional[int] = ...) -> None: ...

class SlotRequest(_message.Message):
    __slots__ = ("version", "epoch", "rank")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    version: str
    epoch: int
    rank: int
    def __init__(self, version: _Optional[str] = ..., epoch: _Optional[int] = ..., rank: _Optional[int] = ...) -> None: ...

class MissingChunks(_message.Message):
    __slots__ = ("indices",)
    INDICES_FIELD_NUMBER: _ClassVar[int]
    indices: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, indices: _Optional[_Iterable[int]] = ...) -> None: ...

class ReleaseFilesRequest(_message.Message):
    __slots__ = ("version", "epoch", "rank", "files", "unchanged")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    UNCHANGED_FIELD_NUMBER: _ClassVar[int]
    version: str
    epoch: int
    rank: int
    files: _containers.RepeatedScalarFieldContainer[str]
    unchanged: bool
    def __init__(self, version: _Optional[str] = ..., epoch: _Optional[int] = ..., rank: _Optional[int] = ..., files: _Optional[_Iterable[str]] = ..., unchanged: bool = ...) -> None: ...

class ReleaseFilesResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ThawFilesResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SealSlotRequest(_message.Message):
    __slots__ = ("version", "epoch", "rank", "digests", "mapped", "timings", "unchanged")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    MAPPED_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    UNCHANGED_FIELD_NUMBER: _ClassVar[int]
    version: str
    epoch: int
    rank: int
    digests: _containers.RepeatedScalarFieldContainer[int]
    mapped: bool
    timings: _containers.RepeatedCompositeFieldContainer[_resources_pb2.Timing]
    unchanged: bool
    def __init__(self, version: _Optional[str] = ..., epoch: _Optional[int] = ..., rank: _Optional[int] = ..., digests: _Optional[_Iterable[int]] = ..., mapped: bool = ..., timings: _Optional[_Iterable[_Union[_resources_pb2.Timing, _Mapping]]] = ..., unchanged: bool = ...) -> None: ...

class AbortVersionRequest(_message.Message):
    __slots__ = ("version", "epoch", "reason")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    version: str
    epoch: int
    reason: str
    def __init__(self, version: _Optional[str] = ..., epoch: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class WaitVersionRequest(_message.Message):
    __slots__ = ("version", "wait_seconds", "serving")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SERVING_FIELD_NUMBER: _ClassVar[int]
    version: str
    wait_seconds: float
    serving: bool
    def __init__(self, version: _Optional[str] = ..., wait_seconds: _Optional[float] = ..., serving: bool = ...) -> None: ...
