"""A TCP proxy that survives the death of its target, and that cuts, slows and silences connections.

One event loop in one thread serves all links of a run: `Proxies().link("left", "127.0.0.1:7677").endpoint`.
"""

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

_CHUNK = 1 << 14
_HANDSHAKE = b"\x16"  # the type of the first record of TLS
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER of zero seconds: closing sends RST


@dataclass
class Link:
    """One listening port in front of a target.

    Attributes:
        endpoint: Address to connect to, `host:port`.
        delay: Seconds before each chunk of at most 16 KiB is forwarded.
        accepted: Connections so far.
        forwarded: Bytes so far, in both directions.
        plain: Connections so far whose first byte was not that of a TLS handshake.
    """

    name: str
    target: tuple[str, int]
    endpoint: str = ""
    delay: float = 0.0
    accepted: int = 0
    forwarded: int = 0
    plain: int = 0
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)
    _flowing: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def connections(self) -> int:
        """Open connections, counting both sides of each."""
        return len(self._writers)

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one connection until one side ends. While the link is silent, nothing is forwarded, not even an end."""
        self.accepted += 1
        self._writers.add(writer)
        try:
            await self._flowing.wait()
            try:
                from_target, to_target = await asyncio.open_connection(*self.target)
            except OSError:
                return _reset(writer)
            self._writers.add(to_target)
            there, back = self._pump(reader, to_target, first=True), self._pump(from_target, writer)
            pumps = [asyncio.create_task(there), asyncio.create_task(back)]
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            for pump in pumps:
                pump.cancel()
            self._close(to_target)
        except asyncio.CancelledError:
            return  # the proxy is closed
        finally:
            self._close(writer)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, first: bool = False) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(_CHUNK):
                self.plain += first and not data.startswith(_HANDSHAKE)
                first = False
                if self.delay:
                    await asyncio.sleep(self.delay)
                await self._flowing.wait()
                sink.write(data)
                await sink.drain()
                self.forwarded += len(data)
            await self._flowing.wait()

    def cut(self) -> None:
        """Reset every open connection."""
        for writer in list(self._writers):
            _reset(writer)
            self._writers.discard(writer)

    def silence(self, silent: bool) -> None:
        """Accept and keep connections, but forward nothing while `silent`."""
        if silent:
            self._flowing.clear()
        else:
            self._flowing.set()

    def _close(self, writer: asyncio.StreamWriter) -> None:
        self._writers.discard(writer)
        with contextlib.suppress(OSError, RuntimeError):
            writer.close()


def _reset(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError, RuntimeError):
        connection = writer.get_extra_info("socket")
        if connection is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        writer.transport.abort()


class Proxies:
    """All links of a run, on an event loop of their own. Calls are thread-safe."""

    def __init__(self) -> None:
        self.links: dict[str, Link] = {}
        self._loop = asyncio.new_event_loop()
        self._servers: list[asyncio.Server] = []
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()

    def link(self, name: str, target: str) -> Link:
        """Open a link to `target`, which need not run."""
        host, _, port = target.rpartition(":")
        link = Link(name, (host, int(port)))
        self._call(self._open(link))
        self.links[name] = link
        return link

    def cut(self, name: str) -> None:
        """Reset all connections of a link."""
        self._loop.call_soon_threadsafe(self.links[name].cut)

    def silence(self, name: str, silent: bool = True) -> None:
        """Stop forwarding on a link, or continue."""
        self._loop.call_soon_threadsafe(self.links[name].silence, silent)

    def slow(self, name: str, delay: float) -> None:
        """Delay each chunk on a link by `delay` seconds; 0 for none."""
        self.links[name].delay = delay

    def heal(self) -> None:
        """End every fault of every link."""
        for name in self.links:
            self.slow(name, 0.0)
            self.silence(name, False)

    def close(self) -> None:
        """Close all ports and connections."""
        self._call(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()

    async def _open(self, link: Link) -> None:
        link.silence(False)
        server = await asyncio.start_server(link.accept, "127.0.0.1", 0)
        link.endpoint = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._servers.append(server)

    async def _end(self) -> None:
        for server in self._servers:
            server.close()
        for link in self.links.values():
            link.cut()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _call(self, act: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(act, self._loop).result(30)
