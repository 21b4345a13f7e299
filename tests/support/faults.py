"""A medium that fails one file operation: all operations below a folder are intercepted, and one of them is refused."""

import errno
import fcntl
import io
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

_OPENING = ("open", "io.open", "listdir", "scandir", "dup")
_GROWING = ("create", "write", "pwrite", "fsync", "rename", "replace", "mkdir", "posix_fallocate")
_SEAMS: list[tuple[ModuleType, str, str]] = [
    *((os, name, name) for name in ("open", "write", "pwrite", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir", "dup")),
    *((os, name, name) for name in ("posix_fallocate", "ftruncate", "truncate", "link", "symlink", "statvfs", "preadv")),
    *((os, name, name) for name in ("listdir", "scandir")),
    (io, "open", "io.open"),
    (mmap, "mmap", "mmap"),
    (fcntl, "fcntl", "lease"),
]


class Faults:
    """Refuses operation `at`, counted from 1, with the error `number`, among those that can fail so. `hit`: which one it was."""

    def __init__(self, root: Path, at: int, number: int) -> None:
        self.root, self.at, self.number, self.seen, self.hit = str(root), at, number, 0, ""
        self._lock, self._own = threading.Lock(), threading.local()

    @contextmanager
    def active(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for module, name, kind in _SEAMS:
                patch.setattr(module, name, self._seam(getattr(module, name), kind))
            yield

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exempt the operations of this thread, which are not the daemon's."""
        self._own.paused = True
        try:
            yield
        finally:
            self._own.paused = False

    def _seam(self, real: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def seam(*arguments: Any, **named: Any) -> Any:
            place = _place(arguments[0], named.get("dir_fd"))
            if place.startswith(self.root) and not getattr(self._own, "paused", False) and self._may_fail(kind, arguments):
                with self._lock:
                    self.seen += 1
                    due = self.seen == self.at
                if due:
                    self.hit = f"{kind} {place}"
                    raise OSError(
                        self.number, os.strerror(self.number), *([place] if isinstance(arguments[0], str | Path) else [])
                    )
            return real(*arguments, **named)

        return seam

    def _may_fail(self, kind: str, arguments: tuple[Any, ...]) -> bool:
        if kind == "lease" and arguments[1] != fcntl.F_SETLEASE:
            return False
        if self.number == errno.EMFILE:
            return kind in _OPENING and (kind == "dup" or not isinstance(arguments[0], int))
        if kind == "open" and arguments[1] & os.O_CREAT:
            kind = "create"
        return self.number != errno.ENOSPC or kind in _GROWING


def _place(first: Any, folder: int | None) -> str:
    if isinstance(first, int):
        try:
            return os.readlink(f"/proc/self/fd/{first}")
        except OSError:
            return ""
    path = os.fsdecode(first) if isinstance(first, str | bytes | os.PathLike) else ""
    return path if folder is None else f"{_place(folder, None)}/{path}"
