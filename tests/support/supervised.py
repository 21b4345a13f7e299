"""A command whose processes all end with it, also those that left its session or are stopped: `supervised([…])` in a main thread.

Its processes are found by a variable in their environment, and killed until none is left: some start others again that end.
"""

import ctypes
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

MARK = "RESHARDER_SUPERVISED"
"""Variable in the environment of every process of a command; its value is the folder for their temporary files."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1
MEMORY = "RESHARDER_TEST_MEMORY"


class _Ended(BaseException):
    """This process got a signal."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def supervised(command: Sequence[str]) -> int:
    """Run a command, and return its exit status, or 128 + N after signal N to it or to this process.

    All its processes have ended then, and its folders in shared memory are removed. Its temporary files remain if it failed by
    itself.
    """
    folder = Path(tempfile.mkdtemp(prefix="resharder-run-"))
    memory = Path(tempfile.mkdtemp(prefix="resharder-run-", dir=shared_memory()))
    before = {number: signal.signal(number, _end) for number in _SIGNALS}
    kept = False
    try:
        environment = os.environ | {MARK: str(folder), "TMPDIR": str(folder), MEMORY: str(memory)}
        status = subprocess.Popen(command, env=environment, start_new_session=True).wait()
        kept = status != 0
    except _Ended as ended:
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        status = 128 + ended.number
    _end_all(folder)
    for path in (memory,) if kept else (memory, folder):
        shutil.rmtree(path, ignore_errors=True)
    for number, handler in before.items():
        signal.signal(number, handler)
    return status if status >= 0 else 128 - status


def shared_memory() -> str:
    """Return the folder in shared memory below which those of daemons and nodes are: one that ends with a supervised command."""
    return os.environ.get(MEMORY, "/dev/shm")


def end_with_parent() -> None:
    """Let this process be killed once the thread that has forked it ends, whatever ends that."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL):
        raise OSError(ctypes.get_errno(), "prctl")


def processes(folder: Path) -> Iterator[Path]:
    """Yield the folders in /proc of the processes of a command, those of forked ones included."""
    mark = f"{MARK}={folder}".encode()
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark in (path / "environ").read_bytes().split(b"\0"):
                yield path


def _end(number: int, frame: FrameType | None) -> None:
    raise _Ended(number)


def _end_all(folder: Path, timeout: float = 60) -> None:
    """SIGKILL all processes, until none is left. Raises TimeoutError."""
    end = time.monotonic() + timeout
    while left := list(processes(folder)):
        for path in left:
            with suppress(ProcessLookupError):
                os.kill(int(path.name), signal.SIGKILL)
        if time.monotonic() > end:
            raise TimeoutError(f"expected all processes to end within {timeout:g} s, left are {[path.name for path in left]}")
        time.sleep(0.05)
