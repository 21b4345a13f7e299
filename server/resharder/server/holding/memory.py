"""Memory that a transfer engine reads and writes: a version's mapped files, and who may write to a piece of them.

A one-sided read writes unchecked bytes straight into the files, until the engine has ended it. So it excludes every other fetch
of its piece: bytes that arrive late must not reach a piece that another fetch has completed.

A peer may be late too: a request for memory of a version that is gone may arrive at any time, and over TCP the engine reads it.
So the addresses of files stay readable for good. They are used again for later files, and a peer compares checksums.
"""

import ctypes
import os
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np
from resharder.converters.storage.digest import Array
from resharder.converters.storage.pages import AddressRange, Span, forget_pages
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
        self._registered: list[Span] = []
        self._ranges: dict[str, AddressRange] = {}
        try:
            for file, size in sizes.items():
                self._ranges[file] = _mapped(folder / file, size)
        except BaseException:
            self.close()
            raise
        self.addresses = tuple(each.begin for each in self._ranges.values())

    def register(self, spans: Iterable[PieceSpan]) -> None:
        """Register pieces, neighbours as one. Raises EngineFailed."""
        for span in _joined(spans):
            begin = self._ranges[span.file].begin
            bounds = begin + span.start, begin + span.end
            self._engine.register(bounds)
            self._registered.append(bounds)

    def array(self, part: PieceSpan) -> Array:
        """Return the bytes of a part of a file. They are no longer those of the file after `close`."""
        return array_at(self._ranges[part.file].begin + part.start, part.end - part.start)

    def close(self) -> None:
        """End all registrations, and unmap the files."""
        for span in self._registered:
            self._engine.unregister(span)
            forget_pages(span)
        for each in self._ranges.values():
            each.unmap()
            _FREE.give(each)
        self._registered, self._ranges = [], {}


class _FreeAddresses:
    """Addresses of files that are mapped no longer, by their size. Thread-safe."""

    def __init__(self) -> None:
        self._lock, self._of = threading.Lock(), defaultdict[int, list[AddressRange]](list)

    def take(self, size: int) -> AddressRange:
        """Return addresses for a file, reserved if none are free. Raises OSError."""
        with self._lock:
            return self._of[size].pop() if self._of[size] else AddressRange(size)

    def give(self, addresses: AddressRange) -> None:
        """Take back addresses at which nothing is mapped."""
        with self._lock:
            self._of[addresses.size].append(addresses)


_FREE = _FreeAddresses()


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


def array_at(address: int, size: int) -> Array:
    """Return the bytes at an address, which keep nothing mapped."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


def _mapped(path: Path, size: int) -> AddressRange:
    addresses, descriptor = _FREE.take(size), os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        addresses.map(descriptor)
    except BaseException:
        _FREE.give(addresses)
        raise
    finally:
        os.close(descriptor)
    return addresses


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
