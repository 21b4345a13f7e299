"""Strided boxes read in three ways, on the loopback: `python -m benchmarks.read_plans [--rounds N] [--tls] [--json FILE]`.

A box has 32 MiB in runs of equal length, between which a share of the bytes is not needed. It is read from the daemon's data port

    cover    by ranges of all bytes from its first to its last run: up to a share of `MOST_UNNEEDED`
    runs     by a range for each run: from runs of `LONG_RUN` on
    packed   as chunks that the daemon packs

with a connection for each core, into a warm mirror as a worker's, without digests of the tensors. The two constants are those of
client/versions/read_plan.py. All ways of a box take turns in each round, in another order each time; a round before compares the
bytes. The table has the medians of the ratios within a round, and the ratios of the CPU seconds of both sides over all rounds.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from unittest.mock import patch

import numpy as np
import torch
from resharder.client import connect
from resharder.client.inference.worker.source import DESCRIPTORS, Mirror
from resharder.client.rpc.channel import Channel
from resharder.client.trainer.connect import DeclaredTensor
from resharder.client.versions import read_plan
from resharder.client.versions.manifest import get_manifest
from resharder.client.versions.port_reader import PortReader
from resharder.converters.geometry.layout import Box, Range, box_index
from resharder.converters.storage.files import MappedFiles
from rich.console import Console
from rich.table import Table

from benchmarks.host_ways import cpu_of
from benchmarks.hosts import READER, VERSION, daemon_of
from tests.client.models import CONFIG
from tests.support.secure import Authority

NEEDED = 32 << 20
RUNS = tuple(1 << power for power in range(16, 23))  # 64 KiB to 4 MiB
UNNEEDED = (1 / 8, 1 / 4, 1 / 2, 3 / 4)
NEVER = 1 << 62
WAYS = {
    "cover": {"MOST_UNNEEDED": 1.0},
    "runs": {"MOST_UNNEEDED": -1.0, "LONG_RUN": 0},
    "packed": {"MOST_UNNEEDED": -1.0, "LONG_RUN": NEVER},
}
ITEM = 2  # bytes of BF16


@dataclass(frozen=True)
class Shape:
    """A tensor, and the box of its first columns."""

    run: int
    unneeded: float

    @property
    def name(self) -> str:
        return f"run.{self.run >> 10}.{round(8 * self.unneeded)}"

    @property
    def shape(self) -> tuple[int, int]:
        return NEEDED // self.run, round(self.run / (1 - self.unneeded)) // ITEM

    @property
    def box(self) -> Box:
        rows, _ = self.shape
        return (Range(0, rows), Range(0, self.run // ITEM))


@dataclass(frozen=True)
class Outcome:
    """Medians of one box: seconds of each way, their ratios to `packed` within a round, and CPU seconds of both sides."""

    run: int
    unneeded: float
    seconds: dict[str, float]
    over_packed: dict[str, float]
    cpu: dict[str, float]


def shapes() -> Iterator[Shape]:
    return (Shape(run, unneeded) for run in RUNS for unneeded in UNNEEDED)


def publish(endpoint: str, authority: Authority | None) -> None:
    tls = authority.tls("trainer.test") if authority else None
    random = np.random.default_rng(1)
    weights = {each.name: torch.from_numpy(random.integers(0, 1 << 15, each.shape, np.int16)) for each in shapes()}
    with connect(endpoint, model="policy", job="j", rank=0, world_size=1, config=CONFIG, tls=tls) as publisher:
        publisher.attach_tensors([DeclaredTensor(name, torch.bfloat16, tuple(t.shape)) for name, t in weights.items()])
        found = [(name, tensor.view(torch.bfloat16)) for name, tensor in weights.items()]
        publisher.publish_tensors(1, found).wait_ready(300)


def measure(rounds: int, authority: Authority | None) -> list[Outcome]:
    with ExitStack() as ended:
        daemon = ended.enter_context(daemon_of(authority))
        publish(daemon.endpoint, authority)
        if authority:
            ended.enter_context(patch.dict(os.environ, authority.environment(READER)))
        channel = ended.enter_context(Channel(daemon.endpoint))
        manifest = get_manifest(channel, VERSION)
        mirror = Mirror("/dev/shm")
        ended.callback(mirror.close)
        mapped = MappedFiles(DESCRIPTORS, mirror.prepare(manifest.files), writable=True)
        reader = PortReader(channel, manifest)
        folder = daemon.store / "models" / "policy" / "versions" / "00000001"
        stored = MappedFiles(folder, manifest.files)

        def read(each: Shape, way: str) -> tuple[float, float]:
            with patch.multiple(read_plan, **WAYS[way]):
                jobs = read_plan.plan_reads(manifest.files, [(each.name, each.box)]).jobs
            cpu, began = cpu_of(daemon.pid) + time.process_time(), time.perf_counter()
            reader.read(jobs, mapped.contents, mapped.arrays, lambda position: None)
            return time.perf_counter() - began, cpu_of(daemon.pid) + time.process_time() - cpu

        def check(each: Shape, way: str) -> None:
            target = mapped.arrays[each.name][box_index(each.box)]
            target[:] = 0
            read(each, way)
            if not np.array_equal(target, stored.arrays[each.name][box_index(each.box)]):
                raise SystemExit(f"{each.name} by {way}: other bytes than in the store")

        return [outcome(each, rounds, read, check) for each in shapes()]


def outcome(each: Shape, rounds: int, read, check) -> Outcome:  # type: ignore[no-untyped-def]
    names, taken = list(WAYS), list[dict[str, tuple[float, float]]]()
    for way in names:
        check(each, way)
    for number in range(rounds):
        first = number % len(names)
        taken.append({way: read(each, way) for way in (*names[first:], *names[:first])})
    return Outcome(
        each.run,
        each.unneeded,
        {way: median(found[way][0] for found in taken) for way in names},
        {way: median(found[way][0] / found["packed"][0] for found in taken) for way in names},
        {way: sum(found[way][1] for found in taken) / rounds for way in names},
    )


def show(outcomes: list[Outcome]) -> None:
    ratios = ("cover / packed", "runs / packed")
    table = Table("run", "unneeded", "packed s", *ratios, "CPU packed s", *(f"CPU {title}" for title in ratios))
    for each in outcomes:
        cpu = each.cpu
        table.add_row(
            f"{each.run >> 10} KiB",
            f"{each.unneeded:.3f}",
            f"{each.seconds['packed']:.4f}",
            *(f"{each.over_packed[way]:.2f}" for way in ("cover", "runs")),
            f"{cpu['packed']:.4f}",
            *(f"{cpu[way] / cpu['packed']:.2f}" for way in ("cover", "runs")),
        )
    Console(width=150).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tls", action="store_true", help="with mutual TLS")
    arguments = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as folder:
        authority = Authority(Path(folder)) if arguments.tls else None
        if authority:
            authority.tls(READER)
        found = measure(arguments.rounds, authority)
    show(found)
    print(f"load {os.getloadavg()[0]:.1f}")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(each) for each in found], indent=2) + "\n")


if __name__ == "__main__":
    main()
