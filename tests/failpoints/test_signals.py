"""A supervised command, as each driver of a long run is, ends with all its processes and their memory, also by SIGKILL."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.support.hidden import unavailable

MARK = "RESHARDER_SIGNALS_TEST"
_ROOT = Path(__file__).parents[2]


def marked(mark: str) -> Iterator[tuple[int, str]]:
    """Yield the processes that have inherited a variable, with their command lines."""
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"{MARK}={mark}".encode() in (path / "environ").read_bytes():
                yield int(path.name), (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()


def memory_of(mark: str) -> set[Path]:
    """Return the folders in shared memory of supervised commands that these processes belong to."""
    found = set()
    for process, _ in marked(mark):
        with suppress(OSError):
            environment = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
            found |= {Path(line.decode().partition("=")[2]) for line in environment if line.startswith(b"RESHARDER_TEST_MEMORY=")}
    return found


def wait_for(holds: Callable[[], object], timeout: float) -> bool:
    end = time.monotonic() + timeout
    while not (found := holds()) and time.monotonic() < end:
        time.sleep(0.1)
    return bool(found)


@pytest.fixture
def mark() -> Iterator[str]:
    """A folder with a short path, for sockets are in it. Processes that have its path in their environment end with the test."""
    found = tempfile.mkdtemp(prefix="s-")
    yield found
    for process, _ in marked(found):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    shutil.rmtree(found)


def start(mark: str, *command: str) -> subprocess.Popen[bytes]:
    environment = os.environ | {MARK: mark, "OMP_NUM_THREADS": "1", "TMPDIR": mark}
    return subprocess.Popen(
        [sys.executable, *command], cwd=_ROOT, env=environment, start_new_session=True, stdout=subprocess.DEVNULL
    )


def supervise(code: str) -> tuple[str, str]:
    """Return arguments of Python that supervise a command of this code."""
    return (
        "-c",
        f"import sys; from tests.support.supervised import supervised; sys.exit(supervised([sys.executable, '-c', {code!r}]))",
    )


RESTARTS = """
import os, subprocess, tempfile
from tests.support.daemon import Daemon
from tests.support.node import Node
made = Daemon(), Node("127.0.0.1:1", "one")
open(tempfile.mkstemp()[1], "w").write("text")
while True:
    one = subprocess.Popen(["sh", "-c", "kill -STOP $$"], start_new_session=True)
    other = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    one.wait(), other.wait()
"""
SEGMENT = """
import subprocess
from multiprocessing.shared_memory import SharedMemory
held = SharedMemory(create=True, size=4096)
subprocess.run(["sleep", "1000"], env={}, start_new_session=True)
"""


def below(driver: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return psutil.Process(driver.pid).children(recursive=True)


def lines(driver: subprocess.Popen[bytes]) -> Iterator[str]:
    """Yield the command lines of the processes below a driver; forked ones show no environment of their own."""
    for process in below(driver):
        with suppress(psutil.Error):
            yield " ".join(process.cmdline())


def bare_in(processes: list[psutil.Process]) -> bool:
    """Return whether a process has an empty environment."""
    with suppress(psutil.Error):
        return {} in [process.environ() for process in processes]
    return False


def left_in(mark: str) -> list[Path]:
    """Return the folders of supervised commands that are left."""
    return list(Path(mark).glob("resharder-run-*"))


def gone(processes: list[psutil.Process]) -> Callable[[], bool]:
    """Return whether processes have ended, whatever environment they have."""
    return lambda: not any(process.is_running() for process in processes)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL])
def test_a_signal_ends_stopped_processes_and_those_of_other_sessions_too(mark: str, number: signal.Signals) -> None:
    """The signal goes to the whole process group, as that of a terminal does."""
    driver = start(mark, *supervise(RESTARTS))
    assert wait_for(lambda: len(list(marked(mark))) >= 5, 60), list(marked(mark))
    (memory,) = memory_of(mark)
    assert len(list(memory.iterdir())) == 2, "of the daemon and the node"
    os.killpg(driver.pid, number)
    assert driver.wait(60) == (-number if number == signal.SIGKILL else 128 + number)
    assert wait_for(lambda: (list(marked(mark)), memory.exists(), list(Path(mark).iterdir())) == ([], False, []), 60)


@pytest.mark.parametrize("whose", ["driver", "guard", "command"])
def test_sigkill_to_any_process_above_ends_those_without_a_trace_in_their_environment(mark: str, whose: str) -> None:
    driver = start(mark, *supervise(SEGMENT))
    assert wait_for(lambda: bare_in(descendants := below(driver)) and len(descendants) == 4, 60), below(driver)
    guard, command, *_ = (processes := below(driver))
    held = {link.readlink() for link in Path(f"/proc/{command.pid}/fd").iterdir()}
    shared = {path for path in held if path.parent == Path("/dev/shm")} | memory_of(mark)
    assert len(shared) == 2, "the segment and the folder for daemons"
    os.kill({"driver": driver.pid, "guard": guard.pid, "command": command.pid}[whose], signal.SIGKILL)
    assert driver.wait(60) == (-9 if whose == "driver" else 137)
    assert wait_for(gone(processes), 60), processes
    assert wait_for(lambda: not any(path.exists() for path in shared), 60), shared
    assert wait_for(lambda: bool(left_in(mark)) == (whose == "command"), 60), (
        "the files of a command that failed by itself are kept"
    )


@pytest.mark.parametrize(("end", "status"), [("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", 137), ("pass", 0)])
def test_a_command_that_ends_leaves_no_process_and_keeps_its_files_if_it_failed(mark: str, end: str, status: int) -> None:
    code = f"import os, subprocess, sys, tempfile; subprocess.Popen(['sleep', '1000']); tempfile.mkstemp(); {end}"
    driver = start(mark, *supervise(code))
    assert driver.wait(60) == status
    assert list(marked(mark)) == []
    assert bool(list(Path(mark).iterdir())) == (status != 0)


COMMANDS = {
    "failpoints": (["tests.failpoints", "--only", "node.", "--kind", "stop", "--jobs", "2"], "resharder.server.node.main", 1),
    "simulation": (["tests.simulation", "--only", "store", "--jobs", "2"], "tests.simulation.main", 3),
    "chaos": (["tests.chaos", "--minutes", "1"], "tests.support.torchrun", 4),
    "soak": (["tests.soak", "--minutes", "1"], "tests.support.torchrun", 4),
    "sabotage": (["tools.sabotage", "--only", "store", "--match", "rename before"], "tools.sabotage.main", 2),
    "mutants": (["tools.mutants", "--file", "chunking.py", "--jobs", "2"], "tools.mutants.main", 4),
}
"""Drivers with options, and a part of the command lines of at least so many of their processes once they are in the midst."""


@pytest.mark.full
@pytest.mark.parametrize(("name", "number"), [*((name, signal.SIGKILL) for name in COMMANDS), ("failpoints", signal.SIGTERM)])
def test_a_signal_to_a_driver_ends_all_its_processes(mark: str, name: str, number: signal.Signals) -> None:
    options, part, count = COMMANDS[name]
    if name == "chaos" and (reason := unavailable()):
        pytest.skip(reason)
    driver = start(mark, "-m", *options)
    assert wait_for(lambda: sum(part in line for line in lines(driver)) >= count, 300), list(lines(driver))
    (memory,) = memory_of(mark)
    processes = below(driver)
    assert len(processes) >= count
    driver.send_signal(number)
    assert driver.wait(60) == (-number if number == signal.SIGKILL else 128 + number)
    assert wait_for(lambda: not memory.exists() and not left_in(mark), 60)
    assert wait_for(gone(processes), 60), processes
    assert list(marked(mark)) == []
