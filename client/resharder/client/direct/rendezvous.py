"""Rendezvous of a group's members: keys in a torch Store on the daemon, then a process group of the members alone."""

import datetime
import json
import socket
import time
from collections.abc import Iterable, Sequence
from ipaddress import ip_address
from typing import Any

import torch
import torch.distributed as dist
from resharder.client.direct.base import DirectFailed, DirectGroup, PeerMessage
from resharder.client.direct.gloo import GlooGroup
from resharder.client.errors import ResharderError
from resharder.client.rpc.channel import Channel
from resharder.v1 import direct_pb2, direct_pb2_grpc
from torch._C._distributed_c10d import PrefixStore

_ASK = 10.0  # seconds: longest wait of one call, and time allowed for the call itself


class DaemonStore(dist.Store):  # type: ignore[name-defined,misc]
    """torch Store whose keys are on the daemon, for the life of the group. Methods raise RuntimeError, as torch expects."""

    def __init__(self, channel: Channel, group: str) -> None:
        super().__init__()
        self._channel, self._group, self._timeout = channel, group, datetime.timedelta(seconds=30)
        self._stub = direct_pb2_grpc.DirectServiceStub(channel.grpc)

    def set(self, key: str, value: bytes | str) -> None:
        """Set a key for all members of the group."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._call(self._stub.SetGroupKey, direct_pb2.SetGroupKeyRequest(group=self._group, key=key, value=data))

    def get(self, key: str) -> bytes:
        """Return the value of a key, as soon as a member has set it. Raises RuntimeError after the store's timeout."""
        return self._get(key, self._timeout)

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        """Return when members have set all keys. Raises RuntimeError if one is missing after
        `timeout`, by default the store's.
        """
        for key in keys:
            self._get(key, timeout or self._timeout)

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are set, without waiting."""
        return all(self._ask(key, 0.0) is not None for key in keys)

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Set the store's timeout, 30 s at first."""
        self._timeout = timeout

    def _get(self, key: str, timeout: datetime.timedelta) -> bytes:
        deadline = time.monotonic() + timeout.total_seconds()
        while (left := deadline - time.monotonic()) > 0:
            found = self._ask(key, min(left, _ASK))
            if found is not None:
                return found
        raise RuntimeError(f"group {self._group}: no member has set {key} within {timeout.total_seconds():g} s")

    def _ask(self, key: str, seconds: float) -> bytes | None:
        request = direct_pb2.GetGroupKeyRequest(group=self._group, key=key, wait_seconds=seconds)
        answer = self._call(self._stub.GetGroupKey, request, seconds)
        return answer.value if answer.HasField("value") else None

    def _call(self, method: Any, request: Any, seconds: float = 0.0) -> Any:
        """Call the daemon. Raises RuntimeError, as torch expects of a Store."""
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
    address: str = "",
) -> DirectGroup:
    """Form a group of `size` processes through a torch Store.

    Args:
        store: Store that all processes share.
        prefix: Prefix of keys, different for each group.
        rank: Rank of this process.
        size: Number of processes that meet.
        device: Device of the messages; its type selects NCCL or gloo.
        timeout: Seconds to wait for members.
        peers: Ranks with which this one exchanges messages, the same pairs on both sides; by default all. The group has connected
            ranks only, because a failure ends it for all its members.
        most_peers: Largest number of peers of any rank, the same on all.
        address: Address at which members reach this process over gloo, by default that of the host's name. NCCL finds its own.

    Raises:
        DirectFailed: Members are missing.
    """
    within = PrefixStore(f"resharder/{prefix}", store)
    if device.type == "cuda":
        from resharder.client.direct.nccl_group import NcclGroup

        others = set(range(size)) - {rank} if peers is None else set(peers)
        return NcclGroup(within, rank, others, device, timeout, max(most_peers, len(others)))
    if peers is None:
        return GlooGroup(within, rank, list(range(size)), timeout, address)
    members = connected(within, rank, peers, time.monotonic() + timeout)
    return GlooGroup(PrefixStore(f"of {members[0]}", within), rank, members, timeout, address)


def address_towards(endpoint: str) -> str:
    """Return this host's address on the route to `endpoint` (host:port); empty if that is a loopback address or there is none."""
    host, _, port = endpoint.rpartition(":")
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as trial:  # sends nothing
            trial.connect(target)
            found = str(trial.getsockname()[0])
    except OSError:
        return ""
    return "" if ip_address(found.partition("%")[0]).is_loopback else found


def connected(store: Any, rank: int, peers: Iterable[int], deadline: float) -> list[int]:
    """Return all ranks that `rank` reaches from peer to peer, itself included. Each rank stores its peers under a key."""
    store.set(f"peers/{rank}", json.dumps(sorted(peers)))
    found, left = set[int](), [rank]
    try:
        while left:
            if (each := left.pop()) not in found:
                store.wait([f"peers/{each}"], datetime.timedelta(seconds=max(0.001, deadline - time.monotonic())))
                found.add(each)
                left += json.loads(store.get(f"peers/{each}"))
    except (RuntimeError, ValueError) as error:
        raise DirectFailed(f"rank {each} did not report its peers in time: {error}") from error
    return sorted(found)


def connect(group: DirectGroup, device: torch.device, sends: Sequence[int], receives: Sequence[int], timeout: float) -> None:
    """Exchange a byte with each of these ranks, in a round of its own.

    The first use of a connection takes a fraction of a second, for which servers then need not pause.
    """
    byte = torch.zeros(1, dtype=torch.uint8, device=device)
    deadline = time.monotonic() + timeout
    got = [PeerMessage(peer, torch.empty_like(byte)) for peer in sorted(receives)]
    group.post([PeerMessage(peer, byte) for peer in sorted(sends)], got, deadline).wait(deadline)
