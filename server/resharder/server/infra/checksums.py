"""Checksums of parts of files."""

import os
from pathlib import Path

import xxhash
from resharder.converters.wire.ranges import PIECE_BYTES
from resharder.server.state.errors import Unavailable

_BLOCK_BYTES = 1 << 20


def checksum_of(descriptor: int, start: int, end: int) -> int:
    """Return the xxh3_64 of bytes of a file, read in blocks that stay in the cache. Raises Unavailable (STORE_FAILED)."""
    state, block, at = xxhash.xxh3_64(), memoryview(bytearray(_BLOCK_BYTES)), start
    while at < end:
        found = os.preadv(descriptor, [block[: end - at]], at)
        if not found:
            raise Unavailable("STORE_FAILED", f"a file of the store ends at {at}, before {end} bytes")
        state.update(block[:found])
        at += found
    return state.intdigest()


def part_checksums(path: Path, size: int) -> tuple[int, ...]:
    """Return the xxh3_64 of each part of a file, `PIECE_BYTES` long, the last one perhaps shorter.

    Raises OSError, Unavailable (STORE_FAILED).
    """
    with path.open("rb", buffering=0) as opened:
        return tuple(checksum_of(opened.fileno(), at, min(at + PIECE_BYTES, size)) for at in range(0, size, PIECE_BYTES))
