"""Edit the family tables, geometry and fleets one place at a time and run the tests: an edit that none notices is a survivor.

    python -m tools.mutants [--family gemma2] [--file table.py] [--jobs 2] [--part 1/3] [--seconds 500]

The edits are those of `edits.py`: names, numbers, dimensions, transposes and flags changed, rules dropped or exchanged, guards
negated. Each is run in a fork that reads the edited source instead of the file, by the tests that run its lines, the fastest
first; no file is ever changed. An edit of a function that did not run yet gets a fork that has collected the tests, in which
its code replaces the function's. `equivalent.toml` lists the edits that change nothing, with the reason. The exit code is 1 where
an edit survives that is not listed, or a listed one is killed or does not exist.
"""

import argparse
import importlib.abc
import importlib.util
import json
import os
import re
import resource
import signal
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.machinery import ModuleSpec
from math import inf
from pathlib import Path
from types import ModuleType

from tools.mutants.coverage import ROOT, Covered, Selection, Suite, coverage, run_pytest, tests_of
from tools.mutants.edits import Mutant, file_name, mutants
from tools.mutants.forks import Forks

EQUIVALENT = Path(__file__).parent / "equivalent.toml"
LIMIT = 600  # seconds for one edit
MEMORY = 4 << 30  # bytes for one edit, beside those of the process that it is forked from
KILLED, SURVIVED = "killed", "survived"


CONVERTERS, SERVER = "converters/resharder/converters", "server/resharder/server"
QUICK = ("tables", "checkpoint", "megatron_tables", "architectures")
FAMILIES = (
    "recipes",
    "agreement",
    "computation",
    "megatron",
    "families_dense",
    "families_hybrid",
    "families_mla",
    "megatron_layouts",
    "dtensor",
)
SUITES = (
    Suite(
        "converters",
        ("tests.support.megatron_shim", "megatron.core.models.gpt", "transformers.models.auto", "torch.distributed.fsdp"),
        (
            f"{CONVERTERS}/architectures/*.py",
            f"{CONVERTERS}/models/dtensor.py",
            f"{CONVERTERS}/models/hf_names.py",
            f"{CONVERTERS}/models/megatron/layout.py",
            f"{CONVERTERS}/models/megatron/extras.py",
        ),
        tuple(f"tests/converters/test_{name}.py" for name in QUICK),
        tuple(f"tests/converters/test_{name}.py" for name in FAMILIES),
    ),
    Suite(
        "geometry",
        (),
        (f"{CONVERTERS}/geometry/*.py",),
        tuple(
            f"tests/converters/test_{name}.py"
            for name in ("layout", "plan", "senders", "copy_table", "piece_arrays", "runs", "chunking")
        ),
        (),
        "",
    ),
    Suite(
        "digests",
        ("numba",),
        (*(f"{CONVERTERS}/storage/{name}.py" for name in ("digest", "digest_1", "digest_loops")), f"{SERVER}/store/digests.py"),
        ("tests/converters/test_digest_kernels.py", "tests/converters/test_digest.py"),
        ("tests/server/test_digesting.py",),
        "",
        r"module|_compiled|_fold|_row_weight|sum_rows|copy_rows|sum_matrices",
    ),
    Suite(
        "decisions",
        (),
        tuple(f"{SERVER}/fleets/{name}.py" for name in ("goals", "versions")),
        tuple(f"tests/server/test_{name}.py" for name in ("goals", "pause_admission", "fleet_pins")),
        (),
        "",
    ),
    Suite(
        "fleets",
        (),
        (
            *(f"{SERVER}/fleets/{name}.py" for name in ("fleets", "commands", "canary_checks")),
            f"{SERVER}/fleets/reconciler/step.py",
            f"{SERVER}/state/*.py",
        ),
        tuple(
            f"tests/server/test_{name}.py"
            for name in ("fleet_changes", "fleet_reconciler", "terms", "leaving", "lingering", "states", "decisions", "goals")
        ),
        tuple(
            f"tests/server/test_{name}.py"
            for name in ("operations", "fleet_clocks", "explain", "checks", "serve_ahead", "lost_in_moves", "server_service")
        ),
        "",
    ),
)


class _Edited(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives one module another source."""

    def __init__(self, mutant: Mutant) -> None:
        path = mutant.file.relative_to(ROOT).with_suffix("")
        parts = path.parts[1:-1] if path.name == "__init__" else path.parts[1:]
        self._name, self._mutant, self._package = ".".join(parts), mutant, path.name == "__init__"

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        folder = [str(self._mutant.file.parent)] if self._package else None
        return importlib.util.spec_from_file_location(fullname, self._mutant.file, loader=self, submodule_search_locations=folder)

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self._mutant.source, str(self._mutant.file), "exec"), vars(module))


def prepare(mutant: Mutant, suite: Suite, covered: Sequence[Covered], *, imported: bool) -> list[str]:
    """Prepare a fork for an edit: bound its time and memory, silence it, and leave out compiled code of the unedited source.

    Args:
        mutant: The edit.
        suite: Its suite.
        covered: The suite's tests.
        imported: Whether the fork has the module in memory, and only its functions change.

    Returns:
        Node ids of the tests of the edit.
    """
    seconds = {test.node: test.seconds for test in covered}
    nodes = tests_of(mutant, suite, covered, imported=imported)
    signal.alarm(LIMIT)
    most = 10 + int(2 * sum(seconds[node] for node in nodes))  # of a processor: on a busy machine, tests wait for theirs
    resource.setrlimit(resource.RLIMIT_CPU, (most, most))
    size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    if suite.compiled and (not imported or re.fullmatch(suite.compiled, mutant.within)):
        os.environ["NUMBA_CACHE_DIR"] = tempfile.mkdtemp(prefix="numba-", dir=suite_folder())
        importlib.import_module("numba").config.reload_config()
    return nodes


def suite_folder() -> str:
    """Return the folder for temporary files of all edits, which goes with the process that tries them."""
    return os.environ["MUTANTS_FOLDER"]


def start(mutant: Mutant, suite: Suite, covered: Sequence[Covered]) -> int:
    """Run the tests on an edit, in a fork that imports the edited source and ends with 0 where all pass.

    Args:
        mutant: The edit.
        suite: Its suite.
        covered: The suite's tests.

    Returns:
        The process id.
    """
    child = os.fork()
    if child:
        return child
    nodes = prepare(mutant, suite, covered, imported=False)
    sys.meta_path.insert(0, _Edited(mutant))
    for quick in (True, False):
        wanted = [node for node in nodes if (node.partition("::")[0] in suite.quick) == quick]
        files = sorted({node.partition("::")[0] for node in wanted})
        if files and run_pytest(files, suite.select, Selection(wanted)):
            os._exit(1)
    os._exit(0)


def each_of(
    wanted: Sequence[Mutant], begin: Callable[[Mutant], int], jobs: int, until: float
) -> Iterator[tuple[Mutant, int, float]]:
    """Try edits, several at a time, none of which begins after `until` on the monotonic clock.

    Returns:
        Each edit with the status of its process and its seconds, as they end. An edit that runs into a limit is killed.
    """
    running: dict[int, tuple[Mutant, float]] = {}
    waiting = list(reversed(wanted))
    while waiting or running:
        if time.monotonic() > until:
            waiting.clear()
        while waiting and len(running) < jobs:
            mutant = waiting.pop()
            running[begin(mutant)] = mutant, time.perf_counter()
        if not running:
            return
        process, status = os.wait()
        mutant, began = running.pop(process)
        yield mutant, status, time.perf_counter() - began


def outcomes(
    wanted: Sequence[Mutant], suite: Suite, covered: Sequence[Covered], jobs: int, until: float
) -> Iterator[tuple[Mutant, int, float]]:
    """Try edits: first those of functions, in forks of a process that has collected the tests; then those that need an import.

    Returns:
        Each edit with the status of its process and its seconds, as they end.
    """
    inlet, outlet = os.pipe()
    child = os.fork()
    if not child:
        os.close(inlet)

        def tests(mutant: Mutant) -> list[str]:
            return prepare(mutant, suite, covered, imported=True)

        files = sorted({test.node.partition("::")[0] for test in covered})
        forks = Forks(wanted, {str(file) for file in suite.sources()}, tests, partial(each_of, jobs=jobs, until=until), outlet)
        os._exit(run_pytest(files, suite.select, forks))
    os.close(outlet)
    tried = set()
    with open(inlet) as lines:
        for line in lines:
            number, status, seconds = json.loads(line)
            tried.add(number)
            yield wanted[number], status, seconds
    os.waitpid(child, 0)
    others = [mutant for number, mutant in enumerate(wanted) if number not in tried]
    yield from each_of(others, lambda mutant: start(mutant, suite, covered), jobs, until)


def listed() -> dict[str, str]:
    """Edits that change nothing.

    Returns:
        By name, the reason.

    Raises:
        ValueError: One is listed twice, or without a reason.
    """
    found: dict[str, str] = {}
    for entry in tomllib.loads(EQUIVALENT.read_text())["equivalent"]:
        for edit in entry["edits"]:
            name = f"{entry['file']}: {entry['within']}: {edit}"
            if name in found or not entry["reason"]:
                raise ValueError(f"{name}: expected one entry with a reason")
            found[name] = entry["reason"]
    return found


def run(suite: Suite, asked: argparse.Namespace) -> int:
    """Try the edits of a suite that were asked for, and print those whose outcome is not the expected one.

    Args:
        suite: The suite.
        asked: The command's options.

    Returns:
        The exit status.
    """
    chosen = {*asked.file, *(f"{name}.py" for name in asked.family)}
    files = [file for file in suite.sources() if not chosen or not chosen.isdisjoint((file.name, file_name(file)))]
    every = [mutant for file in files for mutant in mutants(file)]
    part, parts = asked.part
    found = [mutant for mutant in every if re.search(asked.match, mutant.name)][part - 1 :: parts]
    if asked.list or not found:
        print(*(mutant.name for mutant in found), sep="\n", flush=True)
        return 0
    names, wrong, count = {mutant.name for mutant in every}, 0, Counter[str]()
    equivalent = {name for name in listed() if name.partition(":")[0] in map(file_name, files)}
    for name in sorted(equivalent - names):
        wrong += 1
        print(f"listed as equivalent, but there is no such edit: {name}")
    until = time.monotonic() + asked.seconds
    covered = coverage(suite)
    print(f"{suite.name}: {len(found)} edits, {len(covered)} tests", flush=True)
    for mutant, status, seconds in outcomes(found, suite, covered, asked.jobs, until):
        outcome = KILLED if status else SURVIVED
        expected = SURVIVED if mutant.name in equivalent else KILLED
        count["equivalent" if outcome == expected == SURVIVED else outcome] += 1
        if outcome != expected:
            wrong += 1
            print(f"{outcome}: {mutant.name} (line {mutant.lines.start}, {seconds:.0f} s)", flush=True)
    rest = f", {len(found) - count.total()} not tried" if count.total() < len(found) else ""
    counts = ", ".join(f"{count[kind]} {kind}" for kind in (KILLED, "equivalent", SURVIVED))
    print(f"{suite.name}: {counts}{rest}", flush=True)
    return int(wrong > 0)


def part_of(text: str) -> tuple[int, int]:
    """Return the two numbers of a part such as 1/3. Raises ValueError if there is no such part."""
    part, parts = (int(number) for number in text.split("/"))
    if not 1 <= part <= parts:
        raise ValueError(f"expected a part such as 1/3, got {text}")
    return part, parts


def main() -> int:
    parser = argparse.ArgumentParser(
        "python -m tools.mutants", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--family", action="append", default=[], metavar="NAME", help="edits of this family's module alone")
    parser.add_argument(
        "--file",
        action="append",
        default=[],
        metavar="NAME",
        help="edits of this file alone, such as plan.py or geometry/layout.py",
    )
    parser.add_argument("--match", default="", metavar="REGEX", help="edits whose names match alone")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="edits tried at a time")
    parser.add_argument("--seconds", type=float, default=inf, help="begin no edit of a suite after this time")
    parser.add_argument("--part", type=part_of, default=(1, 1), metavar="I/N", help="of N parts of the edits, the Ith alone")
    parser.add_argument("--list", action="store_true", help="name the edits and run nothing")
    asked = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    status = 0
    for suite in SUITES:  # each in a process of its own: Megatron and vLLM never share one
        child = os.fork()
        if not child:
            with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
                os.environ["MUTANTS_FOLDER"] = folder
                status = run(suite, asked)
            os._exit(status)
        status |= os.waitpid(child, 0)[1]
    return int(status != 0)


if __name__ == "__main__":
    sys.exit(main())
