"""The direct path on four GPUs of one host, two senders and two receivers: `python -m benchmarks.direct_path [--json FILE]`.

Trainer TP=2 to vLLM TP=2 in the shape of Qwen3-8B, and EP=2 to TP=2 in that of Qwen3-30B-A3B. Weights are hashes of their
positions, which receivers check. A time counts from when the last process begins to when the last is done; medians. The limit is
what a worker keeps over the rate of plain sends of the same group, in the same run. `--recorded`: layouts from Megatron and vLLM
themselves; what is written in `direct_layouts` is the same and takes no minute. `--cpu-tiny`: the very same with gloo.
"""

import argparse
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from resharder.client.direct.group import DirectFailed, Group, Part, connect, make_group
from resharder.client.direct.proof import Proof
from resharder.client.direct.schedule import quota_of, schedule
from resharder.client.direct.transfer import Seconds, Transfer
from resharder.converters.copies import Copies, copies_of
from resharder.converters.digest import digest_torch
from resharder.converters.layout import Layout, Piece
from resharder.converters.local import view_of
from resharder.converters.plan import plan
from resharder.converters.replicas import held_digests
from rich.console import Console
from rich.table import Table
from torch.distributed import TCPStore

from benchmarks import shapes, vllm_nccl
from benchmarks.direct_layouts import DENSE, EXPERTS, both_sides, memory_of
from benchmarks.rows import Row, show, write
from tests.support.late_group import Late

MIB = 1 << 20
SENDERS, RECEIVERS = (0, 1), (2, 3)
TIMEOUT = 60.0  # seconds
Own = tuple[Copies, int, int]  # a process's own copies, and most_peers and most_made of all


class Way(NamedTuple):
    """What is tried: the shortest run that goes from memory to memory, and the memory for packing and unpacking."""

    direct_bytes: int
    staging: int

    def __str__(self) -> str:
        return f"runs from {self.direct_bytes / MIB:g} MiB, staging {self.staging / MIB:g} MiB"


class Job(NamedTuple):
    name: str
    config: dict[str, Any]
    ways: tuple[Way, ...]  # the first is what counts
    link_bytes: int


GPU_WAYS = tuple(Way(d * MIB, s * MIB) for d, s in ((16, 1024), (64, 1024), (4, 1024), (16, 512), (16, 256)))
CPU_WAYS = (Way(1 << 17, 2 * MIB), Way(1 << 14, 4 * MIB))
GPU_JOBS = (
    Job("Qwen3-8B", shapes.QWEN3_8B, GPU_WAYS, 4 << 30),
    Job("Qwen3-30B-A3B", shapes.QWEN3_30B_A3B, GPU_WAYS, 4 << 30),
)
CPU_JOBS = (Job("tiny dense", DENSE, CPU_WAYS, MIB), Job("tiny experts", EXPERTS, CPU_WAYS, MIB))


def values(piece: Piece, shape: tuple[int, ...], version: int, device: torch.device) -> torch.Tensor:
    """16 bits of a hash of each element's tensor and place in it, as bfloat16."""
    place = torch.full((), sum(piece.tensor.encode()) * 7919 + version * 104729, dtype=torch.int64, device=device)
    for r, n in zip(piece.box, shape, strict=True):
        along = torch.arange(r.start, r.last + 1, r.step, device=device)
        place = place.unsqueeze(-1) * n + along
    return place.mul_(0x9E3779B1).bitwise_right_shift_(13).to(torch.int16).view(torch.bfloat16)


class Process:
    """One of the four."""

    def __init__(self, rank: int, port: int, layout: Layout, part: Own, cpu: bool) -> None:
        self.rank, self.layout, (self.copies, *self.most) = rank, layout, part
        self.device = torch.device("cpu") if cpu else torch.device("cuda", rank)
        if not cpu:
            torch.cuda.set_device(self.device)
        self.store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=TIMEOUT))
        self.tensors = {n: torch.empty(size, dtype=t, device=self.device) for n, (size, t) in memory_of(layout).items()}
        self.sends, self.facts = rank in SENDERS, dict[str, Any]()
        before = self.free()
        self.group = self.new_group("first")
        self.facts["group MiB"] = (before - self.free()) / MIB

    def new_group(self, prefix: str, members: tuple[int, ...] = (0, 1, 2, 3)) -> Group:
        group = make_group(self.store, prefix, members.index(self.rank), len(members), self.device, TIMEOUT)
        peers = [i for i, rank in enumerate(members) if rank in (RECEIVERS if self.sends else SENDERS)]
        connect(group, self.device, *((peers, []) if self.sends else ([], peers)), TIMEOUT)
        return group

    def free(self) -> int:
        return int(torch.cuda.mem_get_info(self.device)[0]) if self.device.type == "cuda" else 0

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def meet(self, where: str) -> None:
        self.store.set(f"{where}/{self.rank}", "here")
        self.store.wait([f"{where}/{rank}" for rank in range(4)], timedelta(seconds=TIMEOUT))

    def fill(self, version: int) -> None:
        """Senders hold `version`, receivers nothing of it."""
        for tensor in self.tensors.values():
            tensor.view(torch.int16).fill_(-23131)
        for piece in self.layout.pieces if self.sends else ():
            there = view_of(self.tensors[piece.local], piece.view(piece.box))
            there.copy_(values(piece, self.layout.tensors[piece.tensor].shape, version, self.device))
        self.wait()

    def wrong(self, version: int) -> int:
        """Elements that are not `version`'s."""
        total = torch.zeros((), dtype=torch.int64, device=self.device)
        for piece in self.layout.pieces:
            there = view_of(self.tensors[piece.local].view(torch.int16), piece.view(piece.box))
            total += (
                there != values(piece, self.layout.tensors[piece.tensor].shape, version, self.device).view(torch.int16)
            ).sum()
        return int(total)

    def transfer(self, way: Way, group: Group | None = None) -> Transfer:
        found = schedule(self.copies, self.rank, quota_of(*self.most, way.staging), way.direct_bytes)
        transfer = Transfer(found, group or self.group, self.device)
        for what in ("prepared", "prepared again"):
            begin = time.monotonic()
            transfer.prepare(*((self.tensors, {}) if self.sends else ({}, self.tensors)))
            self.facts[what] = time.monotonic() - begin
        return transfer

    def run(self, transfer: Transfer, timeout: float = TIMEOUT) -> Seconds:
        return transfer.run(timeout)

    def timed(self, name: str, work: Any, rounds: int, warm_up: int = 2) -> list[tuple[float, float, Any]]:
        """(begin, end, what `work` said) of each round."""
        found = []
        for i in range(warm_up + rounds):
            self.meet(f"{name} {i}")
            begin = time.monotonic()
            said = work()
            found.append((begin, time.monotonic(), said))
        return found[warm_up:]

    def link(self, size: int, crossed: bool) -> None:
        """Plain sends of one buffer: each sender to one receiver, or half of it to each."""
        mine = RECEIVERS if self.sends else SENDERS
        peers = mine if crossed else (mine[self.rank % 2],)
        memory = self.link_memory[:size].view(len(peers), -1)
        parts = [Part(peer, memory[i]) for i, peer in enumerate(peers)]
        deadline = time.monotonic() + TIMEOUT
        self.group.post(*((parts, []) if self.sends else ([], parts)), deadline).wait(deadline)

    def measure(self, job: Job, rounds: int) -> dict[str, Any]:
        self.link_memory = torch.ones(job.link_bytes, dtype=torch.uint8, device=self.device)
        links = {
            name: self.timed(name, partial(self.link, job.link_bytes, name == "crossed"), rounds)
            for name in ("straight", "crossed")
        }
        del self.link_memory
        ways = []
        for version, way in enumerate(job.ways):
            transfer = self.transfer(way)
            self.fill(version)
            self.meet(f"filled {way}")
            self.run(transfer)
            wrong = 0 if self.sends else self.wrong(version)
            took = self.timed(str(way), lambda transfer=transfer: self.run(transfer), rounds)
            s = transfer.schedule
            facts = {"rounds": len(s.rounds), "messages": s.messages, "staging": transfer.staging, "wrong": wrong}
            ways.append({"took": took, **facts})
            del transfer
        self.prove(job.ways[0], len(job.ways), rounds)
        return {"links": links, "ways": ways, "bytes": s.sent + s.received, **self.facts}

    def prove(self, way: Way, version: int, rounds: int) -> None:
        """Transfers that end with the digests of all that arrived; some of those are compared with digests taken otherwise."""
        transfer, found = self.transfer(way), list[int]()
        self.fill(version)
        begin = time.monotonic()
        digests = self.digests()
        self.facts["proof made"] = time.monotonic() - begin

        def work() -> float:
            """Seconds of the proof alone."""
            self.run(transfer)
            begin = time.monotonic()
            found[:] = [] if self.sends else digests()
            return time.monotonic() - begin

        self.facts["proven"] = self.timed("proven", work, rounds)
        self.facts["unproven"] = 0
        for i in range(0, len(found), max(1, len(found) // 64)):
            piece = self.layout.pieces[i]
            shape = self.layout.tensors[piece.tensor].shape
            wanted = digest_torch(values(piece, shape, version, self.device), piece.box, shape)
            self.facts["unproven"] += wanted != found[i]

    def digests(self) -> Callable[[], list[int]]:
        if self.device.type == "cuda":
            return Proof(self.layout, self.tensors, self.device).digests
        return lambda: [held.digest for held in held_digests(self.layout, self.tensors)]


def measuring(rank: int, port: int, layout: Layout, part: Own, cpu: bool, job: Job, rounds: int, answers: Any) -> None:
    process = Process(rank, port, layout, part, cpu)
    answers.put((rank, process.measure(job, rounds)))
    process.meet("end")
    process.group.close()


def failing(rank: int, port: int, layout: Layout, part: Own, cpu: bool, job: Job, rounds: int, answers: Any) -> None:
    """Sender 1 sleeps past the others' timeout; a new group works; then it is killed."""
    process, said = Process(rank, port, layout, part, cpu), []
    way, timeout = job.ways[-1], 3.0
    for act, what in (("sleeps", lambda: time.sleep(2 * timeout)), ("nothing", None), ("is killed", _die)):
        process.fill(len(said))
        group = process.new_group(act)
        transfer = process.transfer(way, Late(group, 2, what) if rank == 1 and what else group)
        process.meet(act)
        begin = time.monotonic()
        try:
            process.run(transfer, TIMEOUT if act == "nothing" else timeout)
            outcome = f"{0 if process.sends else process.wrong(len(said))} wrong elements"
        except DirectFailed as error:
            outcome = f"torn {error.torn}: {error}"
        seconds = time.monotonic() - begin
        group.close()
        alive = float(torch.ones(8, device=process.device).sum()) == 8
        said.append(f"sender 1 {act}: rank {rank} after {seconds:.3f} s, alive {alive}, {outcome[:120]}")
        answers.put((rank, said[-1]))


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def processes(job: Job, target: Any, arguments: argparse.Namespace, seconds: float) -> Iterator[tuple[int, Any]]:
    """What four of them answer. Raises RuntimeError where they do not, in time."""
    have, want, whose = both_sides(job.config, 2, written=not arguments.recorded)
    copies = copies_of(plan(have, want))
    print(f"{job.name}: {whose}; {len(copies)} copies", flush=True)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    layouts, most = [*have.values(), *want.values()], (copies.most_peers, copies.most_made)
    parts = [(copies.of(rank), *most) for rank in range(4)]
    started = [
        context.Process(
            target=target,
            args=(rank, store.port, layout, part, arguments.cpu_tiny, job, arguments.rounds, answers),
            daemon=True,
        )
        for rank, (layout, part) in enumerate(zip(layouts, parts, strict=True))
    ]
    for process in started:
        process.start()
    deadline = time.monotonic() + seconds
    try:
        while any(process.is_alive() for process in started) or not answers.empty():
            if time.monotonic() > deadline:
                raise RuntimeError(f"{job.name}: expected answers within {seconds:g} s")
            if target is measuring and any(process.exitcode for process in started):
                raise RuntimeError(f"{job.name}: a process ended")
            if not answers.empty():
                yield answers.get()
            time.sleep(0.02)
    finally:
        for process in started:
            process.kill()
            process.join()


def seconds_of(took: list[list[tuple[float, float, Any]]]) -> float:
    """The median, over rounds, of the time from when the last process begins to when the last is done."""
    return median(max(end for _, end, _ in each) - max(begin for begin, _, _ in each) for each in zip(*took, strict=True))


def report(job: Job, said: dict[int, dict[str, Any]], peer: float | None) -> list[Row]:
    kept = max(said[rank]["bytes"] for rank in RECEIVERS)
    rates = {name: job.link_bytes / seconds_of([said[r]["links"][name] for r in range(4)]) for name in ("straight", "crossed")}
    limit = kept / rates["straight"]
    print(f"{job.name}: {kept / 1e9:.2f} GB a worker; plain sends {rates['straight'] / 1e9:.0f} GB/s one to one, "
          f"{rates['crossed'] / 1e9:.0f} each to both: limit {limit * 1000:.1f} ms")  # fmt: skip
    table = Table(
        "way", "ms", "of limit", "rounds", "messages", "pack", "wire (s)", "wire (r)", "unpack", "MiB (s)", "MiB (r)", "wrong"
    )
    rows = []
    for i, way in enumerate(job.ways):
        each = [said[rank]["ways"][i] for rank in range(4)]
        total = seconds_of([one["took"] for one in each])
        parts = [[median(getattr(s, part) for *_, s in one["took"]) * 1000 for part in Seconds._fields] for one in each]
        wrong = sum(one["wrong"] for one in each)
        counts = (str(max(one[what] for one in each)) for what in ("rounds", "messages"))
        times = (parts[0][1], parts[0][2], parts[2][2], parts[2][3])
        memory = (f"{each[rank]['staging'] / MIB:.0f}" for rank in (0, 2))
        shown = (f"{total * 1000:.1f}", f"{limit / total:.0%}", *counts, *(f"{t:.1f}" for t in times), *memory, str(wrong))
        table.add_row(str(way), *shown)
        if wrong:
            raise AssertionError(f"{job.name}, {way}: {wrong} elements are wrong")
        rows.append(Row(f"direct {job.name}" + (f", {way}" if i else ""), total, peer, limit))
    Console(width=180).print(table)
    proven, alone = seconds_of([one["proven"] for one in said.values()]), [t for *_, t in said[2]["proven"]]
    if sum(one["unproven"] for one in said.values()):
        raise AssertionError(f"{job.name}: digests are wrong")
    rows.append(Row(f"direct {job.name}, with the digest proof", proven, peer, limit))
    print(f"{job.name}: the group takes {said[0]['group MiB']:.0f} MiB of a sender and {said[2]['group MiB']:.0f} of a receiver; "
          f"with the proof {proven * 1000:.1f} ms, {proven / rows[0].ours - 1:+.0%}; alone {median(alone) * 1000:.1f}, "
          f"made in {said[2]['proof made'] * 1000:.0f}; schedules prepared in {said[0]['prepared'] * 1000:.0f} ms, again in "
          f"{said[0]['prepared again'] * 1000:.1f} and {said[2]['prepared again'] * 1000:.1f}", flush=True)  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--cpu-tiny", action="store_true")
    parser.add_argument("--recorded", action="store_true")
    parser.add_argument("--peer", action="store_true", help="measure vLLM's own transfer in the same run, on three of the GPUs")
    arguments = parser.parse_args()
    jobs, rows = CPU_JOBS if arguments.cpu_tiny else GPU_JOBS, list[Row]()
    for job in jobs:
        peer = vllm_nccl.measure(job.name) if arguments.peer else None
        rows += report(job, dict(processes(job, measuring, arguments, 90)), peer)
        if arguments.json:
            write(rows, arguments.json)
    show(rows)
    few = jobs[1]._replace(config=jobs[1].config | {"num_hidden_layers": 4})
    for _, line in sorted(processes(few, failing, arguments, 50)):
        print(line, flush=True)


if __name__ == "__main__":
    main()
