"""Chunks of ranks by HTTP: the body of a request, each chunk read into one buffer, checked and written to its version."""

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from resharder.converters.wire.chunk_body import LENGTH, MOST_BODY_BYTES, ChunksTarget
from resharder.converters.wire.chunk_frame import ChunkHeader, unframe
from resharder.server.state.errors import InvalidArgument

_HEAD_BYTES = 1 << 10  # upper bound on a Chunk's bytes beside its data
_SCRATCH_BYTES = 256 << 10


@dataclass(frozen=True)
class ChunkWrites:
    """Parts of the daemon that a data port needs to receive chunks."""

    check: Callable[[Sequence[str], Mapping[str, Any] | None, str, str], AbstractContextManager[None]]
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
    for header, data in _chunks(body, writes.chunk_bytes + _HEAD_BYTES):
        if header.version != target.number:
            raise InvalidArgument("CHUNK", f"expected chunks of version {target.number}, got one of {header.version}")
        writes.land(target.model, header, data)
        size += len(data)
    return size


def _chunks(body: Body, most: int) -> Iterator[tuple[ChunkHeader, memoryview]]:
    """Yield chunks, whose data are valid until the next one. Raises InvalidArgument (CHUNK), OSError."""
    buffer, head = memoryview(bytearray()), memoryview(bytearray(LENGTH.size))
    while body.left:
        if body.left < LENGTH.size:
            raise InvalidArgument("CHUNK", f"expected the length of a chunk, got {body.left} bytes")
        body.read_into(head)
        (length,) = LENGTH.unpack(head)
        if not 0 < length <= min(most, body.left):
            raise InvalidArgument("CHUNK", f"expected a chunk of 1 to {min(most, body.left)} bytes, got one of {length}")
        if length > len(buffer):
            buffer = memoryview(bytearray(length))
        body.read_into(buffer[:length])
        try:
            header, data, _ = unframe(buffer[:length])
        except ValueError as error:
            raise InvalidArgument("CHUNK", str(error)) from error
        yield header, data


def body_length(headers: Mapping[str, Sequence[str]]) -> int:
    """Return the length of a body. Raises ValueError unless it is given, and at most `MOST_BODY_BYTES`."""
    given = headers.get("content-length", [""])[0]
    if not given.isdecimal() or not 0 < int(given) <= MOST_BODY_BYTES:
        raise ValueError(f"expected a Content-Length of 1 to {MOST_BODY_BYTES}, got {given[:40]!r}")
    return int(given)
