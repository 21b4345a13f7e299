"""Group of the direct path on CPUs, over gloo."""

import datetime
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from resharder.client.direct.base import DirectFailed, Exchange, PeerMessage
from resharder.client.gpu.streams import WorkStream
from resharder.client.settings import GLOO_INTERFACES

_UNUSED = 0x7FFFFFFF  # tag that no message has
_PATIENCE = datetime.timedelta(milliseconds=1)


class GlooGroup:
    """Group over gloo on CPUs. A tag numbers the messages of a pair.

    Each member listens at `address`, or on the interfaces of GLOO_SOCKET_IFNAME; without either, at the address of the host's
    name. Ports are the kernel's choice.
    """

    def __init__(self, store: Any, rank: int, members: Sequence[int], timeout: float, address: str = "") -> None:
        self.rank, self.size, self._why = rank, len(members), ""
        self._place = {member: i for i, member in enumerate(members)}
        size = len(members)
        self._sent, self._received = [0] * size, [0] * size
        self._lock = threading.Lock()
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = datetime.timedelta(seconds=timeout)
        where = GLOO_INTERFACES.text()
        try:
            options._devices = _devices(where, address)
            self._gloo: Any = dist.ProcessGroupGloo(store, self._place[rank], size, options)
        except RuntimeError as error:
            at = f"{GLOO_INTERFACES.name}={where}" if where else address or "the address of its host's name"
            raise DirectFailed(
                f"{size} processes did not meet within {timeout:g} s, this one is at {at}; each has to reach the others, at "
                f"any port: {error}"
            ) from error

    path = "gloo"

    def prepare(self, rounds: Sequence[Exchange]) -> None:
        """Do nothing: messages are located when they are posted."""

    def skip(self, rounds: Sequence[Exchange]) -> None:
        """Do nothing: rounds have no numbers."""

    def release(self) -> None:
        """Do nothing: no memory is held between transfers."""

    def post(self, sends: Sequence[PeerMessage], receives: Sequence[PeerMessage], deadline: float) -> "_GlooWork":
        """Begin to send and receive. Raises DirectFailed."""
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
        return _GlooWork(self, works)

    def failed(self, error: Exception) -> DirectFailed:
        """Return the error for a failed message: the reason of `abort`, if there was one, else gloo's error."""
        return DirectFailed(self._why or f"rank {self.rank}: {error}")

    def check(self) -> None:
        """Raise DirectFailed if the group was aborted or closed. A lost member shows only when a message fails."""
        if self._why or self._gloo is None:
            raise DirectFailed(self._why or "the group is closed")

    def abort(self, why: str) -> None:
        """Make waits of other threads raise DirectFailed, by closing all connections."""
        self._why = self._why or why
        self._cut()

    def _cut(self) -> None:
        """Close all connections, gloo's only way to end the waits of other threads."""
        with self._lock:
            gloo = self._gloo
            for peer in range(self.size):
                if gloo is not None and peer != self._place[self.rank]:
                    try:
                        gloo.recv([torch.empty(1, dtype=torch.uint8)], peer, _UNUSED).wait(_PATIENCE)
                    except RuntimeError:
                        return

    def close(self) -> None:
        """Close all connections and release the group."""
        self._cut()
        self._gloo = None


def _devices(interfaces: str, address: str) -> list[Any]:
    """Return gloo's devices. Raises RuntimeError for an interface or address that this host does not have."""
    gloo: Any = dist.ProcessGroupGloo
    if interfaces:
        return [gloo.create_device(interface=name.strip()) for name in interfaces.split(",")]
    return [gloo.create_device(hostname=address) if address else gloo.create_default_device()]


class _GlooWork:
    def __init__(self, group: GlooGroup, works: list[tuple[Any, torch.Tensor]]) -> None:
        self._group, self._works = group, works

    def wait(self, deadline: float) -> None:
        for work, _ in self._works:
            try:
                work.wait(datetime.timedelta(seconds=max(0.001, deadline - time.monotonic())))
            except RuntimeError as error:
                raise self._group.failed(error) from error
        self._works = []

    def come_before(self, stream: WorkStream, deadline: float) -> None:
        self.wait(deadline)
