"""Runs of simulations over many seeds, on one or several processes."""

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from math import inf
from multiprocessing import get_context
from random import Random

Simulation = Callable[[Random, Callable[[str], None]], Counter[str]]
"""Run one schedule and return counts of what happened. All chance comes from the `Random`, and every step is passed to the
trace. Raises AssertionError if an invariant is violated."""
_BATCH = 20  # schedules of one task of a worker, between two collections of garbage
MESSAGES = 20  # failures that are kept with their messages; all are counted


@dataclass
class Totals:
    """Results of a simulation. `failed` has the seeds and messages of the first failures, `busy` the processors' seconds."""

    schedules: int = 0
    failures: int = 0
    seconds: float = 0.0
    busy: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    failed: dict[int, str] = field(default_factory=dict)

    def add(self, other: "Totals") -> None:
        """Add the results of other seeds; their time is not added."""
        self.schedules += other.schedules
        self.failures += other.failures
        self.busy += other.busy
        self.counts += other.counts
        self.failed |= dict(islice(other.failed.items(), max(0, MESSAGES - len(self.failed))))


def ignore(step: str) -> None:
    """Trace of runs that print nothing."""


@contextmanager
def collections_paused() -> Iterator[None]:
    """Collect garbage now, and not inside of the block: all else that is alive are imported modules, whose visit takes long."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def run_one(name: str, simulation: Simulation, seed: int, trace: Callable[[str], None] = ignore) -> Counter[str]:
    """Run the schedule of one seed. Raises whatever the simulation raises."""
    return simulation(Random(f"{name}/{seed}"), trace)


def run_seeds(name: str, simulation: Simulation, seeds: Sequence[int], failures: float = 1) -> Totals:
    """Run the schedules of all seeds in this process, until `failures` have failed."""
    totals, began, busy = Totals(), time.monotonic(), time.process_time()
    with collections_paused():
        for seed in seeds:
            totals.schedules += 1
            try:
                totals.counts += run_one(name, simulation, seed)
            except Exception as error:
                totals.failures += 1
                if len(totals.failed) < MESSAGES:
                    totals.failed[seed] = f"{type(error).__name__}: {error}"
                if totals.failures >= failures:
                    break
    totals.seconds, totals.busy = time.monotonic() - began, time.process_time() - busy
    return totals


def run_many(
    name: str,
    simulations: Mapping[str, Simulation],
    seeds: Sequence[int],
    jobs: int = 1,
    failures: float = 1,
    progress: Callable[[Totals], None] = lambda totals: None,
    busy: float = inf,
    elapsed: float = inf,
) -> Totals:
    """Run the schedules of all seeds on `jobs` processes, to the first `failures`, or for `busy` or `elapsed` seconds."""
    totals, began = Totals(), time.monotonic()

    runs = partial(run_seeds, name, simulations[name], failures=failures)

    def is_due() -> bool:
        return totals.failures < failures and totals.busy < busy and totals.seconds < elapsed

    for part in _parts(runs, seeds, jobs, is_due):
        totals.add(part)
        totals.seconds = time.monotonic() - began
        progress(totals)
    return totals


def _parts(
    runs: Callable[[Sequence[int]], Totals], seeds: Sequence[int], jobs: int, is_due: Callable[[], bool]
) -> Iterator[Totals]:
    """Yield the results of one batch of seeds after the other, while more are due. Each batch that has begun is yielded."""
    # The first schedule runs in this process, because forks share what it imports.
    batches = iter([seeds[:1], *(seeds[at : at + _BATCH] for at in range(1, len(seeds), _BATCH))])
    for batch in batches if jobs == 1 else islice(batches, 1):
        yield runs(batch)
        if not is_due():
            return
    with ProcessPoolExecutor(jobs, get_context("fork")) as pool:
        running: set[Future[Totals]] = set()
        while running or is_due():
            if is_due():
                running |= {pool.submit(runs, batch) for batch in islice(batches, 2 * jobs - len(running))}
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for task in done:
                yield task.result()
