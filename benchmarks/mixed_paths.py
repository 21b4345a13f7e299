"""How long `publish` holds a trainer where versions take all paths in turn: `python -m benchmarks.mixed_paths [--versions 200]`.

Each version is staged, direct or served ahead of READY, and the next one is published at once, when it is served, or a little
later, all by a seed. On CPUs with a small model; `--gpus 0,1` (or `0,0`) with Qwen3-8B, whose trainer and server these are.

It prints the distribution of the calls' durations by path, and for the longest ones what happened meanwhile, from the version's
trace (docs/tracing.md) and the daemon's log. Servers are waited for as long as it takes (`direct_wait=120`), so that a wait shows
in full. How long each process waited for a processor meanwhile tells a busy host from a wait of Resharder's.
"""

import argparse
import os
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import NamedTuple

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.direct_system import CPU_JOBS, GPU_JOBS, System
from benchmarks.stores import fast_store
from tests.support.collector import Collector, Span
from tests.support.observing import servers, wait_serving, wait_until

PATHS = ("staged", "direct", "ahead")
AFTER = ("at once", "when served", "later")
LONGEST = 8  # of which the parts are printed


class Processes:
    """The system's processes. `waited`: how long each was ready to run and had no processor, since the last call.

    That is in seconds, of the thread of a process or of its children that waited longest.
    """

    def __init__(self, system: System) -> None:
        self._roots = {"trainer": system.trainer.process.pid, "daemon": system.daemon.pid}
        if (served := system.servers[0].process) is not None:
            self._roots["server"] = served.pid
        self._before = dict[str, int]()

    def waited(self) -> dict[str, float]:
        before, self._before = self._before, {}
        found = {}
        for name, root in self._roots.items():
            pids, delays = [root, *(child.pid for child in psutil.Process(root).children(recursive=True))], [0]
            for file in (file for pid in pids for file in Path(f"/proc/{pid}/task").glob("*/schedstat")):
                with suppress(OSError):  # the thread has ended
                    delay = self._before[str(file)] = int(file.read_text().split()[1])
                    delays.append(delay - before.get(str(file), 0))
            found[name] = max(delays) / 1e9
        return found


class Held(NamedTuple):
    """One version: its path, when it was published, when `publish` was called, how long it took, and how long the system's
    processes waited for a processor meanwhile, in seconds."""

    version: int
    path: str
    after: str
    before: str
    began: float
    seconds: float
    waited: dict[str, float]


def run(system: System, count: int, seed: int) -> list[Held]:
    processes = Processes(system)
    choose, found, ahead, last, version = random.Random(seed), list[Held](), None, "staged", system.newest
    for _ in range(count):
        path, after = choose.choice(PATHS), choose.choice(AFTER)
        if after != "at once":
            wait_serving(system.daemon, version, 300)
        if after == "later":
            time.sleep(choose.uniform(0, 2))
        if path != "staged" and ahead != (path == "ahead"):
            ahead = path == "ahead"
            system.serve_ahead(ahead)
        processes.waited()
        version = system.publish(direct=path != "staged")
        found.append(Held(version, path, after, last, system.began, system.published_seconds, processes.waited()))
        last = path
    wait_serving(system.daemon, version, 300)
    wait_until(lambda: not any(server.ahead for server in servers(system.daemon)), "it is the store's")
    return found


def summary(found: Sequence[Held]) -> Table:
    """Return milliseconds of the calls by path, and by when and after which path they were made."""
    table = Table("versions", "number", "median", "90 %", "99 %", "longest", title="publish, ms")
    rows = [("all", found)]
    rows += [(path, [each for each in found if each.path == path]) for path in PATHS]
    rows += [(f"published {after}", [each for each in found if each.after == after]) for after in AFTER]
    rows += [
        (f"{path} after {before}", [e for e in found if (e.path, e.before) == (path, before)])
        for path in PATHS
        for before in PATHS
    ]
    for name, part in rows:
        took = sorted(each.seconds * 1e3 for each in part)
        if took:
            ranks = (median(took), took[int(0.9 * (len(took) - 1))], took[int(0.99 * (len(took) - 1))], took[-1])
            table.add_row(name, str(len(took)), *(f"{each:,.1f}" for each in ranks))
    return table


def parts(held: Held, spans: Sequence[Span], system: System) -> list[str]:
    """Return what happened during one call, in milliseconds from its begin: spans of any version, and events of the daemon."""
    end = held.began + held.seconds
    lines = []
    for span in spans:
        begin, until = span.start / 1e9, span.end / 1e9
        if begin < end and until > held.began:
            what = f"{span.name} of version {span.attributes.get('version')}"
            lines.append((begin, f"{_ms(begin - held.began)} to {_ms(until - held.began)}  {what}"))
    for line in system.events():
        at = datetime.fromisoformat(line["timestamp"]).timestamp()
        if held.began <= at <= end:
            said = {key: line[key] for key in ("subject", "version", "reason", "server") if key in line}
            lines.append((at, f"{_ms(at - held.began)}  {line['event']} {said}"))
    return [text for _, text in sorted(lines)]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:8.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--gpus", default="", help="the trainer's and the server's")
    asked = parser.parse_args()
    cpu = not asked.gpus
    with Collector() as collector, fast_store() as (folder, _):
        os.environ |= {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint, "OTEL_BSP_SCHEDULE_DELAY": "50"}
        job = (CPU_JOBS if cpu else GPU_JOBS)[0]
        with System(job, 1, 1, cpu=cpu, eager=cpu, gpus=asked.gpus, store=folder / "store", direct_seconds=20) as system:
            found = run(system, asked.versions, asked.seed)
            time.sleep(1)  # for the last spans
            spans, longest = collector.spans, sorted(found, key=lambda each: -each.seconds)[:LONGEST]
            typical = [sorted((e for e in found if e.path == path), key=lambda e: e.seconds) for path in PATHS]
            for held in [*longest, *(each[len(each) // 2] for each in typical if each)]:
                when = f"published {held.after}, after {held.before}"
                print(f"version {held.version}, {held.path}, {when}: {held.seconds * 1e3:.1f} ms,")
                waits = ", ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in held.waited.items())
                print(f"  and waited for a processor: {waits}")
                print(*(f"    {line}" for line in parts(held, spans, system)), sep="\n", flush=True)
            failed = [line["reason"] for line in system.events("direct_failed")]
    print(f"failed transfers: {failed}")
    Console(width=120).print(summary(found))


if __name__ == "__main__":
    main()
