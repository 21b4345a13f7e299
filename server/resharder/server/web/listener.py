"""The HTTP port: an ASGI application on uvicorn's HTTP/1.1 protocol, on an event loop in a thread of its own.

Bounds that uvicorn does not have: a connection lasts at most `CONNECTION_SECONDS`, from its first byte to its last, and of
`MAX_CONNECTIONS` open ones the oldest is aborted in favour of a new one. A request head has at most `MAX_HEAD_BYTES`.
"""

import asyncio
import socket
import ssl
import threading
from functools import partial
from typing import Any

import anyio.to_thread
import uvicorn
from resharder.server.infra.descriptors import log_loop_error
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

CONNECTION_SECONDS = 10.0
MAX_CONNECTIONS = 128
MAX_HEAD_BYTES = 16 << 10
_THREADS = 4  # for synchronous endpoints


class _BoundedProtocol(H11Protocol):
    """One connection. `request.state.certificate` is the peer's verified certificate, as `SSLSocket.getpeercert` returns it."""

    def __init__(self, *args: Any, opened: dict["_BoundedProtocol", asyncio.Transport], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._opened = opened
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self._opened) >= MAX_CONNECTIONS:
            next(iter(self._opened.values())).abort()
        self._opened[self] = transport
        self._deadline = self.loop.call_later(CONNECTION_SECONDS, transport.abort)
        self.app_state = {**self.app_state, "certificate": transport.get_extra_info("peercert")}
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._opened.pop(self, None)
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)


class Listener:
    """HTTP server that listens once constructed. Raises OSError if the address cannot be bound."""

    def __init__(self, app: ASGIApp, host: str, port: int, tls: ssl.SSLContext | None = None) -> None:
        self.opened: dict[_BoundedProtocol, asyncio.Transport] = {}  # oldest first
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(log_loop_error)
        try:
            self._server = self._loop.run_until_complete(self._listen(app, host, port, tls))
        except BaseException:
            self._loop.close()
            raise
        self.port: int = self._server.sockets[0].getsockname()[1]
        self._thread = threading.Thread(target=self._loop.run_forever, name="web", daemon=True)
        self._thread.start()

    async def _listen(self, app: ASGIApp, host: str, port: int, tls: ssl.SSLContext | None) -> asyncio.Server:
        anyio.to_thread.current_default_thread_limiter().total_tokens = _THREADS
        config = uvicorn.Config(
            app,
            http=_BoundedProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",
            access_log=False,
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        )
        config.load()
        return await self._loop.create_server(
            partial(_BoundedProtocol, config, ServerState(), {}, opened=self.opened),
            host,
            port,
            reuse_address=True,
            family=socket.AF_UNSPEC,
            ssl=tls,
            ssl_handshake_timeout=CONNECTION_SECONDS if tls else None,
            ssl_shutdown_timeout=1.0 if tls else None,
        )

    def close(self) -> None:
        """Abort open connections, stop listening, and wait for the thread."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        self._server.close()
        for transport in list(self.opened.values()):
            transport.abort()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
