"""Group of the direct path over NIXL: a worker reads from the memory of each rank, which is registered once for all groups.

For each peer, a rank numbers the rounds in which it sends to it, and so does the peer. When a round's bytes are in place, the
rank sends `ready` with the number; the worker then reads them, and the end of the read sends `done` back.

    rank:    memory ............ ready 0 ........... ready 1 ........
    worker:  prepares reads .... read 0 .. done 0 .. read 1 .. done 1

`memory` has the keys of the registered memory, where its allocations begin and the boxes of each round; it comes again when a
tensor has moved. Messages may overtake each other, so `ready` names the memory that it speaks of. Each process also sends
`alive`, because that is how NIXL notices that the other is gone.
"""

import json
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from resharder.client.direct.base import DirectFailed, Exchange, PeerMessage
from resharder.client.direct.boxes import merge_boxes, merge_ranges
from resharder.client.direct.nixl_agent import NixlAgent
from resharder.client.gpu import cuda_driver
from resharder.client.gpu.streams import WorkStream
from resharder.converters.geometry.piece_arrays import Ints

_NAP = 0.0002  # seconds between two looks at reads in progress
_ALIVE = 0.5  # seconds between two messages to a peer that is waited for


@dataclass
class _Memory:
    """Memory of a rank: where the boxes of each round are, in the rank's order."""

    serial: int
    device: int
    boxes: list[Ints]  # (n, 2) for each round: address and size
    begins: Ints  # (m,): addresses at which its allocations begin


@dataclass
class _Peer:
    """The other side of a pair."""

    name: str
    greeted: bool = False
    sent: int = 0  # rounds in which this process has sent to it
    done: set[int] = field(default_factory=set)  # of these, rounds that it has read, until they are waited for
    received: int = 0  # rounds in which this process has asked for bytes of it
    first: int = 0  # of these, the first one since `own` has changed
    ready: int = 0  # rounds that may be read
    serial: int = 0  # memory in which they are
    memory: _Memory | None = None
    own: list[Ints] = field(default_factory=list)  # (n, 2) for each round: where this process wants its bytes
    prepared: int = 0  # memory from which reads are prepared


class NixlGroup:
    """Group of `rank` and its `peers`. Lasts from version to version, with one agent."""

    path = "nixl"

    def __init__(
        self,
        store: Any,
        prefix: str,
        rank: int,
        peers: Iterable[int],
        device: torch.device,
        timeout: float,
        agent: NixlAgent | None = None,
    ) -> None:
        """Meet all peers.

        Args:
            store: torch Store that all members share.
            prefix: Name of the group, different for each.
            rank: Rank of this process.
            peers: Ranks with which it exchanges messages.
            device: Device of the messages.
            timeout: Seconds to wait for the peers.
            agent: Agent of a process that is only read from, which its groups share; by default one of this group's own.

        Raises:
            DirectFailed: A peer is missing or cannot be reached, or NIXL does not start.
        """
        self.rank, self._why, self._device, self._prefix = rank, "", device, prefix
        self._peers = {peer: _Peer("") for peer in sorted(peers)}
        self._ranks: dict[str, int] = {}  # by the name of their agent
        self.size = 1 + len(self._peers)
        self._rounds: Sequence[Exchange] | None = None
        self._serial = 0
        self._begins: Ints = np.empty(0, np.int64)
        self._pending: deque[_Reads] = deque()
        self._alive_at = 0.0
        deadline = time.monotonic() + timeout
        self._shared = agent is not None
        self._agent = agent or NixlAgent(f"{prefix}/{rank}", device)
        try:
            store.set(f"nixl/{rank}", json.dumps([self._agent.name, self._agent.address().hex()]))
            for number, peer in self._peers.items():
                store.wait([f"nixl/{number}"], timedelta(seconds=max(0.001, deadline - time.monotonic())))
                peer.name, address = json.loads(store.get(f"nixl/{number}"))
                self._ranks[peer.name] = number
                self._agent.listen([peer.name])
                self._agent.add(bytes.fromhex(address))
            self._greet(deadline)
        except BaseException as error:
            self.abort(str(error))
            self.close()
            if isinstance(error, RuntimeError | ValueError):
                raise DirectFailed(f"rank {rank}: a peer did not report its address for NIXL: {error}") from error
            raise

    def _greet(self, deadline: float) -> None:
        """Exchange a message with every peer, which connects the two. Raises DirectFailed."""
        for peer in self._peers.values():
            self._tell(peer, "hello")
        while missing := [rank for rank, peer in self._peers.items() if not peer.greeted]:
            self._take_messages()
            if time.monotonic() > deadline:
                raise DirectFailed(
                    f"rank {self.rank}: no word from ranks {missing} over NIXL; each has to reach the others, at any port "
                    "(UCX_NET_DEVICES selects interfaces)"
                )
            time.sleep(_NAP)

    def prepare(self, rounds: Sequence[Exchange]) -> None:
        """Register the memory of all rounds, tell the peers, and prepare the reads. Raises DirectFailed."""
        self.check()
        if rounds is not self._rounds:
            self._register(rounds)
        self._take_messages()
        for peer in self._peers.values():
            if self._fits(peer):  # else the peer has not told of its memory for these rounds yet
                self._prepare_reads(peer)

    def _register(self, rounds: Sequence[Exchange]) -> None:
        self._agent.deregister(self._prefix, self._ranks)
        self._rounds, self._serial = None, self._serial + 1
        everything = [message for exchange in rounds for messages in exchange for message in messages]
        allocations = _allocations(everything, self._device)
        self._begins = allocations[:, 0]
        keys = self._agent.register(self._prefix, allocations)
        for rank, peer in self._peers.items():
            peer.own, peer.prepared, peer.first = _by_round([receives for _, receives in rounds], rank), 0, peer.received
            if boxes := _by_round([sends for sends, _ in rounds], rank):
                about = {"serial": self._serial, "device": self._agent.place, "counts": [len(each) for each in boxes]}
                about |= {"begins": len(self._begins), "keys": [len(each) for each in keys]}
                self._tell(peer, "memory", b"".join((np.concatenate(boxes).tobytes(), self._begins.tobytes(), *keys)), **about)
        self._rounds = rounds

    def _prepare_reads(self, peer: _Peer) -> None:
        """Prepare the reads from a peer's memory, if it is known and they are not prepared yet. Raises DirectFailed."""
        memory = peer.memory
        if memory is None or peer.prepared == memory.serial or not peer.own:
            return
        if not self._fits(peer):
            raise DirectFailed(f"rank {self.rank}: the other side of {peer.name} divides its bytes in another way")
        pairs = zip(memory.boxes, peer.own, strict=True)
        begins = memory.begins, self._begins
        boxes = [merge_boxes(np.column_stack([there[:, 0], here]), begins) for there, here in pairs]
        self._agent.prepare(peer.name, boxes, memory.device)
        peer.prepared = memory.serial

    def _fits(self, peer: _Peer) -> bool:
        """Return whether a peer's memory, if it is known, is divided as the places where this process wants it."""
        memory = peer.memory
        return memory is None or [boxes[:, 1].tolist() for boxes in memory.boxes] == [boxes[:, 1].tolist() for boxes in peer.own]

    def post(self, sends: Sequence[PeerMessage], receives: Sequence[PeerMessage], deadline: float) -> "_Reads":
        """Begin to let others read, and to read, after the current stream's pending work. Raises DirectFailed."""
        self.check()
        mark: Any = None
        if self._device.type == "cuda":
            mark = torch.cuda.Event()  # type: ignore[no-untyped-call,unused-ignore]
            mark.record(torch.cuda.current_stream(self._device))
        work = _Reads(self, mark)
        for rank in dict.fromkeys(message.peer for message in sends):
            work.to[rank] = self._peers[rank].sent
            self._peers[rank].sent += 1
        for rank in dict.fromkeys(message.peer for message in receives):
            work.of[rank] = self._peers[rank].received
            self._peers[rank].received += 1
        self._pending.append(work)
        self.advance()
        return work

    def skip(self, rounds: Sequence[Exchange]) -> None:
        """Count rounds that are left out."""
        for sends, receives in rounds:
            for rank in {message.peer for message in sends}:
                self._peers[rank].sent += 1
            for rank in {message.peer for message in receives}:
                self._peers[rank].received += 1

    def advance(self) -> None:
        """Do what can be done now of all rounds that are posted. Raises DirectFailed."""
        self._take_messages()
        for work in self._pending:
            if not work.begun:
                if work.mark is not None and not work.mark.query():
                    break
                work.begun = True
                for rank, number in work.to.items():
                    self._tell(self._peers[rank], "ready", serial=self._serial, number=number)
            for rank, number in list(work.of.items()):
                if self._has_read(work, self._peers[rank], rank, number):
                    del work.of[rank]
            for rank, number in list(work.to.items()):
                if number in self._peers[rank].done:
                    self._peers[rank].done.discard(number)
                    del work.to[rank]
        while self._pending and self._pending[0].over:
            self._pending.popleft()
        if self._pending and (now := time.monotonic()) > self._alive_at:
            self._alive_at = now + _ALIVE
            for rank in {rank for work in self._pending for rank in (*work.to, *work.of)}:
                self._tell(self._peers[rank], "alive")

    def _has_read(self, work: "_Reads", peer: _Peer, rank: int, number: int) -> bool:
        """Begin or look at the read of a round. Raises DirectFailed."""
        if rank in work.reading:
            return self._agent.has_ended(peer.name, (number - peer.first) % len(peer.own))
        if number < peer.ready and peer.memory is not None and peer.memory.serial == peer.serial:
            self._prepare_reads(peer)
            self._agent.start(peer.name, (number - peer.first) % len(peer.own), _message("done", number=number))
            work.reading.add(rank)
        return False

    def _take_messages(self) -> None:
        """Take what peers have sent. Raises DirectFailed."""
        for name, message in self._agent.received(self._ranks):
            self._take(self._peers[self._ranks[name]], message)

    def _take(self, peer: _Peer, message: bytes) -> None:
        head, _, data = message.partition(b"\n")
        try:
            about = json.loads(head)
            match about["kind"]:
                case "hello":
                    peer.greeted = True
                case "memory":
                    ends = np.cumsum(about["counts"])
                    table = np.frombuffer(data, np.int64, 2 * int(ends[-1])).reshape(-1, 2)
                    begins = np.frombuffer(data, np.int64, about["begins"], table.nbytes)
                    before = table.nbytes + begins.nbytes
                    if min(about["keys"]) < 0 or sum(about["keys"]) != len(data) - before:
                        raise ValueError(f"expected {len(data) - before} bytes of keys, got {about['keys']}")
                    for begin, end in pairwise(np.cumsum([before, *about["keys"]]).tolist()):
                        self._agent.add(data[begin:end])
                    if peer.memory is None or peer.memory.serial < about["serial"]:
                        boxes = np.split(table, ends[:-1])
                        peer.memory = _Memory(int(about["serial"]), int(about["device"]), boxes, begins)
                case "ready":
                    peer.ready, peer.serial = max(peer.ready, int(about["number"]) + 1), int(about["serial"])
                case "done":
                    peer.done.add(int(about["number"]))
        except (KeyError, ValueError, IndexError, TypeError) as error:
            raise DirectFailed(f"rank {self.rank}: {peer.name} sent {head[:100]!r}, which is no message: {error}") from error

    def _tell(self, peer: _Peer, kind: str, data: bytes = b"", **fields: Any) -> None:
        self._agent.send(peer.name, _message(kind, data, **fields))

    def release(self) -> None:
        """Give back all registered memory, which the next `prepare` registers again; if that fails, with the whole agent."""
        try:
            self._agent.deregister(self._prefix, self._ranks)
        except DirectFailed as error:
            self.abort(str(error))
            self.close()
        self._rounds = None
        for peer in self._peers.values():
            peer.prepared = 0

    def check(self) -> None:
        """Raise DirectFailed if the group was aborted. A lost member shows when a message is sent to it."""
        if self._why:
            raise DirectFailed(self._why)

    def abort(self, why: str) -> None:
        """Make waits of other threads raise DirectFailed."""
        self._why = self._why or why

    def close(self) -> None:
        """End the agent, unless other groups share it: no read in progress writes any more."""
        self.abort("the group is closed")
        if self._shared:
            self._agent.leave(self._prefix, self._ranks)
        else:
            self._agent.close()


class _Reads:
    """One round: what others read of this process, and what it reads of others."""

    def __init__(self, group: NixlGroup, mark: Any) -> None:
        self._group, self.mark, self.begun = group, mark, False
        self.to: dict[int, int] = {}  # number of the round, by rank, until it has read
        self.of: dict[int, int] = {}  # number of the round, by rank, until it is read
        self.reading: set[int] = set()  # ranks of which a read has begun

    @property
    def over(self) -> bool:
        """Whether all bytes have arrived."""
        return self.begun and not self.to and not self.of

    def wait(self, deadline: float) -> None:
        while not self.over:
            self._group.check()
            if time.monotonic() > deadline:
                late = sorted({*self.to, *self.of})
                raise DirectFailed(f"rank {self._group.rank}: reads between it and ranks {late} did not end in time")
            self._group.advance()
            if not self.over:
                time.sleep(_NAP)

    def come_before(self, stream: WorkStream, deadline: float) -> None:
        self.wait(deadline)


def _message(kind: str, data: bytes = b"", **fields: Any) -> bytes:
    return json.dumps({"kind": kind, **fields}).encode() + b"\n" + data


def _allocations(messages: Iterable[PeerMessage], device: torch.device) -> Ints:
    """Return (n, 2): address and size of the allocations in which the messages' memory is, each once, sorted.

    Other groups' messages are in the same ones. On a GPU an allocation is what CUDA has allocated: torch puts many small storages
    into one, and UCX opens it as a whole.
    """
    found, end = list[tuple[int, int]](), 0
    with cuda_driver.context(device) if device.type == "cuda" else nullcontext():
        for storage in sorted((message.memory.untyped_storage() for message in messages), key=lambda each: each.data_ptr()):
            begin, size = storage.data_ptr(), storage.nbytes()
            if begin + size <= end:
                continue
            if device.type == "cuda" and (whole := cuda_driver.allocation_at(begin)).ipc:
                begin, size = whole.begin, whole.size
            found.append((begin, size))
            end = begin + size
    return merge_ranges(np.array(found, np.int64).reshape(-1, 2))


def _places(messages: Iterable[PeerMessage]) -> Ints:
    """Return (n, 2): address and size of each message's memory."""
    rows = [(message.memory.data_ptr(), message.memory.numel()) for message in messages]
    return np.array(rows, np.int64).reshape(-1, 2)


def _by_round(rounds: Sequence[Sequence[PeerMessage]], rank: int) -> list[Ints]:
    """Return the places of the messages from or to a rank, for each round that has some."""
    found = [_places(message for message in messages if message.peer == rank) for messages in rounds]
    return [each for each in found if len(each)]
