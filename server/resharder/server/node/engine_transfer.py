"""Fetches by a transfer engine, straight into a version's memory, and by another way where the engine does not deliver."""

import threading
import time
from collections.abc import Callable

import structlog
import xxhash
from numpy.lib.array_utils import byte_bounds
from resharder.converters.storage.pages import map_pages
from resharder.converters.wire.pieces import PieceSpan
from resharder.server.holding.held_files import HeldFiles
from resharder.server.holding.memory import EngineFailed, MemoryEngine, PieceTaken, VersionMemory
from resharder.server.holding.piece_requests import LIMITS, PeerRecord, RequestLimits, after_failure
from resharder.server.holding.transfers import PartChecksum, PieceSource, PieceTransfer, ReceivedBytes

_log = structlog.get_logger("resharder.node")


class EngineTransfer:
    """Fetcher of pieces by an engine from peers that offer a session, for many threads at once.

    A session that fails, is slow, or delivers wrong bytes is left alone for a time that doubles each time. Its pieces, and those
    of other peers, come by `otherwise`.

    Args:
        engine: The engine.
        checksum: The daemon's checksums.
        otherwise: Fetcher by another way.
        received: Counts the bytes that the engine delivers.
    """

    def __init__(
        self,
        engine: MemoryEngine,
        checksum: PartChecksum,
        otherwise: PieceTransfer,
        received: ReceivedBytes,
        limits: RequestLimits = LIMITS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine, self._checksum, self._otherwise, self._received = engine, checksum, otherwise, received
        self._limits, self._clock = limits, clock
        self._lock = threading.Lock()
        self._records: dict[str, PeerRecord] = {}  # of sessions that failed

    def fetch(self, version: HeldFiles, piece: int, source: PieceSource) -> int:
        """Fetch a piece, and return its bytes. Raises as `PieceTransfer.fetch` does."""
        memory = version.memory
        if memory is not None and self._is_usable(source, version):
            try:
                with version.claims.fetching(piece, in_place=True):
                    size = self._read(memory, version, piece, source)
            except PieceTaken:
                pass
            except EngineFailed as error:
                self._suspend(source.session, str(error))
            else:
                self._received.add_engine(size)
                return size
        return self._otherwise.fetch(version, piece, source)

    def close_idle(self) -> None:
        """Close the idle connections of the other way; the engine keeps its own."""
        self._otherwise.close_idle()

    def _is_usable(self, source: PieceSource, version: HeldFiles) -> bool:
        if not source.session or len(source.addresses) != len(version.sizes):
            return False
        with self._lock:
            return self._records.get(source.session, PeerRecord()).retry_at <= self._clock()

    def _read(self, memory: VersionMemory, version: HeldFiles, piece: int, source: PieceSource) -> int:
        """Read the parts of a piece, and check them. Raises EngineFailed."""
        size, began = 0, self._clock()
        bases = dict(zip(version.sizes, source.addresses, strict=True))
        for part in version.numbering.parts(piece):
            expected = self._checksum(version, part)
            got = self._read_part(memory, part, source.session, bases[part.file])
            if got != expected:
                raise EngineFailed(
                    f"{source.session}: {version.name}, {part.file}: expected checksum {expected:016x} of bytes "
                    f"{part.start} to {part.end}, got {got:016x}"
                )
            size += part.end - part.start
        if (seconds := self._clock() - began) > self._limits.stalled:
            self._suspend(source.session, f"{source.session}: {seconds:.1f} s for {size} bytes")
        else:
            with self._lock:
                self._records.pop(source.session, None)
        return size

    def _read_part(self, memory: VersionMemory, part: PieceSpan, session: str, base: int) -> int:
        """Read a part into its place, and return the checksum of what has arrived."""
        target = memory.array(part)
        span = byte_bounds(target)
        map_pages(span, write=True)
        self._engine.read(session, base + part.start, span)
        return xxhash.xxh3_64_intdigest(target.data)

    def _suspend(self, session: str, reason: str) -> None:
        with self._lock:
            record = after_failure(self._records.get(session, PeerRecord()), self._clock(), self._limits)
            self._records[session] = record
            while len(self._records) > _MOST_RECORDS:  # of processes that are gone
                del self._records[next(iter(self._records))]
        _log.warning("session_suspended", session=session, failures=record.failures, reason=reason)


_MOST_RECORDS = 1024
