"""Parts of versions that the daemon's host does not hold, brought from nodes for as long as they are read.

A part is up to 16 MiB of a file, with a checksum. It is written to its place in the file, which is as long as the version's and
otherwise a hole, and is punched out again once nobody reads it and the parts read last take more than a bound.
"""

import ctypes
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from resharder.converters.wire.pieces import PieceSpan
from resharder.converters.wire.ranges import PIECE_BYTES
from resharder.server.holding.transfers import HttpTransfer, PieceBusy, PieceFailed, PieceSource
from resharder.server.infra.filesystem import touching
from resharder.server.nodes.registry import NodeRegistry
from resharder.server.state.errors import Unavailable
from resharder.server.store.partial import VerifiedVersion

KEPT_BYTES = 1 << 30
"""Bound on the parts that are kept although nobody reads them now."""
_THREADS = 8
_PATIENCE = 5.0  # seconds in which a part is asked for again
_PAUSE = 0.05  # seconds until nodes that were busy or failed are asked again
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # of <linux/falloc.h>
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong)
_Key = tuple[str, str, int]  # version, file, first byte


@dataclass
class _Borrowed:
    """A part that is there, or is being fetched, and its readers."""

    version: VerifiedVersion
    span: PieceSpan
    fetched: "Future[None]"
    readers: int = field(default=0)


class Borrowing:
    """Parts that readers of versions need. Thread-safe.

    Args:
        nodes: The register, which knows the holders.
        transfer: Fetcher of parts.
        kept_bytes: Bound on the parts that nobody reads now.
        patience: Seconds in which a part is asked for again.
        clock: Monotonic clock in seconds.
    """

    def __init__(
        self,
        nodes: NodeRegistry,
        transfer: HttpTransfer,
        kept_bytes: int = KEPT_BYTES,
        patience: float = _PATIENCE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._nodes, self._transfer, self._kept_bytes = nodes, transfer, kept_bytes
        self._patience, self._clock = patience, clock
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._pool = ThreadPoolExecutor(_THREADS, "borrow")
        self._parts: OrderedDict[_Key, _Borrowed] = OrderedDict()  # that read last at the end

    @contextmanager
    def reading(self, version: VerifiedVersion, spans: Iterable[PieceSpan]) -> Iterator[None]:
        """Have bytes of a version in its files meanwhile.

        Raises Unavailable (PIECES_ELSEWHERE) if no node delivers some of them, OSError if they cannot be written.
        """
        needed = {
            (span.file, start) for span in spans for start in range(span.start - span.start % PIECE_BYTES, span.end, PIECE_BYTES)
        }
        parts = [self._borrow(version, file, start) for file, start in sorted(needed)]
        try:
            for part in parts:
                part.fetched.result()
            yield
        finally:
            with self._lock:
                for part in parts:
                    part.readers -= 1
                self._trim()

    def close(self) -> None:
        """Fetch nothing any longer."""
        self._ended.set()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._transfer.close_idle()

    def _borrow(self, version: VerifiedVersion, file: str, start: int) -> _Borrowed:
        key = version.name, file, start
        with self._lock:
            found = self._parts.get(key)
            if found is None or (found.fetched.done() and found.fetched.exception() is not None):
                span = PieceSpan(file, start, min(start + PIECE_BYTES, version.sizes[file]))
                found = self._parts[key] = _Borrowed(version, span, self._pool.submit(self._fetch, version, span))
            found.readers += 1
            self._parts.move_to_end(key)
            return found

    def _fetch(self, version: VerifiedVersion, part: PieceSpan) -> None:
        (piece,) = version.numbering.touched(part.file, part.start, part.end)
        deadline, why = self._clock() + self._patience, "no live node holds it"
        while True:
            for holder in self._nodes.holders(version.name, piece):
                try:
                    self._transfer.fetch_part(version, part, PieceSource(holder.data_address, daemon=False))
                    return
                except (PieceBusy, PieceFailed) as error:
                    why = str(error)
            if self._clock() >= deadline or self._ended.wait(_PAUSE):
                raise Unavailable(
                    "PIECES_ELSEWHERE", f"{version.name}: {part.file}, bytes {part.start} to {part.end}: {why}; try again"
                )

    def _trim(self) -> None:
        """Punch out the parts that nobody has read for longest, beyond the bound. Callers hold the lock."""
        idle = [(key, part) for key, part in self._parts.items() if not part.readers and part.fetched.done()]
        size = sum(part.span.end - part.span.start for _, part in idle)
        for key, part in idle:
            failed = part.fetched.cancelled() or part.fetched.exception() is not None
            if size > self._kept_bytes or failed:
                size -= part.span.end - part.span.start
                del self._parts[key]
                with suppress(OSError):  # its version has ended
                    _punch(part.version, part.span)


def _punch(version: VerifiedVersion, span: PieceSpan) -> None:
    """Free the pages of a part, but for those of the file's header. Raises OSError."""
    header = next(len(file.header) for file in version.manifest.files if file.path == span.file)
    start = max(span.start, header)
    path = version.folder / span.file
    with touching(path, "punching"):
        descriptor = version.open_file(span.file)
        try:
            if start < span.end and _libc.fallocate(descriptor, _KEEP_SIZE | _PUNCH_HOLE, start, span.end - start):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        finally:
            os.close(descriptor)
