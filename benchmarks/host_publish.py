"""Publishing from several hosts, beside plain copies: `python -m benchmarks.host_publish [--hosts 4] [--megabytes 400]`.

One rank on each emulated host, a process that reads the folder of its own node alone. In each round, all ranks at once copy their
part into shared memory that they have touched before, the limit; then all take digests and checksums of these copies, with the
threads of a node, the floor of a verification; then all publish it. Prints seconds until the last rank has returned and until
READY, and these and the floor over the seconds of the copies in the same round: with one replica and with two, and for ranks
without nodes, by the data port; and the processor time of a publish, of all ranks and of all nodes, over that of the copies,
which other work on the machine affects less. All hosts share this machine's cores and memory, and the loopback is their network.
With `--huge`, the nodes' memory has huge pages. Needs root.
"""

import argparse
import mmap
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
import xxhash
from resharder.client import Publisher, connect
from resharder.client.trainer.connect import DeclaredTensor
from resharder.converters.geometry.layout import full_box
from resharder.converters.storage.digest import compile_for, digest
from resharder.server.holding.file_proofs import THREADS

from benchmarks.stores import fast_store
from tests.support.daemon import Daemon
from tests.support.home_rank import CONFIG
from tests.support.namespaces import unavailable
from tests.support.node import Node, wait_live
from tests.support.remote import Remote
from tests.support.supervised import MEMORY, shared_memory

TENSOR_BYTES = 16 << 20
WAYS = {"nodes, 1 replica": ("auto", 1), "nodes, 2 replicas": ("auto", 2), "data port": ("http", 1)}
"""Transport and replicas."""


class Rank:
    """One rank, in a process of its own."""

    threads = os.cpu_count()

    def attach(self, endpoint: str, job: str, rank: int, hosts: int, tensors: int, transport: str) -> None:
        shape = (TENSOR_BYTES // 2048, 1024)
        values = torch.randint(-(1 << 15), 1 << 15, shape, dtype=torch.int16).view(torch.bfloat16)
        self._tensors = [(f"t{rank}.{i}", values.clone()) for i in range(tensors)]
        self._publisher: Publisher = connect(
            endpoint, model="policy", job=job, rank=rank, world_size=hosts, config=CONFIG, transport=transport
        )
        self._publisher.attach_tensors([DeclaredTensor(name, torch.bfloat16, shape) for name, _ in self._tensors], wait=False)
        with tempfile.TemporaryFile(dir="/dev/shm") as file:
            file.truncate(tensors * TENSOR_BYTES)
            self._target = np.frombuffer(mmap.mmap(file.fileno(), tensors * TENSOR_BYTES), np.uint8)
        self._target[...] = 0
        self._shape = shape
        compile_for([2])

    def copy(self) -> tuple[float, float]:
        """Return the seconds of a copy of all tensors into shared memory, and its processor seconds."""
        began, used = time.perf_counter(), time.process_time()
        for i, (_, tensor) in enumerate(self._tensors):
            self._target[i * TENSOR_BYTES : (i + 1) * TENSOR_BYTES] = tensor.view(torch.uint8).reshape(-1).numpy()
        return time.perf_counter() - began, time.process_time() - used

    def verify(self) -> float:
        """Return the seconds of the digests and checksums of the copies."""
        box, blocks = full_box(self._shape), self._target.reshape(-1, TENSOR_BYTES)
        began = time.perf_counter()
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(lambda block: digest(block.view(np.uint16).reshape(self._shape), box, self._shape), blocks))
            list(pool.map(xxhash.xxh3_64_intdigest, blocks))
        return time.perf_counter() - began

    def publish(self, step: int) -> tuple[float, str]:
        """Return the seconds until this rank has returned, and its transport."""
        began = time.perf_counter()
        self._handle = self._publisher.publish_tensors(step, self._tensors)
        return time.perf_counter() - began, self._handle.transport

    def processor_time(self) -> float:
        """Return the processor seconds of this process since its start."""
        return time.process_time()

    def ready(self) -> None:
        self._handle.wait_ready(600)

    def close(self) -> None:
        self._publisher.close()
        del self._target


class Round(NamedTuple):
    """Seconds of the copies, of their verification, until all ranks have returned, and until READY; processor seconds of all
    ranks and of all nodes, over those of the copies; the transport.
    """

    copied: float
    floor: float
    returned: float
    ready: float
    ranks: float
    nodes: float
    transport: str


def measure(ranks: list[Remote], nodes: list[Node], pool: ThreadPoolExecutor, rounds: int, pause: float) -> list[Round]:
    """Return all rounds but the first, with `pause` seconds between them."""

    def used() -> tuple[float, float]:
        of_nodes = sum(processor_seconds(node.process.pid) for node in nodes if node.process is not None)
        return sum(rank.call("processor_time") for rank in ranks), of_nodes

    found = []
    for step in range(1, rounds + 2):
        copies = list(pool.map(lambda rank: rank.call("copy"), ranks))
        copied, copying = max(seconds for seconds, _ in copies), sum(seconds for _, seconds in copies)
        floor = max(pool.map(lambda rank: rank.call("verify"), ranks))
        before, began = used(), time.perf_counter()
        returned = list(pool.map(lambda rank, step=step: rank.call("publish", step), ranks))  # type: ignore[misc]
        ranks[0].call("ready")
        ready = time.perf_counter() - began
        ranks_used, nodes_used = ((after - earlier) / copying for after, earlier in zip(used(), before, strict=True))
        last = max(seconds for seconds, _ in returned)
        found.append(Round(copied, floor, last, ready, ranks_used, nodes_used, returned[0][1]))
        time.sleep(pause)  # until files are laid out again, and the daemon has copied
    return found[1:]


def processor_seconds(pid: int) -> float:
    """Return the processor seconds of a process since its start."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rounds_of(way: str, asked: argparse.Namespace) -> list[Round]:
    """Return the rounds of one way, with a daemon and nodes of its own."""
    transport, replicas = WAYS[way]
    with ExitStack() as stack:
        daemon = stack.enter_context(Daemon(data_listen="127.0.0.1:0", shared_memory=False, keep_count=1, replicas=replicas))
        nodes = [stack.enter_context(Node(daemon.endpoint, f"host-{number}")) for number in range(asked.hosts)]
        wait_live(daemon, *(node.name for node in nodes))
        pool = stack.enter_context(ThreadPoolExecutor(asked.hosts))
        ranks = []
        for node in nodes:
            hidden = [other.root for other in nodes if other is not node]
            ranks.append(stack.enter_context(Remote(Rank, hidden=hidden)))
        for rank, process in enumerate(ranks):
            process.call("attach", daemon.endpoint, way, rank, asked.hosts, tensors_of(asked), transport)
        found = measure(ranks, nodes, pool, asked.rounds, asked.pause)
        for process in ranks:
            process.call("close")
        return found


def tensors_of(asked: argparse.Namespace) -> int:
    return max(1, asked.megabytes * 10**6 // TENSOR_BYTES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--megabytes", type=int, default=400, help="of each rank")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pause", type=float, default=3.0, help="seconds between two rounds")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--huge", action="store_true", help="give the nodes' memory huge pages")
    asked = parser.parse_args()
    if reason := unavailable():
        print(f"not measured: {reason}")
        return
    with fast_store() if asked.huge else nullcontext((Path(shared_memory()), "/dev/shm")) as (memory, kind):
        os.environ[MEMORY] = str(memory)
        print_table(asked, kind)


def print_table(asked: argparse.Namespace, memory: str) -> None:
    """Measure each way and print its row."""
    size = tensors_of(asked) * TENSOR_BYTES / 1e6
    print(f"{asked.hosts} hosts, {size:.0f} MB each, {memory}; medians of {asked.rounds} rounds (least to most), over the copies")
    print("| way | transport | copies, s | floor | returned | READY | ranks' CPU | nodes' CPU | READY, s |")
    print("|---|---|---|---|---|---|---|---|---|")
    for way in asked.ways:
        rounds = rounds_of(way, asked)
        copied, ready = (median(column) for column in zip(*((r.copied, r.ready) for r in rounds), strict=True))
        over = ((r.floor / r.copied, r.returned / r.copied, r.ready / r.copied, r.ranks, r.nodes) for r in rounds)
        ratios = map(sorted, zip(*over, strict=True))
        cells = [f"{median(each):.2f} ({each[0]:.2f} to {each[-1]:.2f})" for each in ratios]
        print(f"| {way} | {rounds[0].transport} | {copied:.3f} | {' | '.join(cells)} | {ready:.2f} |", flush=True)


if __name__ == "__main__":
    main()
