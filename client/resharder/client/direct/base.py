"""The interface of a process group for direct transfers: NCCL on GPUs, gloo on CPUs.

A group needs no default group of `torch.distributed` and leaves an existing one alone.

torch's ProcessGroupNCCL is not used: on a failure its watchdog informs every group of the process
through the default store, sleeps for a minute before it cleans up, and by default ends the process
(ProcessGroupNCCL.cpp, torch 2.11). `nccl_group` calls NCCL itself.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from resharder.client.errors import ResharderError
from resharder.client.gpu.streams import WorkStream


class DirectFailed(ResharderError):
    """The group can do nothing more; the next one is to be a new one. `torn`, from a transfer: targets may hold a mix."""

    reason = "DIRECT_FAILED"

    def __init__(self, message: str, torn: bool = False) -> None:
        super().__init__(message)
        self.torn = torn


class PeerMessage(NamedTuple):
    """A message: `memory` is bytes in one dimension, contiguous."""

    peer: int
    memory: torch.Tensor


class Pending(Protocol):
    """Messages under way."""

    def wait(self, deadline: float) -> None:
        """Until they are there, or until `deadline` (time.monotonic), then DirectFailed."""

    def come_before(self, stream: WorkStream, deadline: float) -> None:
        """What `stream` gets to do from now on comes after them. Without streams that is to wait."""


class DirectGroup(Protocol):
    """What processes send over; `size` of them. Their ranks are those of all that met, not all of whom need be in it. One thread
    at a time uses it; `abort` and `close` may come from any."""

    rank: int
    size: int

    def post(self, sends: Sequence[PeerMessage], receives: Sequence[PeerMessage], deadline: float) -> Pending:
        """Begins to send and receive, on the current stream where there are streams. Both sides of a pair post alike, in the same
        order. Raises DirectFailed."""

    def check(self) -> None:
        """Raises DirectFailed where the group was aborted or lost a member, as far as that shows."""

    def abort(self, why: str) -> None:
        """Whoever waits for this group, in this process, gets DirectFailed at once. Nothing raises."""

    def close(self) -> None:
        """Lets go of everything. Nothing of the group writes into memory any more."""
