"""Reads of a version from the daemon's data port: into mapped files, or box by box in order, over several connections.

A connection is opened when needed, and again after a cut.
"""

import mmap
import ssl
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace

import numpy as np
from numpy.lib.array_utils import byte_bounds
from resharder.client.errors import DATA_PORT, CorruptData, DaemonUnreachable, ResharderError, WaitTimeout, refusal_of_port
from resharder.client.rpc.channel import Channel
from resharder.client.rpc.data_port import data_port
from resharder.client.transport.shared_memory import copy_threads
from resharder.client.versions.manifest import Arrived, VersionManifest, get_manifest
from resharder.client.versions.read_plan import FileRange
from resharder.converters.environment import PROXY
from resharder.converters.geometry.chunking import Part
from resharder.converters.geometry.layout import ITEM_SIZES, box_index, box_shape, box_size
from resharder.converters.storage.files import BITS, Array
from resharder.converters.storage.pages import map_pages
from resharder.converters.wire.chunk_body import ReusedMemory
from resharder.converters.wire.range_client import (
    BROKEN,
    DataAddress,
    NotConnected,
    PartRefused,
    PartRequest,
    RangeConnection,
    WrongBytes,
)
from resharder.converters.wire.windows import WINDOW_BYTES, BoxPart, Window, window_request

PATIENCE = 30.0  # seconds without progress on a connection, while the daemon answers
_ALIGNMENT, _HEADS_BYTES = 64, 64 << 10
_PIN_SECONDS = 10.0  # between requests that keep a version pinned; the daemon closes a silent connection after 30


class DaemonPort:
    """The data port of a version's daemon, at the address of the daemon's last answer. Thread-safe.

    Args:
        channel: Channel to the daemon, for the port's address and its TLS settings.
        manifest: The version's manifest.

    Raises:
        DaemonUnreachable: The daemon has no data port (DATA_PORT).
    """

    def __init__(self, channel: Channel, manifest: VersionManifest) -> None:
        self._channel, self.manifest = channel, manifest
        self.address = self._of(manifest)

    def renew(self, failed: DataAddress) -> bool:
        """Look for another way than the address that failed, and return whether patience begins anew.

        The proxy of calls is the second way, if there is one. After that the daemon is asked for its address, which a restart
        may change; an absent one is waited for. Raises ResharderError.
        """
        before, proxy, absent = self.address, PROXY.text(), False
        if _way(before) != _way(failed):  # another connection has found one
            return True
        if proxy and not before.proxy:
            self.address = replace(before, proxy=proxy)
            return True
        try:
            found = get_manifest(self._channel, self.manifest.name, patience=0)
        except (DaemonUnreachable, WaitTimeout):
            found, absent = get_manifest(self._channel, self.manifest.name), True
        self.address = replace(self._of(found), proxy=before.proxy)
        return absent or _way(self.address) != _way(before)

    def _of(self, manifest: VersionManifest) -> DataAddress:
        address = data_port(self._channel, manifest.data_address)
        if address is None:
            raise DaemonUnreachable(
                f"the daemon at {self._channel.endpoint} has no data port; start it with --data-listen, and open that port to "
                "this host",
                DATA_PORT,
            )
        return address


def _way(address: DataAddress) -> tuple[str, int, str]:
    return address.host, address.port, address.proxy


class PortConnection:
    """Connection for reads of one version; after a cut, a new one reads the rest.

    Methods that read raise DaemonUnreachable (DATA_PORT) if the port cannot be reached, CorruptData if received bytes differ from
    their checksum twice, and otherwise as `refusal_of_port`.
    """

    def __init__(self, port: DaemonPort, patience: float) -> None:
        self._port, self._manifest, self._patience = port, port.manifest, patience
        self._connection = RangeConnection(port.address)

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
                    for position, box, array in _parts(parts, sizes, data):
                        arrived(Arrived(asked[position].position, box, array))
                    done += 1
                    yield
            finally:
                left = [asked[position]._replace(box=box) for parts in chunks[done:] for position, box in parts]

        self._finish(rest)

    def _finish(self, rest: Callable[[], Iterator[None]]) -> None:
        """Read what is left, and continue after errors that end."""

        def attempt() -> Iterator[None]:
            try:
                self._connection.address = self._port.address
                yield from rest()
            except NotConnected:
                if self._port.renew(self._connection.address):
                    yield  # an absence of the daemon is not the port's
                raise

        at = self._port.address
        try:
            self._connection.read_all(attempt, self._patience)
        except BROKEN as error:
            raise DaemonUnreachable(_why_unreachable(at, error, self._patience), DATA_PORT) from error
        except PartRefused as error:
            raise refusal_of_port(str(error), error.status, error.reason) from error
        except WrongBytes as error:
            raise CorruptData(str(error)) from error


def _why_unreachable(at: DataAddress, error: Exception, patience: float) -> str:
    port, found = f"the daemon's data port at {at.host}:{at.port}", str(error) or type(error).__name__
    if isinstance(error, ssl.SSLError) or isinstance(error.__cause__, ssl.SSLError):
        return f"cannot use {port}: {found}; set RESHARDER_TLS_CA, _CERT and _KEY as for its calls"
    if isinstance(error, NotConnected):
        return f"cannot reach {port}: {found}; open port {at.port} to this host"
    return f"{port} has sent nothing for {patience:g} s: {found}"


def _parts(parts: Sequence[Part], sizes: Sequence[int], data: memoryview) -> Iterator[Arrived]:
    """Yield the parts of a chunk, in its memory; `sizes` has the bytes of an element, by the position of a part."""
    at = 0
    for position, box in parts:
        array = np.frombuffer(data, BITS[sizes[position]], box_size(box), at)
        yield Arrived(position, box, array.reshape(box_shape(box)))
        at += array.nbytes


class PortReader:
    """Reader of one version from the data port, over at most `connections` connections.

    Args:
        channel: Channel to the daemon, for its address and TLS settings.
        manifest: The version's manifest.
        connections: Upper bound on connections; 0: one for each available core, at most four.
        patience: Seconds without progress on a connection, while the daemon answers; by default `PATIENCE`.

    Raises:
        DaemonUnreachable: The daemon has no data port (DATA_PORT).
    """

    def __init__(self, channel: Channel, manifest: VersionManifest, connections: int = 0, patience: float | None = None) -> None:
        self._port = DaemonPort(channel, manifest)
        self._connections = connections or copy_threads()
        self._patience = PATIENCE if patience is None else patience

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
            DaemonUnreachable: The port cannot be reached (DATA_PORT), or the daemon.
            CorruptData: Received bytes differ from their checksum twice.
            Refused: The daemon refuses; NotFound (VERSION_GONE) if the version is no longer READY.
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

        count = min(self._connections, len(jobs))
        threads = [threading.Thread(target=work, name="resharder-range", daemon=True) for _ in range(count)]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except BaseException as error:  # Ctrl-C: they end after their job, or with the process
            failures.append(error)
            raise
        if failures:
            raise next((error for error in failures if not isinstance(error, DaemonUnreachable)), failures[0])

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
        connection = PortConnection(self._port, self._patience)
        try:
            yield connection
        finally:
            connection.close()

    @contextmanager
    def _pinned(self) -> Iterator[None]:
        """Pin the version by a connection of its own, which is never silent for long."""
        ended, byte = threading.Event(), np.empty(1, np.uint8)

        def keep() -> None:
            with suppress(ResharderError), self._opened() as connection:  # readers have the same errors
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
