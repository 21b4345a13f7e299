"""Wire format of proto `Chunk`, written and read without protobuf's copies of the data.

Fixed-width fields come first and in order, so that one struct reads them; messages in any other encoding are parsed by protobuf.
"""

import struct
from typing import NamedTuple

from resharder.v1 import publisher_pb2

# tag, value: version, epoch (fixed64), rank, index (fixed32), checksum (fixed64), tag of data
_FIXED = struct.Struct("<BQBQBIBIBQB")
_TAGS = (0x09, 0x11, 0x1D, 0x25, 0x29, 0x32)


class ChunkHeader(NamedTuple):
    """Fields of a Chunk before its data. `checksum` is the xxh3_64 of the data."""

    version: int
    epoch: int
    rank: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which is not needed
    checksum: int


def frame(header: ChunkHeader, data: bytes | memoryview, model: str = "") -> bytes:
    """Return the wire bytes of one Chunk. The first chunk of a stream names the `model`."""
    end = b"" if not model else b"\x3a" + _varint(len(model.encode())) + model.encode()
    return b"".join((frame_head(header, len(data)), data, end))


def frame_head(header: ChunkHeader, size: int) -> bytes:
    """Return the wire bytes of a Chunk with `size` bytes of data, up to its data."""
    values = [field for pair in zip(_TAGS[:5], header, strict=True) for field in pair]
    return _FIXED.pack(*values, _TAGS[5]) + _varint(size)


def head_size(size: int) -> int:
    """Return the length of `frame_head` for `size` bytes of data."""
    return _FIXED.size + len(_varint(size))


def unframe(message: bytes | memoryview) -> tuple[ChunkHeader, memoryview, str]:
    """Return (header, data, model). Raises ValueError for an invalid Chunk."""
    view = memoryview(message)
    if len(view) > _FIXED.size:
        fields = _FIXED.unpack_from(view)
        if fields[0:10:2] + fields[10:] == _TAGS:
            length, at = _read_varint(view, _FIXED.size)
            if at + length == len(view):
                return ChunkHeader(*fields[1:10:2]), view[at:], ""
    chunk = publisher_pb2.Chunk()
    try:
        chunk.ParseFromString(bytes(message))
    except Exception as error:
        raise ValueError(f"expected a Chunk message, got {len(message)} bytes that do not parse: {error}") from error
    header = ChunkHeader(chunk.version, chunk.epoch, chunk.rank, chunk.index, chunk.checksum)
    return header, memoryview(chunk.data), chunk.model


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(view: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 35, 7):
        if at >= len(view):
            break
        byte = view[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
    return value, at
