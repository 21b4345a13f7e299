"""How members of a group meet: keys through the daemon, then a group of their own, then a transfer over it."""

import datetime
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from resharder.client.direct.group import DirectFailed, Group, connect, make_group
from resharder.client.direct.transfer import Follower, Seconds, Tensors, Transfer
from resharder.client.errors import ResharderError
from resharder.client.gpu.schedule import Schedule, quota_of, schedule
from resharder.client.rpc.channel import Channel
from resharder.converters.errors import ConversionError
from resharder.converters.wire.direct import copies_from_proto
from resharder.v1 import direct_pb2, direct_pb2_grpc

_ASK = 10.0  # seconds of one call
_LONGEST = 60.0  # seconds of one that waits
_NEVER_SET = "over"  # a key of nobody's
_OVER = "NOT_OFFERED"


class DaemonStore(dist.Store):  # type: ignore[name-defined,misc]
    """A torch Store whose keys the daemon keeps, as long as the group."""

    def __init__(self, channel: Channel, group: str) -> None:
        super().__init__()
        self._channel, self._group, self._timeout = channel, group, datetime.timedelta(seconds=30)
        self._stub = direct_pb2_grpc.DirectServiceStub(channel.grpc)

    def set(self, key: str, value: bytes | str) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._call(self._stub.SetGroupKey, direct_pb2.SetGroupKeyRequest(group=self._group, key=key, value=data))

    def get(self, key: str) -> bytes:
        return self._get(key, self._timeout)

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        for key in keys:
            self._get(key, timeout or self._timeout)

    def check(self, keys: list[str]) -> bool:
        return all(self._ask(key, 0.0) is not None for key in keys)

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        self._timeout = timeout

    def _get(self, key: str, timeout: datetime.timedelta) -> bytes:
        deadline = time.monotonic() + timeout.total_seconds()
        while (left := deadline - time.monotonic()) > 0:
            found = self._ask(key, min(left, _ASK))
            if found is not None:
                return found
        raise RuntimeError(f"group {self._group}: nobody set {key} in time")

    def _ask(self, key: str, seconds: float) -> bytes | None:
        request = direct_pb2.GetGroupKeyRequest(group=self._group, key=key, wait_seconds=seconds)
        answer = self._call(self._stub.GetGroupKey, request, seconds)
        return answer.value if answer.HasField("value") else None

    def _call(self, method: Any, request: Any, seconds: float = 0.0) -> Any:
        """Raises RuntimeError: that is what torch expects of a Store."""
        try:
            return self._channel.call(method, request, timeout=seconds + _ASK, patience=0)
        except ResharderError as error:
            raise RuntimeError(str(error)) from error


class Link:
    """One process's side of a group, kept from version to version. `memory`: for packing, where several links share it."""

    def __init__(
        self, channel: Channel, message: direct_pb2.DirectLink, device: torch.device, memory: torch.Tensor | None = None
    ) -> None:
        """Raises DirectFailed where the members do not meet, or this one cannot."""
        self.id, self.seconds, self._channel = message.group, message.seconds, channel
        group: Group | None = None
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
        """Bytes that come with each version."""
        return self._transfer.schedule.received

    def prepare(self, sources: Tensors, targets: Tensors) -> None:
        """Raises DirectFailed where tensors are not as they were declared."""
        try:
            self._transfer.prepare(sources, targets)
        except (KeyError, ValueError, RuntimeError) as error:
            raise DirectFailed(f"group {self.id}: {error}") from error

    @property
    def complete(self) -> dict[str, int]:
        """The last round that writes into each target local."""
        return self._transfer.schedule.complete

    def run(self, follower: Follower | None = None, meanwhile: Callable[[], None] | None = None) -> Seconds:
        """As `Transfer.run` has it. Raises DirectFailed; the link is of no use then."""
        return self._transfer.run(self.seconds, follower, meanwhile)

    def watched(self) -> AbstractContextManager[None]:
        """A transfer that runs inside fails as soon as the group is over for the daemon, as when a rank's stream has ended; NCCL
        does not notice that its process is gone."""
        return until_over(self._channel, self.id, self.seconds, self._transfer.group.abort)

    def close(self) -> None:
        self._transfer.group.close()


@contextmanager
def until_over(channel: Channel, group: str, seconds: float, over: Callable[[str], None]) -> Iterator[None]:
    """Calls `over`, in another thread, if the daemon says meanwhile that the group is; not where it says nothing."""

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
    """Whom it sends to, and whom it receives from."""
    sends = {post.peer for each in found.rounds for post in each.sends}
    return sorted(sends), sorted({post.peer for each in found.rounds for post in each.receives})


def finish(channel: Channel, member: direct_pb2.Member, group: str, error: str = "", seconds: float = 0.0, size: int = 0) -> None:
    """Tells the daemon how it went for this member. Raises ResharderError."""
    request = direct_pb2.FinishTransferRequest(
        member=member, group=group, ok=not error, error=error, seconds=seconds, size_bytes=size
    )
    channel.call(direct_pb2_grpc.DirectServiceStub(channel.grpc).FinishTransfer, request, timeout=_ASK, patience=0)


def declare(channel: Channel, member: direct_pb2.Member, fingerprint: str, layout: direct_pb2.MemoryLayout) -> None:
    """Raises ResharderError."""
    request = direct_pb2.DeclareMemoryRequest(member=member, fingerprint=fingerprint, layout=layout)
    channel.call(direct_pb2_grpc.DirectServiceStub(channel.grpc).DeclareMemory, request, timeout=120)
