"""Fetching of one piece, and the way by HTTP: over a pooled connection, checked against the daemon's checksums, then written."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from resharder.converters.storage.digest import Array
from resharder.converters.wire.pieces import PieceSpan
from resharder.converters.wire.range_client import (
    BROKEN,
    DataAddress,
    PartRefused,
    PartRequest,
    PortBusy,
    RangeConnection,
    WrongBytes,
)
from resharder.converters.wire.ranges import PIECE_BYTES
from resharder.server.holding.deltas import Deltas, read_whole
from resharder.server.holding.held_files import HeldFiles
from resharder.server.holding.memory import PieceTaken
from resharder.server.holding.tls import NodeTls
from resharder.server.infra.addresses import parse_listen

_MOST_IDLE = 32
_BUSY_SECONDS = 0.05  # until a busy port is asked again for the rest of a piece


class PieceFailed(Exception):
    """A piece that a peer does not deliver."""


class PieceBusy(PieceFailed):
    """A piece that a peer does not deliver now, because it delivers others."""


class FetchFailed(Exception):
    """Pieces or boxes that no peer delivers. The message has the reason; `node` is the id of a node to blame, or empty."""

    def __init__(self, reason: str, node: str = "") -> None:
        super().__init__(reason)
        self.node = node


@dataclass(frozen=True)
class PieceSource:
    """A peer that has a piece.

    Attributes:
        address: `host:port` of its data port.
        daemon: Whether the port is the daemon's.
        session: Its session of a transfer engine; empty for none.
        addresses: Addresses of the version's files in the session's memory, in the order of the manifest; none if not there.
        peer: `nodes/{id}`, or `daemon`.
    """

    address: str
    daemon: bool
    session: str = ""
    addresses: tuple[int, ...] = ()
    peer: str = ""


class PieceTransfer(Protocol):
    """Way in which pieces come from a peer, for many threads at once."""

    def fetch(self, version: HeldFiles, piece: int, source: PieceSource) -> int:
        """Bring a piece into the version's files, checked, and return its bytes.

        Args:
            version: The version.
            piece: Number of the piece.
            source: The peer.

        Raises:
            PieceBusy: The peer is busy, or the piece is arriving from another one.
            PieceFailed: The peer does not deliver it, or delivers other bytes.
            OSError: The piece cannot be written.
            grpc.RpcError: The daemon does not return the checksums.
        """

    def close_idle(self) -> None:
        """Close the idle connections."""


@dataclass
class ReceivedBytes:
    """Bytes that were received, by source, since the process began; `engine`: of them, those by a transfer engine."""

    daemon: int = 0
    peers: int = 0
    engine: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def total(self) -> int:
        """Bytes from all sources."""
        return self.daemon + self.peers

    def add(self, size: int, *, daemon: bool) -> None:
        """Count the bytes of a checked piece."""
        with self._lock:
            if daemon:
                self.daemon += size
            else:
                self.peers += size

    def add_engine(self, size: int) -> None:
        """Count the bytes of a checked piece that a transfer engine has delivered."""
        with self._lock:
            self.engine += size


PartChecksum = Callable[[HeldFiles, PieceSpan], int]
"""Function that returns the expected checksum of a part of a piece. It may raise grpc.RpcError, OSError."""


def data_address(address: str, tls: NodeTls | None, silent_seconds: float, *, daemon: bool) -> DataAddress:
    """Return the data port at `host:port`, the daemon's if `daemon`. Raises ValueError for an address that is none."""
    host, port = parse_listen(address)
    if tls is None:
        return DataAddress(host, port, silent_seconds=silent_seconds)
    if daemon:
        return DataAddress(host, port, tls.context, tls.daemon_name, tls.headers, silent_seconds)
    # The token is for the daemon alone: a node could call in this one's name by it.
    return DataAddress(host, port, tls.context, tls.peer_name, silent_seconds=silent_seconds)


class HttpTransfer:
    """Fetcher of pieces from data ports. Connections and buffers are reused.

    Args:
        checksum: The expected checksums.
        tls: Certificates; None connects without TLS.
        silent_seconds: Time without a byte after which a connection is given up.
        deltas: Reads of parts as deltas, where that is faster; None for whole ones.
    """

    def __init__(
        self,
        checksum: PartChecksum,
        tls: NodeTls | None,
        silent_seconds: float,
        clock: Callable[[], float] = time.monotonic,
        deltas: Deltas | None = None,
    ) -> None:
        self._clock, self._deltas = clock, deltas
        self._checksum, self._tls, self._silent = checksum, tls, silent_seconds
        self._lock = threading.Lock()
        self._idle: OrderedDict[RangeConnection, str] = OrderedDict()  # with their address, longest idle first
        self._buffers: list[Array] = []

    def fetch(self, version: HeldFiles, piece: int, source: PieceSource) -> int:
        """Fetch a piece from a data port, and return its bytes. Raises as `PieceTransfer.fetch` does."""
        try:
            with version.claims.fetching(piece, in_place=False):
                return self._fetch(version, piece, source)
        except PieceTaken as error:
            raise PieceBusy(str(error)) from error

    def _fetch(self, version: HeldFiles, piece: int, source: PieceSource) -> int:
        size, began = 0, self._clock()
        for part in version.numbering.parts(piece):
            self.fetch_part(version, part, source, busy_until=began + self._silent if size else 0.0)
            size += part.end - part.start
        return size

    def fetch_part(self, version: HeldFiles, part: PieceSpan, source: PieceSource, busy_until: float = 0.0) -> None:
        """Fetch a part of a piece. Until a time, a busy port is asked again. Raises as `PieceTransfer.fetch` does."""
        expected = self._checksum(version, part)
        # A node may have these bytes in files that ranks have written, before the version has a fingerprint.
        tag = version.fingerprint if source.daemon else ""
        request = PartRequest(version.name, tag, part.file, version.sizes[part.file], part.start, part.end, expected)
        buffer = self._buffer()
        try:
            target = buffer[: part.end - part.start]
            self._read_patiently(request, version, source, target, busy_until=busy_until)
            version.write(part, target)
        finally:
            with self._lock:
                self._buffers.append(buffer)

    def _read_patiently(
        self, request: PartRequest, version: HeldFiles, source: PieceSource, target: Array, busy_until: float
    ) -> None:
        """Read a part; until a time, a busy port is asked again, so that the parts before it were not read in vain."""
        while True:
            try:
                return self._read(request, version, source, target)
            except PieceBusy:
                if self._clock() >= busy_until:
                    raise
                threading.Event().wait(_BUSY_SECONDS)

    def _read(self, request: PartRequest, version: HeldFiles, source: PieceSource, target: Array) -> None:
        address = source.address
        connection = self._connection(address, source.daemon)
        try:
            if self._deltas is not None:
                self._deltas.read(connection, request, version, source.peer, target)
            else:
                read_whole(connection, request, target)
        except PortBusy as error:
            self._keep(connection, address)
            raise PieceBusy(str(error)) from error
        except BaseException as error:
            connection.close()
            if isinstance(error, (*BROKEN, PartRefused, WrongBytes)):
                raise PieceFailed(f"{address}: {str(error) or type(error).__name__}") from error
            raise
        self._keep(connection, address)

    def _keep(self, connection: RangeConnection, address: str) -> None:
        closed = []
        with self._lock:
            self._idle[connection] = address
            while len(self._idle) > _MOST_IDLE:
                closed.append(self._idle.popitem(last=False)[0])
        for former in closed:
            former.close()

    def _connection(self, address: str, daemon: bool) -> RangeConnection:
        with self._lock:
            found = next((connection for connection, at in reversed(self._idle.items()) if at == address), None)
            if found is not None:
                del self._idle[found]
                return found
        return RangeConnection(data_address(address, self._tls, self._silent, daemon=daemon))

    def _buffer(self) -> Array:
        with self._lock:
            if self._buffers:
                return self._buffers.pop()
        return np.empty(PIECE_BYTES, np.uint8)

    def close_idle(self) -> None:
        """Close the idle connections."""
        with self._lock:
            idle, self._idle = list(self._idle), OrderedDict()
        for connection in idle:
            with suppress(OSError):
                connection.close()
