"""The kind of each pair of a group, agreed by both sides before anything is sent.

A pair shares memory if both processes run on one host and see each other's sockets, both want to, and the worker has mapped what
the rank has shared. A pair on different hosts uses NIXL if both have it; with RESHARDER_NIXL=on for both, one on the same host
does too, in place of shared memory. Every other pair goes over NCCL, or gloo on CPUs. Containers of one host share memory only if
they share a network namespace and CUDA lets one open the other's handles.
"""

import json
import logging
import secrets
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from resharder.client.direct import nixl_agent
from resharder.client.direct.base import DirectFailed
from resharder.client.direct.peer_memory.export import NotShareable
from resharder.client.direct.peer_memory.messages import Line
from resharder.client.direct.peer_memory.owner import PeerOwner
from resharder.client.direct.peer_memory.pairs import PeerPairs
from resharder.client.direct.peer_memory.reader import PeerReader
from resharder.client.gpu.table import Tensors
from resharder.client.runtime.host import host_identity
from resharder.client.settings import NIXL, PEER_MEMORY
from resharder.converters.geometry.copy_table import Copies
from resharder.converters.wire.nixl import has_rdma

logger = logging.getLogger(__name__)
_CPU = "cpu"
_ONE_GPU, _OTHER_GPU = 264, 64  # programs of the copying kernel: measured on H200s, where more are no faster


class Place(NamedTuple):
    """Where a process of a group runs.

    Attributes:
        host: The same for processes that reach each other's sockets.
        device: Identity of its device; the same for two processes on one GPU.
        shares: Whether it takes part.
        socket: Name of the socket on which it awaits readers.
        token: What readers have to send first.
        nixl: Whether it has NIXL and may use it.
        named: Whether it uses NIXL on its own host too.
    """

    host: str
    device: str
    shares: bool
    socket: str
    token: str
    nixl: bool = False
    named: bool = False


def path_between(one: Place, other: Place) -> str:
    """Return the kind of a pair: `peer-memory`, `nixl`, or empty for NCCL or gloo. The same for both sides."""
    same = one.host == other.host
    if one.nixl and other.nixl and (not same or (one.named and other.named)):
        return "nixl"
    return "peer-memory" if same and one.shares and other.shares else ""


def wanted(device: torch.device, environment: Mapping[str, str] | None = None) -> bool:
    """Return whether this process shares memory: by default on GPUs only.

    RESHARDER_PEER_MEMORY=off excludes it; `cpu` has CPUs share memory too, which copies everything twice.
    """
    setting = PEER_MEMORY.text(environment)
    return setting != "off" and (device.type == "cuda" or setting == "cpu")


def meet(
    store: Any, rank: int, copies: Copies, device: torch.device, sources: Tensors, timeout: float, nixl: bool = False
) -> PeerPairs:
    """Agree with all peers of this process on the kind of each pair, and share memory with those that do.

    Args:
        store: torch Store of the group.
        rank: Rank of this process.
        copies: Copies that it sends or receives.
        device: Device of its tensors.
        sources: The tensors that it sends from.
        timeout: Bound in seconds.
        nixl: Whether NIXL may be used.

    Raises:
        DirectFailed: A peer is missing, or was lost on the way; or a pair on one GPU, which NCCL does not join, cannot share.
        RuntimeError: The store fails.
    """
    deadline, found = time.monotonic() + timeout, PeerPairs()
    pairs = {pair for pair in zip(copies.source.tolist(), copies.target.tolist(), strict=True) if pair[0] != pair[1]}
    readers, owners = ({pair[1 - i] for pair in pairs if pair[i] == rank} for i in (0, 1))
    nixl = may_use_nixl(nixl)
    name, token = f"resharder-{secrets.token_hex(16)}", secrets.token_hex(16)
    own = Place(host_identity(), _identity(device), wanted(device), name, token, nixl, nixl and NIXL.read() == "on")
    with socket.socket(socket.AF_UNIX) as listening:
        if own.shares and readers:
            listening.bind("\0" + own.socket)
            listening.listen(len(readers))
        store.set(f"place/{rank}", json.dumps(own))
        asks = own.shares or own.nixl
        places = {other: _place(store, other, deadline) for other in sorted(readers | owners)} if asks else {}
        paths = {other: path_between(own, place) for other, place in places.items()}
        found.nixl.update(other for other, path in paths.items() if path == "nixl")
        sharing = {other for other, path in paths.items() if path == "peer-memory"}
        try:
            for source in sorted(owners & sharing):
                line = _call(rank, source, places[source], deadline)
                programs = _ONE_GPU if own.device == places[source].device else _OTHER_GPU
                found.readers[source] = PeerReader(line, _between(copies, source, rank), source, device, programs)
            awaited = readers & sharing
            while awaited:
                line, target = _answer(listening, own, awaited, deadline)
                awaited.discard(target)
                found.owners[target] = PeerOwner(line, _between(copies, rank, target), rank, device)
                if why := _lend(found.owners[target], sources, deadline):
                    found.owners.pop(target).close()
                    _refused(target, why, own, places[target])
            for source, reader in list(found.readers.items()):
                if why := reader.accept(deadline):
                    found.readers.pop(source).close()
                    _refused(source, why, own, places[source])
            found.on_device.update(o for o in (*found.owners, *found.readers) if places[o].device == own.device)
        except BaseException:
            found.close()
            raise
    return found


def may_use_nixl(allowed: bool) -> bool:
    """Return whether this process has NIXL and may use it, where the daemon has `allowed` it.

    What hinders it is logged, as a warning if RESHARDER_NIXL=on asks for it.
    """
    if (setting := NIXL.read()) == "off":
        return False
    why = nixl_agent.unavailable() if allowed else "the daemon has security, and not direct_trusted_fabric"
    if not why and not setting and not has_rdma():
        why = nixl_agent.NO_RDMA
    if why:
        logger.log(logging.WARNING if setting else logging.DEBUG, "NIXL is not used: %s", why)
    return not why


def _lend(owner: PeerOwner, sources: Tensors, deadline: float) -> str:
    """Share the tensors. Returns why they cannot be shared, empty if they are. Raises DirectFailed if the worker is gone."""
    try:
        owner.prepare(sources)
    except NotShareable as error:
        owner.refuse(str(error))
        return str(error)
    return owner.accepted(deadline)


def _identity(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else _CPU


def _place(store: Any, rank: int, deadline: float) -> Place:
    store.wait([f"place/{rank}"], timedelta(seconds=max(0.001, deadline - time.monotonic())))
    return Place(*json.loads(store.get(f"place/{rank}")))


def _between(copies: Copies, source: int, target: int) -> Copies:
    return copies.take((copies.source == source) & (copies.target == target))


def _call(rank: int, source: int, place: Place, deadline: float) -> Line:
    """Connect to a rank whose memory this process reads. Raises DirectFailed."""
    connected = socket.socket(socket.AF_UNIX)
    try:
        connected.settimeout(max(0.001, deadline - time.monotonic()))
        connected.connect("\0" + place.socket)
    except OSError as error:
        connected.close()
        raise DirectFailed(f"cannot connect to rank {source}: {error}") from error
    line = Line(connected, f"rank {source}")
    line.send("hello", token=place.token, rank=rank)
    return line


def _answer(listening: socket.socket, own: Place, awaited: set[int], deadline: float) -> tuple[Line, int]:
    """Return the connection of an awaited reader, and its rank. Raises DirectFailed after `deadline`."""
    while True:
        listening.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            connected, _ = listening.accept()
        except OSError as error:
            raise DirectFailed(f"ranks {sorted(awaited)} did not connect: {error}") from error
        line = Line(connected, "a reader")
        with suppress(DirectFailed):  # of a process that is no member
            hello = line.receive(deadline).fields
            if secrets.compare_digest(str(hello.get("token")), own.token) and hello.get("rank") in awaited:
                line.peer = f"rank {hello['rank']}"
                return line, hello["rank"]
        line.close()


def _refused(rank: int, why: str, own: Place, other: Place) -> None:
    """Log that a pair goes over NCCL. Raises DirectFailed if it cannot."""
    if own.device == other.device != _CPU:
        raise DirectFailed(f"rank {rank} is on the same GPU, where NCCL cannot be used, and cannot share its memory: {why}")
    logger.warning("rank %d shares no memory, its part goes over the network library: %s", rank, why)
