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
