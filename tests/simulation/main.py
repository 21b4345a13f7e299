"""Run simulations: `python -m tests.simulation --schedules 20000 --seed 1`, or one schedule with `--replay SEED --only NAME`.

Each simulation runs the given number of schedules, from the seed on, until one fails. Progress and counts are printed; a
violated invariant is printed with its seed and the trace of its steps, and the status is 1 then. With `--keep-going`, the
others run too: all failures are counted, and the first ones are printed without their traces.
"""

import argparse
import logging
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from math import inf

from tests.simulation import SIMULATIONS, prepare
from tests.simulation.driver import Totals, run_many, run_one

_EVERY = 5.0  # seconds between lines of progress
_MESSAGE = 2000  # characters of a failure's message


def main() -> int:
    """Run what the command line asks for and return the exit status."""
    parser = argparse.ArgumentParser("python -m tests.simulation", description=__doc__)
    parser.add_argument("--schedules", type=int, default=20_000, help="schedules of each simulation")
    parser.add_argument("--seconds", type=float, default=inf, help="end each simulation after these seconds of processors")
    parser.add_argument("--elapsed", type=float, default=inf, metavar="SECONDS", help="end each simulation after this time")
    parser.add_argument("--seed", type=int, default=1, help="first seed; the next schedules have the next seeds")
    parser.add_argument("--only", choices=sorted(SIMULATIONS), action="append", help="simulation to run; may be repeated")
    parser.add_argument(
        "--replay", type=int, nargs="+", metavar="SEED", help="run the schedules of these seeds and print their steps"
    )
    parser.add_argument(
        "--first", type=int, nargs="+", default=[], metavar="SEED", help="run the schedules of these seeds before the others"
    )
    parser.add_argument("--keep-going", action="store_true", help="run the schedules after one that fails too")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    options = parser.parse_args()
    names = options.only or sorted(SIMULATIONS)
    logging.disable(logging.CRITICAL)  # of the code under simulation
    if options.replay is not None:
        return max((_replay(name, seed) for name in names for seed in options.replay), default=0)
    following = range(options.seed, options.seed + options.schedules)
    seeds = [*options.first, *following] if options.first else following
    bounds = {"busy": options.seconds, "elapsed": options.elapsed, "failures": inf if options.keep_going else 1}
    found = {name: _run(name, seeds, options.jobs, bounds, traces=not options.keep_going) for name in names}
    print(_summary(found, options.seed))
    return int(any(totals.failures for totals in found.values()))


def _run(name: str, seeds: Sequence[int], jobs: int, bounds: dict[str, float], *, traces: bool) -> Totals:
    prepare(name)
    totals = run_many(name, SIMULATIONS, seeds, jobs, progress=_progress(name), **bounds)
    print(_line(name, totals))
    for event, count in sorted(totals.counts.items()):
        print(f"  {count:12,} {event}")
    for seed in totals.failed if traces else ():
        print("Its steps:")
        _replay(name, seed)
    return totals


def _summary(found: dict[str, Totals], seed: int) -> str:
    each = ", ".join(f"{totals.schedules:,} of {name} ({totals.failures} failed)" for name, totals in found.items())
    schedules, failures = (sum(getattr(totals, of) for totals in found.values()) for of in ("schedules", "failures"))
    busy = sum(totals.busy for totals in found.values())
    return f"all: {schedules:,} schedules from seed {seed} on, {failures} failed, {busy:.0f} s of processors: {each}"


def _progress(name: str) -> Callable[[Totals], None]:
    last, printed = [time.monotonic()], set[int]()

    def report(totals: Totals) -> None:
        for seed in sorted(totals.failed.keys() - printed):
            printed.add(seed)
            print(f"{name}: seed {seed} fails: {totals.failed[seed][:_MESSAGE]}", flush=True)
        if time.monotonic() - last[0] > _EVERY:
            last[0] = time.monotonic()
            print(_line(name, totals), flush=True)

    return report


def _line(name: str, totals: Totals) -> str:
    rate = totals.schedules / max(totals.busy, 1e-9)
    return (
        f"{name}: {totals.schedules:,} schedules in {totals.seconds:.1f} s, {totals.busy:.1f} s of processors, "
        f"{rate:.0f} per second, {totals.failures} failed"
    )


def _replay(name: str, seed: int) -> int:
    try:
        run_one(name, SIMULATIONS[name], seed, print)
    except Exception:
        traceback.print_exc(file=sys.stdout)
        print(f"{name}: seed {seed} fails; repeat it with: python -m tests.simulation --only {name} --replay {seed}")
        return 1
    print(f"{name}: seed {seed} passes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
