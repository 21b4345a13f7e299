"""Lines that each test runs, and its duration: a mutant is tested only by tests that run its lines."""

import contextlib
import gc
import hashlib
import importlib
import json
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest
from hypothesis import Phase, settings

from tools.mutants.edits import Mutant

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".pytest_cache/mutants"
OPTIONS = ("-q", "-x", "-W", "ignore", "--import-mode=importlib")
PLUGINS = ("cacheprovider", "unraisableexception", "threadexception", "faulthandler")  # disabled, because they take half a second
PRELOADED = re.compile(
    r"(grpc|google|starlette|uvicorn|numba|transformers|hypothesis|megatron|safetensors|tokenizers|numpy|torch\.(distributed|testing))(\.|$)"
)


class Suite(NamedTuple):
    """Sources with the tests of theirs, and the modules to import first. `quick`: tests that import little."""

    name: str
    preload: tuple[str, ...]
    files: tuple[str, ...]
    quick: tuple[str, ...]
    tests: tuple[str, ...]
    select: str = "not wrong_line"
    """pytest's `-k`: a table with another mistake beside says nothing."""
    compiled: str = ""
    """Pattern of functions that numba compiles: its cache does not see an edit of them."""

    def sources(self) -> list[Path]:
        """Return the files to edit."""
        return [file for pattern in self.files for file in sorted(ROOT.glob(pattern))]


class Covered(NamedTuple):
    """One test: its seconds, and the lines of each file that it runs."""

    node: str
    seconds: float
    lines: dict[str, set[int]]


def tests_of(mutant: Mutant, suite: Suite, covered: Sequence[Covered], *, imported: bool) -> list[str]:
    """Choose the tests of a mutant.

    Args:
        mutant: An edit.
        suite: Its suite.
        covered: All tests.
        imported: Whether the edit is one of a function, which did not run at import.

    Returns:
        Node ids of the tests that run the lines of the edit; for lines that run at import, of the quick tests and of all that run
        any line of its file. The tests named like the file come first, then the fastest.
    """
    file, own = str(mutant.file), f"test_{mutant.file.stem}.py"
    found = [test for test in covered if not test.lines.get(file, set()).isdisjoint(mutant.lines)]
    if not found and not imported:
        found = [test for test in covered if file in test.lines or test.node.startswith(suite.quick)]
    return [test.node for test in sorted(found, key=lambda test: (own not in test.node, test.seconds))]


def coverage(suite: Suite) -> list[Covered]:
    """Run all tests without an edit, in a fork, and import what they import of others' modules.

    Args:
        suite: The suite. Results are kept for a file of tests until that file, a source or a shared part of the tests changes.

    Returns:
        Every test.

    Raises:
        RuntimeError: A test fails without an edit.
    """
    sources, kept = suite.sources(), CACHE / f"{suite.name}.json"
    shared = [*sources, *(ROOT / "tests/support").rglob("*.py"), ROOT / "tests/conftest.py", Path(__file__)]
    common = b"".join(path.read_bytes() for path in sorted(shared))
    keys = {file: hashlib.sha256(common + (ROOT / file).read_bytes()).hexdigest() for file in (*suite.quick, *suite.tests)}
    known: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    for module in suite.preload:
        importlib.import_module(module)
    changed = [file for file, key in keys.items() if known.get(file, {}).get("key") != key]
    if changed:
        kept.parent.mkdir(parents=True, exist_ok=True)
        child = os.fork()
        if not child:
            recorder = _Recorder({str(file) for file in sources})
            failed = run_pytest(changed, suite.select, recorder)
            modules = [name for name in sys.modules if PRELOADED.match(name)]
            known |= {file: {"key": keys[file], "tests": [], "modules": modules} for file in changed}
            for node, seconds, lines in recorder.found:
                ran = {file: sorted(some) for file, some in lines.items()}
                known[node.partition("::")[0]]["tests"].append((node, seconds, ran))
            if not failed:
                kept.write_text(json.dumps(known))
            os._exit(failed)
        if os.waitpid(child, 0)[1]:
            raise RuntimeError(f"{suite.name}: the tests fail without an edit")
        known = json.loads(kept.read_text())
    for module in dict.fromkeys(name for file in keys for name in known[file]["modules"]):
        with contextlib.suppress(Exception):
            importlib.import_module(module)
    gc.collect()
    gc.freeze()
    return [
        Covered(node, seconds, {file: set(some) for file, some in lines.items()})
        for file in keys
        for node, seconds, lines in known[file]["tests"]
    ]


def run_pytest(tests: Sequence[str], select: str, *plugins: object) -> int:
    """Run pytest in this process, with temporary folders that go with it.

    Args:
        tests: Files, relative to the root.
        select: pytest's `-k`.
        plugins: Plugins beside pytest's own.

    Returns:
        The exit status.
    """
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        left_out = [option for plugin in PLUGINS for option in ("-p", f"no:{plugin}")]
        arguments = [*OPTIONS, *left_out, "-k", select, f"--rootdir={ROOT}", f"--basetemp={folder}/tests", *tests]
        return int(pytest.main(arguments, plugins=[_Unshrunk(), *plugins]))


class _Unshrunk:
    """Plugin of pytest with which Hypothesis draws the same examples each time, at most 40, and ends at the first that fails."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> None:
        phases = (Phase.explicit, Phase.generate)
        settings.register_profile("mutants", settings(), max_examples=40, phases=phases, derandomize=True, database=None)
        settings.load_profile("mutants")


class Selection:
    """Plugin of pytest that runs only the given tests, in their order."""

    def __init__(self, nodes: Sequence[str]) -> None:
        self._places = {node: place for place, node in enumerate(nodes)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted((item for item in items if item.nodeid in self._places), key=lambda item: self._places[item.nodeid])


class _Recorder:
    """Plugin of pytest that traces every test."""

    def __init__(self, files: set[str]) -> None:
        self._files = files
        self._lines: dict[str, set[int]] = {}
        self.found: list[Covered] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        architectures: Any = sys.modules.get("resharder.converters.architectures")
        if architectures:
            architectures._table_of.cache_clear()
        self._lines = {}
        start = time.perf_counter()
        sys.settrace(self._call)
        threading.settrace(self._call)  # of threads that the test starts
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]
            self.found.append(Covered(item.nodeid, time.perf_counter() - start, self._lines))

    def _call(self, frame: FrameType, event: str, argument: object) -> Any:
        return self._line if frame.f_code.co_filename in self._files else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        self._lines.setdefault(frame.f_code.co_filename, set()).add(frame.f_lineno)
        return self._line
