"""Reads of parts of a version's files and of its boxes from a data port, and writes of chunks to it, over one HTTP connection.

The sender uses `sendfile`, and the kernel copies the bytes to their place. They are checked in blocks while they are in the
core's cache. The pages of a part are mapped by one call before, because a fault for each costs more than the copy.
"""

import base64
import http.client
import re
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from types import MappingProxyType
from urllib.parse import unquote, urlsplit

import xxhash
from numpy.lib.array_utils import byte_bounds
from resharder.converters.storage.digest import Array
from resharder.converters.storage.pages import map_pages
from resharder.converters.wire.backoff import Backoff
from resharder.converters.wire.chunk_body import BOXES, Chunk, body_size, boxes_header, chunks_path, read_chunks
from resharder.converters.wire.endpoint import PROXY
from resharder.converters.wire.ranges import BASE, CHECKSUM, is_piece, path_of
from resharder.v1 import server_pb2

CONNECT_SECONDS = 3.0
_BLOCK_BYTES = 1 << 20
_SILENT_SECONDS = 20.0  # without a byte, until a connection is replaced
_REASON_BYTES, _HEAD_BYTES = 4096, 16 << 10
_REASON = re.compile(r"([A-Z][A-Z_]+): ")
_LONGEST_PAUSE = 5.0  # seconds until a port that asked for a pause is asked again
_BUSY_SECONDS = 0.05  # until a busy one is


class PartRefused(Exception):
    """A data port that answers, and does not send the part.

    `status` is that of the answer, 0 for one of another kind; `reason` is the daemon's, or empty.
    """

    def __init__(self, message: str, status: int = 0, reason: str = "") -> None:
        super().__init__(message)
        self.status, self.reason = status, reason


class PortBusy(PartRefused):
    """A data port that answers as many requests as it may. The connection can be used again."""


class NotConnected(OSError):
    """A data port to which no connection can be opened."""


class WrongBytes(Exception):
    """Received bytes that differ from their checksum."""


class Cut(Exception):
    """A connection that ended before its response was complete."""


class AskLater(Cut):
    """A data port that has no connection left, or does not have the part yet, and says that it will: ask after `seconds`."""

    def __init__(self, message: str, seconds: float) -> None:
        super().__init__(message)
        self.seconds = seconds


BROKEN = (OSError, http.client.HTTPException, Cut)
"""Errors after which the same part may be requested again over a new connection."""


@dataclass(frozen=True)
class PartRequest:
    """Bytes `start` to `end`, exclusive, of a file of `size` bytes of the version with this fingerprint; any one, if empty.

    `checksum` is that of a whole piece, if the reader has it from elsewhere; None: that of the response is used.
    """

    version: str
    fingerprint: str
    file: str
    size: int
    start: int
    end: int
    checksum: int | None = None


@dataclass(frozen=True)
class BoxesRequest:
    """Boxes of the version with this fingerprint; `sizes` has the bytes of data of each of their chunks."""

    version: str
    fingerprint: str
    request: server_pb2.BoxesRequest
    sizes: Sequence[int]


@dataclass(frozen=True)
class DataAddress:
    """Address of a data port, and how to connect: TLS settings and headers, both read anew for each use."""

    host: str
    port: int
    tls_context: Callable[[], ssl.SSLContext] | None = None
    server_name: str = ""
    """Name in the port's certificate, if it differs from the host."""
    headers: Callable[[], Mapping[str, str]] = field(default=dict)
    silent_seconds: float = _SILENT_SECONDS
    proxy: str = ""
    """`http://host:port` of an HTTP proxy through which the port is reached; empty: directly."""


class RangeConnection:
    """One connection to a data port, opened when needed and again after `close`."""

    def __init__(self, address: DataAddress) -> None:
        self.address = address
        self._http: http.client.HTTPConnection | None = None

    def close(self) -> None:
        """Close the connection, if it is open."""
        if self._http is not None:
            self._http.close()
            self._http = None

    def blocks(self, part: PartRequest, target: Array) -> Iterator[int]:
        """Write a part to `target`, and yield the size of each block. The connection must be closed after an error.

        Raises:
            PartRefused: The port does not send the part.
            WrongBytes: The bytes differ from the piece's checksum.
            OSError, http.client.HTTPException, Cut: `BROKEN`, the connection.
        """
        return self._received(self._request(part), part, target)

    def delta(self, part: PartRequest, base: str, target: Array) -> tuple[bytes | None, bool]:
        """Ask for a piece as a delta of `base`, as by `base_header`. It may come whole, and is then written to `target`.

        Returns:
            The delta, or None if the piece has come whole; whether the port has tried to make one.

        Raises as `blocks` does.
        """
        response = self._request(part, {BASE: base})
        if response.status == HTTPStatus.IM_USED:
            return response.read(), True
        for _ in self._received(response, part, target):
            pass
        return None, response.getheader(BASE) is not None

    def _received(self, response: http.client.HTTPResponse, part: PartRequest, target: Array) -> Iterator[int]:
        given, state, at = response.getheader(CHECKSUM, ""), xxhash.xxh3_64(), 0
        expected = given if part.checksum is None else f"{part.checksum:016x}"
        map_pages(byte_bounds(target), write=True)
        while at < part.end - part.start:
            block = target[at : at + _BLOCK_BYTES].data
            size = _read(response, block)
            if expected:
                state.update(block[:size])
            at += size
            yield size
        response.read()  # the end of the response, so that the connection can be used again
        if is_piece(part.start, part.end, part.size) and expected != f"{state.intdigest():016x}":
            raise WrongBytes(
                f"{part.version}, {part.file}: expected checksum {expected or 'of a piece'} of bytes {part.start} to {part.end}, "
                f"got {state.intdigest():016x}"
            )

    def chunks(self, boxes: BoxesRequest, memory: Callable[[int], memoryview]) -> Iterator[Chunk]:
        """Read boxes, and yield their chunks, each with the checksum of its data.

        Args:
            boxes: The boxes.
            memory: As in `read_chunks`.

        Raises as `blocks` does.
        """
        headers = {BOXES: boxes_header(boxes.request), "If-Match": f'"{boxes.fingerprint}"'}
        response = self._get(chunks_path(boxes.version), headers, HTTPStatus.OK)
        size = body_size(boxes.sizes)
        if response.length != size:
            raise PartRefused(f"{self._at}: expected chunks of {size} bytes in all, got {response.length}")

        def fill(target: memoryview) -> None:
            at = 0
            while at < len(target):
                at += _read(response, target[at:])

        expected = iter(enumerate(boxes.sizes))
        try:
            for header, data in read_chunks(fill, size, max(boxes.sizes), memory):
                if (header.index, len(data)) != (found := next(expected, None)):
                    raise PartRefused(f"{self._at}: expected chunk and bytes {found}, got {(header.index, len(data))}")
                if header.checksum != (computed := xxhash.xxh3_64_intdigest(data)):
                    raise WrongBytes(
                        f"{boxes.version}: expected checksum {header.checksum:016x} of chunk {header.index}, got {computed:016x}"
                    )
                yield header, data
        except ValueError as error:
            raise WrongBytes(f"{boxes.version}: {error}") from error
        response.read()

    def read_all(
        self,
        rest: Callable[[], Iterable[object]],
        patience: float,
        longest_pause: float = 2.0,
        ends: Callable[[Exception], bool] = lambda error: isinstance(error, PartRefused),
    ) -> None:
        """Read what is left, again after an error that another attempt may end.

        A port that is busy, or says that it has the rest later, makes progress elsewhere, which counts.

        Args:
            rest: Function that reads what is left now, and yields after each progress.
            patience: Seconds without progress.
            longest_pause: Bound on the seconds between two attempts.
            ends: Returns whether an error of `BROKEN` or PartRefused is raised at once.

        Raises as `blocks` does: `BROKEN` once the patience is used up, WrongBytes for the second time.
        """
        backoff, wrong = Backoff(patience, longest=longest_pause), 0
        while True:
            progress = False
            try:
                for _ in rest():
                    progress = True
            except (AskLater, PortBusy) as error:
                backoff = Backoff(patience, longest=longest_pause)
                time.sleep(error.seconds if isinstance(error, AskLater) else _BUSY_SECONDS)
            except (*BROKEN, PartRefused) as error:
                self.close()
                backoff = Backoff(patience, longest=longest_pause) if progress else backoff
                if ends(error) or not backoff.wait():
                    raise
            except WrongBytes:
                self.close()
                wrong += 1
                if wrong > 1:
                    raise
            else:
                return

    def put(self, path: str, size: int, body: Iterable[bytes | memoryview]) -> None:
        """Send a body of `size` bytes, and return when the port has received all of it.

        Raises as `blocks` does.
        """
        connection = self._open()
        connection.request("PUT", path, body=body, headers={"Content-Length": str(size), **self.address.headers()})
        response = connection.getresponse()
        if response.status != HTTPStatus.NO_CONTENT:
            raise self._refusal(response)
        response.read()

    def _request(self, part: PartRequest, further: Mapping[str, str] = MappingProxyType({})) -> http.client.HTTPResponse:
        """Request a part and return the checked head of its response."""
        headers = {
            "Range": f"bytes={part.start}-{part.end - 1}",
            "If-Match": f'"{part.fingerprint}"' if part.fingerprint else "*",
            **further,
        }
        statuses = [HTTPStatus.PARTIAL_CONTENT, *([HTTPStatus.IM_USED] if BASE in further else [])]
        response = self._get(path_of(part.version, part.file), headers, *statuses)
        expected, size = f"bytes {part.start}-{part.end - 1}/{part.size}", part.end - part.start
        fits = 0 < (response.length or 0) < size if response.status == HTTPStatus.IM_USED else response.length == size
        if response.getheader("Content-Range") != expected or not fits:
            raise PartRefused(
                f"{self._at}: expected {expected}, got {response.getheader('Content-Range')}, {response.length} bytes"
            )
        return response

    def _get(self, path: str, headers: Mapping[str, str], *statuses: HTTPStatus) -> http.client.HTTPResponse:
        """Send a request and return its response, which has one of these statuses. Raises as `blocks` does."""
        connection = self._open()
        connection.request("GET", path, headers={**headers, **self.address.headers()})
        response = connection.getresponse()
        if response.status not in statuses:
            raise self._refusal(response)
        return response

    def _open(self) -> http.client.HTTPConnection:
        if self._http is None or self._http.sock is None:  # none yet, or the port has closed it after an answer
            self._http = _connect(self.address)
        return self._http

    @property
    def _at(self) -> str:
        return f"{self.address.host}:{self.address.port}"

    def _refusal(self, response: http.client.HTTPResponse) -> Exception:
        """Return the error of a response that is not the expected one."""
        reason = response.read(_REASON_BYTES).decode(errors="replace").strip()
        if not response.isclosed():
            self.close()
        text = f"{self._at} answered {response.status}: {reason}"
        if response.status == HTTPStatus.SERVICE_UNAVAILABLE:
            later = response.getheader("Retry-After", "")
            return AskLater(text, min(int(later), _LONGEST_PAUSE)) if later.isdecimal() else Cut(text)
        refused = PortBusy if response.status == HTTPStatus.TOO_MANY_REQUESTS else PartRefused
        named = _REASON.match(reason)
        return refused(text, response.status, named[1] if named else "")


def _read(response: http.client.HTTPResponse, target: memoryview) -> int:
    """Read the next bytes of a response, and return their number. Raises Cut at its end."""
    if not (size := response.readinto(target)):
        raise Cut(f"the connection ended {response.length} bytes before the end of a response")
    return size


def _connect(address: DataAddress) -> http.client.HTTPConnection:
    """Open a connection. Raises NotConnected from an OSError (ssl.SSLError)."""
    connection = http.client.HTTPConnection(address.host, address.port, timeout=CONNECT_SECONDS)
    connection.auto_open = 0  # never again without TLS
    try:
        opened = _tunnel(address) if address.proxy else socket.create_connection((address.host, address.port), CONNECT_SECONDS)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if address.tls_context is not None:
            opened = address.tls_context().wrap_socket(opened, server_hostname=address.server_name or address.host)
    except OSError as error:
        raise NotConnected(str(error) or type(error).__name__) from error
    opened.settimeout(address.silent_seconds)
    connection.sock = opened
    return connection


def _tunnel(address: DataAddress) -> socket.socket:
    """Open a connection through a proxy, by CONNECT. Raises OSError."""
    proxy = urlsplit(address.proxy)
    opened = socket.create_connection((proxy.hostname or "", proxy.port or 0), CONNECT_SECONDS)
    try:
        target = f"[{address.host}]:{address.port}" if ":" in address.host else f"{address.host}:{address.port}"
        head = [f"CONNECT {target} HTTP/1.1", f"Host: {target}"]
        if proxy.username is not None:
            credentials = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
            head.append(f"Proxy-Authorization: Basic {base64.b64encode(credentials.encode()).decode()}")
        opened.sendall("\r\n".join([*head, "", ""]).encode())
        answer = b""
        while not answer.endswith(b"\r\n\r\n"):  # byte by byte: what follows is the port's
            found = opened.recv(1)
            if not found or len(answer) > _HEAD_BYTES:
                raise OSError(f"the proxy {proxy.hostname}:{proxy.port} ({PROXY}) sent no answer to CONNECT")
            answer += found
        status = answer.split(b" ", 2)[1:2]
        if status != [b"200"]:
            raise OSError(f"the proxy {proxy.hostname}:{proxy.port} ({PROXY}) answered {b''.join(status).decode('latin-1')}")
    except BaseException:
        opened.close()
        raise
    return opened
