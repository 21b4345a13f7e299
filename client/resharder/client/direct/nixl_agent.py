"""NIXL's agent of one process, over UCX: registered memory, messages, and reads of other processes' memory.

A worker has one in its only group. A rank has one for all its groups, so that its memory is registered once, however many servers
read it.
"""

import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import cache
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from resharder.client.direct.base import DirectFailed
from resharder.client.direct.boxes import merge_ranges, outside
from resharder.converters.geometry.piece_arrays import Ints
from resharder.converters.wire import nixl

T = TypeVar("T")
_EARLY = 256  # agents that are not listened to, of which messages are kept
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
        self.name = name
        self._kind, self._device = ("VRAM_SEG", device.index or 0) if device.type == "cuda" else ("DRAM_SEG", 0)
        self._regions: list[tuple[Ints, Any]] = []  # registered together, with NIXL's list of them
        self._needed: dict[str, Ints] = {}  # ranges, by group
        self._messages: dict[str, list[bytes]] = {}  # by the agents that are listened to
        self._early: OrderedDict[str, list[bytes]] = OrderedDict()  # of agents that are not listened to, or not yet
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

    def register(self, group: str, ranges: Ints) -> list[bytes]:
        """Register memory that a group needs in place of what it needed, unless that is registered.

        Args:
            group: Name of the group.
            ranges: (n, 2): addresses and sizes of allocations.

        Returns:
            Keys of the memory for other agents, in parts.
        """

        def register() -> list[bytes]:
            self._need(group, ranges)
            missing = ranges
            for regions, _ in self._regions:
                missing = outside(missing, regions)
            if len(missing):
                missing = merge_ranges(missing)
                wanted = nixl.bindings().nixlRegDList(self._memory, self._rows(missing[:, 0], missing[:, 1], self._device))
                self._agent.registerMem(wanted, [self._backend])
                self._regions.append((missing, wanted))
            used = [listed for regions, listed in self._regions if len(outside(ranges, regions)) < len(ranges)]
            return [bytes(self._agent.getLocalPartialMD(listed, False, [self._backend])) for listed in used]

        return self._call(register)

    def deregister(self, group: str, peers: Collection[str]) -> None:
        """Give back memory that this group alone needs, and drop its reads from these agents. None may be in progress."""

        def deregister() -> None:
            for peer in peers:
                self._drop(peer)
            self._need(group, np.empty((0, 2), np.int64))

        self._call(deregister)

    def _need(self, group: str, ranges: Ints) -> None:
        """Set what a group needs, and give back what no group needs. The lock is held."""
        self._needed[group] = ranges
        needed = np.concatenate([*self._needed.values()])
        unused = [len(outside(needed, regions)) == len(needed) for regions, _ in self._regions]
        given_back = [listed for (_, listed), over in zip(self._regions, unused, strict=True) if over]
        self._regions = [each for each, over in zip(self._regions, unused, strict=True) if not over]
        for listed in given_back:
            self._agent.deregisterMem(listed, [self._backend])

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

    def listen(self, peers: Collection[str]) -> None:
        """Keep the messages of these agents until they are taken."""
        with self._lock:
            self._messages |= {peer: self._early.pop(peer, []) for peer in peers}

    def received(self, peers: Collection[str]) -> list[tuple[str, bytes]]:
        """Return the messages of these agents that have come since the last call, each with the name of its agent.

        Those of one agent may have overtaken each other.
        """

        def received() -> list[tuple[str, bytes]]:
            found: dict[str, list[bytes]] = self._agent.getNotifs({}, [self._backend])
            for name, messages in found.items():
                (self._messages if name in self._messages else self._early).setdefault(name, []).extend(messages)
            while len(self._early) > _EARLY:
                self._early.popitem(last=False)
            taken = {peer: self._messages[peer] for peer in peers}
            self._messages |= {peer: [] for peer in peers}
            return [(name, message) for name, messages in taken.items() for message in messages]

        return self._call(received)

    def leave(self, group: str, peers: Collection[str]) -> None:
        """Forget a group that shares the agent with others, and its peers' agents."""
        with self._lock:
            if self._agent is None:
                return
            for peer in peers:
                with suppress(Exception):
                    self._drop(peer)
                _ended(self._agent.invalidateRemoteMD, peer)
                self._messages.pop(peer, None)
            with suppress(Exception):
                self._need(group, np.empty((0, 2), np.int64))
            self._needed.pop(group, None)

    def close(self) -> None:
        """End the agent. Reads in progress write no more."""
        with self._lock:
            if self._agent is not None:
                for read in (read for _, reads in self._reads.values() for read in reads):
                    _ended(self._agent.releaseXferReq, read)
                self._reads, self._regions, self._needed, self._agent = {}, [], {}, None

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


class SharedAgent:
    """The agent of a rank, started for its first group. Its memory is read by others, and nothing is written into it."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._lock = device, threading.Lock()
        self._agent: NixlAgent | None = None

    def get(self) -> NixlAgent:
        """Return the agent. Raises DirectFailed if it does not start."""
        with self._lock:
            if self._agent is None:
                self._agent = NixlAgent(uuid.uuid4().hex, self._device)
            return self._agent

    def close(self) -> None:
        """End the agent."""
        with self._lock:
            agent, self._agent = self._agent, None
        if agent is not None:
            agent.close()


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


def _ended(end: Callable[[T], object], what: T) -> None:
    """End a read that may have failed, or the knowledge of an agent that may be gone."""
    with suppress(Exception):
        end(what)
