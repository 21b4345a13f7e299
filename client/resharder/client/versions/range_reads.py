"""Reads of HTTP ranges from the daemon's data port into mapped files, over several connections.

The daemon sends the bytes by `sendfile`, and the kernel copies them to their place. They are checked in blocks while they are in
the core's cache. The pages of a range are mapped by one call before, because a fault for each costs more than the copy.
"""

import http.client
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http import HTTPStatus

import xxhash
from numpy.lib.array_utils import byte_bounds
from resharder.client.errors import CorruptData, ResharderError
from resharder.client.rpc.channel import Backoff, Channel
from resharder.client.rpc.tls import Tls
from resharder.client.transport.shared_memory import copy_threads
from resharder.client.versions.range_plan import FileRange
from resharder.client.versions.remote import VersionManifest
from resharder.converters.storage.files import Array
from resharder.converters.storage.pages import map_pages
from resharder.converters.wire.ranges import CHECKSUM, is_piece, path_of

_BLOCK_BYTES = 1 << 20
_CONNECT_SECONDS = 3.0
_SILENT_SECONDS = 20.0  # without a byte, until a connection is replaced
_PATIENCE = 5.0  # seconds without progress on a connection until the stream takes over


class RangesUnavailable(ResharderError):
    """The data port cannot be used; the gRPC stream may."""

    reason = "DATA_PORT"


class _Cut(Exception):
    """A connection that ended before its response was complete."""


def data_address(manifest: VersionManifest, endpoint: str) -> tuple[str, int]:
    """Return host and port of the data port. Raises RangesUnavailable if the daemon has none."""
    host, _, port = manifest.data_address.rpartition(":")
    if not port.isdecimal():
        raise RangesUnavailable("the daemon has no data port (data_listen)")
    return (host or endpoint.rpartition(":")[0]).strip("[]"), int(port)


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
        self._host, self._port = data_address(manifest, channel.endpoint)
        self._manifest, self._tls = manifest, channel.tls
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
        connection = _Connection(self._host, self._port, self._tls, self._manifest, self._contents)
        try:
            yield connection
        finally:
            connection.close()


class _Connection:
    """One connection to the data port, opened when needed and again after a cut."""

    def __init__(self, host: str, port: int, tls: Tls | None, manifest: VersionManifest, contents: Sequence[Array]) -> None:
        self._host, self._port, self._tls = host, port, tls
        self._manifest, self._contents = manifest, contents
        self._http: http.client.HTTPConnection | None = None

    def close(self) -> None:
        """Close the connection, if it is open."""
        if self._http is not None:
            self._http.close()
            self._http = None

    def fetch(self, part: FileRange) -> None:
        """Write one range to its file. Raises RangesUnavailable, CorruptData."""
        at, backoff, wrong = part.start, Backoff(_PATIENCE), 0
        while at < part.end:
            began = at
            try:
                for size in self._blocks(part._replace(start=at)):
                    at += size
            except (OSError, http.client.HTTPException, _Cut) as error:
                self.close()
                backoff = Backoff(_PATIENCE) if at > began else backoff
                if not backoff.wait():
                    raise RangesUnavailable(f"{self._host}:{self._port}: {error or type(error).__name__}") from error
            except CorruptData:
                self.close()
                at, wrong = part.start, wrong + 1
                if wrong > 1:
                    raise

    def _blocks(self, part: FileRange) -> Iterator[int]:
        """Request a range, write its blocks, and yield the size of each. Raises OSError, HTTPException, _Cut, CorruptData."""
        response = self._request(part)
        state, at, piece = xxhash.xxh3_64(), part.start, response.getheader(CHECKSUM, "")
        file, target = self._manifest.files[part.file], self._contents[part.file]
        map_pages(byte_bounds(target[part.start : part.end]), write=True)
        while at < part.end:
            block = target[at : min(part.end, at + _BLOCK_BYTES)].data
            size = response.readinto(block)
            if not size:
                raise _Cut(f"expected {part.end - part.start} bytes, the connection ended after {at - part.start}")
            if piece:
                state.update(block[:size])
            at += size
            yield size
        response.read()  # the end of the response, so that the connection can be used again
        if is_piece(part.start, part.end, file.size) and piece != f"{state.intdigest():016x}":
            raise CorruptData(
                f"{self._manifest.name}, {file.path}: expected checksum {piece or 'of a piece'} of bytes {part.start} to "
                f"{part.end}, got {state.intdigest():016x}"
            )

    def _request(self, part: FileRange) -> http.client.HTTPResponse:
        """Request a range and return the checked head of its response."""
        connection = self._http = self._http or _connect(self._host, self._port, self._tls)
        name = self._manifest.files[part.file].path
        headers = {
            "Range": f"bytes={part.start}-{part.end - 1}",
            "If-Match": f'"{self._manifest.fingerprint}"',
            **({key: value for key, value in self._tls.metadata()} if self._tls else {}),
        }
        connection.request("GET", path_of(self._manifest.name, name), headers=headers)
        response = connection.getresponse()
        if response.status == HTTPStatus.SERVICE_UNAVAILABLE:
            raise _Cut("the data port has no connection left (503)")
        if response.status != HTTPStatus.PARTIAL_CONTENT:
            said = response.read(500).decode(errors="replace").strip()
            raise RangesUnavailable(f"{self._host}:{self._port} answered {response.status}: {said}")
        expected = f"bytes {part.start}-{part.end - 1}/{self._manifest.files[part.file].size}"
        if response.getheader("Content-Range") != expected or response.length != part.end - part.start:
            raise RangesUnavailable(f"expected {expected}, got {response.getheader('Content-Range')}, {response.length} bytes")
        return response


def _connect(host: str, port: int, tls: Tls | None) -> http.client.HTTPConnection:
    """Open a connection. Raises OSError (ssl.SSLError)."""
    connection = http.client.HTTPConnection(host, port, timeout=_CONNECT_SECONDS)
    connection.auto_open = 0  # never again without TLS
    opened = socket.create_connection((host, port), _CONNECT_SECONDS)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if tls is not None:
        opened = tls.context().wrap_socket(opened, server_hostname=tls.name or host)
    opened.settimeout(_SILENT_SECONDS)
    connection.sock = opened
    return connection
