"""Pieces of a file as differences from the same piece of an earlier file: the XOR of their bytes, compressed by zstd.

A weight that an optimizer's step leaves as it is gives zeros, so little is left of a step. The bytes are not interpreted: any
dtype, scales and headers alike. A piece that would not become smaller is stored as it is.
"""

from typing import Literal, NamedTuple

import numpy as np
import xxhash

PIECE = 16 << 20
_LEVEL = 1
How = Literal["xor", "whole"]


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
        base: Bytes of the same piece of the base, of the same size; None to store the piece as it is.
    """
    proof = checksum(content)
    if base is not None:
        import zstandard

        packed = zstandard.ZstdCompressor(level=_LEVEL).compress(_xor(content, base))
        if len(packed) < len(content):
            return StoredPiece("xor", len(packed), proof), packed
    return StoredPiece("whole", len(content), proof), content


def decode(piece: StoredPiece, stored: bytes, base: bytes | memoryview | None, size: int) -> bytes | memoryview:
    """Return the `size` bytes of a piece.

    Args:
        piece: What `encode` said of it.
        stored: Its stored bytes.
        base: Bytes of the base's piece; unused where it is stored whole.
        size: Size of the piece.

    Raises:
        BadPiece: These are not the stored bytes, or the base is another one.
    """
    if len(stored) != piece.size:
        raise BadPiece(f"expected {piece.size} bytes, found {len(stored)}")
    content: bytes | memoryview = stored
    if piece.how == "xor":
        if base is None or len(base) != size:
            raise BadPiece(f"expected a base of {size} bytes, found {'none' if base is None else len(base)}")
        content = _xor(_unpacked(stored, size), base)
    if len(content) != size:
        raise BadPiece(f"expected a piece of {size} bytes, found {len(content)}")
    if checksum(content) != piece.checksum:
        raise BadPiece(f"expected checksum {piece.checksum}, found {checksum(content)}")
    return content


def _unpacked(stored: bytes, size: int) -> bytes:
    import zstandard

    try:
        if zstandard.frame_content_size(stored) != size:  # before that much is allocated
            raise BadPiece(f"expected a frame of {size} bytes, found {zstandard.frame_content_size(stored)}")
        return zstandard.ZstdDecompressor().decompress(stored, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise BadPiece(f"not a zstd frame: {error}") from error


def _xor(one: bytes | memoryview, other: bytes | memoryview) -> memoryview:
    return np.bitwise_xor(np.frombuffer(one, np.uint8), np.frombuffer(other, np.uint8)).data
