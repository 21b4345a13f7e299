"""Publishing from several hosts, beside plain copies: `python -m benchmarks.host_publish [--hosts 4] [--megabytes 400]`.

One rank on each emulated host, a process that reads the folder of its own node alone. In each round, all ranks at once copy their
part into shared memory that they have touched before, the limit; then all publish it. Prints seconds until the last rank has
returned and until READY, and both over the seconds of the copies in the same round; also for ranks without nodes, by the data
port. All hosts share this machine's cores and memory, and the loopback is their network. Needs root.
"""

import argparse
import mmap
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from statistics import median

import numpy as np
import torch
from resharder.client import Publisher, connect
from resharder.client.trainer.connect import DeclaredTensor

from tests.support.daemon import Daemon
from tests.support.home_rank import CONFIG, HomeRanks, serve
from tests.support.namespaces import unavailable
from tests.support.node import Node, joined

TENSOR_BYTES = 16 << 20


class Rank:
    """One rank, in a process of its own."""

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

    def copy(self) -> float:
        """Return the seconds of a copy of all tensors into shared memory."""
        began = time.perf_counter()
        for i, (_, tensor) in enumerate(self._tensors):
            self._target[i * TENSOR_BYTES : (i + 1) * TENSOR_BYTES] = tensor.view(torch.uint8).reshape(-1).numpy()
        return time.perf_counter() - began

    def publish(self, step: int) -> tuple[float, str]:
        """Return the seconds until this rank has returned, and its transport."""
        began = time.perf_counter()
        self._handle = self._publisher.publish_tensors(step, self._tensors)
        return time.perf_counter() - began, self._handle.transport

    def ready(self) -> None:
        self._handle.wait_ready(600)

    def close(self) -> None:
        self._publisher.close()
        del self._target


def measure(ranks: list[HomeRanks], pool: ThreadPoolExecutor, rounds: int) -> list[tuple[float, float, float, str]]:
    """Return, of each round but the first, seconds of the copies, until all ranks have returned, until READY; the transport."""
    found = []
    for step in range(1, rounds + 2):
        copied = max(pool.map(lambda rank: rank.call("copy"), ranks))
        began = time.perf_counter()
        returned = list(pool.map(lambda rank, step=step: rank.call("publish", step), ranks))  # type: ignore[misc]
        ranks[0].call("ready")
        found.append((copied, max(seconds for seconds, _ in returned), time.perf_counter() - began, returned[0][1]))
        time.sleep(1)  # until files are laid out again
    return found[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--megabytes", type=int, default=400, help="of each rank")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        return serve(Rank())
    if reason := unavailable():
        print(f"not measured: {reason}")
        return
    tensors = max(1, asked.megabytes * 10**6 // TENSOR_BYTES)
    with ExitStack() as stack:
        daemon = stack.enter_context(Daemon(data_listen="127.0.0.1:0", shared_memory=False, keep_count=1))
        nodes = [stack.enter_context(Node(daemon.endpoint, f"host-{number}")) for number in range(asked.hosts)]
        joined(daemon, *(node.name for node in nodes))
        pool = stack.enter_context(ThreadPoolExecutor(asked.hosts))
        ranks = []
        for node in nodes:
            hidden = [other.root for other in nodes if other is not node]
            ranks.append(stack.enter_context(HomeRanks(hidden, program=("-m", "benchmarks.host_publish", "--serve"))))
        print(
            f"{asked.hosts} hosts, {tensors * TENSOR_BYTES / 1e6:.0f} MB each; medians of {asked.rounds} rounds (least to most)"
        )
        print("| way | copies, s | returned, s | READY, s | returned of copies | READY of copies |\n|---|---|---|---|---|---|")
        for transport in ("auto", "http"):
            part = daemon.endpoint, f"by {transport}"
            for rank, process in enumerate(ranks):
                process.call("attach", *part, rank, asked.hosts, tensors, transport)
            rounds = measure(ranks, pool, asked.rounds)
            copied, returned, ready = (median(column) for column in list(zip(*rounds, strict=True))[:3])
            ratios = [sorted(row[i] / row[0] for row in rounds) for i in (1, 2)]
            said = [f"{median(each):.2f} ({each[0]:.2f} to {each[-1]:.2f})" for each in ratios]
            print(f"| {rounds[0][3]} | {copied:.3f} | {returned:.3f} | {ready:.2f} | {said[0]} | {said[1]} |", flush=True)
            for process in ranks:
                process.call("close")


if __name__ == "__main__":
    main()
