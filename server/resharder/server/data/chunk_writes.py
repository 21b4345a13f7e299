"""Chunks of ranks by HTTP: the body of a request, each chunk read into one buffer, checked and written to its version."""

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from resharder.converters.wire.chunk_body import MOST_BODY_BYTES, Chunk, ChunksTarget, ReusedMemory, read_chunks
from resharder.converters.wire.chunk_frame import ChunkHeader
from resharder.server.state.errors import InvalidArgument

_SCRATCH_BYTES = 256 << 10


@dataclass(frozen=True)
class ChunkWrites:
    """Parts of the daemon that a data port needs to receive chunks."""

    check: Callable[[Sequence[str], Mapping[str, Any] | None, str, str], AbstractContextManager[object]]
    """Check of `Authorization` headers, the certificate, host and model of a write. The context counts it. Raises DaemonError."""
    land: Callable[[str, ChunkHeader, memoryview], None]
    """Writes a chunk to a version of a model. Raises DaemonError."""
    chunk_bytes: int
    """Upper bound on a chunk's data."""


class Body:
    """Body of a request, read from a connection.

    Args:
        connected: Socket of the connection.
        first: Bytes of the body that have been read already.
        length: Bytes of the body.
        timeout: Function that returns the seconds for which the next read may wait. Raises TimeoutError.
    """

    def __init__(self, connected: socket.socket, first: bytes, length: int, timeout: Callable[[], float]) -> None:
        self._socket, self._first, self._timeout = connected, memoryview(first)[:length], timeout
        self.left = length

    def read_into(self, target: memoryview) -> None:
        """Fill `target`, which is at most as long as the rest. Raises OSError, also if the peer ends the connection before."""
        at = min(len(self._first), len(target))
        target[:at], self._first = self._first[:at], self._first[at:]
        while at < len(target):
            self._socket.settimeout(self._timeout())
            found = self._socket.recv_into(target[at:])
            if not found:
                raise ConnectionError("the peer ended the connection in a request's body")
            at += found
        self.left -= len(target)

    def skip(self) -> None:
        """Read the rest, so that the peer reads the response, and drop it. Raises OSError."""
        scratch = memoryview(bytearray(min(self.left, _SCRATCH_BYTES)))
        while self.left:
            self.read_into(scratch[: self.left])


def write_chunks(body: Body, target: ChunksTarget, writes: ChunkWrites) -> int:
    """Write all chunks of a body, and return the bytes of their data. Raises DaemonError, OSError."""
    size = 0
    for header, data in _chunks(body, writes.chunk_bytes):
        if header.version != target.number:
            raise InvalidArgument("CHUNK", f"expected chunks of version {target.number}, got one of {header.version}")
        writes.land(target.model, header, data)
        size += len(data)
    return size


def _chunks(body: Body, most: int) -> Iterator[Chunk]:
    """Yield chunks, whose data are valid until the next one. Raises InvalidArgument (CHUNK), OSError."""
    try:
        yield from read_chunks(body.read_into, body.left, most, ReusedMemory())
    except ValueError as error:
        raise InvalidArgument("CHUNK", str(error)) from error


def body_length(headers: Mapping[str, Sequence[str]]) -> int:
    """Return the length of a body. Raises ValueError unless it is given, and at most `MOST_BODY_BYTES`."""
    given = headers.get("content-length", [""])[0]
    if not given.isdecimal() or not 0 < int(given) <= MOST_BODY_BYTES:
        raise ValueError(f"expected a Content-Length of 1 to {MOST_BODY_BYTES}, got {given[:40]!r}")
    return int(given)
