"""A small HTTP server: GET and HEAD, one answer a connection, on an event loop of its own thread.

Nobody can hold it: a connection has 10 s from its first byte to its last, a request 16 KiB, and where more than 128 are open the
oldest is ended. What answers take to make runs on few threads beside the loop.
"""

import asyncio
import io
import ssl
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from http.client import HTTPException, parse_headers
from typing import Any

import structlog

_SECONDS = 10.0
_CONNECTIONS = 128
_REQUEST_BYTES = 16 << 10
_THREADS = 4
_log = structlog.get_logger("resharder.web")


@dataclass(frozen=True)
class Request:
    """`certificate`: the peer's verified one, as `SSLSocket.getpeercert` gives it."""

    path: str
    headers: Mapping[str, list[str]] = field(default_factory=dict)  # names in lower case
    certificate: Mapping[str, Any] | None = None

    def header(self, name: str) -> str:
        return self.headers.get(name, [""])[0]


@dataclass(frozen=True)
class Answer:
    body: bytes
    kind: str = "text/plain; charset=utf-8"
    status: HTTPStatus = HTTPStatus.OK
    headers: tuple[tuple[str, str], ...] = ()


class BadRequest(Exception):
    def __init__(self, status: HTTPStatus) -> None:
        super().__init__(status.phrase)
        self.status = status


class HttpServer:
    """Listens once it is made. Raises OSError where the address cannot be had."""

    def __init__(self, host: str, port: int, answer: Callable[[Request], Answer], tls: ssl.SSLContext | None = None) -> None:
        self._answer = answer
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="web")
        self._open: dict[asyncio.Task[None], asyncio.WriteTransport] = {}  # oldest first
        self._loop = asyncio.new_event_loop()
        try:
            made = asyncio.start_server(
                self._connected,
                host,
                port,
                limit=_REQUEST_BYTES,
                ssl=tls,
                ssl_handshake_timeout=_SECONDS if tls else None,
                ssl_shutdown_timeout=1.0 if tls else None,
            )
            self._server = self._loop.run_until_complete(made)
        except BaseException:
            self._loop.close()
            raise
        self.port: int = self._server.sockets[0].getsockname()[1]
        self._thread = threading.Thread(target=self._loop.run_forever, name="web", daemon=True)
        self._thread.start()

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _end(self) -> None:
        self._server.close()
        for task, transport in self._open.items():
            transport.abort()
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._open) >= _CONNECTIONS:
            next(iter(self._open.values())).abort()
        self._open[task] = writer.transport
        try:
            async with asyncio.timeout(_SECONDS):
                await self._serve(reader, writer)
        except (TimeoutError, OSError, asyncio.IncompleteReadError):
            writer.transport.abort()
        finally:
            del self._open[task]
            with suppress(OSError, RuntimeError):
                writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        method = "GET"
        try:
            method, request = await _read(reader, writer.get_extra_info("peercert"))
        except BadRequest as error:
            answer = Answer(f"{error}\n".encode(), status=error.status)
        else:
            answer = await self._loop.run_in_executor(self._threads, self._answered, request)
        writer.write(_head(answer) + (b"" if method == "HEAD" else answer.body))
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    def _answered(self, request: Request) -> Answer:
        try:
            return self._answer(request)
        except Exception as error:
            _log.error("request_failed", exc_info=error)
            return Answer(b"the daemon failed; its log says why\n", status=HTTPStatus.INTERNAL_SERVER_ERROR)


async def _read(reader: asyncio.StreamReader, certificate: Mapping[str, Any] | None) -> tuple[str, Request]:
    """Raises BadRequest."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        raise BadRequest(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE) from None
    first, _, rest = head.partition(b"\r\n")
    parts = first.decode("latin-1").split(" ")
    if len(parts) != 3 or not parts[2].startswith("HTTP/1.") or not parts[1].startswith("/"):
        raise BadRequest(HTTPStatus.BAD_REQUEST)
    if parts[0] not in ("GET", "HEAD"):
        raise BadRequest(HTTPStatus.METHOD_NOT_ALLOWED)
    try:
        message = parse_headers(io.BytesIO(rest))
    except HTTPException:
        raise BadRequest(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE) from None
    headers: dict[str, list[str]] = {}
    for name, value in message.items():
        headers.setdefault(name.lower(), []).append(value)
    return parts[0], Request(parts[1].partition("?")[0], headers, certificate)


def _head(answer: Answer) -> bytes:
    lines = [
        f"HTTP/1.1 {answer.status.value} {answer.status.phrase}",
        f"Content-Type: {answer.kind}",
        f"Content-Length: {len(answer.body)}",
        "Connection: close",
        "Cache-Control: no-store",
        "X-Content-Type-Options: nosniff",
        *(f"{name}: {value}" for name, value in answer.headers),
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
