"""A soak of real processes: `python -m tests.soak --minutes 45 [--server left] [--every 3]`.

Prints figures, a table and every measure that grows beyond its bound; a failing run keeps its folder with history and logs.
With `--check FILE` the samples of an earlier run are judged again.
"""

import argparse
import os
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.chaos.history import read
from tests.chaos.schedule import SERVERS
from tests.soak.report import table, verdict
from tests.soak.soak import Result, Soak, sample_of
from tests.soak.verdict import Sample, judge
from tests.support.supervised import record_folder


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=45.0, help="time of publishing after the server is ready")
    parser.add_argument("--server", choices=SERVERS, default="left")
    parser.add_argument("--every", type=float, default=3.0, help="seconds from one version to the next, at least")
    parser.add_argument("--period", type=float, default=10.0, help="seconds between two samples")
    parser.add_argument("--check", type=Path, help="judge the samples of this history, and run nothing")
    parser.add_argument("--keep", action="store_true", help="keep the folder of a run that passes")
    given = parser.parse_args()
    if given.check:
        return bool(judged([sample_of(event) for event in read(given.check) if event["kind"] == "sample"]))
    folder = Path(tempfile.mkdtemp(prefix="resharder-soak-", dir=record_folder()))
    print(f"in {folder}", flush=True)
    result = Soak(folder, given.server, given.every, given.period).run(60 * given.minutes)
    failed = report(result, folder)
    if not failed and not given.keep:
        shutil.rmtree(folder)
    sys.stdout.flush()
    os._exit(bool(failed))  # no thread of the run is waited for


def report(result: Result, folder: Path) -> int:
    """Print what was done, the table and all problems, and return the number of problems."""
    events = read(folder / "history.jsonl")
    operations = Counter(event["name"] for event in events if event["kind"] == "begin")
    print(f"{result.seconds:.0f} s, {result.versions} versions served, {result.scrapes} scrapes")
    print(f"{result.compared} answers and {result.tokens} tokens compared; operations: {dict(operations)}")
    for name, value in result.installs.items():
        print(f"{name} {value:g}")
    for violation in result.violations[:40]:
        print(str(violation)[:1500])
    print(f"{len(result.violations)} violations")
    failed = len(result.violations) + len(judged(result.samples))
    if failed:
        print(f"history and logs are in {folder}")
    return failed


def judged(samples: list[Sample]) -> list[str]:
    """Print the table of growths and each one beyond its bound; return the latter."""
    try:
        growths = judge(samples)
    except ValueError as error:
        print(error)
        return [str(error)]
    found = verdict(growths)
    print(table(growths), *found, f"{len(found)} of {len(growths)} measures beyond their bound", sep="\n")
    return found


if __name__ == "__main__":
    sys.exit(main())
