"""One of four processes of the direct path, ranks 0 and 1 sending to 2 and 3: `python -m tests.client.direct_ranks RANK PORT`.

Writes one line of JSON for each act that it took part in: what came of it, and after how many seconds.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
from resharder.client.direct.base import DirectFailed, DirectGroup, JoinedGroup
from resharder.client.direct.peer_memory.meeting import meet
from resharder.client.direct.rendezvous import connect, make_group
from resharder.client.direct.transfer import Transfer
from resharder.client.gpu.schedule import Schedule, quota_of, schedule
from resharder.converters.geometry.copy_table import ALIGN, Copies, copies_of
from resharder.converters.geometry.layout import Layout, box_index
from resharder.converters.geometry.plan import plan
from resharder.converters.models.tensor_io import view_of
from torch.distributed import PrefixStore, TCPStore

from benchmarks.direct_layouts import DENSE, EXPERTS, memory_of, written_trainer, written_workers
from tests.support.late_group import DelayedGroup

STAGING, DIRECT_BYTES = 1 << 20, 1 << 17  # the former for each peer
TIMEOUT, LONG = 4.0, 120.0  # seconds: one that a test waits for, and one that nothing here takes
CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]


def full(name: str, shape: tuple[int, ...], version: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(hash_of(name) + version)
    return torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, generator=generator).view(torch.bfloat16)


def hash_of(name: str) -> int:
    return int.from_bytes(name.encode(), "little") % (1 << 40)


def filled(layout: Layout, version: int | None) -> Tensors:
    """What a process holds of a version; without one, memory for it."""
    tensors = {name: torch.zeros(elements, dtype=dtype) for name, (elements, dtype) in memory_of(layout).items()}
    if version is not None:
        for piece in layout.pieces:
            whole = full(piece.tensor, layout.tensors[piece.tensor].shape, version)
            view_of(tensors[piece.local], piece.view(piece.box)).copy_(whole[box_index(piece.box)])
    return tensors


def scheduled(copies: Copies, rank: int) -> Schedule:
    quota = quota_of(copies.most_peers, copies.most_made, STAGING * copies.most_peers)
    return schedule(copies.of(rank), rank, quota, DIRECT_BYTES)


class Early:
    """Compares tensors as soon as they are said to be complete."""

    def __init__(self, complete: Mapping[str, int], mine: Tensors, wanted: Tensors) -> None:
        self.complete, self.mine, self.wanted = complete, mine, wanted
        self.rounds: list[int] = []
        self.early = self.equal = 0  # tensors; the former before the last round

    def begin(self) -> None:
        self.rounds, self.early, self.equal = [], 0, 0
        for tensor in self.mine.values():
            tensor.zero_()

    def arrived(self, number: int) -> None:
        self.rounds.append(number)
        names = [name for name, last in self.complete.items() if last == number]
        self.equal += sum(same(self.mine[name], self.wanted[name]) for name in names)
        self.early += len(names) if number < max(self.complete.values()) else 0


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


class Process:
    def __init__(self, rank: int, port: int) -> None:
        self.rank = rank
        self.store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=LONG))
        self.sides: dict[str, tuple[Copies, Layout]] = {}
        for name, config in (("dense", DENSE), ("experts", EXPERTS)):
            trainer, workers = written_trainer(config, 2), written_workers(config, 2)
            layout = [*trainer.values(), *workers.values()][rank]
            self.sides[name] = copies_of(plan(trainer, workers)), layout

    def group(self, prefix: str, rank: int | None = None, size: int = 4, peers: set[int] | None = None) -> DirectGroup:
        return make_group(self.store, prefix, self.rank if rank is None else rank, size, CPU, LONG, peers)

    def shared(self, act: str, kind: str, numbers: tuple[int, ...], apart: int | None = None) -> None:
        """Transfers over shared memory; rank `apart`, if one is named, shares none, and its peers use gloo for it."""
        os.environ["RESHARDER_PEER_MEMORY"] = "off" if self.rank == apart else "cpu"
        copies, layout = self.sides[kind]
        own, started = copies.of(self.rank), time.monotonic()
        mine, sends = filled(layout, None), self.rank < 2
        sources = filled(layout, numbers[0]) if sends else {}
        pairs = meet(PrefixStore(act, self.store), self.rank, own, CPU, sources, LONG)
        rest = pairs.rest(own)
        peers = {*rest.source.tolist(), *rest.target.tolist()} - {self.rank}
        group = self.group(act, peers=peers) if peers else JoinedGroup(self.rank)
        if peers:
            connect(group, CPU, *(sorted(peers), []) if sends else ([], sorted(peers)), LONG)
        quota = quota_of(copies.most_peers, copies.most_made, STAGING * copies.most_peers)
        transfer = Transfer(schedule(rest, self.rank, quota, DIRECT_BYTES), group, CPU, None, pairs)
        equal, kinds = [], {"owners": sorted(pairs.owners), "readers": sorted(pairs.readers), "rest": sorted(peers)}
        kinds["received"] = [transfer.received, sum(copies.sizes[copies.target == self.rank].tolist())]
        for version in numbers:
            wanted = filled(layout, version)  # in other memory each time
            transfer.prepare(*((wanted, {}) if sends else ({}, mine)))
            early = Early(transfer.complete, mine, wanted) if not sends else None
            transfer.run(LONG, early)
            if early is not None:
                equal.append(all(same(mine[name], wanted[name]) for name in wanted))
                equal.append(early.equal == len(wanted))
            pairs.release(time.monotonic() + LONG)
        transfer.close()
        self.report(act, started, equal=equal, **kinds)

    def shared_failing(self, act: str, actor: int, what: Any, timeout: float) -> None:
        """A transfer over shared memory in which `actor` does `what` instead of its part."""
        os.environ["RESHARDER_PEER_MEMORY"] = "cpu"
        copies, layout = self.sides["experts"]
        own, sends = copies.of(self.rank), self.rank < 2
        tensors = filled(layout, 1 if sends else None)
        pairs = meet(PrefixStore(act, self.store), self.rank, own, CPU, tensors if sends else {}, LONG)
        group = JoinedGroup(self.rank)
        transfer = Transfer(schedule(pairs.rest(own), self.rank, ALIGN), group, CPU, None, pairs)
        transfer.prepare(*((tensors, {}) if sends else ({}, tensors)))
        self.store.set(f"{act}/there {self.rank}", "yes")
        self.store.wait([f"{act}/there {rank}" for rank in range(4)], timedelta(seconds=LONG))
        started = time.monotonic()
        try:
            if self.rank == actor:
                what(group)
            transfer.run(timeout)
            self.report(act, started, error=None)
        except DirectFailed as error:
            self.report(act, started, error=str(error), torn=error.torn)
        self.store.set(f"{act}/{self.rank}", "done")
        transfer.close()

    def transfer(self, group: DirectGroup, kind: str) -> Transfer:
        copies, _ = self.sides[kind]
        found = scheduled(copies, self.rank)
        assert found.staging <= STAGING * copies.most_peers
        return Transfer(found, group, CPU)

    def report(self, act: str, started: float, **what: Any) -> None:
        print(json.dumps({"act": act, "seconds": time.monotonic() - started} | what), flush=True)

    def versions(self, act: str, kind: str, numbers: tuple[int, ...]) -> None:
        """Transfers that work: one group, one schedule, version after version."""
        copies, layout = self.sides[kind]
        own = copies.of(self.rank)
        peers = {*own.source.tolist(), *own.target.tolist()} - {self.rank}
        started, group = time.monotonic(), self.group(act, peers=peers)
        transfer = self.transfer(group, kind)
        connect(group, CPU, *(sorted(peers), []) if self.rank < 2 else ([], sorted(peers)), LONG)
        rounds = transfer.schedule.rounds
        equal, kinds = [], {"rounds": len(rounds), "round0": len(rounds[0].receives), "size": group.size}
        mine = filled(layout, None)
        for version in numbers:
            wanted = filled(layout, version)
            transfer.prepare(*((wanted, {}) if self.rank < 2 else ({}, mine)))
            early = Early(transfer.schedule.complete, mine, wanted) if self.rank > 1 else None
            asked = list[int]()
            transfer.run(LONG, early, lambda to=asked: to.append(1))  # type: ignore[misc]
            assert asked == [1]
            if early is not None:
                equal.append(all(same(mine[name], wanted[name]) for name in wanted))
                assert early.rounds == list(range(len(rounds)))
                kinds |= {"tensors": len(wanted), "as complete": early.equal, "early": early.early}
        group.close()
        self.report(act, started, equal=equal, **kinds)

    def refused(self, act: str) -> None:
        """A transfer that rank 2 does not want any more once its last round has begun."""
        group, refuses = self.group(act), self.rank == 2
        transfer = self.transfer(group, "experts")
        tensors = filled(self.sides["experts"][1], 1 if self.rank < 2 else None)
        transfer.prepare(*((tensors, {}) if self.rank < 2 else ({}, tensors)))
        started = time.monotonic()
        try:
            transfer.run(LONG, None, self.refuse if refuses else None)
            self.report(act, started, error=None)
        except DirectFailed as error:
            self.report(act, started, error=str(error), torn=error.torn)
        group.close()

    def refuse(self) -> None:
        raise DirectFailed("other tensors than before")

    def failing(self, act: str, actor: int, what: Any, timeout: float, then: Mapping[int, Any] | None = None) -> None:
        """A transfer in which `actor` does `what` on the way, and others `then`."""
        group = self.group(act)
        transfer = self.transfer(DelayedGroup(group, 3, what) if self.rank == actor else group, "experts")
        tensors = filled(self.sides["experts"][1], 1 if self.rank < 2 else None)
        connect(group, CPU, *([2, 3], []) if self.rank < 2 else ([], [0, 1]), LONG)
        (then or {}).get(self.rank, lambda _: None)(group)
        transfer.prepare(*((tensors, {}) if self.rank < 2 else ({}, tensors)))
        started = time.monotonic()
        try:
            transfer.run(timeout)
            self.report(act, started, error=None)
        except DirectFailed as error:
            self.report(act, started, error=str(error), torn=error.torn)
        before = {name: tensor.clone() for name, tensor in tensors.items()}
        self.store.set(f"{act}/{self.rank}", "done")
        self.store.wait([f"{act}/{rank}" for rank in range(4) if rank != 1 or act != "killed"], timedelta(seconds=LONG))
        if not all(same(tensor, tensors[name]) for name, tensor in before.items()):
            self.report(act, started, error="memory was written to after the error")

    def after(self, act: str, *ranks: int) -> None:
        """Sleeps until that act has failed for these."""
        self.store.wait([f"{act}/{rank}" for rank in ranks], timedelta(seconds=LONG))

    def survivors(self) -> None:
        """Those that are left, in a group of three: rank 0 has everything."""
        started = time.monotonic()
        whole, workers = written_trainer(DENSE, 1), written_workers(DENSE, 2)
        copies, rank = copies_of(plan(whole, workers)), {0: 0, 2: 1, 3: 2}[self.rank]
        group = self.group("survivors", rank, 3)
        transfer = Transfer(scheduled(copies, rank), group, CPU)
        layout = [*whole.values(), *workers.values()][rank]
        wanted, mine = filled(layout, 9), filled(layout, None)
        transfer.prepare(*((wanted, {}) if rank == 0 else ({}, mine)))
        transfer.run(LONG)
        equal = [same(mine[name], wanted[name]) for name in wanted if rank]
        group.close()
        self.report("survivors", started, equal=equal)


def main() -> None:
    torch.set_num_threads(1)
    process = Process(int(sys.argv[1]), int(sys.argv[2]))
    process.versions("dense", "dense", (1, 2))
    process.versions("experts", "experts", (1, 2))
    process.shared("shared dense", "dense", (1, 2, 3))
    process.shared("shared experts", "experts", (4, 5))
    process.shared("mixed", "experts", (6, 7), apart=3)
    process.shared_failing("shared asleep", 1, lambda _: process.after("shared asleep", 2, 3), TIMEOUT)
    process.shared_failing("shared aborted", 2, lambda group: group.abort("the daemon said so"), TIMEOUT)
    process.refused("refused")
    process.failing("asleep", 1, lambda: process.after("asleep", 2, 3), TIMEOUT)
    asked = {2: lambda group: threading.Timer(0.5, group.abort, ["the daemon said so"]).start()}
    process.failing("aborted", 1, lambda: process.after("aborted", 2), LONG, asked)
    process.versions("again", "experts", (3,))
    process.failing("killed", 1, lambda: os.kill(os.getpid(), signal.SIGKILL), LONG)
    process.survivors()


if __name__ == "__main__":
    main()
