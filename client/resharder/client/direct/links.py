"""A process's links to groups, reused from version to version.

Forming a group takes seconds, in which servers of an existing group may be paused for a transfer from this rank. `TransferLinks`
therefore forms each group on a thread of its own.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from resharder.client.direct.base import DirectFailed, DirectGroup, JoinedGroup, reason_of
from resharder.client.direct.nixl_agent import SharedAgent
from resharder.client.direct.nixl_group import NixlGroup
from resharder.client.direct.peer_memory.meeting import meet
from resharder.client.direct.peer_memory.pairs import PeerPairs
from resharder.client.direct.rendezvous import DaemonStore, address_towards, connect, make_group
from resharder.client.direct.transfer import Follower, Seconds, Transfer
from resharder.client.direct.trial import check_room, try_link
from resharder.client.errors import ResharderError
from resharder.client.gpu.schedule import Schedule, quota_of, schedule
from resharder.client.gpu.streams import on_stream
from resharder.client.gpu.table import Tensors
from resharder.client.rpc.channel import Channel
from resharder.converters.wire.direct import copies_from_proto
from resharder.converters.wire.endpoint import addresses_of
from resharder.v1 import direct_pb2, direct_pb2_grpc

_ASK = 10.0  # seconds allowed for a call beyond its wait
_LONGEST = 60.0  # longest wait of a call, in seconds
_NEVER_SET = "over"  # a key that no member sets
_OVER = "NOT_OFFERED"

Failed = Callable[[str, Exception], None]
"""Callback for a failed group, with the group and the error. Called on any thread, after the link was dropped."""


class TransferLink:
    """One process's side of a group, reused from version to version."""

    def __init__(
        self,
        channel: Channel,
        message: direct_pb2.DirectLink,
        device: torch.device,
        sources: Tensors | None = None,
        memory: Callable[[int], torch.Tensor] | None = None,
        nixl: SharedAgent | None = None,
    ) -> None:
        """Form the group.

        Args:
            channel: Channel to the daemon.
            message: The daemon's description of the link, with the process's copies.
            device: Device of the tensors.
            sources: Tensors that this process sends from, which it may share with processes of the same host.
            memory: Returns at least so many bytes on `device` for packing; links that share them must not run at once. By default
                each link has its own.
            nixl: NIXL's agent of all links of this process; by default each link has its own.

        Raises:
            DirectFailed: Members are missing, or this process cannot join.
        """
        self.id, self.seconds, self._channel = message.group, message.seconds, channel
        self.frozen = frozenset(message.frozen)
        """HF tensors that all ranks call frozen, if a transfer may leave them out."""
        store = DaemonStore(channel, message.group)
        groups: dict[DirectGroup, set[int]] = {}
        pairs = PeerPairs()
        try:
            if message.trial:
                check_room(device, message.staging_bytes)
            copies = copies_from_proto(message.copies)
            pairs = meet(store, message.rank, copies, device, sources or {}, message.seconds, message.nixl)
            quota = quota_of(message.most_peers, message.most_made, message.staging_bytes)
            found = schedule(pairs.rest(copies), message.rank, quota)
            sends, receives = map(set, _peers(found))
            if over_nixl := (sends | receives) & pairs.nixl:
                agent = nixl.get() if nixl is not None else None
                groups[NixlGroup(store, message.group, message.rank, over_nixl, device, message.seconds, agent)] = over_nixl
            if others := (sends | receives) - over_nixl:
                who = (message.rank, message.size, device, message.seconds)
                address, most = address_towards(addresses_of(channel.endpoint)[0]), message.most_peers
                group = make_group(store, message.group, *who, peers=others, most_peers=most, address=address)
                groups[group] = others
                connect(group, device, sorted(sends & others), sorted(receives & others), message.seconds)
            own = memory(message.staging_bytes) if memory is not None and found.staging else None
            joined = JoinedGroup(message.rank, groups)
            self.tried_seconds = try_link(joined, found, message.most_peers, device) if message.trial else 0.0
            """Seconds that a version would take, by the trial of a new link; 0 without one."""
            self._transfer = Transfer(found, joined, device, own, pairs)
            self.shares_device = bool(pairs.on_device)
            """Whether a peer that shares memory runs on this process's GPU, or CPUs."""
        except Exception as error:
            pairs.close()
            for group in groups:
                group.abort(reason_of(error))
                group.close()
            raise DirectFailed(f"group {message.group}: {reason_of(error)}") from error

    @property
    def received(self) -> int:
        """Bytes that this process receives with each version."""
        return self._transfer.received

    @property
    def frozen_size(self) -> int:
        """Bytes of `frozen` among them."""
        return self._transfer.frozen_size

    @property
    def path(self) -> str:
        """Kinds of links to its peers: `peer-memory`, `nixl`, `nccl` or `gloo`, joined by `+`."""
        return self._transfer.path

    def prepare(self, sources: Tensors, targets: Tensors) -> None:
        """Locate the tensors for the next transfer. Raises DirectFailed if they differ from their declaration."""
        try:
            self._transfer.prepare(sources, targets)
        except Exception as error:
            raise DirectFailed(f"group {self.id}: {reason_of(error)}") from error

    @property
    def complete(self) -> dict[str, int]:
        """Number of the last arrival into each target tensor, by its name."""
        return self._transfer.complete

    def run(
        self, follower: Follower | None = None, meanwhile: Callable[[], None] | None = None, *, kept: bool = False
    ) -> Seconds:
        """Run a transfer, as `Transfer.run`. Raises DirectFailed; the link is then unusable."""
        return self._transfer.run(self.seconds, follower, meanwhile, kept=kept)

    def watched(self) -> AbstractContextManager[None]:
        """Make a transfer inside the context fail as soon as the daemon ends the group, as when a rank's stream has ended.

        NCCL does not detect that a peer's process is gone.
        """
        return until_over(self._channel, self.id, self.seconds, self._transfer.group.abort)

    @property
    def over(self) -> bool:
        """Whether the daemon has ended the group. An unreachable daemon has not."""
        try:
            DaemonStore(self._channel, self.id).check([_NEVER_SET])
        except RuntimeError as error:
            return isinstance(error.__cause__, ResharderError) and error.__cause__.reason == _OVER
        return False

    def release(self) -> None:
        """Let go of this process's memory, which may then be freed; workers unmap it. `prepare` shares it again."""
        self._transfer.release(_ASK)

    def close(self) -> None:
        """Close the group and stop sharing memory. The link is then unusable."""
        self._transfer.close()


@contextmanager
def until_over(channel: Channel, group: str, seconds: float, over: Callable[[str], None]) -> Iterator[None]:
    """Call `over`, on another thread, when the daemon reports that the group has ended.

    An unreachable daemon is no such report.
    """

    def done(call: Any) -> None:
        if not call.cancelled() and (error := call.exception()) is not None and (found := channel.error(error)).reason == _OVER:
            over(str(found))

    request = direct_pb2.GetGroupKeyRequest(group=group, key=_NEVER_SET, wait_seconds=min(seconds, _LONGEST))
    key = direct_pb2_grpc.DirectServiceStub(channel.grpc).GetGroupKey
    call: Any = channel.begin(key.future, request, timeout=seconds + _ASK)
    call.add_done_callback(done)
    try:
        yield
    finally:
        call.cancel()


def _peers(found: Schedule) -> tuple[list[int], list[int]]:
    """Return the ranks to which this one sends, and from which it receives."""
    sends = {post.peer for each in found.rounds for post in each.sends}
    return sorted(sends), sorted({post.peer for each in found.rounds for post in each.receives})


class TransferLinks:
    """Links of one process. One thread at a time may call its methods.

    Args:
        tensors: Sources of all transfers.
        device: Device of the tensors.
    """

    def __init__(self, tensors: Tensors, device: torch.device) -> None:
        self._tensors, self._device = tensors, device
        self._met: dict[str, Future[TransferLink | None]] = {}
        self._preparing = threading.Lock()  # preparation compiles kernels

    def meet(self, group: str, make: Callable[[], TransferLink], failed: Failed) -> None:
        """Begin to form a group, on a thread and stream of its own.

        Args:
            group: Name of the group.
            make: Forms the group.
            failed: Called if `make` raises.
        """
        met = self._met[group] = Future[TransferLink | None]()

        def run() -> None:
            link: TransferLink | None = None
            try:
                with self._apart():
                    link = self._prepared(make())
            except Exception as error:
                self._met.pop(group, None)
                failed(group, error)
            finally:
                met.set_result(link)

        threading.Thread(target=run, name="resharder-meet", daemon=True).start()

    def get(self, group: str) -> TransferLink:
        """Return the link of a group, once it is formed. Raises DirectFailed if there is none."""
        met = self._met.get(group)
        link = met.result() if met is not None else None
        if link is None:
            raise DirectFailed(f"there is no link of group {group}")
        return link

    def prepare(self, failed: Failed) -> None:
        """Prepare every link that is formed. Links that are being formed prepare themselves."""
        for group, met in list(self._met.items()):
            link = met.result() if met.done() else None
            if link is not None:
                try:
                    self._prepared(link)
                except DirectFailed as error:
                    self._met.pop(group, None)
                    failed(group, error)

    def release(self) -> None:
        """Have workers unmap the memory of this process, over all links, while nothing is offered."""
        for link in self._formed():
            link.release()

    def _formed(self) -> list[TransferLink]:
        return [link for met in list(self._met.values()) if met.done() and (link := met.result()) is not None]

    def _prepared(self, link: TransferLink) -> TransferLink:
        try:
            with self._preparing:
                link.prepare(self._tensors, {})
        except DirectFailed:
            link.close()
            raise
        return link

    def drop(self, group: str) -> None:
        """Drop the link of a group, if necessary as soon as it is formed."""
        met = self._met.pop(group, None)
        if met is not None:
            met.add_done_callback(lambda done: link.close() if (link := done.result()) is not None else None)

    def close(self) -> None:
        for group in list(self._met):
            self.drop(group)

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Use a new stream that is ordered neither after nor before the current one."""
        if self._device.type != "cuda":
            yield
            return
        with on_stream(torch.cuda.Stream(self._device)):  # type: ignore[no-untyped-call]
            yield
