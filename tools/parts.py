"""The parts of `make test`, `make test-all` and continuous integration, run to the end whatever fails.

    python3 tools/parts.py test         # each way of the bytes and each decision once
    python3 tools/parts.py all          # every test that there is
    python3 tools/parts.py ci           # `test`, then as much of the rest as its time allows; the commit says where it begins

Checks (lint, types, docs) run beside the tests. The output of each part goes to `.parts/NAME.log`, and is
printed where the part fails.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[1]
LOGS = ROOT / ".parts"
SHOWN_LINES = 200
MINUTE = 60.0
CI_LAST_START, CI_END = 25 * MINUTE, 80 * MINUTE
"""When continuous integration, which has 90 minutes with its set-up, begins no further part, and when it ends all."""
ALSO = os.environ.get("PYTEST", "").split()


@dataclass(frozen=True)
class Part:
    """A command, and how long it may take. `beside`: it runs while other parts do."""

    name: str
    command: Sequence[str]
    minutes: float
    beside: bool = False
    in_ci: bool = True
    needs: str = ""
    """A program without which the part is not run."""


def make(name: str, minutes: float, target: str = "", *, beside: bool = False, in_ci: bool = True) -> Part:
    return Part(name, ["make", "--no-print-directory", target or name], minutes, beside, in_ci)


def pytest(name: str, marks: str, minutes: float, *folders: str, jobs: int = 2) -> Part:
    """Two files at a time, the costliest first (`tests/conftest.py`)."""
    spread = ["-n", str(jobs), "--dist", "loadfile", "--no-loadscope-reorder"] if jobs > 1 else []
    paths = [f"tests/{folder}" for folder in folders or ("",)]
    return Part(name, [".venv/bin/pytest", "-q", "--durations", "8", *spread, "-m", marks, *paths, *ALSO], minutes)


VLLM = ("0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0")
"""Releases of vLLM with a CPU build, the oldest first; `make setup` installs the newest, which all other parts run with."""


def vllm(release: str) -> Part:
    return Part(f"vLLM {release}", ["make", "--no-print-directory", "test-vllm", f"VERSION={release}"], 30)


def python(release: str) -> Part:
    """The pure tests with another Python than that of `make setup`, where there is one."""
    command = ["make", "--no-print-directory", "test-python", f"VERSION={release}"]
    return Part(f"Python {release}", command, 60, in_ci=False, needs=f"python{release}")


MEGATRON = "0.19.2"
"""The newest megatron-core that is supported; `make setup` installs an older one, for Python 3.11."""


def megatron(release: str) -> Part:
    command = ["make", "--no-print-directory", "test-megatron", f"VERSION={release}"]
    return Part(f"megatron-core {release}", command, 40, in_ci=False)


TEST = [
    make("proto-check", 5),  # not beside tests: it writes the generated files again
    *(make(name, 20, beside=True) for name in ("lint", "types", "docs")),
    pytest("tests", "not full", 45),
]
REST = [
    pytest("converters, in full", "full and not storm", 20, "converters"),
    pytest("client, in full", "full and not storm", 20, "client"),
    pytest("server, in full", "full and not storm", 20, "server", "deploy", "simulation"),
    pytest("engines, in full", "full and not storm", 25, "vllm", "engines", "integrations"),
    pytest("end to end, in full", "full and not storm", 25, "e2e", "chaos", "failpoints"),
    pytest("storms, in full", "full and storm", 25, "chaos", "failpoints", jobs=1),
    vllm(VLLM[0]),
    *(python(release) for release in ("3.12", "3.13")),
    megatron(MEGATRON),
    make("training frameworks", 40, "integrations", in_ci=False),
    make("NIXL", 20, "test-nixl"),
    make("SGLang", 20, "test-sglang"),
]


@dataclass
class Result:
    part: Part
    seconds: float
    status: int | None
    """None: its time was over."""
    cut: bool = False
    """The run's time was over, not its own."""
    missing: bool = False
    """The program that it needs is not installed."""

    @property
    def failed(self) -> bool:
        return self.status != 0 and not self.cut and not self.missing

    @property
    def outcome(self) -> str:
        if self.missing:
            return f"not run: there is no {self.part.needs} here"
        if self.cut:
            return "cut off at the end of the run's time"
        if self.status is None:
            return f"FAILED: not done after {self.part.minutes:g} minutes"
        return "passed" if not self.status else f"FAILED with {self.status}"


class Run:
    """One run of parts, begun `before` seconds ago. `end`: seconds after its beginning when whatever still runs is ended."""

    def __init__(self, end: float = float("inf"), before: float = 0.0) -> None:
        self._began, self._end = time.monotonic() - before, end
        self._results, self._lock = list[Result](), threading.Lock()
        self._ended, self._running = False, set[subprocess.Popen[bytes]]()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    @property
    def failed(self) -> bool:
        return any(result.failed for result in self._results)

    def all(self, parts: Iterable[Part]) -> None:
        """Run parts one after the other, and beside them, also one after the other, those that say so."""
        parts = list(parts)
        lanes = [[part for part in parts if part.beside is beside] for beside in (True, False)]
        threads = [threading.Thread(target=lambda lane=lane: [self._one(part) for part in lane]) for lane in lanes]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except BaseException:  # Ctrl-C, which does not reach sessions of their own
            self._ended = True
            for process in list(self._running):
                end_session(process)
            raise

    def while_time_is_left(self, parts: Iterable[Part], last_start: float) -> None:
        """Run parts until `last_start`; print those that are left."""
        left = list(parts)
        while left and self.seconds < last_start:
            self._one(left.pop(0))
        if left:
            say("not run, for want of time: " + "; ".join(part.name for part in left))

    def _one(self, part: Part) -> None:
        if self._ended:
            return
        if part.needs and not runs(part.needs):
            result = Result(part, 0.0, None, missing=True)
            say(f"{part.name}: {result.outcome}")
            self._results.append(result)
            return
        say(f"{part.name} ...")
        began, log = time.monotonic(), LOGS / f"{part.name.replace(' ', '-').replace(',', '')}.log"
        left = max(1.0, min(part.minutes * MINUTE, self._end - self.seconds))
        with log.open("wb") as output:
            status = self._status(part, output, left)
        result = Result(part, time.monotonic() - began, status, cut=status is None and left < part.minutes * MINUTE)
        with self._lock:
            self._results.append(result)
            say(f"{part.name}: {result.outcome}, {duration(result.seconds)}")
            if result.failed:
                lines = log.read_text(errors="replace").splitlines()
                print(*lines[-SHOWN_LINES:], f"--- the whole output of {part.name}: {log}", sep="\n", flush=True)

    def _status(self, part: Part, output: IO[bytes], seconds: float) -> int | None:
        try:
            process = subprocess.Popen(part.command, cwd=ROOT, stdout=output, stderr=output, start_new_session=True)
        except OSError as error:
            output.write(f"{error}\n".encode())
            return 127
        self._running.add(process)
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            end_session(process)
            self._running.discard(process)

    def report(self) -> int:
        """Print what ran, and return the exit code."""
        print()
        width = max((len(result.part.name) for result in self._results), default=0)
        for result in self._results:
            print(
                f"  {result.part.name:{width}}  {duration(result.seconds):>8}  {result.outcome}  {summary(result.part)}".rstrip()
            )
        print(f"{'FAILED' if self.failed else 'passed'} after {duration(self.seconds)}", flush=True)
        return int(self.failed)


def runs(program: str) -> bool:
    """Whether a program is there and starts: the launchers of version managers are on PATH for releases that are not chosen."""
    with suppress(OSError):
        return subprocess.run([program, "--version"], capture_output=True).returncode == 0
    return False


def end_session(process: subprocess.Popen[bytes]) -> None:
    """End what a part has left in its session."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)


def summary(part: Part) -> str:
    """The last line of pytest's output."""
    log = LOGS / f"{part.name.replace(' ', '-').replace(',', '')}.log"
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()] if log.exists() else []
    return lines[-1].strip("= ") if lines and " in " in lines[-1] and "pytest" in part.command[0] else ""


def vllm_in_turn(commit: str) -> Part:
    """Return the part of a release between the oldest and the newest, another one for another commit."""
    between = VLLM[1:-1]
    return vllm(between[int(commit[:12] or "0", 16) % len(between)])


def rotated(parts: Sequence[Part], commit: str) -> Iterator[Part]:
    """Yield all parts, beginning at another one for another commit."""
    first = int(commit[:12] or "0", 16) % len(parts)
    yield from (*parts[first:], *parts[:first])


def duration(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def main(what: str) -> int:
    LOGS.mkdir(exist_ok=True)
    before = max(0.0, time.time() - float(os.environ.get("RESHARDER_CI_BEGAN", time.time())))
    run = Run(CI_END, before) if what == "ci" else Run()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    run.all(TEST)
    if what == "all":
        run.all(REST)
    elif what == "ci":
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
        commit = head.stdout.strip()
        run.while_time_is_left(rotated([*(part for part in REST if part.in_ci), vllm_in_turn(commit)], commit), CI_LAST_START)
    return run.report()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
