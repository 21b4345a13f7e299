"""Time of a worker's comparison with the store, and how long it stops other threads: `python -m benchmarks.comparison`.

A version that was served ahead of READY is compared with the store's digests beside the engine. The version has the names of
Qwen3-30B-A3B, 18,867 tensors, with rows of 8 elements: what the comparison takes is work for each tensor. A thread that wakes
each millisecond stands for the engine's. Its longest gap is how long the comparison keeps the interpreter at a time; the CPU
that the comparison used between two of its ticks is that without what else ran on the machine.
"""

import argparse
import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from resharder.client.inference.settings import PluginSettings
from resharder.client.inference.worker.receiver import EarlyVersion, compare_with_store
from resharder.client.inference.worker.source import Sources
from resharder.client.inference.worker.staging import Staging
from resharder.client.rpc.channel import Channel
from resharder.client.runtime.gc_pauses import gc_paused
from resharder.client.runtime.switch_interval import short_switch_interval
from resharder.client.trainer.connect import connect
from resharder.client.versions.manifest import Digests, get_manifest
from resharder.converters.architectures.checkpoint import expected_shapes
from resharder.converters.geometry.layout import Piece, full_box
from resharder.v1 import resources_pb2
from rich.console import Console
from rich.table import Table

from benchmarks.lookup import SMALL, model_of
from benchmarks.rows import Row, write
from benchmarks.shapes import QWEN3_30B_A3B
from tests.support.daemon import Daemon

_TICK = 1e-3  # seconds


class Ticker:
    """A thread that wakes each millisecond beside the thread that makes this.

    Attributes:
        gap: Longest time between two ticks, in seconds.
        used: Most CPU that the other thread used between two ticks, in seconds.
    """

    def __init__(self) -> None:
        self.gap = self.used = 0.0
        self._clock, self._over = time.pthread_getcpuclockid(threading.get_ident()), False
        self._thread = threading.Thread(target=self._run)

    def _now(self) -> tuple[float, float]:
        return time.perf_counter(), time.clock_gettime(self._clock)

    def _run(self) -> None:
        last = self._now()
        while not self._over:
            time.sleep(_TICK)
            now = self._now()
            self.gap, self.used, last = max(self.gap, now[0] - last[0]), max(self.used, now[1] - last[1]), now

    @contextmanager
    def ticking(self) -> Iterator[None]:
        self._thread.start()
        time.sleep(0.05)
        self.gap = self.used = 0.0
        try:
            yield
        finally:
            self._over = True
            self._thread.join()


def worker_of(channel: Channel, endpoint: str, version: str) -> tuple[Staging, EarlyVersion, Digests]:
    """A worker's staging, what it received ahead of READY, and the ranks' digests."""
    manifest = get_manifest(channel, version)
    pieces = tuple(Piece(name, full_box(spec.shape), name, 0, (1,) * len(spec.shape)) for name, spec in manifest.specs.items())
    needs = {piece.tensor: (piece.box,) for piece in pieces}
    early = EarlyVersion(version, "", pieces, b"")
    host: Any = SimpleNamespace(device=torch.device("cpu"))
    parts: Any = SimpleNamespace(by_name={}, needs=lambda: needs, loaded=frozenset())
    receiver: Any = None
    staging = Staging(host, channel, PluginSettings(endpoint, "s", "policy"), parts, receiver, lambda: True)
    staging.sources = Sources(channel, resources_pb2.StoreAccess(), PluginSettings(endpoint, "s", "policy"))
    staging.sources.shared = True
    return staging, early, np.array([*manifest.digests.values()], np.uint64)


def measure(rounds: int) -> list[tuple[float, float, float, float]]:
    """Return the longest gap, the CPU in a gap, the wall seconds and the CPU seconds of each round."""
    config, found = QWEN3_30B_A3B | SMALL, []
    with (
        Daemon(keep_count=1) as daemon,
        connect(daemon.endpoint, model="policy", job="j", rank=0, world_size=1) as publisher,
        Channel(daemon.endpoint) as channel,
    ):
        publisher.attach(model_of(expected_shapes(config)), config)
        version = publisher.publish(1)
        version.wait_ready(300)
        staging, early, digests = worker_of(channel, daemon.endpoint, version.name)
        print(f"{len(early.pieces)} tensors")
        gc.collect()
        gc.freeze()
        for number in range(-1, rounds):  # the first is a warm-up
            ticker = Ticker()
            with ticker.ticking():
                wall, cpu = time.perf_counter(), time.thread_time()
                compare(channel, early, digests, staging)
                wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
            if number >= 0:
                found.append((ticker.gap, ticker.used, wall, cpu))
    return found


def compare(channel: Channel, early: EarlyVersion, digests: Digests, staging: Staging) -> None:
    """Compare as a worker's agent does."""
    with short_switch_interval(), gc_paused():
        done = compare_with_store(channel, early, digests, staging.prepare_fallback, lambda: True)
    assert done is not None
    assert not done[1], done[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    taken = measure(arguments.rounds)
    names = ("longest gap of another thread", "CPU of the comparison in a gap", "comparison", "its CPU")
    table, rows = Table("ms", "median", "least", "most"), list[Row]()
    for name, values in zip(names, zip(*taken, strict=True), strict=True):
        table.add_row(name, *(f"{value * 1e3:,.1f}" for value in (median(values), min(values), max(values))))
        rows.append(Row(name, median(values), None, None))
    Console(width=140).print(table)
    if arguments.json:
        write(rows, arguments.json)


if __name__ == "__main__":
    main()
