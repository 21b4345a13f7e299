"""A process's links to groups, reused from version to version.

Forming a group takes seconds, in which servers with an existing group may be paused for a transfer
from this rank: `TransferLinks` forms each group in a thread of its own.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from resharder.client.direct.base import DirectFailed, DirectGroup
from resharder.client.direct.rendezvous import DaemonStore, connect, make_group
from resharder.client.direct.transfer import Follower, Seconds, Tensors, Transfer
from resharder.client.errors import ResharderError
from resharder.client.gpu.schedule import Schedule, quota_of, schedule
from resharder.client.rpc.channel import Channel
from resharder.converters.errors import ConversionError
from resharder.converters.wire.direct import copies_from_proto
from resharder.v1 import direct_pb2, direct_pb2_grpc

_ASK = 10.0  # bound in seconds on the call itself
_LONGEST = 60.0  # seconds of a waiting call
_NEVER_SET = "over"  # a key that no member sets
_OVER = "NOT_OFFERED"

Failed = Callable[[str, Exception], None]
"""Function called, on any thread, when a group has failed; its link is dropped by then."""


class TransferLink:
    """One process's side of a group, reused from version to version. `memory` is the packing buffer,
    if several links share it.
    """

    def __init__(
        self, channel: Channel, message: direct_pb2.DirectLink, device: torch.device, memory: torch.Tensor | None = None
    ) -> None:
        """Form the group. Raises DirectFailed if members are missing, or this one cannot join."""
        self.id, self.seconds, self._channel = message.group, message.seconds, channel
        group: DirectGroup | None = None
        try:
            quota = quota_of(message.most_peers, message.most_made, message.staging_bytes)
            found = schedule(copies_from_proto(message.copies), message.rank, quota)
            sends, receives = _peers(found)
            store, meet = DaemonStore(channel, message.group), (message.rank, message.size, device, message.seconds)
            group = make_group(store, message.group, *meet, peers={*sends, *receives}, most_peers=message.most_peers)
            connect(group, device, sends, receives, message.seconds)
            self._transfer = Transfer(found, group, device, memory)
        except (RuntimeError, ValueError, ResharderError, ConversionError) as error:
            if group is not None:
                group.abort(str(error))
                group.close()
            raise DirectFailed(f"group {message.group}: {error}") from error

    @property
    def received(self) -> int:
        """Bytes received with each version."""
        return self._transfer.schedule.received

    def prepare(self, sources: Tensors, targets: Tensors) -> None:
        """Prepare a transfer. Raises DirectFailed if tensors differ from their declaration."""
        try:
            self._transfer.prepare(sources, targets)
        except (KeyError, ValueError, RuntimeError) as error:
            raise DirectFailed(f"group {self.id}: {error}") from error

    @property
    def complete(self) -> dict[str, int]:
        """Last round that writes into each target local."""
        return self._transfer.schedule.complete

    def run(self, follower: Follower | None = None, meanwhile: Callable[[], None] | None = None) -> Seconds:
        """Run a transfer as `Transfer.run`. Raises DirectFailed; the link is then unusable."""
        return self._transfer.run(self.seconds, follower, meanwhile)

    def watched(self) -> AbstractContextManager[None]:
        """Let a transfer in the context fail as soon as the group is over for the daemon, as when a
        rank's stream has ended: NCCL does not detect that a peer's process is gone.
        """
        return until_over(self._channel, self.id, self.seconds, self._transfer.group.abort)

    def close(self) -> None:
        self._transfer.group.close()


@contextmanager
def until_over(channel: Channel, group: str, seconds: float, over: Callable[[str], None]) -> Iterator[None]:
    """Call `over`, on another thread, when the daemon reports that the group is over; not while it cannot be reached."""

    def heard(call: Any) -> None:
        if not call.cancelled() and (error := call.exception()) is not None and (said := channel.error(error)).reason == _OVER:
            over(str(said))

    request = direct_pb2.GetGroupKeyRequest(group=group, key=_NEVER_SET, wait_seconds=min(seconds, _LONGEST))
    call = direct_pb2_grpc.DirectServiceStub(channel.grpc).GetGroupKey.future(request, timeout=seconds + _ASK)
    call.add_done_callback(heard)
    try:
        yield
    finally:
        call.cancel()


def _peers(found: Schedule) -> tuple[list[int], list[int]]:
    """Return the ranks to which this one sends, and from which it receives."""
    sends = {post.peer for each in found.rounds for post in each.sends}
    return sorted(sends), sorted({post.peer for each in found.rounds for post in each.receives})


class TransferLinks:
    """Links of one process. `tensors` are the sources. One thread at a time calls its methods."""

    def __init__(self, tensors: Tensors, device: torch.device) -> None:
        self._tensors, self._device = tensors, device
        self._met: dict[str, Future[TransferLink | None]] = {}
        self._preparing = threading.Lock()  # compiles kernels

    def meet(self, group: str, make: Callable[[], TransferLink], failed: Failed) -> None:
        """Begin to form a group. `make` runs on a stream of its own and raises DirectFailed, or RuntimeError without memory."""
        met = self._met[group] = Future[TransferLink | None]()

        def run() -> None:
            link: TransferLink | None = None
            try:
                with self._apart():
                    link = self._prepared(make())
            except (DirectFailed, RuntimeError) as error:
                self._met.pop(group, None)
                failed(group, error)
            finally:
                met.set_result(link)

        threading.Thread(target=run, name="resharder-meet", daemon=True).start()

    def get(self, group: str) -> TransferLink:
        """Return the link when it is formed. Raises DirectFailed if there is none."""
        met = self._met.get(group)
        link = met.result() if met is not None else None
        if link is None:
            raise DirectFailed(f"there is no link of group {group}")
        return link

    def prepare(self, failed: Failed) -> None:
        """Prepare each link that is formed; others prepare when they are."""
        for group, met in list(self._met.items()):
            link = met.result() if met.done() else None
            if link is not None:
                try:
                    self._prepared(link)
                except DirectFailed as error:
                    self._met.pop(group, None)
                    failed(group, error)

    def _prepared(self, link: TransferLink) -> TransferLink:
        try:
            with self._preparing:
                link.prepare(self._tensors, {})
        except DirectFailed:
            link.close()
            raise
        return link

    def drop(self, group: str) -> None:
        """Drop a link, or drop it when it is formed."""
        met = self._met.pop(group, None)
        if met is not None:
            met.add_done_callback(lambda done: link.close() if (link := done.result()) is not None else None)

    def close(self) -> None:
        for group in list(self._met):
            self.drop(group)

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Return a stream that is ordered neither after nor before the current one."""
        if self._device.type != "cuda":
            yield
            return
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            yield
