"""Runs of simulations over many seeds, on one or several processes."""

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from math import inf
from multiprocessing import get_context
from random import Random

Simulation = Callable[[Random, Callable[[str], None]], Counter[str]]
"""Run one schedule and return counts of what happened. All chance comes from the `Random`, and every step is passed to the
trace. Raises AssertionError if an invariant is violated."""
_BATCH = 50  # schedules of one task of a worker, between two collections of garbage


@dataclass
class Totals:
    """Results of a simulation. `failed` has the seeds and messages of the first failures, `busy` the processors' seconds."""

    schedules: int = 0
    seconds: float = 0.0
    busy: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    failed: dict[int, str] = field(default_factory=dict)

    def add(self, other: "Totals") -> None:
        """Add the results of other seeds; their time is not added."""
        self.schedules += other.schedules
        self.busy += other.busy
        self.counts += other.counts
        self.failed |= other.failed


def ignore(step: str) -> None:
    """Trace of runs that print nothing."""


def collect_garbage() -> None:
    """Collect now, and not again by itself: all else that is alive are imported modules, which take long to look through."""
    gc.collect()
    gc.freeze()
    gc.disable()


def run_one(name: str, simulation: Simulation, seed: int, trace: Callable[[str], None] = ignore) -> Counter[str]:
    """Run the schedule of one seed. Raises whatever the simulation raises."""
    return simulation(Random(f"{name}/{seed}"), trace)


def run_seeds(name: str, simulation: Simulation, seeds: range, failures: int = 1) -> Totals:
    """Run the schedules of all seeds in this process, until `failures` have failed."""
    totals, began, busy = Totals(), time.monotonic(), time.process_time()
    collect_garbage()
    for seed in seeds:
        try:
            totals.counts += run_one(name, simulation, seed)
        except Exception as error:
            totals.failed[seed] = f"{type(error).__name__}: {error}"
        totals.schedules += 1
        if len(totals.failed) >= failures:
            break
    totals.seconds, totals.busy = time.monotonic() - began, time.process_time() - busy
    return totals


def run_many(
    name: str,
    simulations: Mapping[str, Simulation],
    seeds: range,
    jobs: int = 1,
    failures: int = 1,
    progress: Callable[[Totals], None] = lambda totals: None,
    busy: float = inf,
    elapsed: float = inf,
) -> Totals:
    """Run the schedules of all seeds on `jobs` processes, to the first `failures`, or for `busy` or `elapsed` seconds."""
    totals, began = Totals(), time.monotonic()
    for part in _parts(name, simulations, seeds, jobs, failures):
        totals.add(part)
        totals.seconds = time.monotonic() - began
        progress(totals)
        if len(totals.failed) >= failures or totals.busy >= busy or totals.seconds >= elapsed:
            break
    return totals


def _parts(name: str, simulations: Mapping[str, Simulation], seeds: range, jobs: int, failures: int) -> Iterator[Totals]:
    batches = [seeds[at : at + _BATCH] for at in range(0, len(seeds), _BATCH)]
    if jobs == 1:
        yield from (run_seeds(name, simulations[name], batch, failures) for batch in batches)
        return
    with ProcessPoolExecutor(jobs, get_context("fork")) as pool:
        tasks: list[Future[Totals]] = [pool.submit(run_seeds, name, simulations[name], batch, failures) for batch in batches]
        try:
            yield from (task.result() for task in as_completed(tasks))
        finally:
            pool.shutdown(cancel_futures=True)
