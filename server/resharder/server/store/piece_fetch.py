"""Fetches of parts of a version's files from data ports into a folder that has their layout, checked before they are written."""

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from resharder.converters.failpoints import failpoint
from resharder.converters.storage.digest import Array
from resharder.converters.storage.files import FileLayout
from resharder.converters.wire.range_client import BROKEN, DataAddress, PartRefused, PartRequest, RangeConnection, WrongBytes
from resharder.converters.wire.ranges import PIECE_BYTES
from resharder.server.infra.filesystem import touching, write_at

THREADS = 4
_PATIENCE = 10.0  # seconds of attempts at one part
_PAUSE = 0.1  # between two attempts


class FetchFailed(Exception):
    """A part that no source delivers. The message has the reason; `source` names the last one, empty if none is to blame."""

    def __init__(self, reason: str, source: str = "") -> None:
        super().__init__(reason)
        self.source = source


@dataclass(frozen=True)
class PartSource:
    """A data port that has a file. `tag` is the `ETag` by which it names the version's bytes."""

    name: str
    address: DataAddress
    tag: str


@dataclass(frozen=True)
class FetchedPart:
    """Bytes `start` to `end`, exclusive, of a file of `size` bytes, and their xxh3_64."""

    file: str
    size: int
    start: int
    end: int
    checksum: int


def parts_of(file: FileLayout, checksums: Sequence[int]) -> Iterator[FetchedPart]:
    """Yield the parts of a file, each of at most `PIECE_BYTES`. Raises ValueError unless each has a checksum."""
    for start, checksum in zip(range(0, file.size, PIECE_BYTES), checksums, strict=True):
        yield FetchedPart(file.path, file.size, start, min(start + PIECE_BYTES, file.size), checksum)


def fetch_parts(
    folder: Path,
    version: str,
    parts: Iterable[FetchedPart],
    sources: Callable[[FetchedPart], Sequence[PartSource]],
    gone: Callable[[], str],
    *,
    threads: int = THREADS,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Fetch parts into the files of a folder. Each is fetched again, from its sources in turn, for some seconds.

    Args:
        folder: Folder with files of the version's sizes.
        version: Resource name of the version.
        parts: The parts.
        sources: Returns the sources of a part, at least one.
        gone: Returns why no further attempt is of use; empty while one is.
        threads: Parts in flight.
        clock: Seconds of a monotonic clock.

    Raises:
        FetchFailed: A part does not arrive, or `gone` returns a reason. No part is written afterwards.
        OSError: A part cannot be written.
    """
    fetch = _Fetch(folder, version, sources, gone, clock)
    with ThreadPoolExecutor(threads, "fetch") as pool:
        try:
            for _ in pool.map(fetch.part, parts):
                pass
        except BaseException:
            fetch.stop()
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
            fetch.close()


class _Fetch:
    """One fetch. Threads have a buffer and connections of their own."""

    def __init__(
        self,
        folder: Path,
        version: str,
        sources: Callable[[FetchedPart], Sequence[PartSource]],
        gone: Callable[[], str],
        clock: Callable[[], float],
    ) -> None:
        self._folder, self._version, self._sources, self._gone, self._clock = folder, version, sources, gone, clock
        self._own, self._stopped = threading.local(), threading.Event()
        self._lock, self._open = threading.Lock(), list[RangeConnection]()

    def stop(self) -> None:
        """End the attempts at parts in flight."""
        self._stopped.set()

    def close(self) -> None:
        """Close all connections."""
        for connection in self._open:
            connection.close()

    def part(self, part: FetchedPart) -> None:
        """Fetch one part. Raises as `fetch_parts` does."""
        deadline, attempt, reason = self._clock() + _PATIENCE, 0, ""
        while not self._stopped.is_set():
            found = self._sources(part)
            source = found[attempt % len(found)]
            try:
                content = self._read(part, source)
                break
            except (*BROKEN, PartRefused, WrongBytes) as error:
                reason, attempt = f"{source.name}: {error or type(error).__name__}", attempt + 1
            if why := self._gone():
                raise FetchFailed(why)
            if self._clock() > deadline:
                raise FetchFailed(f"{part.file}, bytes {part.start} to {part.end}: {reason}", source.name)
            self._stopped.wait(_PAUSE)
        else:
            raise FetchFailed(reason or "another part has failed")
        self._write(part, content)

    def _write(self, part: FetchedPart, content: Array) -> None:
        path = self._folder / part.file
        with touching(path, "writing", len(content)):
            failpoint("gather.write")
            descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                write_at(descriptor, content.data, part.start)
            finally:
                os.close(descriptor)

    def _read(self, part: FetchedPart, source: PartSource) -> Array:
        target = self._buffer()[: part.end - part.start]
        request = PartRequest(self._version, source.tag, part.file, part.size, part.start, part.end, part.checksum)
        connection = self._connection(source)
        try:
            for _ in connection.blocks(request, target):
                pass
        except BaseException:
            connection.close()
            raise
        return target

    def _buffer(self) -> Array:
        if not hasattr(self._own, "buffer"):
            self._own.buffer = np.empty(PIECE_BYTES, np.uint8)
        found: Array = self._own.buffer
        return found

    def _connection(self, source: PartSource) -> RangeConnection:
        connections: dict[str, RangeConnection] = self._own.__dict__.setdefault("connections", {})
        if source.name not in connections:
            connections[source.name] = RangeConnection(source.address)
            with self._lock:
                self._open.append(connections[source.name])
        return connections[source.name]
