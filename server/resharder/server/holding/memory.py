"""Memory that a transfer engine reads and writes: a version's mapped files, and who may write to a piece of them.

A one-sided read writes unchecked bytes straight into the files, until the engine has ended it. So it excludes every other fetch
of its piece: bytes that arrive late must not reach a piece that another fetch has completed.
"""

import mmap
import os
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.lib.array_utils import byte_bounds
from resharder.converters.storage.digest import Array
from resharder.converters.storage.pages import Span, forget_pages
from resharder.converters.wire.pieces import PieceSpan


class EngineFailed(Exception):
    """A transfer engine that does not read or register memory."""


class MemoryEngine(Protocol):
    """Transfer engine: one-sided reads between registered memory of processes. Thread-safe.

    `session` names this process to the engines of other nodes.
    """

    session: str

    def register(self, span: Span) -> None:
        """Let peers read memory, and reads write to it. Raises EngineFailed."""

    def unregister(self, span: Span) -> None:
        """End the registration of exactly this span."""

    def read(self, session: str, address: int, target: Span) -> None:
        """Read a peer's memory from `address` on. Once it returns or raises, nothing writes to `target`. Raises EngineFailed."""

    def close(self) -> None:
        """End reads in flight with EngineFailed."""


class VersionMemory:
    """Mapped files of a version, registered with an engine.

    `addresses` are those of the files, in the order of `sizes`. Raises OSError.
    """

    def __init__(self, engine: MemoryEngine, folder: Path, sizes: Mapping[str, int]) -> None:
        self._engine = engine
        self._arrays = {file: _mapped(folder / file, size) for file, size in sizes.items()}
        self._registered: list[Span] = []
        self.addresses = tuple(byte_bounds(array)[0] for array in self._arrays.values())

    def register(self, spans: Iterable[PieceSpan]) -> None:
        """Register pieces, neighbours as one. Raises EngineFailed."""
        for span in _joined(spans):
            bounds = byte_bounds(self.array(span))
            self._engine.register(bounds)
            self._registered.append(bounds)

    def array(self, part: PieceSpan) -> Array:
        """Return the bytes of a part of a file."""
        return self._arrays[part.file][part.start : part.end]

    def close(self) -> None:
        """End all registrations. The files stay mapped while an array of them is in use."""
        for span in self._registered:
            self._engine.unregister(span)
            forget_pages(span)
        self._registered, self._arrays = [], {}


class PieceTaken(Exception):
    """A piece that another fetch brings, in a way that excludes this one."""


class PieceClaims:
    """Fetches in flight of a version's pieces. Thread-safe."""

    def __init__(self) -> None:
        self._lock, self._closed = threading.Lock(), False
        self._checked: Counter[int] = Counter()
        self._in_place: set[int] = set()
        self._complete: set[int] = set()

    @contextmanager
    def fetching(self, piece: int, *, in_place: bool) -> Iterator[None]:
        """Claim a piece meanwhile; it is complete unless the body raises.

        Args:
            piece: Number of the piece.
            in_place: Whether unchecked bytes are written to it: alone, and never to a complete piece.

        Raises:
            PieceTaken: It excludes another fetch, or another one excludes it.
        """
        with self._lock:
            taken = piece in self._in_place
            if in_place:
                taken = taken or self._closed or piece in self._complete or self._checked[piece] > 0
            if taken:
                raise PieceTaken(f"piece {piece} is arriving")
            if in_place:
                self._in_place.add(piece)
            else:
                self._checked[piece] += 1
        try:
            yield
            with self._lock:
                self._complete.add(piece)
        finally:
            with self._lock:
                if in_place:
                    self._in_place.discard(piece)
                else:
                    self._checked[piece] -= 1

    def close(self) -> bool:
        """Let no fetch in place begin from now on, and return whether none is in flight."""
        with self._lock:
            self._closed = True
            return not self._in_place


def _mapped(path: Path, size: int) -> Array:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return np.frombuffer(mmap.mmap(descriptor, size), np.uint8)
    finally:
        os.close(descriptor)


def _joined(spans: Iterable[PieceSpan]) -> Iterator[PieceSpan]:
    """Yield the spans, joined where one begins at the end of the one before."""
    open_span: PieceSpan | None = None
    for span in spans:
        if open_span is not None and (open_span.file, open_span.end) == (span.file, span.start):
            open_span = open_span._replace(end=span.end)
            continue
        if open_span is not None:
            yield open_span
        open_span = span
    if open_span is not None:
        yield open_span
