"""Put known faults back into a copy of the code, one at a time, and count what a simulation or a test needs to find each.

    python -m tools.sabotage [--only store] [--match REGEX] [--schedules 2000] [--seed 1 --seed 10001]

`sabotages.toml` lists the faults: the simulation or the test, the file, and a text of it with its replacement. The exit code is 1
if a fault is not found, by a simulation from each of the seeds on, or if its text is not found exactly once.
"""

import argparse
import importlib
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).parents[2]
_COPIED = ("proto", "server", "client", "converters", "tests")
_PATHS = ("proto", "server", "client", "converters", "")


@dataclass(frozen=True)
class Edit:
    """Replacement of a text that a file has exactly once."""

    file: str
    find: str
    put: str

    def apply(self, tree: Path) -> None:
        """Edit the file. Raises ValueError if it does not have the text exactly once."""
        path = tree / self.file
        content = path.read_text()
        if content.count(self.find) != 1:
            raise ValueError(f"{self.file}: expected {self.find!r} once, found it {content.count(self.find)} times")
        path.write_text(content.replace(self.find, self.put))


@dataclass(frozen=True)
class Sabotage:
    """A fault: the simulation, or the node id of the test, that must find it, and its edits."""

    name: str
    simulation: str
    test: str
    edits: tuple[Edit, ...]


@dataclass(frozen=True)
class Result:
    """Schedules and seconds of a processor, or a test and its seconds, until a fault is found; without a message it is not."""

    tried: int
    seconds: float
    message: str


def sabotages() -> list[Sabotage]:
    """Return the listed faults, in order."""
    entries = tomllib.loads((Path(__file__).parent / "sabotages.toml").read_text())["sabotage"]
    return [
        Sabotage(each["name"], each.get("simulation", ""), each.get("test", ""), tuple(Edit(**edit) for edit in each["edits"]))
        for each in entries
    ]


def copy_tree(target: Path) -> None:
    """Copy the code and its tests, without compiled files."""
    for name in _COPIED:
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
    shutil.copy(ROOT / "pyproject.toml", target)


def attempt(sabotage: Sabotage, seeds: range) -> Result:
    """Run the simulation on a copy of the code with the fault until a schedule fails, or the test."""
    with tempfile.TemporaryDirectory(prefix="sabotage-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        for edit in sabotage.edits:
            edit.apply(tree)
        if sabotage.test:
            return _test(tree, sabotage.test)
        with get_context("fork").Pool(1) as pool:  # the copy is imported in a fork
            return pool.apply(_simulate, (tree, sabotage.simulation, seeds))


def _test(tree: Path, test: str) -> Result:
    """Run a test on the copy; a signal that ends its process counts as found. Raises RuntimeError if it does not run."""
    began = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", test]
    environment = os.environ | {"PYTHONPATH": ":".join(str(tree / path) for path in _PATHS)}
    run = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    seconds = time.monotonic() - began
    if run.returncode < 0:
        return Result(1, seconds, f"the process ended by {signal.Signals(-run.returncode).name}")
    if run.returncode not in (0, 1):  # 1: tests failed
        raise RuntimeError(f"{test} does not run:\n{run.stdout[-3000:]}{run.stderr[-3000:]}")
    reasons = [line.removeprefix("E ").strip() for line in run.stdout.splitlines() if line.startswith("E ")]
    return Result(1, seconds, (reasons or ["failed"])[0] if run.returncode else "")


def _simulate(tree: Path, name: str, seeds: range) -> Result:
    sys.path[:0] = [str(tree / path) for path in _PATHS]
    logging.disable(logging.CRITICAL)
    driver, simulation = importlib.import_module("tests.simulation.driver"), importlib.import_module("tests.simulation")
    assert str(tree) in simulation.__file__
    totals = driver.run_seeds(name, simulation.SIMULATIONS[name], seeds)
    return Result(totals.schedules, totals.busy, next(iter(totals.failed.values()), ""))


def main() -> int:
    """Try the faults and return the exit status."""
    parser = argparse.ArgumentParser("python -m tools.sabotage", description=__doc__)
    parser.add_argument("--only", choices=("control", "store", "test"), help="faults for this simulation, or for tests, alone")
    parser.add_argument("--match", default="", metavar="REGEX", help="faults whose names match alone")
    parser.add_argument("--schedules", type=int, default=2000, help="schedules after which a fault counts as not found")
    parser.add_argument("--seed", type=int, action="append", help="first seed; repeat it for several runs")
    options = parser.parse_args()
    if options.only not in ("store", "test"):
        importlib.import_module("vllm.model_executor.model_loader")  # once, since it takes seconds
    lost = 0
    for sabotage in sabotages():
        place = sabotage.simulation or "test"
        if options.only not in (None, place) or not re.search(options.match, sabotage.name):
            continue
        seeds = [1] if sabotage.test else options.seed or [1]
        results = [attempt(sabotage, range(seed, seed + options.schedules)) for seed in seeds]
        lost += any(not result.message for result in results)
        found = ", ".join(f"{r.tried} in {r.seconds:.1f} s" if r.message else "not found" for r in results)
        print(f"{sabotage.test or place}: {sabotage.name}: {found}: {results[0].message[:150]}", flush=True)
    return int(lost > 0)


if __name__ == "__main__":
    sys.exit(main())
