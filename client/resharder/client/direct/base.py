"""Interface of process groups for direct transfers: NCCL on GPUs, gloo on CPUs.

A group needs no default group of `torch.distributed` and leaves an existing one alone.

torch's ProcessGroupNCCL is not used: on a failure, its watchdog informs every group of the process through the default store,
sleeps for a minute before it cleans up, and by default ends the process (ProcessGroupNCCL.cpp, torch 2.11). `nccl_group` calls
NCCL itself.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from resharder.client.errors import ResharderError
from resharder.client.gpu.streams import WorkStream


class DirectFailed(ResharderError):
    """Failure of a group, which is then unusable; the next transfer needs a new one. With `torn`,
    targets may have a mix of versions.
    """

    reason = "DIRECT_FAILED"

    def __init__(self, message: str, torn: bool = False) -> None:
        super().__init__(message)
        self.torn = torn


class PeerMessage(NamedTuple):
    """Message to or from rank `peer`. `memory` is contiguous, one-dimensional and of dtype uint8."""

    peer: int
    memory: torch.Tensor


class Pending(Protocol):
    """Messages in progress."""

    def wait(self, deadline: float) -> None:
        """Wait until the messages have arrived. Raises DirectFailed at `deadline` (time.monotonic)."""

    def come_before(self, stream: WorkStream, deadline: float) -> None:
        """Order later work of `stream` after the messages; without streams, wait for them."""


class DirectGroup(Protocol):
    """Processes that exchange messages; `size` is their number.

    Ranks are those of all processes that met, of which some may be outside of the group. One thread at a time may use a group;
    any thread may call `abort` and `close`.
    """

    rank: int
    size: int

    def post(self, sends: Sequence[PeerMessage], receives: Sequence[PeerMessage], deadline: float) -> Pending:
        """Begin to send and receive, on the current stream if there are streams.

        Both sides of a pair must post their messages in the same order. Raises DirectFailed.
        """

    def check(self) -> None:
        """Raise DirectFailed if the group was aborted or is known to have lost a member."""

    def abort(self, why: str) -> None:
        """Make every wait for this group in this process raise DirectFailed at once."""

    def close(self) -> None:
        """Release all resources. The group writes to no memory afterwards."""


class NoGroup:
    """Group of a process whose peers all share memory with it: no messages go through it. It can be aborted as any other."""

    def __init__(self, rank: int) -> None:
        self.rank, self.size, self._why = rank, 1, ""

    def post(self, sends: Sequence[PeerMessage], receives: Sequence[PeerMessage], deadline: float) -> Pending:
        """Raise DirectFailed: no other process is in the group."""
        raise DirectFailed(f"rank {self.rank}: expected no messages, got {len(sends)} to send and {len(receives)} to receive")

    def check(self) -> None:
        """Raise DirectFailed if the group was aborted."""
        if self._why:
            raise DirectFailed(self._why)

    def abort(self, why: str) -> None:
        """Make every wait for this group in this process raise DirectFailed at once."""
        self._why = self._why or why

    def close(self) -> None:
        """Make the group unusable."""
        self.abort("the group is closed")
