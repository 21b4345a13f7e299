"""Interface of process groups for direct transfers: NIXL between hosts, else NCCL on GPUs and gloo on CPUs.

A group needs no default group of `torch.distributed` and leaves an existing one alone.

torch's ProcessGroupNCCL is not used: on a failure, its watchdog informs every group of the process through the default store,
sleeps for a minute before it cleans up, and by default ends the process (ProcessGroupNCCL.cpp, torch 2.11). `nccl_group` calls
NCCL itself.
"""

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

import torch
from resharder.client.errors import ResharderError
from resharder.client.gpu.streams import WorkStream
from resharder.converters.errors import ConversionError


class DirectFailed(ResharderError):
    """Failure of a group, which is then unusable; the next transfer needs a new one. With `torn`,
    targets may have a mix of versions.
    """

    reason = "DIRECT_FAILED"

    def __init__(self, message: str, torn: bool = False) -> None:
        super().__init__(message)
        self.torn = torn


def reason_of(error: BaseException) -> str:
    """Return what an error says, with its kind unless it is one of ours: of many others, the text alone tells little."""
    return str(error) if isinstance(error, ResharderError | ConversionError) else f"{type(error).__name__}: {error}"


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


Exchange = tuple[list[PeerMessage], list[PeerMessage]]
"""Messages that a process sends, and those that it receives, in one round."""


class DirectGroup(Protocol):
    """Processes that exchange messages; `size` is their number, `path` the kind of link between them.

    Ranks are those of all processes that met, of which some may be outside of the group. One thread at a time may use a group;
    any thread may call `abort` and `close`.
    """

    rank: int
    size: int

    @property
    def path(self) -> str:
        """Kind of the links: `nixl`, `nccl` or `gloo`, several joined by `+`."""

    def prepare(self, rounds: Sequence[Exchange]) -> None:
        """Make ready for the rounds that are to be posted one after another, time and again. Fast for the same object.

        Raises DirectFailed.
        """

    def post(self, sends: Sequence[PeerMessage], receives: Sequence[PeerMessage], deadline: float) -> Pending:
        """Begin to send and receive, on the current stream if there are streams.

        Both sides of a pair must post their messages in the same order. Raises DirectFailed.
        """

    def skip(self, rounds: Sequence[Exchange]) -> None:
        """Leave out some of the rounds for which `prepare` was called, as all peers do."""

    def release(self) -> None:
        """Hold no memory of messages until the next `prepare`, between transfers: it may be freed."""

    def check(self) -> None:
        """Raise DirectFailed if the group was aborted or is known to have lost a member."""

    def abort(self, why: str) -> None:
        """Make every wait for this group in this process raise DirectFailed at once."""

    def close(self) -> None:
        """Release all resources. The group writes to no memory afterwards."""


class JoinedGroup(DirectGroup):
    """Groups of one process as one: the messages of a peer go through its group.

    Without any group, the process exchanges no messages, because all its peers share memory with it. It can be aborted as any
    other.
    """

    def __init__(self, rank: int, groups: Mapping[DirectGroup, Collection[int]] = MappingProxyType({})) -> None:
        """`groups`: each group, with the peers of this process in it."""
        self.rank, self.size, self._why = rank, 1 + sum(map(len, groups.values())), ""
        self._groups = groups
        self._prepared: Sequence[Exchange] = ()

    @property
    def path(self) -> str:
        """Kinds of the links, joined by `+`."""
        return "+".join(sorted({group.path for group in self._groups}, reverse=True))

    def prepare(self, rounds: Sequence[Exchange]) -> None:
        """Have each group make ready for its messages. Raises DirectFailed."""
        if rounds is not self._prepared:
            self._parts = {
                group: [(_of(sends, peers), _of(receives, peers)) for sends, receives in rounds]
                for group, peers in self._groups.items()
            }
            self._prepared = rounds
        for group, part in self._parts.items():
            group.prepare(part)

    def post(self, sends: Sequence[PeerMessage], receives: Sequence[PeerMessage], deadline: float) -> Pending:
        """Post the messages in their groups. Raises DirectFailed, also for one of a peer that is in no group."""
        self.check()
        parts = [(group, _of(sends, peers), _of(receives, peers)) for group, peers in self._groups.items()]
        if sum(len(part[1]) + len(part[2]) for part in parts) < len(sends) + len(receives):
            raise DirectFailed(f"rank {self.rank}: got messages of ranks that are in no group of {sorted(self._peers)}")
        return _JoinedPending([group.post(out, into, deadline) for group, out, into in parts])

    def skip(self, rounds: Sequence[Exchange]) -> None:
        """Leave rounds out in each group."""
        for group, peers in self._groups.items() if rounds else ():
            group.skip([(_of(sends, peers), _of(receives, peers)) for sends, receives in rounds])

    @property
    def _peers(self) -> set[int]:
        return {peer for peers in self._groups.values() for peer in peers}

    def release(self) -> None:
        """Have no group hold memory."""
        for group in self._groups:
            group.release()

    def check(self) -> None:
        """Raise DirectFailed if a group was aborted."""
        if self._why:
            raise DirectFailed(self._why)
        for group in self._groups:
            group.check()

    def abort(self, why: str) -> None:
        """Make every wait for any group in this process raise DirectFailed at once."""
        self._why = self._why or why
        for group in self._groups:
            group.abort(why)

    def close(self) -> None:
        """Close all groups."""
        self._why = self._why or "the group is closed"
        for group in self._groups:
            group.close()


class _JoinedPending:
    def __init__(self, parts: list[Pending]) -> None:
        self._parts = parts

    def wait(self, deadline: float) -> None:
        for part in self._parts:
            part.wait(deadline)

    def come_before(self, stream: WorkStream, deadline: float) -> None:
        for part in self._parts:
            part.come_before(stream, deadline)


def _of(messages: Sequence[PeerMessage], peers: Collection[int]) -> list[PeerMessage]:
    return [message for message in messages if message.peer in peers]
