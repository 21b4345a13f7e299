"""Process of `benchmarks.direct_path`: a sender or a receiver with its own device, and its measurements."""

import os
import signal
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
from resharder.client.direct.base import DirectFailed, DirectGroup, JoinedGroup, PeerMessage
from resharder.client.direct.nixl_group import NixlGroup
from resharder.client.direct.peer_memory.meeting import meet
from resharder.client.direct.peer_memory.pairs import PeerPairs
from resharder.client.direct.rendezvous import connect, make_group
from resharder.client.direct.transfer import Transfer
from resharder.client.gpu.digest import Digester
from resharder.client.gpu.schedule import quota_of, schedule
from resharder.converters.geometry.copy_table import Copies
from resharder.converters.geometry.layout import Layout, Piece
from resharder.converters.models.replicas import held_digests
from resharder.converters.models.tensor_io import view_of
from resharder.converters.storage.digest import digest_torch
from torch.distributed import PrefixStore, TCPStore

from benchmarks.direct_layouts import memory_of
from tests.support.late_group import DelayedGroup

MIB = 1 << 20
TIMEOUT = 60.0  # seconds
GARBAGE = -23131
Took = list[tuple[float, float, Any]]  # (begin, end, what was said) of each round


class Way(NamedTuple):
    """Parameters of a transfer.

    The shortest run that is sent from memory to memory (None: all runs are packed), the memory for packing and unpacking, and
    the kind of link: "nixl", "peer-memory", or empty for NCCL or gloo.
    """

    direct_bytes: int | None
    staging: int
    link: str = ""

    def __str__(self) -> str:
        if self.link == "peer-memory":
            return self.link
        runs = "all packed" if self.direct_bytes is None else f"runs from {self.direct_bytes / MIB:g} MiB"
        return f"{self.link and f'{self.link}, '}{runs}, staging {self.staging / MIB:g} MiB"


class Job(NamedTuple):
    name: str
    config: dict[str, Any]
    ways: tuple[Way, ...]  # the first is what counts
    link_bytes: int
    sizes: tuple[int, ...] = ()
    """Sizes of plain messages, as many at once as fill `link_bytes`."""


class Place(NamedTuple):
    """Position of a process among all, the first half of which send. `part`: its copies; `most`: `most_peers` and `most_made`."""

    rank: int
    size: int
    port: int
    layout: Layout
    part: Copies
    most: tuple[int, int]
    cpu: bool

    @property
    def sends(self) -> bool:
        return self.rank < self.size // 2

    @property
    def others(self) -> range:
        """Return the ranks of the other side."""
        return range(self.size // 2, self.size) if self.sends else range(self.size // 2)


def values(piece: Piece, shape: tuple[int, ...], version: int, device: torch.device) -> torch.Tensor:
    """Return 16 bits of a hash of each element's tensor, position and version, as bfloat16."""
    place = torch.full((), sum(piece.tensor.encode()) * 7919 + version * 104729, dtype=torch.int64, device=device)
    for r, n in zip(piece.box, shape, strict=True):
        along = torch.arange(r.start, r.last + 1, r.step, device=device)
        place = place.unsqueeze(-1) * n + along
    return place.mul_(0x9E3779B1).bitwise_right_shift_(13).to(torch.int16).view(torch.bfloat16)


class Process:
    def __init__(self, place: Place) -> None:
        self.place, self.layout, self.rank = place, place.layout, place.rank
        self.device = torch.device("cpu") if place.cpu else torch.device("cuda", place.rank)
        if not place.cpu:
            torch.cuda.set_device(self.device)
        self.store = TCPStore("127.0.0.1", place.port, is_master=False, timeout=timedelta(seconds=TIMEOUT))
        self.tensors = {n: torch.empty(size, dtype=t, device=self.device) for n, (size, t) in memory_of(self.layout).items()}
        self.facts = dict[str, Any]()

    def new_group(self, prefix: str, peers: Sequence[int] | None = None) -> DirectGroup:
        """Form a group, by default with the processes with which this one exchanges data."""
        before, place = self.free(), self.place
        if peers is None:
            peers = sorted({*place.part.source.tolist(), *place.part.target.tolist()} - {self.rank})
        group = make_group(self.store, prefix, self.rank, place.size, self.device, TIMEOUT, peers, place.most[0])
        connect(group, self.device, *((peers, []) if self.place.sends else ([], peers)), TIMEOUT)
        self.facts["group MiB"] = (before - self.free()) / MIB
        return group

    def free(self) -> int:
        return int(torch.cuda.mem_get_info(self.device)[0]) if self.device.type == "cuda" else 0

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def meet(self, where: str) -> None:
        self.store.set(f"{where}/{self.rank}", "here")
        self.store.wait([f"{where}/{rank}" for rank in range(self.place.size)], timedelta(seconds=TIMEOUT))

    def fill(self, version: int) -> None:
        """Fill senders' memory with `version`, and clear receivers' memory."""
        self.forget()
        for piece in self.layout.pieces if self.place.sends else ():
            there = view_of(self.tensors[piece.local], piece.view(piece.box))
            there.copy_(values(piece, self.layout.tensors[piece.tensor].shape, version, self.device))
        self.wait()

    def forget(self) -> None:
        for tensor in self.tensors.values():
            tensor.view(torch.int16).fill_(GARBAGE)
        self.wait()

    def wrong(self, version: int) -> int:
        """Return the number of elements that differ from `version`."""
        total = torch.zeros((), dtype=torch.int64, device=self.device)
        for piece in self.layout.pieces:
            there = view_of(self.tensors[piece.local].view(torch.int16), piece.view(piece.box))
            total += (
                there != values(piece, self.layout.tensors[piece.tensor].shape, version, self.device).view(torch.int16)
            ).sum()
        return int(total)

    def transfer(self, way: Way, group: DirectGroup) -> Transfer:
        shortest = 1 << 62 if way.direct_bytes is None else way.direct_bytes
        pairs = PeerPairs()
        if way.link:
            group = self.linked(way, pairs)
        found = schedule(pairs.rest(self.place.part), self.rank, quota_of(*self.place.most, way.staging), shortest)
        transfer = Transfer(found, group, self.device, None, pairs)
        for what in ("prepared", "prepared again"):
            begin = time.monotonic()
            transfer.prepare(*((self.tensors, {}) if self.place.sends else ({}, self.tensors)))
            self.facts[what] = time.monotonic() - begin
        return transfer

    def linked(self, way: Way, pairs: PeerPairs) -> DirectGroup:
        """Form a group of this way's own link; over peer memory, fill `pairs`. Raises DirectFailed if a pair does not share."""
        store, prefix = PrefixStore(f"of {way}", self.store), f"{self.place.port} {way}"
        peers = {*self.place.part.source.tolist(), *self.place.part.target.tolist()} - {self.rank}
        if way.link == "nixl":
            return NixlGroup(store, prefix, self.rank, peers, self.device, TIMEOUT)
        os.environ |= {"RESHARDER_NIXL": "off", "RESHARDER_PEER_MEMORY": "cpu" if self.place.cpu else ""}
        sources = self.tensors if self.place.sends else {}
        found = meet(store, self.rank, self.place.part, self.device, sources, TIMEOUT)
        pairs.owners.update(found.owners)
        pairs.readers.update(found.readers)
        if missing := peers - {*found.owners, *found.readers}:
            raise DirectFailed(f"rank {self.rank} shares no memory with ranks {sorted(missing)}")
        return JoinedGroup(self.rank)

    def timed(self, name: str, work: Any, rounds: int, warm_up: int = 2) -> Took:
        found = []
        for i in range(warm_up + rounds):
            self.meet(f"{name} {i}")
            begin = time.monotonic()
            result = work()
            found.append((begin, time.monotonic(), result))
        return found[warm_up:]

    def plain(self, group: DirectGroup, memory: torch.Tensor, size: int, crossed: bool) -> None:
        """Send all of `memory` in messages of `size` bytes: each sender to one receiver or, if `crossed`, half of it to each."""
        others = self.place.others
        peers = list(others) if crossed else [others[self.rank % len(others)]]
        parts = [
            PeerMessage(peer, half[i : i + size])
            for peer, half in zip(peers, memory.view(len(peers), -1), strict=True)
            for i in range(0, half.numel(), size)
        ]
        deadline = time.monotonic() + TIMEOUT
        group.post(*((parts, []) if self.place.sends else ([], parts)), deadline).wait(deadline)

    def measure(self, job: Job, rounds: int) -> dict[str, Any]:
        ways, plain, links = {}, {}, dict[str, Took]()
        held = list[int]()
        self.fill(0)
        memory, group = (
            torch.ones(job.link_bytes, dtype=torch.uint8, device=self.device),
            self.new_group("links", self.place.others),
        )
        for name in ("straight", "crossed"):
            links[name] = self.timed(name, partial(self.plain, group, memory, job.link_bytes, name == "crossed"), rounds)
        group.close()
        group = self.new_group("measured")
        for size in job.sizes:
            plain[size] = self.timed(str(size), partial(self.plain, group, memory, size, False), rounds)
        for way in job.ways:
            ways[way] = self.tried(way, group, rounds, held)
        self.prove(job.ways[0], group, rounds)
        group.close()
        s = schedule(self.place.part, self.rank, quota_of(*self.place.most, job.ways[0].staging))
        return {"links": links, "ways": ways, "bytes": s.sent + s.received, "plain": plain, **self.facts}

    def tried(self, way: Way, group: DirectGroup, rounds: int, held: list[int]) -> dict[str, Any]:
        """Measure one way. `held`: digests of memory that was compared element by element before."""
        transfer = self.transfer(way, group)
        if not self.place.sends:
            self.forget()
        self.meet(f"ready for {way}")
        transfer.run(TIMEOUT)
        wrong = 0
        if not self.place.sends and not held:
            wrong, held[:] = self.wrong(0), self.digests(self.proof())
        elif not self.place.sends:
            wrong = sum(found != wanted for found, wanted in zip(self.digests(self.proof()), held, strict=True))
        took = self.timed(str(way), lambda: transfer.run(TIMEOUT), rounds)
        if way.link:
            transfer.close()
        s = transfer.schedule
        return {"took": took, "rounds": len(s.rounds), "messages": s.messages, "staging": transfer.staging, "wrong": wrong}

    def prove(self, way: Way, group: DirectGroup, rounds: int) -> None:
        """Measure transfers that end with digests of all received data, and compare some with independently computed ones."""
        transfer, found = self.transfer(way, group), list[int]()
        begin = time.monotonic()
        proof = self.proof(transfer.schedule.complete)
        self.facts["proof made"] = time.monotonic() - begin

        def work() -> float:
            """Return the seconds of verification after the transfer."""
            transfer.run(TIMEOUT, proof)
            begin = time.monotonic()
            if not self.place.sends:
                found[:] = self.digests(proof)
            return time.monotonic() - begin

        self.facts["proven"] = self.timed("proven", work, rounds)
        self.facts["unproven"] = 0
        for i in range(0, len(found), max(1, len(found) // 64)):
            piece = self.layout.pieces[i]
            shape = self.layout.tensors[piece.tensor].shape
            wanted = digest_torch(values(piece, shape, 0, self.device), piece.box, shape)
            self.facts["unproven"] += wanted != found[i]

    def proof(self, complete: dict[str, int] | None = None) -> Digester | None:
        """Return a digester; None on a CPU. `complete`: digests of a transfer that it follows."""
        if self.device.type != "cuda" or self.place.sends:
            return None
        return Digester(self.layout, self.tensors, self.device, complete)

    def digests(self, proof: Digester | None) -> list[int]:
        return proof.digests() if proof else [held.digest for held in held_digests(self.layout, self.tensors)]


def measuring(place: Place, job: Job, rounds: int, answers: Any) -> None:
    process = Process(place)
    answers.put((place.rank, process.measure(job, rounds)))
    process.meet("end")


def failing(place: Place, job: Job, rounds: int, answers: Any) -> None:
    """Suspend the last sender beyond the others' timeout, check a new group, then kill the sender."""
    process, lines = Process(place), list[str]()
    actor, timeout = place.size // 2 - 1, 3.0
    for act, what in (("sleeps", lambda: time.sleep(2 * timeout)), ("nothing", None), ("is killed", _die)):
        process.fill(len(lines))
        group = process.new_group(act)
        transfer = process.transfer(job.ways[-1], DelayedGroup(group, 2, what) if place.rank == actor and what else group)
        process.meet(act)
        begin = time.monotonic()
        try:
            transfer.run(TIMEOUT if act == "nothing" else timeout)
            outcome = f"{0 if place.sends else process.wrong(len(lines))} wrong elements"
        except DirectFailed as error:
            outcome = f"torn {error.torn}: {error}"
        seconds = time.monotonic() - begin
        group.close()
        alive = float(torch.ones(8, device=process.device).sum()) == 8
        lines.append(f"sender {actor} {act}: rank {place.rank} after {seconds:.3f} s, alive {alive}, {outcome[:120]}")
        answers.put((place.rank, lines[-1]))


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
