"""Chunks by HTTP: the path and the body of a request to the data port.

    PUT /models/MODEL/versions/NUMBER/chunks

The body has chunks one after the other, each as its length in 4 bytes, most significant first, and a message `Chunk`.
"""

import re
import struct
from collections.abc import Iterable
from typing import NamedTuple

from resharder.converters.wire.chunk_frame import ChunkHeader, frame_head

MOST_BODY_BYTES = 64 << 20
"""Upper bound on a body of several chunks."""
LENGTH = struct.Struct(">I")
_PATH = re.compile(r"/models/(?P<model>[A-Za-z0-9._-]{1,64})/versions/(?P<number>[0-9]{1,18})/chunks")

Chunk = tuple[ChunkHeader, memoryview]
"""A chunk's header and data."""


class ChunksTarget(NamedTuple):
    """Version to which chunks are sent."""

    model: str
    number: int


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
