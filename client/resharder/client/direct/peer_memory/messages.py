"""Messages between the two processes of a pair, with file descriptors, over a Unix socket."""

import json
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from resharder.client.direct.base import DirectFailed

MOST_FDS = 200
"""File descriptors of one message at most; Linux allows 253."""
_HEAD = struct.Struct("<IQH")  # bytes of fields, bytes of data, file descriptors
_LARGEST = 1 << 31  # bytes of a message
_PIECE = 1 << 20
MESSAGE_SECONDS = 10.0
"""Bound on sending or receiving one message whose transmission has begun, in seconds."""
_POLL = 0.05  # seconds between looks at whether the transfer was aborted


class PairMessage(NamedTuple):
    """Message of a kind, with fields that JSON can express, bytes, and file descriptors that the receiver owns."""

    kind: str
    fields: dict[str, Any]
    data: bytes
    fds: tuple[int, ...]


class Line:
    """One side's connected socket. One thread at a time may receive; any thread may send or close."""

    def __init__(self, connected: socket.socket, peer: str) -> None:
        """Take over a socket. `peer` names the other side in errors."""
        self._socket, self.peer = connected, peer
        connected.settimeout(MESSAGE_SECONDS)  # a stopped process reads nothing and is not gone

    def send(self, kind: str, data: bytes = b"", fds: Sequence[int] = (), **fields: Any) -> None:
        """Send a message; file descriptors stay the caller's. Raises DirectFailed if the other side is gone."""
        header = json.dumps({"kind": kind} | fields).encode()
        try:
            socket.send_fds(self._socket, [_HEAD.pack(len(header), len(data), len(fds))], list(fds))
            self._socket.sendall(header + data)
        except OSError as error:
            raise self._gone(error) from error

    def receive(self, deadline: float = float("inf"), check: Callable[[], None] = lambda: None) -> PairMessage:
        """Return the next message.

        Args:
            deadline: Time by `time.monotonic`.
            check: Called about 20 times a second, to raise if the wait has become pointless.

        Raises:
            DirectFailed: The other side is gone, is late, or has sent something else than a message.
        """
        self._await(deadline, check)
        fds: list[int] = []
        try:
            head, fds, _, _ = socket.recv_fds(self._socket, _HEAD.size, MOST_FDS)
            head += self._read(_HEAD.size - len(head)) if head else b""
            if not head:
                raise self._gone("it was closed")
            length, size, count = _HEAD.unpack(head)
            if length + size > _LARGEST or count != len(fds):
                raise DirectFailed(f"{self.peer}: expected a message with {count} file descriptors, got {len(fds)}")
            fields = json.loads(self._read(length))
            return PairMessage(str(fields.pop("kind")), fields, self._read(size), tuple(fds))
        except (OSError, ValueError, KeyError, AttributeError) as error:
            _close(fds)
            raise self._gone(error) from error
        except DirectFailed:
            _close(fds)
            raise

    def _await(self, deadline: float, check: Callable[[], None]) -> None:
        ready = select.poll()
        try:
            ready.register(self._socket, select.POLLIN)
            while not ready.poll(_POLL * 1000):
                check()
                if time.monotonic() > deadline:
                    raise DirectFailed(f"{self.peer}: no message came in time")
        except (OSError, ValueError) as error:  # closed by another thread
            raise self._gone(error) from error

    def _read(self, size: int) -> bytes:
        parts = []
        while size:
            part = self._socket.recv(min(size, _PIECE))
            if not part:
                raise self._gone("it was closed")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _gone(self, why: object) -> DirectFailed:
        return DirectFailed(f"{self.peer}: the connection has ended: {why}")

    def close(self) -> None:
        """Close the connection; a `receive` of another thread then raises DirectFailed."""
        with suppress(OSError):  # not connected
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
