"""Sets of files of one epoch: laid out ahead of need, given to versions, and used again once no process has them open.

    laid out -> free -> a version's -> ended -> free, under another path
                                         `-> held, while a process has them open -> free, or removed

The store has a pool for each model, a node one for each reservation. Held sets occupy memory and count as used. No version waits
for one where there is room for another set: a worker unmaps a version after it has installed the next one.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import structlog
from resharder.converters.failpoints import FilePoint, failpoint
from resharder.converters.storage.files import FileLayout
from resharder.server.holding.part_files import PartFile, keep_only, lay_out_again, write_parts
from resharder.server.infra.filesystem import (
    is_gone,
    make_folder,
    move,
    sync,
    touching,
    unused_elsewhere,
    write_file,
    write_zeros,
)

SOON = 8
"""Looks after which another set is laid out ahead of need: most workers have unmapped a retired version by then."""
_PAUSE = 0.25  # seconds between two looks at held sets
_PATIENCE = 20  # looks after which a held set is given up, if its room is needed
_log = structlog.get_logger("resharder.store")


class SetHost(NamedTuple):
    """Callbacks of a pool to the store or the node that has it. Called with the lock held."""

    wants_another: Callable[[], bool]
    """Whether a set that has ended is of use, beside the ones that are there."""
    discard: Callable[[Path], object]
    """Removes a set in the background."""
    top_up: Callable[[], object]
    """Lays out a set ahead of need, if there is use and room for it."""
    settled: Callable[[OSError | None], object]
    """Called when background work has ended, with the reason if a set could not be laid out."""


class SetPool:
    """The sets of one epoch. Callers hold the lock of `changed`.

    Attributes:
        files: Their files, laid out in full.
        small: Folder of small files, such as `config.json`, that each set has copies of; None without.
        size: Bytes of a set.
        free: Folders of sets that no version has.
        pending: Sets that are being laid out or cleaned.
        held: Folders of sets that have ended and that a process has open, and the looks at each since.
        failure: Why the last set could not be laid out.
        over: Whether no set is used again.

    Args:
        changed: Guards the pool.
        background: Threads that lay out and clean sets.
        path: Path of sets, to which their numbers are appended.
        numbers: Numbers of sets: those of all pools whose sets have the same path.
        point: Failpoint before a set is laid out.
        host: The store, for one model, or a node.
        files: Their files.
        parts: Further files, of which ranks write some boxes alone.
        small: Folder of their small files.
    """

    def __init__(
        self,
        changed: threading.Condition,
        background: ThreadPoolExecutor,
        path: Path,
        numbers: Iterator[int],
        point: FilePoint,
        host: SetHost,
        files: tuple[FileLayout, ...],
        parts: Sequence[PartFile] = (),
        small: Path | None = None,
    ) -> None:
        self._changed, self._background, self._host = changed, background, host
        self._path, self._numbers, self._point = path, numbers, point
        self.files, self._parts, self.small = files, parts, small
        self.size = sum(file.size for file in files) + sum(part.size for part in parts)
        self.free: list[Path] = []
        self.pending = 0
        self.held: dict[Path, int] = {}
        self.failure: OSError | None = None
        self.over = self._looking = False

    def count(self) -> int:
        """Return the number of sets that no version has."""
        return len(self.free) + self.pending + len(self.held)

    def make(self) -> None:
        """Lay out a set in the background. If that fails, `failure` has the reason."""
        self.pending += 1
        self.failure = None
        self._background.submit(self._lay_out, self.new_path())

    def take_back(self, path: Path) -> None:
        """Use a set again, or discard it. `path` is one at which no process looks for it."""
        self.pending += 1
        self._background.submit(self._clean, path)

    def give_up(self) -> bool:
        """Discard the held sets for which nobody waits any longer, and return whether there were any."""
        late = [path for path, looks in self.held.items() if looks >= _PATIENCE]
        for path in late:
            del self.held[path]
            self._host.discard(path)
        return bool(late)

    def end(self) -> None:
        """Discard all sets, also those that versions still have once they are given back."""
        self.over = True
        for path in (*self.free, *self.held):
            self._host.discard(path)
        self.free, self.held = [], {}

    def new_path(self) -> Path:
        """Return a path that no set has had, not even one that an earlier process could not remove."""
        paths = (self._path.with_name(f"{self._path.name}-{number}") for number in self._numbers)
        return next(filter(is_gone, paths))

    # In the background, without the lock

    def _lay_out(self, path: Path) -> None:
        failure = None
        try:
            failpoint(self._point)
            make_folder(path)
            with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as writers:
                list(writers.map(lambda file: write_zeros(path / file.path, file.header, file.size), self.files))
            self._add_others(path)
        except OSError as error:
            failure = error
        with self._changed:
            self.pending -= 1
            self.failure = failure
            if failure is None and not self.over:
                self.free.append(path)
            else:
                self._host.discard(path)
            self._host.settled(failure)

    def _clean(self, path: Path) -> None:
        """Make a set that has ended a free one, hold it while a process can read or write it, or discard it.

        If it were discarded, most sets would be laid out anew, which takes as much of the memory's bandwidth as a version's
        delivery at the same time.
        """
        safe = used = False
        try:
            with touching(path, "cleaning"):
                failpoint("pool.recycle")
                safe = self._keeps_only(path)
                used = safe and not self._is_unused(path)
                for file in self.files if safe and not used else ():
                    lay_out_again(path / file.path, file)
            if safe and not used:
                self._add_others(path)
        except OSError as error:
            safe = False
            _log.error("recycling_failed", folder=str(path), error=str(error))
        with self._changed:
            self.pending -= 1
            kept = safe and not self.over and (used or self._host.wants_another())
            if not (kept and self._keep(path, used)):
                self._host.discard(path)
                self._host.top_up()
            self._host.settled(None)

    def _keep(self, path: Path, used: bool) -> bool:
        """Add a set to the free ones, or to the held ones. Returns False if it cannot be moved there."""
        kept = self.new_path()
        try:
            make_folder(kept.parent)
            move(path, kept)
        except OSError as error:
            _log.error("recycling_failed", folder=str(path), error=str(error))
            return False
        if not used:
            self.free.append(kept)
            return True
        self.held[kept] = 0
        if not self._looking:
            self._looking = True
            self._background.submit(self._look)
        return True

    def _look(self) -> None:
        """Clean held sets that are released, until none is held. One thread of a pool looks at all of them."""
        while True:
            time.sleep(_PAUSE)
            with self._changed:
                held = list(self.held)
                if self.over or not held:
                    self._looking = False
                    return
            for path in held:
                if self._may_be_unused(path):
                    with self._changed:
                        if not self.over and self.held.pop(path, None) is not None:
                            self.take_back(path)
            with self._changed:
                for path in self.held:
                    self.held[path] += 1
                oldest = max(self.held.values(), default=0)
                if oldest >= SOON and self.failure is None:
                    self._host.top_up()
                if oldest >= _PATIENCE:
                    self._host.settled(None)  # who has no room may have it given up

    def _is_unused(self, path: Path) -> bool:
        """Return whether no process has a set's files open, apart from those that other versions have too."""
        paths = [path / file.path for file in self.files]
        return all(each.stat().st_nlink > 1 or unused_elsewhere(each) for each in paths)

    def _may_be_unused(self, path: Path) -> bool:
        """Return whether no process has a set's files open, or nobody can say, which cleaning reports."""
        try:
            return self._is_unused(path)
        except OSError:
            return True

    def _add_others(self, path: Path) -> None:
        """Add parts, and copies of the small files, some 10 MB. Raises OSError."""
        write_parts(path, self._parts)
        if self.small is not None:
            with touching(self.small, "copying"):
                for file in self.small.iterdir():
                    write_file(path / file.name, file.read_bytes())

    def _keeps_only(self, path: Path) -> bool:
        """Reduce a version's folder to its files, and return whether it has them, in these sizes.

        A job that returns to its epoch may have other shapes. The removals are synced: a power cut that undoes the version's
        retirement must not bring it back with what is written into its folder later.
        """
        keep_only(path, self.files)
        sync(path)
        sizes = {found.name: found.stat().st_size for found in path.iterdir()}
        return all(sizes.get(file.path) == file.size for file in self.files)
