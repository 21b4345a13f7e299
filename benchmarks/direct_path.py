"""The direct path on four GPUs of one host, two senders and two receivers: `python -m benchmarks.direct_path [--json FILE]`.

Trainer TP=2 to vLLM TP=2 in the shape of Qwen3-8B, and EP=2 to TP=2 in that of Qwen3-30B-A3B. Weights are hashes of their
positions, which receivers check. Times are medians, from the begin of the last process to the end of the last one. The limit is a
worker's bytes divided by the rate of plain sends of the same group, in the same run.

`--half`: on two GPUs, only the first sender's part of the first receiver's memory. `--sweep`: more parameters, and plain messages
of many sizes. `--recorded`: layouts recorded from Megatron and vLLM, which takes minutes and gives those of `direct_layouts`.
`--faults`: without measurements, kill and suspend members. `--cpu-tiny`: the same with gloo. `--cpu`: with gloo, in the shape of
four layers of Qwen3-0.6B. `--links`: peer memory and NIXL too, in the same run; with `--half`, between two GPUs. UCX_TLS
names NIXL's transports, as cuda_ipc,cuda_copy,tcp.
"""

import argparse
import multiprocessing
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from resharder.client.direct.transfer import Seconds
from resharder.client.gpu.schedule import DIRECT_BYTES
from resharder.converters.geometry.copy_table import copies_of
from resharder.converters.geometry.layout import Layout
from resharder.converters.geometry.plan import plan
from rich.console import Console
from rich.table import Table
from torch.distributed import TCPStore

from benchmarks import shapes
from benchmarks.direct_layouts import DENSE, EXPERTS, Layouts, both_sides
from benchmarks.direct_process import MIB, Job, Place, Took, Way, failing, measuring
from benchmarks.rows import Row, show, write

STAGING = 1024 * MIB  # the daemon's `direct_staging_bytes`
GPU_WAYS = (Way(DIRECT_BYTES, STAGING), Way(DIRECT_BYTES, STAGING // 2), Way(None, STAGING), Way(None, STAGING // 2))
GPU_SWEEP = tuple(Way(runs, STAGING // k) for runs in (DIRECT_BYTES, 64 * MIB, None) for k in (1, 2, 4))
GPU_SIZES = tuple(size * MIB for size in (4, 16, 64, 128, 256, 512))
LINKS = (
    Way(DIRECT_BYTES, STAGING, "peer-memory"),
    *(Way(runs, STAGING, "nixl") for runs in (DIRECT_BYTES, 4 * MIB, MIB, MIB // 4)),
)
CPU_WAYS = (Way(1 << 17, 2 * MIB), Way(1 << 14, 4 * MIB), Way(None, 4 * MIB))
GPU_JOBS = (
    Job("Qwen3-8B", shapes.QWEN3_8B, GPU_WAYS, 4 << 30),
    Job("Qwen3-30B-A3B", shapes.QWEN3_30B_A3B, GPU_WAYS, 4 << 30),
)
CPU_JOB = Job(
    "four layers of Qwen3-0.6B",
    shapes.QWEN3_0_6B | {"num_hidden_layers": 4, "vocab_size": 32768},
    (Way(DIRECT_BYTES, STAGING // 4),),
    64 * MIB,
)
CPU_JOBS = (Job("tiny dense", DENSE, CPU_WAYS, MIB), Job("tiny experts", EXPERTS, CPU_WAYS, MIB))


def half(have: Layouts, want: Layouts) -> tuple[Layouts, Layouts]:
    """Return the first rank and, of the first worker, the tensors of which this rank has a part."""
    ours, rank = next(iter(have.items()))
    theirs, worker = next(iter(want.items()))
    pieces = tuple(piece for piece in worker.pieces if piece.tensor in rank.tensors)
    return {ours: rank}, {theirs: Layout({piece.tensor: worker.tensors[piece.tensor] for piece in pieces}, pieces)}


def processes(job: Job, target: Any, arguments: argparse.Namespace, seconds: float) -> Iterator[tuple[int, Any]]:
    """Run the processes and yield their answers. Raises RuntimeError unless all answer in time."""
    have, want, whose = both_sides(job.config, 2, written=not arguments.recorded)
    if arguments.half:
        have, want = half(have, want)
    copies = copies_of(plan(have, want))
    print(f"{job.name}: {whose}; {len(copies)} copies", flush=True)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    layouts, most = [*have.values(), *want.values()], (copies.most_peers, copies.most_made)
    started = []
    for rank, layout in enumerate(layouts):
        place = Place(rank, len(layouts), store.port, layout, copies.of(rank), most, arguments.cpu_tiny)
        started.append(context.Process(target=target, args=(place, job, arguments.rounds, answers), daemon=True))
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


def seconds_of(took: list[Took]) -> float:
    """Return the median over rounds of the seconds from the last process's begin to the last process's end."""
    return median(max(end for _, end, _ in each) - max(begin for begin, _, _ in each) for each in zip(*took, strict=True))


def report(job: Job, results: dict[int, dict[str, Any]]) -> list[Row]:
    ranks = sorted(results)
    first = len(ranks) // 2  # of the receivers
    kept = max(results[rank]["bytes"] for rank in ranks[first:])
    rates = {name: job.link_bytes / seconds_of([results[r]["links"][name] for r in ranks]) for name in ("straight", "crossed")}
    limit = kept / rates["straight"]
    print(f"{job.name}: {kept / 1e9:.2f} GB a worker; plain sends {rates['straight'] / 1e9:.0f} GB/s one to one, "
          f"{rates['crossed'] / 1e9:.0f} each to both: limit {limit * 1000:.1f} ms")  # fmt: skip
    plain = {size: seconds_of([results[r]["plain"][size] for r in ranks]) for size in job.sizes}
    if plain:
        found = ", ".join(f"{size / MIB:g} MiB {job.link_bytes / seconds / 1e9:.0f}" for size, seconds in plain.items())
        print(f"{job.name}: many plain messages at once, GB/s: {found}", flush=True)
    table = Table(
        "way", "ms", "of limit", "rounds", "messages", "pack", "wire (s)", "wire (r)", "unpack", "MiB (s)", "MiB (r)", "wrong"
    )
    rows = []
    for way in job.ways:
        each = [results[rank]["ways"][way] for rank in ranks]
        total = seconds_of([one["took"] for one in each])
        parts = [[median(getattr(s, part) for *_, s in one["took"]) * 1000 for part in Seconds._fields] for one in each]
        wrong = sum(one["wrong"] for one in each)
        counts = (str(max(one[what] for one in each)) for what in ("rounds", "messages"))
        times = (parts[0][1], parts[0][2], parts[first][2], parts[first][3])
        memory = (f"{each[rank]['staging'] / MIB:.0f}+{results[rank]['group MiB']:.0f}" for rank in (0, first))
        shown = (f"{total * 1000:.1f}", f"{limit / total:.0%}", *counts, *(f"{t:.1f}" for t in times), *memory, str(wrong))
        table.add_row(str(way), *shown)
        rows.append(Row(f"direct {job.name}" + (f", {way}" if rows else ""), total, None, limit))
    Console(width=180).print(table)
    if any(results[rank]["ways"][way]["wrong"] for rank in ranks for way in job.ways):
        raise AssertionError(f"{job.name}: elements are wrong")
    proven, alone = seconds_of([one["proven"] for one in results.values()]), [t for *_, t in results[first]["proven"]]
    if sum(one["unproven"] for one in results.values()):
        raise AssertionError(f"{job.name}: digests are wrong")
    rows.append(Row(f"direct {job.name}, with the digest proof", proven, None, limit))
    print(f"{job.name}: MiB above: buffers and what the group takes of a sender and of a receiver; "
          f"with the proof {proven * 1000:.1f} ms, {proven / rows[0].ours - 1:+.0%}; alone {median(alone) * 1000:.1f}, "
          f"made in {results[first]['proof made'] * 1000:.0f}; schedules prepared in {results[0]['prepared'] * 1000:.0f} ms, "
          f"again in {results[0]['prepared again'] * 1000:.1f} and "
          f"{results[first]['prepared again'] * 1000:.1f}", flush=True)  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=150, help="bound on the measurements of a shape")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--cpu-tiny", action="store_true")
    parser.add_argument("--cpu", action="store_true", help="on CPUs, in the shape of a small model")
    parser.add_argument("--links", action="store_true", help="measure peer memory and NIXL too")
    parser.add_argument("--half", action="store_true", help="one sender and one receiver of the two, on two GPUs")
    parser.add_argument("--sweep", action="store_true", help="try more ways")
    parser.add_argument("--faults", action="store_true", help="what becomes of a group whose members are killed or sleep")
    parser.add_argument("--recorded", action="store_true")
    parser.add_argument("--only", help="the name of a shape")
    arguments = parser.parse_args()
    on_cpu = (CPU_JOB,) if arguments.cpu else CPU_JOBS
    arguments.cpu_tiny |= arguments.cpu
    every, rows = on_cpu if arguments.cpu_tiny else GPU_JOBS, list[Row]()
    jobs = [job for job in every if not arguments.faults and arguments.only in (None, job.name)]
    if arguments.sweep and not arguments.cpu_tiny:
        jobs = [job._replace(ways=GPU_SWEEP, sizes=GPU_SIZES) for job in jobs]
    if arguments.links:
        jobs = [job._replace(ways=(*job.ways[:1], *(way._replace(staging=job.ways[0].staging) for way in LINKS))) for job in jobs]
    for job in jobs:
        rows += report(job, dict(processes(job, measuring, arguments, arguments.seconds)))
        if arguments.json:
            write(rows, arguments.json)
    if not arguments.faults:
        show(rows)
    else:
        few = every[1]._replace(config=every[1].config | {"num_hidden_layers": 4})
        for _, line in sorted(processes(few, failing, arguments, 60)):
            print(line, flush=True)


if __name__ == "__main__":
    main()
