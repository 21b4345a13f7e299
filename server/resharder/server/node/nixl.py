"""NIXL behind `MemoryEngine`: one-sided reads by UCX, over RDMA or TCP. Needs the extra `nixl`.

UCX listens on every interface, encrypts nothing, and lets every process that reaches it read and write registered memory.

A node has two agents: one has the memory that others read, for as long as the node runs, and one reads theirs. NIXL has no call
that ends a read for certain; what does is the end of the agent. So a read that does not end takes the second agent with it, and
all that it reads at the time: nothing is written into a piece once its read has failed.

Another node's keys change with what it has registered. They are fetched from its data port, and again when a read needs memory
that is not among them.
"""

import http.client
import os
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from resharder.converters.extras import install_line
from resharder.converters.storage.pages import Span
from resharder.converters.wire import nixl
from resharder.converters.wire.ranges import ENGINE_PATH
from resharder.server.holding.memory import EngineFailed
from resharder.server.infra.addresses import parse_listen

_KIND = "nixl"
_KEYS_SECONDS = 3.0
_READ_SECONDS = 10.0
_QUICK, _SLOW, _QUICK_POLLS = 0.0005, 0.005, 100
_MOST_KEYS = 64 << 20


class NixlEngine:
    """NIXL in this process. `session` is `nixl/HOST:PORT/NAME`: the node's data port, and the name of the agent with its memory.

    Args:
        read_seconds: Bound on one read.

    Raises:
        EngineFailed: The package is missing, UCX does not start, or it would take TCP without being told to.
    """

    def __init__(self, read_seconds: float = _READ_SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        if "UCX_TLS" not in os.environ and not nixl.has_rdma():
            raise EngineFailed(
                "this host has no RDMA device, and over TCP UCX ends a node that answers a reader which is gone, as "
                "after it was stopped: leave out this option, or set UCX_TLS=tcp to try it"
            )
        self._name, self._read_seconds, self._clock = f"resharder-{secrets.token_hex(8)}", read_seconds, clock
        self._memory = _Agent(self._name)
        self._lock, self._closed = threading.Lock(), False
        self._spans: dict[Span, None] = {}
        self._reader: _Reader | None = None
        self.session = ""

    def at(self, address: str) -> str:
        """Set the address of the data port from which other nodes fetch this one's keys, and return the session."""
        self.session = f"{_KIND}/{address}/{self._name}"
        return self.session

    def keys(self) -> bytes:
        """Return what other nodes need to read the registered memory; nothing after `close`."""
        try:
            return self._memory.keys()
        except EngineFailed:
            return b""

    def register(self, span: Span) -> None:
        """Register memory, which RDMA pins. Raises EngineFailed."""
        with self._lock:
            self._memory.register(span)
            self._spans[span] = None
            if self._reader is not None:
                self._reader.agent.register(span)

    def unregister(self, span: Span) -> None:
        """End the registration of memory."""
        with self._lock:
            self._spans.pop(span, None)
            for agent in (self._memory, *([self._reader.agent] if self._reader is not None else [])):
                agent.unregister(span)

    def read(self, session: str, address: int, target: Span) -> None:
        """Read a peer's memory. Raises EngineFailed, also for a session of another kind."""
        kind, _, rest = session.partition("/")
        place, _, name = rest.partition("/")
        if kind != _KIND or not name:
            raise EngineFailed(f"expected a session of {_KIND}, got {session}")
        reader = self._reading()
        try:
            reader.read(Peer(place, name), address, target, self._read_seconds)
        except _Stalled as error:
            with self._lock:
                if self._reader is reader:
                    self._reader = None
            reader.agent.close()  # from here on nothing is written to the target
            raise EngineFailed(f"{session}: {error}") from None
        except EngineFailed as error:
            raise EngineFailed(f"{session}: {error}") from None

    def close(self) -> None:
        """End reads in flight with EngineFailed."""
        with self._lock:
            self._closed, reader, self._reader = True, self._reader, None
        if reader is not None:
            reader.agent.close()
        self._memory.close()

    def _reading(self) -> "_Reader":
        with self._lock:
            if self._closed:
                raise EngineFailed("this node ends")
            if self._reader is None:
                reader = _Reader(_Agent(f"{self._name}-{secrets.token_hex(4)}"), self._clock)
                for span in self._spans:
                    reader.agent.register(span)
                self._reader = reader
            return self._reader


class Peer(NamedTuple):
    """Another node: its data port, and the name of the agent with its memory."""

    address: str
    name: str


class _Stalled(Exception):
    """A read that has not ended, and may still write."""


class _Reader:
    """Reads of other nodes' memory by one agent, for many threads at once."""

    def __init__(self, agent: "_Agent", clock: Callable[[], float]) -> None:
        self.agent, self._clock = agent, clock
        self._lock = threading.Lock()
        self._fetching: dict[str, threading.Lock] = {}  # by the peer's name

    def read(self, peer: Peer, address: int, target: Span, seconds: float) -> None:
        """Read memory. Raises EngineFailed, and _Stalled if it has not ended after `seconds`."""
        size = target[1] - target[0]
        if not self.agent.knows(peer.name, address, size):
            with self._lock:
                fetching = self._fetching.setdefault(peer.name, threading.Lock())
            with fetching:
                if not self.agent.knows(peer.name, address, size):
                    self.agent.add(_fetched_keys(peer.address), peer.name)
        read, deadline, polls = self.agent.begin(peer.name, address, target), self._clock() + seconds, 0
        try:
            while not self.agent.has_ended(read):
                polls += 1
                if self._clock() > deadline:
                    raise _Stalled(f"the read has not ended after {seconds:g} s")
                time.sleep(_QUICK if polls < _QUICK_POLLS else _SLOW)
        except EngineFailed:
            self.agent.forget(peer.name)  # its process may be another one by now
            raise
        self.agent.release(read)


def _fetched_keys(address: str) -> bytes:
    """Fetch a node's keys from its data port. Raises EngineFailed."""
    connection = http.client.HTTPConnection(*parse_listen(address), timeout=_KEYS_SECONDS)
    try:
        connection.request("GET", ENGINE_PATH)
        answer = connection.getresponse()
        content = answer.read(_MOST_KEYS)
        if answer.status != http.client.OK:
            raise EngineFailed(f"its keys are refused: {answer.status} {answer.reason}")
        return content
    except (OSError, http.client.HTTPException) as error:
        raise EngineFailed(f"its keys cannot be fetched: {error or type(error).__name__}") from error
    finally:
        connection.close()


class _Agent:
    """Agent with UCX. Any thread may call its methods; all raise EngineFailed, also after `close`."""

    def __init__(self, name: str) -> None:
        self._lock = threading.RLock()
        try:
            self._bindings = nixl.bindings()
        except (ImportError, OSError, RuntimeError) as error:
            raise EngineFailed(f"NIXL cannot be imported: {error}; {install_line('nixl')}") from error
        self._registered: dict[Span, Any] = {}
        self._agent, self._backend = self._call(lambda: nixl.started(name), started=False)

    def keys(self) -> bytes:
        return bytes(self._call(lambda: self._agent.getLocalMD()))

    def register(self, span: Span) -> None:
        def register() -> None:
            rows = self._bindings.nixlRegDList(self._bindings.DRAM_SEG, _row(span[0], span[1] - span[0]))
            self._agent.registerMem(rows, [self._backend])
            self._registered[span] = rows

        self._call(register)

    def unregister(self, span: Span) -> None:
        """End the registration of memory, if it is registered."""

        def unregister() -> None:
            if (rows := self._registered.pop(span, None)) is not None:
                self._agent.deregisterMem(rows, [self._backend])

        with suppress(EngineFailed):
            self._call(unregister)

    def knows(self, name: str, address: int, size: int) -> bool:
        """Return whether there are keys for memory of another agent."""
        return bool(self._call(lambda: self._agent.checkRemoteMD(name, self._rows(address, size)) == self._bindings.NIXL_SUCCESS))

    def add(self, keys: bytes, name: str) -> None:
        """Take the keys of another agent, beside those that are known."""
        found = self._call(lambda: self._agent.loadRemoteMD(keys))
        if found != name.encode():
            raise EngineFailed(f"another process is there: expected the keys of {name}")

    def forget(self, name: str) -> None:
        """Forget the keys of another agent, which ends the connection."""
        with suppress(EngineFailed):
            self._call(lambda: self._agent.invalidateRemoteMD(name))

    def begin(self, name: str, address: int, target: Span) -> int:
        """Begin a read of another agent's memory, and return its number."""
        size = target[1] - target[0]

        def begin() -> int:
            rows = self._rows(target[0], size), self._rows(address, size)
            read = self._agent.createXferReq(self._bindings.NIXL_READ, *rows, name, "", [self._backend])
            try:
                self._ended(self._agent.postXferReq(read, ""))
            except BaseException:
                self._agent.releaseXferReq(read)
                raise
            return int(read)

        return int(self._call(begin))

    def has_ended(self, read: int) -> bool:
        """Return whether a read has ended. Raises EngineFailed if it has failed: then it is released."""

        def has_ended() -> bool:
            try:
                return self._ended(self._agent.getXferStatus(read))
            except BaseException:
                with suppress(Exception):
                    self._agent.releaseXferReq(read)
                raise

        return bool(self._call(has_ended))

    def release(self, read: int) -> None:
        """Forget a read that has ended."""
        self._call(lambda: self._agent.releaseXferReq(read))

    def close(self) -> None:
        """End the agent. Its reads in progress write no more."""
        with self._lock:
            self._agent, self._registered = None, {}

    def _ended(self, state: Any) -> bool:
        if state not in (self._bindings.NIXL_SUCCESS, self._bindings.NIXL_IN_PROG):
            raise EngineFailed(f"the read failed: {state}")
        return bool(state == self._bindings.NIXL_SUCCESS)

    def _rows(self, address: int, size: int) -> Any:
        return self._bindings.nixlXferDList(self._bindings.DRAM_SEG, _row(address, size))

    def _call(self, act: Callable[[], Any], *, started: bool = True) -> Any:
        with self._lock:
            if started and self._agent is None:
                raise EngineFailed("the engine was ended")
            try:
                return act()
            except EngineFailed:
                raise
            except Exception as error:
                why = f"NIXL: {type(error).__name__}: {error}"
            raise EngineFailed(why)  # without the error, whose frames would keep the agent after `close`


def _row(address: int, size: int) -> "np.ndarray[Any, np.dtype[np.uint64]]":
    return np.array([[address, size, 0]], np.uint64)
