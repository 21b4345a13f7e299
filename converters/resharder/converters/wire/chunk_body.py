"""Chunks by HTTP: paths, headers and bodies of the data port's requests for chunks.

    PUT /models/MODEL/versions/NUMBER/chunks    chunks of a rank, in the request's body
    GET /models/MODEL/versions/NUMBER/chunks    boxes of a READY version, in the response's body

A body has chunks one after the other, each as its length in 4 bytes, most significant first, and a message `Chunk`. The header
`BOXES` of a GET is a message `BoxesRequest` in URL-safe base64, whose boxes are cut into chunks by the rule of `DownloadChunks`.
"""

import base64
import binascii
import re
import struct
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from google.protobuf.message import DecodeError
from resharder.converters.wire.chunk_frame import ChunkHeader, frame_head, head_size, unframe
from resharder.v1 import server_pb2

MOST_BODY_BYTES = 64 << 20
"""Upper bound on a body of several chunks."""
MOST_BOXES_BYTES = 8 << 10
"""Upper bound on the message in the header `BOXES`; a request's head has at most 16 KiB."""
BOXES = "Resharder-Boxes"
LENGTH = struct.Struct(">I")
_HEAD_BYTES = 1 << 10  # upper bound on a Chunk's bytes beside its data
_ALIGNMENT = 8  # of a chunk's data in memory
_PATH = re.compile(r"/models/(?P<model>[A-Za-z0-9._-]{1,64})/versions/(?P<number>[0-9]{1,18})/chunks")

Chunk = tuple[ChunkHeader, memoryview]
"""A chunk's header and data."""


class ChunksTarget(NamedTuple):
    """Version to which chunks are sent."""

    model: str
    number: int


class BoxesPart(NamedTuple):
    """Boxes of a READY version."""

    model: str
    number: int
    request: server_pb2.BoxesRequest


def chunks_path(version: str) -> str:
    """Return the path for chunks of `models/{model}/versions/{number}`."""
    return f"/{version}/chunks"


def parse_chunks_path(path: str) -> ChunksTarget:
    """Return the version that a path names. Raises ValueError for another path."""
    if (named := _PATH.fullmatch(path)) is None:
        raise ValueError(f"expected a path /models/MODEL/versions/NUMBER/chunks, got {path[:200]!r}")
    return ChunksTarget(named["model"], int(named["number"]))


def body_of(chunks: Iterable[Chunk]) -> tuple[int, list[bytes | memoryview]]:
    """Return the length of a body, and its parts, which share the chunks' memory."""
    parts: list[bytes | memoryview] = []
    for header, data in chunks:
        head = frame_head(header, len(data))
        parts += [LENGTH.pack(len(head) + len(data)) + head, data]
    return sum(map(len, parts)), parts


def body_size(sizes: Iterable[int]) -> int:
    """Return the length of a body of chunks with these numbers of bytes of data."""
    return sum(LENGTH.size + head_size(size) + size for size in sizes)


class ReusedMemory:
    """Memory for one chunk at a time."""

    def __init__(self) -> None:
        self._memory = memoryview(bytearray())

    def __call__(self, size: int) -> memoryview:
        if size > len(self._memory):
            self._memory = memoryview(bytearray(size))
        return self._memory[:size]


def read_chunks(fill: Callable[[memoryview], None], size: int, most: int, memory: Callable[[int], memoryview]) -> Iterator[Chunk]:
    """Yield the chunks of a body of `size` bytes, each read in one piece.

    Args:
        fill: Fills a memoryview with the next bytes of the body.
        size: Bytes of the body.
        most: Upper bound on a chunk's data.
        memory: Returns memory of at least so many bytes for the next chunk, aligned for every dtype.

    Raises:
        ValueError: A chunk is too long, is cut off, or does not parse.
    """
    head, most = memoryview(bytearray(LENGTH.size)), most + _HEAD_BYTES
    while size:
        if size < LENGTH.size:
            raise ValueError(f"expected the length of a chunk, got {size} bytes")
        fill(head)
        size -= LENGTH.size
        (length,) = LENGTH.unpack(head)
        if not 0 < length <= min(most, size):
            raise ValueError(f"expected a chunk of 1 to {min(most, size)} bytes, got one of {length}")
        start = -(length - _data_size(length)) % _ALIGNMENT
        message = memory(start + length)[start : start + length]
        fill(message)
        size -= length
        header, data, _ = unframe(message)
        yield header, data


def _data_size(length: int) -> int:
    """Return the bytes of data in a Chunk of `length` bytes, if it has the canonical encoding."""
    return next((length - head for head in range(head_size(0), head_size(length) + 1) if head == head_size(length - head)), 0)


def boxes_header(request: server_pb2.BoxesRequest) -> str:
    """Return the header `BOXES` of a request."""
    return base64.urlsafe_b64encode(request.SerializeToString()).decode()


def parse_boxes(header: str) -> server_pb2.BoxesRequest:
    """Return the request in a header `BOXES`. Raises ValueError."""
    try:
        encoded = base64.b64decode(header, altchars=b"-_", validate=True)
        if not 0 < len(encoded) <= MOST_BOXES_BYTES:
            raise ValueError(f"{len(encoded)} bytes")
        request: server_pb2.BoxesRequest = server_pb2.BoxesRequest.FromString(encoded)
    except (binascii.Error, DecodeError, ValueError) as error:
        text = f"expected a header {BOXES} with a BoxesRequest of 1 to {MOST_BOXES_BYTES} bytes in base64"
        raise ValueError(f"{text}, got {header[:40]!r}: {error}") from error
    return request
