"""Reads of a version from the daemon's data port: into mapped files, or box by box in order, over several connections.

A connection is opened when needed, and again after a cut.
"""

import mmap
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress

import numpy as np
from numpy.lib.array_utils import byte_bounds
from resharder.client.errors import CorruptData, ResharderError
from resharder.client.rpc.channel import Channel
from resharder.client.rpc.data_port import NO_DATA_PORT, data_port
from resharder.client.transport.shared_memory import copy_threads
from resharder.client.versions.read_plan import FileRange
from resharder.client.versions.remote import Arrived, VersionManifest, split_chunk
from resharder.converters.geometry.layout import ITEM_SIZES, box_index
from resharder.converters.storage.files import Array
from resharder.converters.storage.pages import map_pages
from resharder.converters.wire.chunk_body import ReusedMemory
from resharder.converters.wire.range_client import (
    BROKEN,
    DataAddress,
    PartRefused,
    PartRequest,
    RangeConnection,
    WrongBytes,
)
from resharder.converters.wire.windows import WINDOW_BYTES, BoxPart, Window, window_request

PATIENCE = 5.0  # seconds without progress on a connection until the stream takes over
_ALIGNMENT, _HEADS_BYTES = 64, 64 << 10
_PIN_SECONDS = 10.0  # between requests that keep a version pinned; the daemon closes a silent connection after 30


class PortUnavailable(ResharderError):
    """The data port cannot be used; the gRPC stream may."""

    reason = "DATA_PORT"


class PortConnection:
    """Connection for reads of one version; after a cut, a new one reads the rest.

    Methods that read raise PortUnavailable if the port cannot be reached or refuses, and CorruptData if received bytes differ
    from their checksum twice.
    """

    def __init__(self, address: DataAddress, manifest: VersionManifest) -> None:
        self._at, self._manifest = f"{address.host}:{address.port}", manifest
        self._connection = RangeConnection(address)

    def close(self) -> None:
        """Close the connection, if it is open."""
        self._connection.close()

    def read_range(self, part: FileRange, target: Array) -> None:
        """Write the bytes of a range to `target`, which has as many bytes."""
        at, file = part.start, self._manifest.files[part.file]

        def rest() -> Iterator[None]:
            nonlocal at
            request = PartRequest(self._manifest.name, self._manifest.fingerprint, file.path, file.size, at, part.end)
            try:
                for size in self._connection.blocks(request, target[at - part.start :]) if at < part.end else ():
                    at += size
                    yield
            except WrongBytes:
                at = part.start
                raise

        self._finish(rest)

    def read_boxes(
        self, window: Sequence[BoxPart], memory: Callable[[int], memoryview], arrived: Callable[[Arrived], None]
    ) -> None:
        """Read parts of boxes.

        Args:
            window: The parts.
            memory: Returns memory of at least so many bytes for the next chunk, aligned for every dtype.
            arrived: Called with each part of a part, in order and once. The array is in the memory of its chunk.
        """
        left, specs = list(window), self._manifest.specs

        def rest() -> Iterator[None]:
            nonlocal left
            sizes = [ITEM_SIZES[specs[part.name].dtype] for part in left]
            request, chunks = window_request(self._manifest.name, self._manifest.fingerprint, left, specs)
            asked, done = left, 0
            try:
                for parts, (_, data) in zip(chunks, self._connection.chunks(request, memory), strict=True):
                    for position, box, array in split_chunk(parts, sizes, data):
                        arrived(Arrived(asked[position].position, box, array))
                    done += 1
                    yield
            finally:
                left = [asked[position]._replace(box=box) for parts in chunks[done:] for position, box in parts]

        self._finish(rest)

    def _finish(self, rest: Callable[[], Iterator[None]]) -> None:
        """Read what is left, and continue after errors that end."""
        try:
            self._connection.read_all(rest, PATIENCE)
        except BROKEN as error:
            raise PortUnavailable(f"{self._at}: {error or type(error).__name__}") from error
        except PartRefused as error:
            raise PortUnavailable(str(error)) from error
        except WrongBytes as error:
            raise CorruptData(str(error)) from error


class PortReader:
    """Reader of one version from the data port, over at most `connections` connections.

    Args:
        channel: Channel to the daemon, for its address and TLS settings.
        manifest: The version's manifest.
        connections: Upper bound on connections; 0: one for each available core, at most four.

    Raises:
        PortUnavailable: The daemon has no data port.
    """

    def __init__(self, channel: Channel, manifest: VersionManifest, connections: int = 0) -> None:
        address = data_port(channel, manifest.data_address)
        if address is None:
            raise PortUnavailable(NO_DATA_PORT)
        self._address, self._manifest = address, manifest
        self._connections = connections or copy_threads()

    def read(
        self,
        jobs: Sequence[FileRange | Window],
        contents: Sequence[Array],
        arrays: Mapping[str, Array],
        arrived: Callable[[int], None],
    ) -> None:
        """Write ranges and boxes to mapped files.

        Args:
            jobs: The ranges and windows.
            contents: Bytes of the files, in the manifest's order.
            arrays: Their tensors.
            arrived: Called on the connections' threads with the position of each job.

        Raises:
            PortUnavailable: The port cannot be reached, or refuses. Jobs that have not arrived remain to be read.
            CorruptData: Received bytes differ from their checksum twice.
        """
        left, failures = deque(range(len(jobs))), list[BaseException]()
        lock = threading.Lock()

        def take() -> int | None:
            with lock:
                return left.popleft() if left and not failures else None

        def work() -> None:
            memory = ReusedMemory()
            try:
                with self._opened() as connection:
                    while (position := take()) is not None:
                        job = jobs[position]
                        if isinstance(job, FileRange):
                            connection.read_range(job, contents[job.file][job.start : job.end])
                        else:
                            connection.read_boxes(job, memory, _Writer(job, arrays))
                        arrived(position)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, name="resharder-range") for _ in range(min(self._connections, len(jobs)))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise next((error for error in failures if not isinstance(error, PortUnavailable)), failures[0])

    def windows(self, windows: Sequence[Window]) -> Iterator[list[Arrived]]:
        """Yield the parts of each window in order. Their arrays share the memory of the window, which no later one uses.

        The version is pinned until the last one, however long the caller takes. Raises as `read` does.
        """
        with ExitStack() as stack:
            stack.enter_context(self._pinned())
            count = min(self._connections, len(windows))
            idle = [stack.enter_context(self._opened()) for _ in range(count)]
            threads = ThreadPoolExecutor(max(1, count), thread_name_prefix="resharder-boxes")
            stack.callback(threads.shutdown, cancel_futures=True)

            def read(window: Window) -> list[Arrived]:
                found, connection = list[Arrived](), idle.pop()
                try:
                    connection.read_boxes(window, _WindowMemory(), found.append)
                finally:
                    idle.append(connection)
                return found

            left, reading = deque(windows), deque[Future[list[Arrived]]]()
            while left or reading:
                while left and len(reading) <= count:
                    reading.append(threads.submit(read, left.popleft()))
                yield reading.popleft().result()

    @contextmanager
    def _opened(self) -> Iterator[PortConnection]:
        connection = PortConnection(self._address, self._manifest)
        try:
            yield connection
        finally:
            connection.close()

    @contextmanager
    def _pinned(self) -> Iterator[None]:
        """Pin the version by a connection of its own, which is never silent for long."""
        ended, byte = threading.Event(), np.empty(1, np.uint8)

        def keep() -> None:
            with suppress(PortUnavailable, CorruptData), self._opened() as connection:  # readers have the same errors
                connection.read_range(FileRange(0, 0, 1), byte)
                while not ended.wait(_PIN_SECONDS):
                    connection.read_range(FileRange(0, 0, 1), byte)

        thread = threading.Thread(target=keep, name="resharder-pin", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


class _Writer:
    """Writes parts of a window's boxes to their tensors, whose pages are mapped by one call for each part."""

    def __init__(self, window: Window, arrays: Mapping[str, Array]) -> None:
        self._tensors = {part.position: arrays[part.name] for part in window}
        for part in window:
            if part.box:  # not a scalar
                map_pages(byte_bounds(self._tensors[part.position][box_index(part.box)]), write=True)

    def __call__(self, part: Arrived) -> None:
        self._tensors[part.position][box_index(part.box)] = part.array


class _WindowMemory:
    """Memory for the chunks of one window, in huge pages if the host has them."""

    def __init__(self) -> None:
        self._left = memoryview(b"")

    def __call__(self, size: int) -> memoryview:
        """Return memory for the next chunk."""
        size += -size % _ALIGNMENT
        if size > len(self._left):
            memory = mmap.mmap(-1, max(size, WINDOW_BYTES + _HEADS_BYTES), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            memory.madvise(mmap.MADV_HUGEPAGE)
            self._left = memoryview(memory)
        found, self._left = self._left[:size], self._left[size:]
        return found
