"""How the members of a group find each other: keys in a torch Store that the daemon keeps, then a process group of their own."""

import datetime
import json
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from resharder.client.direct.base import DirectFailed, DirectGroup, PeerMessage
from resharder.client.direct.gloo import GlooGroup
from resharder.client.errors import ResharderError
from resharder.client.rpc.channel import Channel
from resharder.v1 import direct_pb2, direct_pb2_grpc
from torch._C._distributed_c10d import PrefixStore

_ASK = 10.0  # seconds of one call


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


def make_group(
    store: Any,
    prefix: str,
    rank: int,
    size: int,
    device: torch.device,
    timeout: float,
    peers: Iterable[int] | None = None,
    most_peers: int = 0,
) -> DirectGroup:
    """Meets others of `size` processes at a torch Store under `prefix`, which is to be another for each group. `peers`: those
    that this one exchanges something with, and they with it; all by default. Only those make up the group that are connected by
    that, for it fails for all. `most_peers`: the most that any of them has, alike for all. Raises DirectFailed where they are not
    there within `timeout` seconds."""
    within = PrefixStore(f"resharder/{prefix}", store)
    if device.type == "cuda":
        from resharder.client.direct.nccl_group import NcclGroup

        others = set(range(size)) - {rank} if peers is None else set(peers)
        return NcclGroup(within, rank, others, device, timeout, max(most_peers, len(others)))
    if peers is None:
        return GlooGroup(within, rank, list(range(size)), timeout)
    members = connected(within, rank, peers, time.monotonic() + timeout)
    return GlooGroup(PrefixStore(f"of {members[0]}", within), rank, members, timeout)


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


def connect(group: DirectGroup, device: torch.device, sends: Sequence[int], receives: Sequence[int], timeout: float) -> None:
    """A byte to and from each of these ranks, in a round of its own: connections take a fraction of a second when they are first
    used, and servers need not be paused for that."""
    byte = torch.zeros(1, dtype=torch.uint8, device=device)
    deadline = time.monotonic() + timeout
    got = [PeerMessage(peer, torch.empty_like(byte)) for peer in sorted(receives)]
    group.post([PeerMessage(peer, byte) for peer in sorted(sends)], got, deadline).wait(deadline)
