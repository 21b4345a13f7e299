"""Reads of HTTP ranges from the daemon's data port into mapped files, over several connections.

Each connection is one of `converters/wire/range_client.py`. After a cut, the rest of a range is requested over a new one.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from resharder.client.errors import CorruptData, ResharderError
from resharder.client.rpc.channel import Backoff, Channel
from resharder.client.rpc.data_port import NO_DATA_PORT, data_port
from resharder.client.transport.shared_memory import copy_threads
from resharder.client.versions.range_plan import FileRange
from resharder.client.versions.remote import VersionManifest
from resharder.converters.storage.files import Array
from resharder.converters.wire.range_client import BROKEN, DataAddress, PartRefused, PartRequest, RangeConnection, WrongBytes

_PATIENCE = 5.0  # seconds without progress on a connection until the stream takes over


class RangesUnavailable(ResharderError):
    """The data port cannot be used; the gRPC stream may."""

    reason = "DATA_PORT"


class RangeReader:
    """Reader of one version from the data port, over at most `connections` connections.

    Args:
        channel: Channel to the daemon, for its address and TLS settings.
        manifest: The version's manifest.
        contents: Bytes of the mapped files that are written, in the manifest's order.
        connections: Upper bound on connections; 0: one for each available core, at most four.

    Raises:
        RangesUnavailable: The daemon has no data port.
    """

    def __init__(self, channel: Channel, manifest: VersionManifest, contents: Sequence[Array], connections: int = 0) -> None:
        address = data_port(channel, manifest.data_address)
        if address is None:
            raise RangesUnavailable(NO_DATA_PORT)
        self._address, self._manifest = address, manifest
        self._contents, self._connections = contents, connections or copy_threads()

    def read(self, ranges: Sequence[FileRange], arrived: Callable[[int], None]) -> None:
        """Write the ranges to the files. `arrived` is called on the connections' threads with the position of each.

        After a cut connection, the rest of its range is requested again.

        Raises:
            RangesUnavailable: The port cannot be reached, or refuses. Ranges that have not arrived remain to be read.
            CorruptData: Received bytes differ from the checksum of their piece twice.
        """
        left, failures = deque(range(len(ranges))), list[BaseException]()
        lock = threading.Lock()

        def take() -> int | None:
            with lock:
                return left.popleft() if left and not failures else None

        def work() -> None:
            try:
                with self._opened() as connection:
                    while (position := take()) is not None:
                        connection.fetch(ranges[position])
                        arrived(position)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, name="resharder-range") for _ in range(min(self._connections, len(ranges)))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise next((error for error in failures if not isinstance(error, RangesUnavailable)), failures[0])

    @contextmanager
    def _opened(self) -> Iterator["_Connection"]:
        connection = _Connection(self._address, self._manifest, self._contents)
        try:
            yield connection
        finally:
            connection.close()


class _Connection:
    """One connection to the data port, opened when needed and again after a cut."""

    def __init__(self, address: DataAddress, manifest: VersionManifest, contents: Sequence[Array]) -> None:
        self._at, self._manifest, self._contents = f"{address.host}:{address.port}", manifest, contents
        self._connection = RangeConnection(address)

    def close(self) -> None:
        """Close the connection, if it is open."""
        self._connection.close()

    def fetch(self, part: FileRange) -> None:
        """Write one range to its file. Raises RangesUnavailable, CorruptData."""
        at, backoff, wrong = part.start, Backoff(_PATIENCE), 0
        while at < part.end:
            began = at
            try:
                for size in self._connection.blocks(self._part(at, part), self._contents[part.file][at : part.end]):
                    at += size
            except BROKEN as error:
                self.close()
                backoff = Backoff(_PATIENCE) if at > began else backoff
                if not backoff.wait():
                    raise RangesUnavailable(f"{self._at}: {error or type(error).__name__}") from error
            except PartRefused as error:
                raise RangesUnavailable(str(error)) from error
            except WrongBytes as error:
                self.close()
                at, wrong = part.start, wrong + 1
                if wrong > 1:
                    raise CorruptData(str(error)) from error

    def _part(self, start: int, part: FileRange) -> PartRequest:
        file = self._manifest.files[part.file]
        return PartRequest(self._manifest.name, self._manifest.fingerprint, file.path, file.size, start, part.end)
