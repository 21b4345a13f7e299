"""NIXL's agent of one process in one group, over UCX: registered memory, messages, and reads of other processes' memory."""

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from resharder.client.direct.base import DirectFailed
from resharder.converters.geometry.piece_arrays import Ints
from resharder.converters.wire import nixl

T = TypeVar("T")
NO_RDMA = (
    "this host has no RDMA device, and over TCP UCX ends a process that answers a reader which is gone, as after it was stopped: "
    "RESHARDER_NIXL=on takes that"
)


@cache
def unavailable() -> str:
    """Return why this process cannot use NIXL; empty if it can."""
    try:
        nixl.bindings()
    except (ImportError, OSError, RuntimeError) as error:
        return f"pip install 'resharder[nixl]': {error}"
    return ""


class NixlAgent:
    """An agent with UCX. Any thread may call its methods, one at a time; all raise DirectFailed, also after `close`.

    NIXL has no call that ends a read for certain. What does is the end of the agent, with its connections: nothing is written
    into this process's memory after `close`.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        """Start the agent, which takes half a second. Raises DirectFailed."""
        if why := unavailable():
            raise DirectFailed(f"NIXL cannot be used: {why}")
        self._lock = threading.RLock()
        self._kind, self._device = ("VRAM_SEG", device.index or 0) if device.type == "cuda" else ("DRAM_SEG", 0)
        self._registered: Any = None
        self._reads: dict[str, tuple[list[int], list[int]]] = {}  # by the other agent: lists of boxes, and reads
        self._agent, self._backend = _told(lambda: nixl.started(name))

    @property
    def place(self) -> int:
        """Number of the device of this agent's memory."""
        return self._device

    def address(self) -> bytes:
        """Return what others need to reach this agent, before memory is registered."""
        return self._call(lambda: bytes(self._agent.getLocalMD()))

    def add(self, known: bytes) -> None:
        """Take another agent's address, or the keys of its memory."""
        self._call(lambda: self._agent.loadRemoteMD(known))

    def register(self, ranges: Ints) -> bytes:
        """Register memory, (n, 2) of addresses and sizes, in place of what was registered. Return its keys for other agents."""

        def register() -> bytes:
            self._deregister()
            wanted = nixl.bindings().nixlRegDList(self._memory, self._rows(ranges[:, 0], ranges[:, 1], self._device))
            self._agent.registerMem(wanted, [self._backend])
            self._registered = wanted
            return bytes(self._agent.getLocalPartialMD(wanted, False, [self._backend]))

        return self._call(register)

    def deregister(self) -> None:
        """Give back all registered memory, and drop the reads into it. None may be in progress."""
        self._call(self._deregister)

    def prepare(self, peer: str, boxes: list[Ints], device: int) -> None:
        """Prepare all reads from another agent, in place of earlier ones, of which none may be in progress.

        Args:
            peer: Name of the other agent.
            boxes: For each read (n, 3): address there, address here and size in bytes.
            device: Number of the device of its memory.
        """

        def prepare() -> None:
            self._drop(peer)
            joined = np.concatenate(boxes)
            lists, reads = self._reads[peer] = [], []
            for agent, side, place in ((nixl.bindings().NIXL_INIT_AGENT, 1, self._device), (peer, 0, device)):
                rows = nixl.bindings().nixlXferDList(self._memory, self._rows(joined[:, side], joined[:, 2], place))
                lists.append(self._agent.prepXferDlist(agent, rows, [self._backend]))
            here, there = lists
            for begin, end in pairwise(np.cumsum([0, *map(len, boxes)]).tolist()):
                which = np.arange(begin, end, dtype=np.int32)
                read = self._agent.makeXferReq(nixl.bindings().NIXL_READ, here, which, there, which, b"", [self._backend], False)
                reads.append(read)

        self._call(prepare)

    def start(self, peer: str, read: int, message: bytes) -> None:
        """Begin a prepared read. The other agent receives `message` when it has ended."""
        self._call(lambda: _has_ended(self._agent.postXferReq(self._reads[peer][1][read], message)))

    def has_ended(self, peer: str, read: int) -> bool:
        """Return whether a read has ended. Raises DirectFailed if it has failed."""
        return self._call(lambda: _has_ended(self._agent.getXferStatus(self._reads[peer][1][read])))

    def send(self, peer: str, message: bytes) -> None:
        """Send a message to another agent."""
        self._call(lambda: self._agent.genNotif(peer, message, [self._backend]))

    def received(self) -> list[tuple[str, bytes]]:
        """Return the messages that have come since the last call, each with the name of its agent.

        Those of one agent may have overtaken each other.
        """
        found: dict[str, list[bytes]] = self._call(lambda: self._agent.getNotifs({}, [self._backend]))
        return [(name, message) for name, messages in found.items() for message in messages]

    def close(self) -> None:
        """End the agent. Reads in progress write no more."""
        with self._lock:
            if self._agent is not None:
                for read in (read for _, reads in self._reads.values() for read in reads):
                    _ended(self._agent.releaseXferReq, read)
                self._reads, self._registered, self._agent = {}, None, None

    def _deregister(self) -> None:
        for peer in list(self._reads):
            self._drop(peer)
        if self._registered is not None:
            registered, self._registered = self._registered, None
            self._agent.deregisterMem(registered, [self._backend])

    def _drop(self, peer: str) -> None:
        lists, reads = self._reads.pop(peer, ([], []))
        for read in reads:
            self._agent.releaseXferReq(read)
        for each in lists:
            self._agent.releasedDlistH(each)

    @property
    def _memory(self) -> Any:
        return getattr(nixl.bindings(), self._kind)

    @staticmethod
    def _rows(at: Ints, sizes: Ints, device: int) -> Any:
        return np.column_stack([at, sizes, np.full(len(at), device)]).astype(np.uint64)

    def _call(self, act: Callable[[], T]) -> T:
        with self._lock:
            if self._agent is None:
                raise DirectFailed("the group is closed")
            return _told(act)


def _has_ended(state: Any) -> bool:
    """Return whether a read has ended. Raises RuntimeError if it has failed."""
    if state not in (nixl.bindings().NIXL_SUCCESS, nixl.bindings().NIXL_IN_PROG):
        raise RuntimeError(f"a read has failed: {state}")
    return bool(state == nixl.bindings().NIXL_SUCCESS)


def _told(act: Callable[[], T]) -> T:
    """Return the result of `act`. Raises DirectFailed for what it raises."""
    try:
        return act()
    except Exception as error:
        why = f"NIXL: {type(error).__name__}: {error}"
    raise DirectFailed(why)  # without the error, whose frames would keep the agent after `close`


def _ended(end: Callable[[int], None], read: int) -> None:
    """End a read that may have failed."""
    with suppress(Exception):
        end(read)
