"""Replacement of what the daemon's code uses of the operating system: files, clocks, locks and threads.

Everything below the folder `ROOT` is simulated; other paths and descriptors reach the real system calls.
"""

import fcntl
import io
import mmap
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

from resharder.converters.storage import files as storage_files
from resharder.converters.storage import writable_files
from resharder.converters.wire import pieces
from resharder.server.holding import file_proofs, held_files, set_pool
from resharder.server.infra import change_signal
from resharder.server.ingest import intake, publisher, upload
from resharder.server.store import (
    catalogue,
    digests,
    file_pool,
    folder,
    history,
    lifecycle,
    manifest,
    renames,
    restore,
)

from tests.simulation.filesystem import FIRST_DESCRIPTOR, ROOT
from tests.simulation.medium import Medium
from tests.simulation.schedule import InlineExecutor, Process, Schedule, SimulatedExecutor, SimulatedLock

_NEVER = ("claim_unreadable",)
"""Entries about files that no fault of a process or a medium damages, since they are replaced durably."""
_LOGGING = (
    file_pool, folder, history, intake, lifecycle, manifest, renames, restore, set_pool,
)  # fmt: skip


class Log:
    """Logger of the daemon's modules. `errors` has entries that are the daemon's faults: with a traceback, or in `_NEVER`."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule, self.errors = schedule, list[str]()

    def info(self, event: str, **values: object) -> None:
        if self._schedule.is_traced:
            self._schedule.trace(f"log: {event} {values}")

    warning = info

    def error(self, event: str, **values: object) -> None:
        self.info(event, **values)
        if values.get("exc_info") or event in _NEVER:
            self.errors.append(f"{event} {values!r}")


class _Entry:
    def __init__(self, medium: Medium, folder: str, name: str) -> None:
        self.name, self.path, self._medium = name, f"{folder}/{name}", medium

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return self._medium.inode(self.path).is_folder

    def is_symlink(self) -> bool:
        return False

    is_junction = is_symlink  # `shutil` asks from Python 3.12 on


class _Entries:
    """What `os.scandir` returns; `os.walk`, with which `shutil.rmtree` removes since Python 3.13, takes one after the other."""

    def __init__(self, medium: Medium, folder: str) -> None:
        self._entries = iter([_Entry(medium, folder, name) for name in medium.listdir(folder)])

    def __iter__(self) -> "_Entries":
        return self

    def __next__(self) -> _Entry:
        return next(self._entries)

    def __enter__(self) -> "_Entries":
        return self

    def __exit__(self, *error: object) -> None:
        pass


class _Reader:
    """File opened for reading by `io.open`."""

    def __init__(self, medium: Medium, path: str) -> None:
        self._medium, self._at = medium, 0
        self._descriptor = medium.open(path, os.O_RDONLY)

    def read(self, size: int = -1) -> bytes:
        data = self._medium.read(self._descriptor, size if size >= 0 else 1 << 30, self._at)
        self._at += len(data)
        return data

    def __enter__(self) -> "_Reader":
        return self

    def __exit__(self, *error: object) -> None:
        self._medium.close(self._descriptor)


def _path(place: Any) -> str:
    """Return the simulated path of an argument, or an empty string for anything else."""
    if isinstance(place, int):
        return ""
    path = os.fspath(place)
    return path if isinstance(path, str) and path.startswith(ROOT) else ""


def _is_simulated(descriptor: Any) -> bool:
    return isinstance(descriptor, int) and descriptor >= FIRST_DESCRIPTOR


def _by_path(real: Callable[..., Any], simulated: Callable[..., Any]) -> Callable[..., Any]:
    def call(place: Any, *arguments: Any, **named: Any) -> Any:
        if path := _path(place):
            return simulated(path, *arguments)
        return real(place, *arguments, **named)

    return call


def _by_descriptor(real: Callable[..., Any], simulated: Callable[..., Any]) -> Callable[..., Any]:
    def call(descriptor: Any, *arguments: Any, **named: Any) -> Any:
        if _is_simulated(descriptor):
            return simulated(descriptor, *arguments, **named)
        return real(descriptor, *arguments, **named)

    return call


def _file_calls(medium: Medium) -> Iterator[tuple[Any, str, Any]]:
    def preadv(descriptor: int, buffers: Sequence[memoryview], at: int) -> int:
        data = medium.read(descriptor, len(buffers[0]), at)
        buffers[0][: len(data)] = data
        return len(data)

    def lease(descriptor: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_SETLEASE and argument != fcntl.F_UNLCK:
            medium.lease(descriptor, argument == fcntl.F_WRLCK)
        elif command == fcntl.F_SETLEASE:
            medium.files.file(descriptor).leased = False
        elif command == fcntl.F_GETLEASE:
            return fcntl.F_RDLCK if medium.files.file(descriptor).leased else fcntl.F_UNLCK
        return 0

    def mapped(descriptor: int, length: int, access: int = mmap.ACCESS_READ) -> Any:
        return medium.map(descriptor, access == mmap.ACCESS_WRITE)

    by_path: dict[str, Callable[..., Any]] = {
        "open": lambda path, flags, mode=0: medium.open(path, flags),
        "mkdir": lambda path, mode=0: medium.mkdir(path),
        "rmdir": medium.rmdir,
        "unlink": medium.unlink,
        "rename": lambda path, target: medium.rename(path, os.fspath(target)),
        "replace": lambda path, target: medium.rename(path, os.fspath(target)),
        "link": lambda path, target: medium.link(path, os.fspath(target)),
        "listdir": medium.listdir,
        "scandir": lambda path: _Entries(medium, path),
        "lstat": medium.stat,
        "chmod": lambda path, mode: None,
        "statvfs": medium.statvfs,
        "truncate": medium.truncate,
        "stat": lambda path: medium.stat(path),
    }
    by_descriptor: dict[str, Callable[..., Any]] = {
        "close": medium.close,
        "write": lambda descriptor, content: medium.write(descriptor, content, None),
        "pwrite": medium.write,
        "fsync": medium.fsync,
        "fstat": medium.fstat,
        "posix_fallocate": lambda descriptor, at, size: medium.allocate(descriptor, size),
        "preadv": preadv,
    }
    yield from ((os, name, _by_path(getattr(os, name), call)) for name, call in by_path.items())
    yield from ((os, name, _by_descriptor(getattr(os, name), call)) for name, call in by_descriptor.items())
    yield io, "open", _by_path(io.open, lambda path, *arguments: _Reader(medium, path))
    yield mmap, "mmap", _by_descriptor(mmap.mmap, mapped)
    yield fcntl, "fcntl", _by_descriptor(fcntl.fcntl, lease)
    yield fcntl, "flock", _by_descriptor(fcntl.flock, lambda descriptor, how: medium.flock(descriptor))
    yield shutil, "_use_fd_functions", False


def _thread_calls(schedule: Schedule, process: Callable[[], Process]) -> Iterator[tuple[Any, str, Any]]:
    class Thread:
        def __init__(self, target: Callable[..., Any], name: str, args: tuple[Any, ...] = ()) -> None:
            self._target, self._arguments, self._name = target, args, name

        def start(self) -> None:
            schedule.start(self._name, process(), lambda: self._target(*self._arguments))

    def executor(max_workers: int, thread_name_prefix: str = "") -> SimulatedExecutor:
        return SimulatedExecutor(schedule, process(), max_workers, thread_name_prefix)

    def awaited(max_workers: int, thread_name_prefix: str = "") -> SimulatedExecutor:
        return SimulatedExecutor(schedule, process(), max_workers, thread_name_prefix, awaited=True)

    def sleep(seconds: float) -> None:
        schedule.pause(None, schedule.now + seconds)

    lock = partial(SimulatedLock, schedule)
    threading = SimpleNamespace(Condition=lock, Lock=lock, RLock=lock, Thread=Thread)
    waiting = (intake, file_proofs, upload, change_signal, held_files)
    yield from ((module, "threading", threading) for module in waiting)
    yield catalogue, "Condition", lock
    yield from ((module, "ThreadPoolExecutor", executor) for module in (catalogue, set_pool, manifest))
    yield digests, "ThreadPoolExecutor", lambda *arguments: InlineExecutor()
    yield file_proofs, "ThreadPoolExecutor", awaited
    yield from (
        (module, "time", SimpleNamespace(monotonic=schedule.monotonic, sleep=sleep)) for module in (file_proofs, set_pool)
    )


def _other_calls(log: Log, file_bytes: int, piece_bytes: int) -> Iterator[tuple[Any, str, Any]]:
    yield from ((module, "_log", log) for module in _LOGGING)
    yield from ((module, "forget_pages", lambda span: None) for module in (storage_files, digests))
    yield writable_files, "in_shared_memory", lambda descriptor: False
    yield pieces, "PIECE_BYTES", piece_bytes
    yield publisher, "lay_out", partial(storage_files.lay_out, max_file_bytes=file_bytes)


@contextmanager
def installed(
    medium: Medium, process: Callable[[], Process], log: Log, file_bytes: int, piece_bytes: int = 16 << 20
) -> Iterator[None]:
    """Replace the system calls.

    `process` returns the daemon's process, `file_bytes` bounds the tensors of one file, `piece_bytes` is the length of a piece.
    """
    calls = [*_file_calls(medium), *_thread_calls(medium.schedule, process), *_other_calls(log, file_bytes, piece_bytes)]
    before = [(module, name, getattr(module, name)) for module, name, _ in calls]
    for module, name, call in calls:
        setattr(module, name, call)
    try:
        yield
    finally:
        for module, name, call in before:
            setattr(module, name, call)
