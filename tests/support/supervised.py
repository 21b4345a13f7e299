"""A command whose processes all end with it, whatever ends it: `supervised([…])` in a main thread.

The command runs below a guard, a process in a session of its own. The kernel sends the guard SIGTERM when the process that has
called `supervised` ends, also by SIGKILL (PR_SET_PDEATHSIG), and makes it the parent of every orphan below it
(PR_SET_CHILD_SUBREAPER): each process of the command is one of its descendants, also one that left its session, is stopped, or
has another environment. The guard kills its descendants until none is left.
"""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, MappingProxyType

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_SHARED = Path("/dev/shm")
MEMORY, _LASTING = "RESHARDER_TEST_MEMORY", "RESHARDER_TEST_LASTING"
_ENDS = 60.0  # seconds in which killed processes end
_TRACKED = 10.0  # seconds for Python's resource trackers, which remove what the processes that they serve have left


class _Ended(BaseException):
    """This process got a signal."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@dataclass(frozen=True)
class _Run:
    """A command, its folders for temporary files and in shared memory, and the names that shared memory had before."""

    command: Sequence[str]
    environment: Mapping[str, str]
    folder: Path
    memory: Path
    before: frozenset[str]

    def end(self, *, kept: bool) -> None:
        """Kill all descendants of this process, and remove what they have in shared memory and, unless `kept`, their files."""
        for segment in _end_descendants():
            if segment.name not in self.before:
                segment.unlink(missing_ok=True)
        for path in (self.memory,) if kept else (self.memory, self.folder):
            shutil.rmtree(path, ignore_errors=True)


def supervised(command: Sequence[str], environment: Mapping[str, str] = MappingProxyType({})) -> int:
    """Run a command, and return its exit status, or 128 + N after signal N to it or to this process.

    All its processes have ended then, and its folders in shared memory are removed, as are files directly in /dev/shm that are
    new and that they had open. Its temporary files remain if it failed by itself.

    Args:
        command: The command line.
        environment: Variables besides those of this process.
    """
    folder = Path(tempfile.mkdtemp(prefix="resharder-run-"))
    memory = Path(tempfile.mkdtemp(prefix="resharder-run-", dir=shared_memory()))
    lasting_folder = str(Path(tempfile.gettempdir()).absolute())
    given = {"TMPDIR": str(folder), MEMORY: str(memory), _LASTING: lasting_folder, **environment}
    run = _Run(command, os.environ | given, folder, memory, frozenset(os.listdir(_SHARED)))
    _control(_PR_SET_CHILD_SUBREAPER, 1)  # for the guard's descendants, if it is killed
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    parent, guard = os.getpid(), os.fork()
    if not guard:
        _guard(run, parent)
    before = {number: signal.signal(number, lambda number, frame: os.kill(guard, number)) for number in _SIGNALS}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    status = os.waitstatus_to_exitcode(os.waitpid(guard, 0)[1])
    if status < 0:
        run.end(kept=False)
    for number, handler in before.items():
        signal.signal(number, handler)
    return status if status >= 0 else 128 - status


def shared_memory() -> str:
    """Return the folder in shared memory for folders that end with a supervised command, as those of daemons and nodes."""
    return os.environ.get(MEMORY, str(_SHARED))


def record_folder() -> str:
    """Return the folder for temporary files that outlive a supervised command, such as the record of a run."""
    return os.environ.get(_LASTING, tempfile.gettempdir())


def _guard(run: _Run, parent: int) -> None:
    """Run the command in this process, a fork, which ends with its status."""
    status = 1
    try:
        status = _guarded(run, parent)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status if status >= 0 else 128 - status)


def _guarded(run: _Run, parent: int) -> int:
    os.setsid()
    _control(_PR_SET_CHILD_SUBREAPER, 1)
    for number in _SIGNALS:
        signal.signal(number, _end)
    kept = False
    try:
        _control(_PR_SET_PDEATHSIG, signal.SIGTERM)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        if os.getppid() != parent:
            raise _Ended(signal.SIGTERM)
        status = _status_of(subprocess.Popen(run.command, env=run.environment, start_new_session=True).pid)
        kept = status != 0
    except _Ended as ended:
        status = 128 + ended.number
    finally:
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        run.end(kept=kept)
    return status


def _status_of(process: int) -> int:
    """Wait for a child, and meanwhile for the orphans that end; return its exit status."""
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == process:
            return os.waitstatus_to_exitcode(status)


def _control(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value):
        raise OSError(ctypes.get_errno(), "prctl")


def _end(number: int, frame: FrameType | None) -> None:
    raise _Ended(number)


def _end_descendants() -> set[Path]:
    """SIGKILL all descendants, until none is left; resource trackers end by themselves, after the others. Raises TimeoutError.

    Returns:
        The files directly in /dev/shm that they had open or mapped.
    """
    began, segments = time.monotonic(), set[Path]()
    while left := _descendants(os.getpid()):
        segments |= {segment for process in left for segment in _segments(process)}
        others = [process for process in left if not _is_tracker(process)]
        for process in left if time.monotonic() > began + _TRACKED else others:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if time.monotonic() > began + _ENDS:
            raise TimeoutError(f"expected all processes to end within {_ENDS:g} s, left are {left}")
        time.sleep(0.02)
    return segments


def _descendants(process: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = path.read_text(errors="replace").rpartition(")")[2].split()[1]
            children.setdefault(int(parent), []).append(int(path.parent.name))
    found = [process]
    for each in found:
        found += children.get(each, ())
    return found[1:]


def _is_tracker(process: int) -> bool:
    with suppress(OSError):
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{process}/cmdline").read_bytes()
    return False


def _segments(process: int) -> Iterable[Path]:
    """Yield the files directly in /dev/shm that a process has open or mapped."""
    for folder in ("fd", "map_files"):
        with suppress(OSError):
            for link in Path(f"/proc/{process}/{folder}").iterdir():
                with suppress(OSError):
                    if (path := link.readlink()).parent == _SHARED:
                        yield path
