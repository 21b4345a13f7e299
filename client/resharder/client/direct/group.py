"""A process group of the direct path's own: NCCL on GPUs, gloo on CPUs. No default group is needed and none is touched.

torch's ProcessGroupNCCL is not used: at a failure its watchdog tells every group of the process by way of the default store,
sleeps a minute before it cleans up, and by default ends the process (ProcessGroupNCCL.cpp, torch 2.11). `nccl_group.py` speaks
to NCCL itself.
"""

import datetime
import json
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from resharder.client.errors import ResharderError
from resharder.client.gpu.streams import Lane


class DirectFailed(ResharderError):
    """The group can do nothing more; the next one is to be a new one. `torn`, from a transfer: targets may hold a mix."""

    reason = "DIRECT_FAILED"

    def __init__(self, message: str, torn: bool = False) -> None:
        super().__init__(message)
        self.torn = torn


class Part(NamedTuple):
    """A message: `memory` is bytes in one dimension, contiguous."""

    peer: int
    memory: torch.Tensor


class Pending(Protocol):
    """Messages under way."""

    def wait(self, deadline: float) -> None:
        """Until they are there, or until `deadline` (time.monotonic), then DirectFailed."""

    def come_before(self, lane: Lane, deadline: float) -> None:
        """What `lane` gets to do from now on comes after them. Without streams that is to wait."""


class Group(Protocol):
    """What processes send over; `size` of them. Their ranks are those of all that met, not all of whom need be in it. One thread
    at a time uses it; `abort` and `close` may come from any."""

    rank: int
    size: int

    def post(self, sends: Sequence[Part], receives: Sequence[Part], deadline: float) -> Pending:
        """Begins to send and receive, on the current stream where there are streams. Both sides of a pair post alike, in the same
        order. Raises DirectFailed."""

    def check(self) -> None:
        """Raises DirectFailed where the group was aborted or lost a member, as far as that shows."""

    def abort(self, why: str) -> None:
        """Whoever waits for this group, in this process, gets DirectFailed at once. Nothing raises."""

    def close(self) -> None:
        """Lets go of everything. Nothing of the group writes into memory any more."""


def make_group(
    store: Any,
    prefix: str,
    rank: int,
    size: int,
    device: torch.device,
    timeout: float,
    peers: Iterable[int] | None = None,
    most_peers: int = 0,
) -> Group:
    """Meets others of `size` processes at a torch Store under `prefix`, which is to be another for each group. `peers`: those
    that this one exchanges something with, and they with it; all by default. Only those make up the group that are connected by
    that, for it fails for all. `most_peers`: the most that any of them has, alike for all. Raises DirectFailed where they are not
    there within `timeout` seconds."""
    within = torch._C._distributed_c10d.PrefixStore(f"resharder/{prefix}", store)
    if device.type == "cuda":
        from resharder.client.direct.nccl_group import NcclGroup

        others = set(range(size)) - {rank} if peers is None else set(peers)
        return NcclGroup(within, rank, others, device, timeout, max(most_peers, len(others)))
    if peers is None:
        return GlooGroup(within, rank, list(range(size)), timeout)
    members = connected(within, rank, peers, time.monotonic() + timeout)
    return GlooGroup(torch._C._distributed_c10d.PrefixStore(f"of {members[0]}", within), rank, members, timeout)


def connected(store: Any, rank: int, peers: Iterable[int], deadline: float) -> list[int]:
    """All that `rank` reaches from peer to peer, and itself, when each says at the store whom it exchanges something with."""
    store.set(f"peers/{rank}", json.dumps(sorted(peers)))
    found, left = set[int](), [rank]
    try:
        while left:
            if (each := left.pop()) not in found:
                store.wait([f"peers/{each}"], datetime.timedelta(seconds=max(0.001, deadline - time.monotonic())))
                found.add(each)
                left += json.loads(store.get(f"peers/{each}"))
    except (RuntimeError, ValueError) as error:
        raise DirectFailed(f"expected rank {each} to say in time whom it sends to: {error}") from error
    return sorted(found)


def connect(group: Group, device: torch.device, sends: Sequence[int], receives: Sequence[int], timeout: float) -> None:
    """A byte to and from each of these ranks, in a round of its own: connections take a fraction of a second when they are first
    used, and servers need not be paused for that."""
    byte = torch.zeros(1, dtype=torch.uint8, device=device)
    deadline = time.monotonic() + timeout
    got = [Part(peer, torch.empty_like(byte)) for peer in sorted(receives)]
    group.post([Part(peer, byte) for peer in sorted(sends)], got, deadline).wait(deadline)


_UNUSED = 0x7FFFFFFF  # a tag
_PATIENCE = datetime.timedelta(milliseconds=1)


class GlooGroup:
    """Messages of a pair are told apart by their number."""

    def __init__(self, store: Any, rank: int, members: Sequence[int], timeout: float) -> None:
        self.rank, self.size, self._why = rank, len(members), ""
        self._place = {member: i for i, member in enumerate(members)}
        size = len(members)
        self._sent, self._received = [0] * size, [0] * size
        self._lock = threading.Lock()
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = datetime.timedelta(seconds=timeout)
        options._devices = [dist.ProcessGroupGloo.create_default_device()]
        try:
            self._gloo: Any = dist.ProcessGroupGloo(store, self._place[rank], size, options)
        except RuntimeError as error:
            raise DirectFailed(f"expected {size} processes to meet within {timeout:g} s: {error}") from error

    def post(self, sends: Sequence[Part], receives: Sequence[Part], deadline: float) -> "_Works":
        self.check()
        works = []
        try:
            for peer, memory in ((self._place[peer], memory) for peer, memory in receives):
                works.append((self._gloo.recv([memory], peer, self._received[peer]), memory))
                self._received[peer] += 1
            for peer, memory in ((self._place[peer], memory) for peer, memory in sends):
                works.append((self._gloo.send([memory], peer, self._sent[peer]), memory))
                self._sent[peer] += 1
        except (RuntimeError, AttributeError) as error:
            raise self.failed(error) from error
        return _Works(self, works)

    def failed(self, error: Exception) -> DirectFailed:
        return DirectFailed(self._why or f"rank {self.rank}: {error}")

    def check(self) -> None:
        if self._why or self._gloo is None:
            raise DirectFailed(self._why or "the group is closed")

    def abort(self, why: str) -> None:
        self._why = self._why or why
        self._cut()

    def _cut(self) -> None:
        """gloo has nothing else that ends the waits of other threads: one that ran out of time closes all connections."""
        with self._lock:
            gloo = self._gloo
            for peer in range(self.size):
                if gloo is not None and peer != self._place[self.rank]:
                    try:
                        gloo.recv([torch.empty(1, dtype=torch.uint8)], peer, _UNUSED).wait(_PATIENCE)
                    except RuntimeError:
                        return

    def close(self) -> None:
        self._cut()
        self._gloo = None


class _Works:
    def __init__(self, group: GlooGroup, works: list[tuple[Any, torch.Tensor]]) -> None:
        self._group, self._works = group, works

    def wait(self, deadline: float) -> None:
        for work, _ in self._works:
            try:
                work.wait(datetime.timedelta(seconds=max(0.001, deadline - time.monotonic())))
            except RuntimeError as error:
                raise self._group.failed(error) from error
        self._works = []

    def come_before(self, lane: Lane, deadline: float) -> None:
        self.wait(deadline)
