"""A signal to a supervised command, as the driver of the matrix is, ends all its processes and removes their memory."""

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

import pytest

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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_stopped_processes_and_those_of_other_sessions_too(mark: str, number: signal.Signals) -> None:
    """The signal goes to the whole process group, as that of a terminal does."""
    driver = start(mark, *supervise(RESTARTS))
    assert wait_for(lambda: len(list(marked(mark))) >= 4, 60), list(marked(mark))
    (memory,) = memory_of(mark)
    assert len(list(memory.iterdir())) == 2, "of the daemon and the node"
    os.killpg(driver.pid, number)
    assert driver.wait(60) == 128 + number
    assert (list(marked(mark)), memory.exists(), list(Path(mark).iterdir())) == ([], False, [])


@pytest.mark.parametrize(("end", "status"), [("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", 137), ("pass", 0)])
def test_a_command_that_ends_leaves_no_process_and_keeps_its_files_if_it_failed(mark: str, end: str, status: int) -> None:
    code = f"import os, subprocess, sys, tempfile; subprocess.Popen(['sleep', '1000']); tempfile.mkstemp(); {end}"
    driver = start(mark, *supervise(code))
    assert driver.wait(60) == status
    assert list(marked(mark)) == []
    assert bool(list(Path(mark).iterdir())) == (status != 0)


def test_sigterm_to_the_driver_of_the_matrix_ends_the_cycles(mark: str) -> None:
    driver = start(mark, "-m", "tests.failpoints", "--only", "node.", "--kind", "stop", "--jobs", "2")

    def runs() -> bool:
        return any("node_main" in line for _, line in marked(mark)) and len(list(marked(mark))) >= 6

    assert wait_for(runs, 300), list(marked(mark))
    (memory,) = memory_of(mark)
    assert len(list(memory.iterdir())) >= 2
    driver.terminate()
    assert driver.wait(60) == 128 + signal.SIGTERM
    assert (list(marked(mark)), memory.exists(), list(Path(mark).iterdir())) == ([], False, [])
