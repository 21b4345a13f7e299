"""One connection of the data port: HTTP/1.1 by h11, bodies by `sendfile`, on a thread of its own.

A connection pins the version that it reads until it reads another one or ends, so that a reader of many parts does not lose the
version between two of them. Without a request for `IDLE_SECONDS` it is closed.
"""

import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import h11
from resharder.converters.failpoints import failpoint
from resharder.converters.wire.chunk_body import BOXES, LENGTH, BoxesPart, body_size, parse_boxes, parse_chunks_path
from resharder.converters.wire.chunk_frame import frame_head
from resharder.converters.wire.pieces import PieceSpan
from resharder.converters.wire.ranges import BASE, CHECKSUM, ENGINE_PATH, PIECE_BYTES, FilePart, is_piece, parse_part
from resharder.server.data.checksums import PieceChecksums
from resharder.server.data.chunk_writes import Body, ChunkWrites, body_length, write_chunks
from resharder.server.data.deltas import DeltaEncoder
from resharder.server.data.versions import PinnedVersion, ServedVersions
from resharder.server.infra.addresses import names_address
from resharder.server.infra.checksums import checksum_of
from resharder.server.state.errors import (
    DaemonError,
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    PermissionDenied,
    ResourceExhausted,
    ResourceNotFound,
    Unauthenticated,
)

IDLE_SECONDS = 30.0  # from one response to the whole head of the next request, and for the handshake
RESPONSE_SECONDS = 120.0
MAX_HEAD_BYTES = 16 << 10
_SEND_BYTES = 4 << 20
_ENCRYPT_BYTES = 256 << 10  # stays in the core's cache between the file and the encryption
_STATUS = {
    Unauthenticated: HTTPStatus.UNAUTHORIZED,
    PermissionDenied: HTTPStatus.FORBIDDEN,
    ResourceNotFound: HTTPStatus.NOT_FOUND,
    ResourceExhausted: HTTPStatus.TOO_MANY_REQUESTS,
    FailedPrecondition: HTTPStatus.CONFLICT,
    InvalidArgument: HTTPStatus.BAD_REQUEST,
    DataLoss: HTTPStatus.UNPROCESSABLE_ENTITY,
}

ReadCheck = Callable[[Sequence[str], Mapping[str, Any] | None, str, str], AbstractContextManager[bool]]
"""Check of `Authorization` headers, the certificate, host and model of a read. The context counts it. Raises DaemonError.

Its value is whether the reader may read a version that nodes replicate before READY.
The certificate is `SSLSocket.getpeercert()`, and its bytes under the key `DER`.
"""
DER = "der"
RETRY = (("Retry-After", "1"),)
"""Headers of a refusal that ends by itself: the same request succeeds later."""


class _Refused(Exception):
    """A request that is answered with a status and a line of text."""

    def __init__(self, status: HTTPStatus, text: str, *headers: tuple[str, str]) -> None:
        super().__init__(text)
        self.status, self.headers = status, headers


@dataclass(frozen=True)
class DataReads:
    """Parts of the daemon or node that a connection needs."""

    versions: ServedVersions
    check: ReadCheck
    local_only: bool
    """Whether only a host that is an IP address or `localhost` is served, against DNS rebinding."""
    checksums: PieceChecksums = field(default_factory=PieceChecksums)
    clock: Callable[[], float] = time.monotonic
    sent: Callable[[int], object] = lambda size: None
    """Called with the bytes of each complete response."""
    places: threading.Semaphore | None = None
    """Responses at a time: a request without a place is refused with 429. None: no bound."""
    writes: ChunkWrites | None = None
    """Receiver of ranks' chunks; None: they are refused."""
    deltas: DeltaEncoder = field(default_factory=DeltaEncoder)
    engine: Callable[[], bytes] | None = None
    """Function that returns what the transfer engine tells others; None without one. Whoever may connect may read it."""


class DataConnection:
    """One accepted connection. `serve` runs on its thread; `close` may be called from any.

    `full`: the port has as many connections as it may. The connection is refused with its first request, and ended.
    """

    def __init__(self, connected: socket.socket, peer: str, reads: DataReads, *, full: bool = False) -> None:
        self._socket, self._peer, self._reads, self.full = connected, peer, reads, full
        self._http = _new_http()
        self._pinned: PinnedVersion | None = None
        self.idle_since: float | None = reads.clock()
        """Time since which no request is being answered; None while one is."""

    def close(self) -> None:
        """End the connection; its thread ends soon after."""
        with suppress(OSError):  # ended already
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)  # not TLS's own, which is not for another thread

    def serve(self) -> None:
        """Answer requests until either side ends the connection."""
        try:
            if isinstance(self._socket, ssl.SSLSocket):
                self._socket.settimeout(IDLE_SECONDS)
                self._socket.do_handshake()
            while (request := self._request()) is not None:
                self.idle_since = None
                if self.full:
                    text = "the data port has too many connections: try again later"
                    self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, text, [*RETRY, ("Connection", "close")])
                    break
                if not (self._receive(request) if request.method == b"PUT" else self._answer(request)):
                    break
                self.idle_since = self._reads.clock()
        except (OSError, h11.ProtocolError):
            pass  # the peer ended the connection, was silent, or does not use HTTP
        finally:
            self._unpin()
            self._socket.close()

    def _request(self) -> h11.Request | None:
        """Return the next request once it has arrived in full; None if the peer has ended the connection."""
        deadline, request = self._reads.clock() + IDLE_SECONDS, None
        while True:
            event = self._http.next_event()
            if event is h11.NEED_DATA:
                self._socket.settimeout(self._left(deadline))
                self._http.receive_data(self._socket.recv(MAX_HEAD_BYTES))
            elif isinstance(event, h11.Request):
                request = event
                if request.method == b"PUT":
                    return request  # its body is read past h11
            elif isinstance(event, h11.EndOfMessage):
                return request
            else:  # the end of the connection, or a body, which no request has
                return None

    def _left(self, deadline: float) -> float:
        left = deadline - self._reads.clock()
        if left <= 0:
            raise TimeoutError("the peer is too slow")
        return left

    def _answer(self, request: h11.Request) -> bool:
        """Answer a request, and return whether another one may follow."""
        headers = _headers(request)
        try:
            if self._reads.engine is not None and (request.method, request.target) == (b"GET", ENGINE_PATH.encode()):
                _check_host(self._reads, headers)
                self._send_whole(self._reads.engine())
            else:
                self._send_part(self._parsed(request, headers), headers)
        except _Refused as refused:
            self._refuse(refused.status, str(refused), refused.headers)
        except DaemonError as error:
            self._refuse(*_refusal_of(error))
        if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
            return False
        self._http.start_next_cycle()
        return True

    def _send_part(self, part: FilePart | BoxesPart, headers: Mapping[str, Sequence[str]]) -> None:
        reader = headers.get("authorization", []), _certificate(self._socket), self._peer
        with self._reads.check(*reader, part.model) as replicates, self._place():
            version, tag = self._wanted(part, headers, replicates)
            if isinstance(part, BoxesPart):
                return self._send_boxes(part, version, tag)
            self._send(part, version, tag, ", ".join(headers.get(BASE.lower(), [])))

    def _send_whole(self, content: bytes) -> None:
        with self._response(HTTPStatus.OK, len(content), []) as deadline:
            self._write(content, deadline)

    def _receive(self, request: h11.Request) -> bool:
        """Receive a rank's chunks, and return whether another request may follow. The body of a refused one is read too."""
        headers, deadline = _headers(request), self._reads.clock() + RESPONSE_SECONDS
        try:
            length = body_length(headers)
        except ValueError as error:
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, str(error))
            return False
        first = self._http.trailing_data[0]
        body = Body(self._socket, first, length, lambda: min(IDLE_SECONDS, self._left(deadline)))
        try:
            try:
                self._write_chunks(request, headers, body)
            finally:
                body.skip()
            for event in (h11.Response(status_code=HTTPStatus.NO_CONTENT, headers=[]), h11.EndOfMessage()):
                self._write(self._http.send(event), deadline)
        except _Refused as refused:
            self._refuse(refused.status, str(refused), refused.headers)
        except DaemonError as error:
            self._refuse(*_refusal_of(error))
        self._http = _new_http()  # h11 has not seen the body
        if len(first) > length:
            self._http.receive_data(first[length:])
        return True

    def _write_chunks(self, request: h11.Request, headers: Mapping[str, Sequence[str]], body: Body) -> None:
        _check_host(self._reads, headers)
        writes = self._reads.writes
        if writes is None:
            raise _Refused(HTTPStatus.METHOD_NOT_ALLOWED, "expected GET", ("Allow", "GET"))
        try:
            target = parse_chunks_path(request.target.decode("latin-1"))
        except ValueError as error:
            raise _Refused(HTTPStatus.BAD_REQUEST, str(error)) from None
        with writes.check(headers.get("authorization", []), _certificate(self._socket), self._peer, target.model):
            write_chunks(body, target, writes)

    def _parsed(self, request: h11.Request, headers: Mapping[str, Sequence[str]]) -> FilePart | BoxesPart:
        _check_host(self._reads, headers)
        if request.method != b"GET":
            raise _Refused(HTTPStatus.METHOD_NOT_ALLOWED, "expected GET or PUT", ("Allow", "GET, PUT"))
        path, boxes = request.target.decode("latin-1"), headers.get(BOXES.lower(), [])
        try:
            if boxes:
                return BoxesPart(*parse_chunks_path(path), parse_boxes(", ".join(boxes)))
            return parse_part(path, ", ".join(headers.get("range", [])))
        except ValueError as error:
            raise _Refused(HTTPStatus.BAD_REQUEST, str(error)) from None

    @contextmanager
    def _place(self) -> Iterator[None]:
        places = self._reads.places
        if places is not None and not places.acquire(blocking=False):
            raise _Refused(HTTPStatus.TOO_MANY_REQUESTS, "busy with other requests", *RETRY)
        try:
            yield
        finally:
            if places is not None:
                places.release()

    def _send(self, part: FilePart, version: PinnedVersion, tag: str, base: str) -> None:
        """Send a part of a file, as a delta of `base` if that is named, is here, and is worth it.

        Raises OSError if the peer does not take it in time, and then part of it may be sent.
        """
        descriptor, size = version.open(part.file)
        if part.end > size:
            text = f"expected a range within {size} bytes, got {part.start}-{part.end - 1}"
            raise _Refused(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, text, ("Content-Range", f"bytes */{size}"))
        answer = [("Content-Range", f"bytes {part.start}-{part.end - 1}/{size}"), ("ETag", tag)]
        spans = [PieceSpan(part.file, at, min(at + PIECE_BYTES, part.end)) for at in range(part.start, part.end, PIECE_BYTES)]
        with ExitStack() as stack:
            stack.enter_context(version.served.reading(spans[:1]))  # refused, if the bytes are not there, before the response
            if is_piece(part.start, part.end, size):
                key = (version.served.fingerprint, part.file, part.start)
                known = version.served.checksum_of
                checksum = self._reads.checksums.get(
                    key, lambda: known(spans[0]) if known is not None else checksum_of(descriptor, part.start, part.end)
                )
                answer.append((CHECKSUM, f"{checksum:016x}"))
                if base and (delta := self._delta(part, size, descriptor, base)) is not None:
                    answer.append((BASE, base))
                    if delta:
                        with self._response(HTTPStatus.IM_USED, len(delta), answer) as deadline:
                            return self._write(delta, deadline)
            with self._response(HTTPStatus.PARTIAL_CONTENT, part.end - part.start, answer) as deadline:
                self._send_span(descriptor, spans[0], deadline)
                stack.close()
                for span in spans[1:]:
                    self._send_later(version, descriptor, span, deadline)

    def _delta(self, part: FilePart, size: int, descriptor: int, base: str) -> bytes | None:
        """Return a piece of a file of `size` bytes as a delta; empty if that is not smaller, None if none can be made now."""
        span, deltas = PieceSpan(part.file, part.start, part.end), self._reads.deltas
        with deltas.base(self._reads.versions, part.model, base, span, size) as found:
            return deltas.encode(descriptor, found) if found is not None else None

    def _send_later(self, version: PinnedVersion, descriptor: int, span: PieceSpan, deadline: float) -> None:
        """Send a further span of a response that has begun. Raises OSError, also for bytes that are not there."""
        with ExitStack() as stack:
            try:
                stack.enter_context(version.served.reading([span]))
            except DaemonError as error:
                raise OSError(str(error)) from error
            self._send_span(descriptor, span, deadline)

    def _send_span(self, descriptor: int, span: PieceSpan, deadline: float) -> None:
        if isinstance(self._socket, ssl.SSLSocket):
            self._encrypt(descriptor, span.start, span.end, deadline)
        else:
            self._sendfile(descriptor, span.start, span.end, deadline)

    def _send_boxes(self, part: BoxesPart, version: PinnedVersion, tag: str) -> None:
        """Send boxes of a version as chunks. Raises OSError as `_send` does."""
        manifest = version.served.manifest
        if manifest is None:
            raise _Refused(HTTPStatus.NOT_FOUND, "a node sends no boxes: ask for a range of a file")
        boxes = version.boxes(part.request, manifest)
        with (
            version.packed(boxes) as chunks,
            self._response(HTTPStatus.OK, body_size(boxes.sizes()), [("ETag", tag)]) as deadline,
        ):
            for header, data in chunks:
                head = frame_head(header, len(data))
                self._write(LENGTH.pack(len(head) + len(data)) + head, deadline)
                self._write(data, deadline)

    def _wanted(
        self, part: FilePart | BoxesPart, headers: Mapping[str, Sequence[str]], replicates: bool
    ) -> tuple[PinnedVersion, str]:
        """Pin the version that a request names, and return it with its tag."""
        version = self._pin(part.model, part.number, replicates)
        tag = f'"{version.served.fingerprint}"'
        if any(wanted not in ("*", tag) for wanted in headers.get("if-match", [])):
            raise _Refused(HTTPStatus.PRECONDITION_FAILED, f"the version's fingerprint is {tag}")
        return version, tag

    @contextmanager
    def _response(self, status: HTTPStatus, size: int, headers: Sequence[tuple[str, str]]) -> Iterator[float]:
        """Send the head of a response, and yield the deadline for its body of `size` bytes, which is sent past h11."""
        failpoint("data.send")
        deadline = self._reads.clock() + RESPONSE_SECONDS
        fields = [("Content-Type", "application/octet-stream"), ("Content-Length", str(size)), *headers]
        self._write(self._http.send(h11.Response(status_code=status, headers=fields)), deadline)
        self._http.send_with_data_passthrough(h11.Data(data=_Body(size)))  # type: ignore[arg-type]
        yield deadline
        self._http.send(h11.EndOfMessage())
        self._reads.sent(size)

    def _sendfile(self, descriptor: int, at: int, end: int, deadline: float) -> None:
        with open(descriptor, "rb", buffering=0, closefd=False) as file:
            while at < end:
                self._socket.settimeout(self._left(deadline))
                sent = self._socket.sendfile(file, at, min(_SEND_BYTES, end - at))
                if not sent:
                    raise OSError(f"the file ends at {at}")
                at += sent

    def _encrypt(self, descriptor: int, at: int, end: int, deadline: float) -> None:
        block = memoryview(bytearray(_ENCRYPT_BYTES))
        while at < end:
            found = os.preadv(descriptor, [block[: end - at]], at)
            if not found:
                raise OSError(f"the file ends at {at}")
            self._write(block[:found], deadline)
            at += found

    def _write(self, data: bytes | memoryview | None, deadline: float) -> None:
        self._socket.settimeout(self._left(deadline))
        self._socket.sendall(data or b"")

    def _refuse(self, status: HTTPStatus, text: str, headers: Sequence[tuple[str, str]] = ()) -> None:
        body, deadline = f"{text}\n".encode(), self._reads.clock() + IDLE_SECONDS
        fields = [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(body))), *headers]
        for event in (h11.Response(status_code=status, headers=fields), h11.Data(data=body), h11.EndOfMessage()):
            self._write(self._http.send(event), deadline)

    def _pin(self, model: str, number: int, replicates: bool) -> PinnedVersion:
        if self._pinned is None or self._pinned.key != (model, number, replicates):
            self._unpin()
            self._pinned = PinnedVersion(self._reads.versions, model, number, replicates)
        return self._pinned

    def _unpin(self) -> None:
        if self._pinned is not None:
            self._pinned.close()
            self._pinned = None


def _certificate(connected: socket.socket) -> Mapping[str, Any] | None:
    if not isinstance(connected, ssl.SSLSocket):
        return None
    found: dict[str, Any] = dict(connected.getpeercert() or {})
    return found | {DER: connected.getpeercert(binary_form=True)} if found else None


def _check_host(reads: DataReads, headers: Mapping[str, Sequence[str]]) -> None:
    if reads.local_only and not names_address(headers.get("host", [""])[0]):
        raise _Refused(HTTPStatus.MISDIRECTED_REQUEST, "expected an IP address or localhost as host")


def _refusal_of(error: DaemonError) -> tuple[HTTPStatus, str, Sequence[tuple[str, str]]]:
    later = isinstance(error, ResourceExhausted) or error.reason == "PIECES_ELSEWHERE"
    status = _STATUS.get(type(error), HTTPStatus.SERVICE_UNAVAILABLE)
    return status, f"{error.reason}: {error}", RETRY if later else ()


def _new_http() -> h11.Connection:
    return h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)


def _headers(request: h11.Request) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, value in request.headers:
        found.setdefault(name.decode("ascii"), []).append(value.decode("latin-1"))
    return found


class _Body:
    """Body of a known size, which is sent past h11."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size
