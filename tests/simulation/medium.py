"""The medium of a simulated daemon: every file operation of its code may fail, be cut short, or be its last."""

import errno
import os
from collections import Counter
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace
from typing import Any, Protocol

from tests.simulation.filesystem import ROOT, Inode, MappedArray, SimulatedFiles
from tests.simulation.schedule import Killed, Process, Schedule

KINDS = (
    "open", "create", "read", "write", "fsync", "sync folder", "rename", "link", "mkdir", "unlink", "rmdir", "list", "stat",
    "statvfs", "map", "lease", "allocate", "truncate",
)  # fmt: skip
_GROWING = ("create", "write", "fsync", "sync folder", "rename", "link", "mkdir", "allocate")
_OPENING = ("open", "create", "list")
_PLACES = (
    "claim.json",
    "/versions",
    "/staging/",
    "/retired",
    "/pool",
    "history.jsonl",
    "/files",
    "resharder.json",
    "safetensors",
)


class FaultPlan:
    """Which file operations fail, and with which error. `ends` is the step after which none does."""

    def __init__(self, random: Random) -> None:
        self._random = random
        style = random.choice(("none", "none", "sparse", "sparse", "kind", "place", "place", "burst"))
        self.style = style
        self.number = random.choice((errno.EIO, errno.EIO, errno.ENOSPC, errno.EMFILE))
        self.chance = {"none": 0.0, "sparse": random.choice((0.003, 0.02)), "burst": 0.5}.get(style, random.choice((0.1, 0.5)))
        self.kind = random.choice(KINDS) if style == "kind" or (style == "place" and random.random() < 0.7) else ""
        self.place = random.choice(_PLACES) if style == "place" else ""
        self.windows = [self._window() for _ in range(random.randint(1, 3))] if style == "burst" else []

    def _window(self) -> tuple[int, int]:
        start = self._random.randrange(400)
        return start, start + self._random.choice((1, 3, 10, 60))

    def describe(self) -> str:
        """Describe the plan in a line of the trace."""
        name = errno.errorcode[self.number]
        return f"faults: {self.style} {name} chance {self.chance} kind {self.kind!r} place {self.place!r} at {self.windows}"

    def strikes(self, kind: str, path: str, count: int) -> bool:
        """Return whether this operation, the one of this number, fails."""
        if not self.chance or (self.kind and kind != self.kind) or (self.place and self.place not in path):
            return False
        if self.windows and not any(first <= count < last for first, last in self.windows):
            return False
        if (self.number == errno.ENOSPC and kind not in _GROWING) or (self.number == errno.EMFILE and kind not in _OPENING):
            return False
        return self._random.random() < self.chance


class Faults(Protocol):
    """Which file operations fail, and with which error."""

    @property
    def number(self) -> int: ...
    def strikes(self, kind: str, path: str, count: int) -> bool: ...


@dataclass(frozen=True)
class Crash:
    """The end of the daemon at its file operation `at`, counted from its start: killed, or with the power of its host.

    With a `kind`, at the first operation of it from there on whose path ends with `ending`.
    """

    at: int
    power: bool
    kind: str = ""
    ending: str = ""

    def is_due(self, kind: str, path: str, count: int) -> bool:
        """Return whether this operation is the last one."""
        return count >= self.at and self.kind in ("", kind) and path.endswith(self.ending)


class Medium:
    """File operations of the task that runs, on behalf of its process. Without a task, none fails.

    `crash` is the next crash, `crashed` the one that has happened, for the schedule to act on.
    """

    def __init__(self, files: SimulatedFiles, schedule: Schedule, plan: Faults | None) -> None:
        self.files, self.schedule, self.random = files, schedule, schedule.random
        self.plan: Faults | None = plan
        self.crash: Crash | None = None
        self.crashed: Crash | None = None
        self.faulty: Process | None = None  # the daemon's process
        self.operations = self._since_start = 0
        self.counts: Counter[str] = Counter()
        self.failed_syncs: set[str] = set()
        self._flocks: dict[int, int] = {}

    def begin(self, process: Process, crash: Crash | None) -> None:
        """Let a new process of the daemon use the medium."""
        self.faulty, self.crash, self._since_start = process, crash, 0

    @property
    def _owner(self) -> str:
        current = self.schedule.current
        return current.process.name if current else "checks"

    def _enter(self, kind: str, path: str) -> bool:
        """Begin an operation. Return whether it is torn: done in part, and then fails. Raises OSError or Killed instead of it."""
        task = self.schedule.current
        if task is None:
            return False
        if task.worker is not None:
            self.schedule.may_switch()
        if task.process is not self.faulty:
            return False
        self.operations += 1
        self._since_start += 1
        if self.crash is not None and self.crash.is_due(kind, path, self._since_start):
            if kind == "write" and self.random.random() < 0.5:
                return True
            self._die(f"{kind} {path}")
        if self.plan is not None and self.plan.strikes(kind, path, self.operations):
            if kind == "write" and self.random.random() < 0.5:
                return True
            self._fail(kind, path)
        if self.schedule.is_traced:
            self.schedule.trace(f"{kind} {path.removeprefix(ROOT)}")
        return False

    def _die(self, where: str) -> None:
        assert self.crash is not None
        assert self.faulty is not None
        self.crashed, self.crash = self.crash, None
        self.faulty.dead = True
        self.counts["power cuts" if self.crashed.power else "daemons killed"] += 1
        self.schedule.trace(f"{'POWER CUT' if self.crashed.power else 'KILLED'} before {where}")
        raise Killed

    def _fail(self, kind: str, path: str) -> None:
        assert self.plan is not None
        number = self.plan.number
        self.counts[f"{kind} failed"] += 1
        if kind in ("fsync", "sync folder"):
            self.failed_syncs.add(path)
        self.schedule.trace(f"{errno.errorcode[number]} at {kind} {path.removeprefix(ROOT)}")
        raise OSError(number, os.strerror(number), path)

    # System calls

    def open(self, path: str, flags: int) -> int:
        creates = flags & os.O_CREAT and not self.files.exists(path)
        self._enter("create" if creates else "open", path)
        return self.files.open(path, flags, self._owner)

    def close(self, descriptor: int) -> None:
        task = self.schedule.current
        if task is not None and task.process.dead:
            raise Killed
        self.files.close(descriptor)

    def write(self, descriptor: int, content: bytes | memoryview, at: int | None) -> int:
        file = self.files.file(descriptor)
        if self._enter("write", file.path):
            part = self.random.randrange(len(content) + 1)
            place = len(file.inode.data) if at is None else at
            self.files.write(file.inode, memoryview(content)[:part], place)
            self.schedule.trace(f"only {part} of {len(content)} bytes written to {file.path.removeprefix(ROOT)}")
            if self.crash is not None and self.crash.is_due("write", file.path, self._since_start):
                self._die(f"the rest of a write to {file.path}")
            if not 0 < part < len(content):
                self._fail("write", file.path)
            self.counts["write cut short"] += 1
            return part
        return self.files.write(file.inode, content, len(file.inode.data) if at is None else at)

    def allocate(self, descriptor: int, size: int) -> None:
        file = self.files.file(descriptor)
        self._enter("allocate", file.path)
        if size > len(file.inode.data):
            self.files.truncate(file.inode, size)

    def truncate(self, path: str, size: int) -> None:
        self._enter("truncate", path)
        self.files.truncate(self.files.find(path), size)

    def read(self, descriptor: int, size: int, at: int) -> bytes:
        file = self.files.file(descriptor)
        self._enter("read", file.path)
        return bytes(file.inode.data[at : at + size])

    def fsync(self, descriptor: int) -> None:
        file = self.files.file(descriptor)
        try:
            self._enter("sync folder" if file.inode.is_folder else "fsync", file.path)
        except OSError:
            self.files.fail_fsync(file.inode)
            raise
        self.files.fsync(file.inode)

    def map(self, descriptor: int, writable: bool) -> MappedArray:
        file = self.files.file(descriptor)
        self._enter("map", file.path)
        return self.files.map(file.inode, self._owner, writable)

    def lease(self, descriptor: int, exclusive: bool) -> None:
        file = self.files.file(descriptor)
        self._enter("lease", file.path)
        if not self.files.is_leasable(descriptor, exclusive):
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        file.leased = True

    def flock(self, descriptor: int) -> None:
        number = self.files.file(descriptor).inode.number
        if self._flocks.get(number) in self.files.open_files:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        self._flocks[number] = descriptor

    def mkdir(self, path: str) -> None:
        self._enter("mkdir", path)
        self.files.mkdir(path)

    def rmdir(self, path: str) -> None:
        self._enter("rmdir", path)
        self.files.rmdir(path)

    def unlink(self, path: str) -> None:
        self._enter("unlink", path)
        self.files.unlink(path)

    def rename(self, source: str, target: str) -> None:
        self._enter("rename", target)
        self.files.rename(source, target)

    def link(self, source: str, target: str) -> None:
        self._enter("link", target)
        self.files.link(source, target)

    def listdir(self, path: str) -> list[str]:
        self._enter("list", path)
        return self.files.listdir(path)

    def stat(self, path: str) -> SimpleNamespace:
        self._enter("stat", path)
        return self.files.stat(self.files.find(path))

    def fstat(self, descriptor: int) -> SimpleNamespace:
        return self.files.stat(self.files.file(descriptor).inode)

    def statvfs(self, path: str) -> Any:
        self._enter("statvfs", path)
        return SimpleNamespace(f_bavail=self.files.free(), f_frsize=1)

    def inode(self, path: str) -> Inode:
        return self.files.find(path)
