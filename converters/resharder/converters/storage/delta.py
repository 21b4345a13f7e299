"""Pieces of a file as differences from the same piece of an earlier file: the XOR of their bytes, compressed by zstd.

A weight that an optimizer's step leaves as it is gives zeros, so little is left of a step. The bytes are not interpreted: any
dtype, scales and headers alike. A piece that would not become smaller is stored as it is.
"""

import threading
from typing import Literal, NamedTuple

import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

PIECE = 16 << 20
_LEVEL = 1
_BLOCK = 256 << 10
_scratch = threading.local()
How = Literal["xor", "whole"]
Buffer = NDArray[np.uint8]


class StoredPiece(NamedTuple):
    """One piece of a file as stored: how, its stored size in bytes, and the checksum of what it decodes to."""

    how: How
    size: int
    checksum: str  # xxh3_64, hexadecimal


class BadPiece(ValueError):
    """Stored piece that does not decode to the bytes that were encoded."""


def checksum(content: bytes | memoryview) -> str:
    """Return the checksum of a piece's bytes."""
    return xxhash.xxh3_64_hexdigest(content)


def encode(content: bytes | memoryview, base: bytes | memoryview | None) -> tuple[StoredPiece, bytes | memoryview]:
    """Return a piece as stored, and its stored bytes.

    Args:
        content: Bytes of the piece.
        base: Bytes of the same piece of the base; None to store the piece as it is.

    Raises:
        ValueError: The base's piece has another size.
    """
    proof = checksum(content)
    if base is not None:
        packed = zstandard.ZstdCompressor(level=_LEVEL).compress(_xor(content, base))
        if len(packed) < len(content):
            return StoredPiece("xor", len(packed), proof), packed
    return StoredPiece("whole", len(content), proof), content


def decode(
    piece: StoredPiece, stored: bytes, base: bytes | memoryview | None, size: int, out: Buffer | None = None
) -> bytes | memoryview:
    """Return the `size` bytes of a piece.

    Args:
        piece: What `encode` said of it.
        stored: Its stored bytes.
        base: Bytes of the base's piece; unused where it is stored whole.
        size: Size of the piece.
        out: Buffer for the bytes, of `size` bytes or more, that is not `base`; a new one by default, whose fresh pages take as
            long as the XOR. It is not used for a piece that is stored whole.

    Raises:
        BadPiece: These are not the stored bytes, or the base is another one.
    """
    if len(stored) != piece.size:
        raise BadPiece(f"expected {piece.size} bytes, found {len(stored)}")
    if piece.how == "whole":
        content: bytes | memoryview = stored
        found = checksum(content)
    else:
        if base is None or len(base) != size:
            raise BadPiece(f"expected a base of {size} bytes, found {'none' if base is None else len(base)}")
        content, found = _unpacked(stored, base, np.empty(size, np.uint8) if out is None else out[:size])
    if len(content) != size:
        raise BadPiece(f"expected a piece of {size} bytes, found {len(content)}")
    if found != piece.checksum:
        raise BadPiece(f"expected checksum {piece.checksum}, found {found}")
    return content


def _unpacked(stored: bytes, base: bytes | memoryview, content: Buffer) -> tuple[memoryview, str]:
    """Return the bytes of a difference applied to a base, and their checksum, which is taken while they are in a core's cache."""
    before, proof = np.frombuffer(base, np.uint8), xxhash.xxh3_64()
    try:
        if zstandard.frame_content_size(stored) != len(before):
            raise BadPiece(f"expected a frame of {len(before)} bytes, found {zstandard.frame_content_size(stored)}")
        with zstandard.ZstdDecompressor().stream_reader(stored) as frame:
            if (found := frame.readinto(content)) != len(before):  # in one call, which needs no window of its own
                raise BadPiece(f"expected a frame of {len(before)} bytes, found {found}")
    except zstandard.ZstdError as error:
        raise BadPiece(f"not a zstd frame: {error}") from error
    for start in range(0, len(content), _BLOCK):
        block = content[start : start + _BLOCK]
        np.bitwise_xor(block, before[start : start + _BLOCK], out=block)
        proof.update(block.data)
    return content.data, proof.hexdigest()


def _xor(one: bytes | memoryview, other: bytes | memoryview) -> memoryview:
    """Return the XOR in a buffer of this thread, which the next call overwrites: fresh pages take as long as the XOR itself."""
    if len(one) != len(other):
        raise ValueError(f"expected a base of {len(one)} bytes, found {len(other)}")
    buffer = getattr(_scratch, "buffer", None)
    if buffer is None or len(buffer) < len(one):
        buffer = _scratch.buffer = np.empty(len(one), np.uint8)
    found: memoryview = buffer[: len(one)].data
    np.bitwise_xor(np.frombuffer(one, np.uint8), np.frombuffer(other, np.uint8), out=buffer[: len(one)])
    return found
