"""Tensors cut over several hosts: `python -m benchmarks.gathered_tensors [--hosts 4] [--rate 500mbit] [--megabytes 100]`.

Emulated hosts (tests/support/namespaces.py) with links limited both ways: a daemon on one, a node and a rank on each of the
others, which has as many rows of every tensor. The ranks publish the same version in two ways in turn: into the nodes' memory,
where nodes gather the tensors, and over the daemon's data port. Prints medians of seconds until all ranks have returned and
until READY, with one replica, and the bytes that the ranks' hosts have sent until then over those of the version. The version is
compared with what the ranks have published, bit for bit. Needs root and iproute2.
"""

import argparse
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from resharder.client import Publisher, connect
from resharder.client.trainer.connect import DeclaredTensor
from resharder.converters.wire.ranges import HELD_FILE
from safetensors.torch import load_file

from benchmarks.host_lab import emulated
from tests.support.home_rank import CONFIG
from tests.support.namespaces import unavailable
from tests.support.remote import Remote

ROWS, COLUMNS = 1024, 1024  # of each rank, of two bytes
WAYS = {"gathered on nodes": "auto", "data port of the daemon": "http"}
"""Transport of the ranks."""


class Rank:
    """One rank, in a process of its own."""

    threads = os.cpu_count()

    def attach(self, endpoint: str, job: str, rank: int, hosts: int, tensors: int, transport: str) -> None:
        self._values, self._index = values_of(rank, tensors), (slice(rank * ROWS, (rank + 1) * ROWS),)
        self._publisher: Publisher = connect(
            endpoint, model="policy", job=job, rank=rank, world_size=hosts, config=CONFIG, transport=transport
        )
        declared = [DeclaredTensor(f"t{i:04}", torch.bfloat16, (hosts * ROWS, COLUMNS), self._index) for i in range(tensors)]
        self._publisher.attach_tensors(declared, wait=False)

    def publish(self, step: int) -> tuple[float, str]:
        """Return the seconds until this rank has returned, and its transport."""
        items = [(f"t{i:04}", self._index, values) for i, values in enumerate(self._values)]
        began = time.perf_counter()
        self._handle = self._publisher.publish_tensors(step, items)
        return time.perf_counter() - began, self._handle.transport

    def ready(self) -> str:
        self._handle.wait_ready(600)
        return self._handle.name

    def close(self) -> None:
        self._publisher.close()


class Round(NamedTuple):
    """Seconds until all ranks have returned and until READY, the hosts' sent bytes until then, and the ranks' transport."""

    returned: float
    ready: float
    sent: int
    transport: str


def measure(asked: argparse.Namespace, way: str) -> list[Round]:
    """Return all rounds of a way but the first."""
    tensors = max(1, asked.megabytes * 10**6 // (ROWS * COLUMNS * 2))
    with emulated(asked.hosts, asked.rate) as (hosts, daemon, nodes), ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(asked.hosts))
        ranks = []
        for number, node in enumerate(nodes):
            hidden = [*(other.root for other in nodes if other is not node), daemon.store]
            ranks.append(stack.enter_context(Remote(Rank, hidden=hidden, namespace=hosts.namespace(number + 1))))
        for rank, process in enumerate(ranks):
            process.call("attach", daemon.endpoint, way, rank, asked.hosts, tensors, WAYS[way])
        found = []
        for step in range(1, asked.rounds + 2):
            before = sum(hosts.sent_bytes(number + 1) for number in range(asked.hosts))
            began = time.perf_counter()
            returned = list(pool.map(lambda rank, step=step: rank.call("publish", step), ranks))  # type: ignore[misc]
            name = ranks[0].call("ready")
            ready = time.perf_counter() - began
            sent = sum(hosts.sent_bytes(number + 1) for number in range(asked.hosts)) - before
            found.append(Round(max(seconds for seconds, _ in returned), ready, sent, returned[0][1]))
            folder = daemon.store / f"models/policy/versions/{int(name.rpartition('/')[2]):08}"
            while (folder / HELD_FILE).exists():  # until the daemon has copied
                time.sleep(0.2)
            time.sleep(asked.pause)
        check(folder, asked.hosts, tensors)
        for process in ranks:
            process.call("close")
        return found[1:]


def values_of(rank: int, tensors: int) -> torch.Tensor:
    """Return a rank's rows of all tensors."""
    generator, shape = torch.Generator().manual_seed(rank), (tensors, ROWS, COLUMNS)
    return torch.randint(-(1 << 15), 1 << 15, shape, dtype=torch.int16, generator=generator).view(torch.bfloat16)


def check(folder: Path, hosts: int, tensors: int) -> None:
    """Compare a version with what the ranks have published. Raises AssertionError."""
    found = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert len(found) == tensors
    for rank in range(hosts):
        for i, values in enumerate(values_of(rank, tensors)):
            rows = found[f"t{i:04}"][rank * ROWS : (rank + 1) * ROWS]
            assert torch.equal(rows.view(torch.int16), values.view(torch.int16)), f"t{i:04}, rows of rank {rank}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rate", default="500mbit", help="of each link, both ways")
    parser.add_argument("--megabytes", type=int, default=100, help="of each rank")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pause", type=float, default=2.0, help="seconds between two rounds")
    asked = parser.parse_args()
    if reason := unavailable():
        print(f"not measured: {reason}")
        return
    size = asked.hosts * max(1, asked.megabytes * 10**6 // (ROWS * COLUMNS * 2)) * ROWS * COLUMNS * 2
    print(f"{asked.hosts} hosts, links of {asked.rate}, a version of {size / 1e6:.0f} MB; medians of {asked.rounds} rounds")
    print("| way | transport | returned, s | READY, s | READY, all rounds | the ranks' hosts sent, of the version |")
    print("|---|---|---|---|---|---|")
    for way in WAYS:
        rounds = measure(asked, way)
        returned, ready, sent = (median(column) for column in zip(*((r.returned, r.ready, r.sent) for r in rounds), strict=True))
        every = ", ".join(f"{each.ready:.2f}" for each in rounds)
        print(f"| {way} | {rounds[0].transport} | {returned:.2f} | {ready:.2f} | {every} | {sent / size:.2f} |", flush=True)


if __name__ == "__main__":
    main()
