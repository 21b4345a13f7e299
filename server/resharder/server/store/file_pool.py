"""Files for future versions: laid out ahead of need, handed to versions, and recycled once no process has them open.

`pool/<epoch>-<n>/` has the files of one version: the safetensors files with headers written and pages allocated, and copies of
the model's small files.

    laid out -> pool -> a version's -> retired -> pool
                                          `-> held, while a process has them open -> pool, or removed

Held sets occupy memory and count as used. No version waits for one where the limit leaves room for another set.
"""

import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import structlog
from resharder.converters.failpoints import failpoint
from resharder.converters.storage.files import FileLayout
from resharder.server.infra.filesystem import (
    is_gone,
    make_folder,
    move,
    sync,
    touching,
    unused_elsewhere,
    write_file,
    write_header,
    write_zeros,
)
from resharder.server.store.catalogue import Catalogue, Reservation, StoredModel
from resharder.server.store.retention import Capacity

_PAUSE = 0.25  # seconds between two looks at held sets
_SOON = 8  # looks after which another set is laid out ahead of need: most workers have unmapped a retired version by then
_PATIENCE = 20  # looks after which a held set is unlinked, if a version has no room otherwise
_log = structlog.get_logger("resharder.store")


class FilePool:
    """Sets of files of all models.

    Callers must hold the lock of the catalogue. Its `changed` is notified when background work ends.
    """

    def __init__(self, catalogue: Catalogue, capacity: Capacity) -> None:
        self._changed, self._capacity = catalogue.changed, capacity
        self._catalogue, self._serial = catalogue, 0

    def drop(self, model: StoredModel) -> None:
        """Cancel the model's reservation and discard its sets."""
        self.remove_stuck(model)
        reservation, model.reservation = model.reservation, None
        if reservation is not None:
            for path in (*reservation.pool, *reservation.held):
                self.discard(model, path, reservation.size)
            reservation.held.clear()
            self._changed.notify_all()

    def discard(self, model: StoredModel, path: Path, size: int) -> None:
        """Remove a set of `size` bytes in the background. The bytes count as used until then."""
        model.leaving += size
        model.background.submit(self._remove, model, path, size)

    def remove_stuck(self, model: StoredModel) -> None:
        """Retry the removal of folders that could not be removed."""
        stuck, model.stuck = model.stuck, {}
        for path, size in stuck.items():
            self.discard(model, path, size)

    def top_up(self, model: StoredModel) -> None:
        """Lay out a set ahead of need, unless the epoch has as many as it uses in turn."""
        reservation = model.reservation
        if reservation is None or reservation.pool or reservation.pending:
            return
        if model.sets(reservation) < reservation.sets and self._capacity.within_limit(model, reservation.size):
            self.make_set(model, reservation)

    def make_set(self, model: StoredModel, reservation: Reservation) -> None:
        """Lay out a set in the background. A failure is kept in `reservation.failure`."""
        reservation.pending += 1
        reservation.failure = None
        model.background.submit(self._fault_in, model, reservation, self._next_path(model, reservation))

    def take_back(self, model: StoredModel, epoch: int, path: Path, size: int) -> None:
        """Recycle the files of a version of `epoch`, or discard them."""
        reservation = model.reservation
        if reservation is not None and reservation.epoch == epoch:
            reservation.pending += 1
            model.background.submit(self._recycle, model, reservation, path)
        else:
            self.discard(model, path, size)

    def give_up(self) -> bool:
        """Discard free sets beyond their reservations, and held ones for which nobody waits any longer.

        Returns whether capacity becomes free: by these, or soon by held ones, or pending ones beyond a reservation.
        """
        found = False
        for model in self._catalogue.stored():
            reservation = model.reservation
            if reservation is None:
                continue
            for path in [path for path, looks in reservation.held.items() if looks >= _PATIENCE]:
                del reservation.held[path]
                self.discard(model, path, reservation.size)
                found = True
            while reservation.pool and model.lent():
                self.discard(model, reservation.pool.pop(), reservation.size)
                found = True
            found |= bool(reservation.held or model.lent())
        return found

    def _next_path(self, model: StoredModel, reservation: Reservation) -> Path:
        while True:
            self._serial += 1
            path = model.folder / "pool" / f"{reservation.epoch}-{self._serial}"
            if is_gone(path):  # not left by an earlier daemon that could not remove it
                return path

    # On the model's background threads, without the lock

    def _remove(self, model: StoredModel, path: Path, size: int) -> None:
        shutil.rmtree(path, ignore_errors=True)
        left = not is_gone(path)
        if left:
            _log.error("not_removed", model=model.name, folder=str(path), bytes=size)
        with self._changed:
            model.leaving -= size
            if left:
                model.stuck[path] = size
            self._changed.notify_all()

    def _fault_in(self, model: StoredModel, reservation: Reservation, path: Path) -> None:
        failure = None
        try:
            failpoint("pool.write")
            make_folder(path)
            with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as writers:
                list(writers.map(lambda layout: write_zeros(path / layout.path, layout.header, layout.size), reservation.layouts))
            _copy_small_files(reservation, path)
        except OSError as error:
            failure = error
            _log.error("layout_failed", model=model.name, error=str(error))
        with self._changed:
            reservation.pending -= 1
            if failure or model.reservation is not reservation:
                reservation.failure = failure
                self.discard(model, path, reservation.size)
            else:
                reservation.pool.append(path)
            self._changed.notify_all()

    def _recycle(self, model: StoredModel, reservation: Reservation, path: Path) -> None:
        """Return the files of a retired version to the pool, hold them while a process can read or write them, or discard them.

        A worker unmaps a version after it has installed the next one. If its files were discarded, most sets would be laid out
        anew, which takes as much of the memory's bandwidth as a version's delivery at the same time.
        """
        safe = used = False
        try:
            with touching(path, "cleaning"):
                failpoint("pool.recycle")
                safe = _keeps_only(path, reservation.layouts)
                used = safe and not _are_unused(path, reservation)
                for layout in reservation.layouts if safe and not used else ():
                    write_header(path / layout.path, layout.header)
            if safe and not used:
                _copy_small_files(reservation, path)
        except OSError as error:
            safe = False
            _log.error("recycling_failed", model=model.name, error=str(error))
        with self._changed:
            reservation.pending -= 1
            kept = safe and not self._catalogue.closed and model.reservation is reservation
            if not (kept and (used or self._is_wanted(model, reservation)) and self._keep(model, reservation, path, used)):
                self.discard(model, path, reservation.size)
                self.top_up(model)
            self._changed.notify_all()

    def _is_wanted(self, model: StoredModel, reservation: Reservation) -> bool:
        """Return whether the epoch uses another set in turn: as many as reserved, or the only free one, if there is room."""
        if model.sets(reservation) < reservation.sets:
            return True
        return not reservation.pool and self._capacity.within_limit(model, reservation.size)

    def _keep(self, model: StoredModel, reservation: Reservation, path: Path, used: bool) -> bool:
        """Put a set into the pool, or among the held ones. Returns False if it cannot be moved there."""
        kept = self._next_path(model, reservation)
        try:
            make_folder(kept.parent)
            move(path, kept)
        except OSError as error:
            _log.error("recycling_failed", model=model.name, error=str(error))
            return False
        if not used:
            reservation.pool.append(kept)
            return True
        reservation.held[kept] = 0
        if not reservation.looking:
            reservation.looking = True
            model.background.submit(self._look, model, reservation)
        return True

    def _look(self, model: StoredModel, reservation: Reservation) -> None:
        """Recycle held sets that are released, until none is held. One thread of a model looks at all of them."""
        while True:
            time.sleep(_PAUSE)
            with self._changed:
                held = list(reservation.held)
                if self._catalogue.closed or not held:
                    reservation.looking = False
                    return
            for path in held:
                if _may_be_unused(path, reservation):
                    with self._changed:
                        if not self._catalogue.closed and reservation.held.pop(path, None) is not None:
                            reservation.pending += 1
                            model.background.submit(self._recycle, model, reservation, path)
            with self._changed:
                for path in reservation.held:
                    reservation.held[path] += 1
                oldest = max(reservation.held.values(), default=0)
                if oldest >= _SOON and reservation.failure is None:
                    self.top_up(model)
                if oldest >= _PATIENCE:
                    self._changed.notify_all()  # who has no room may have it given up


def _are_unused(path: Path, reservation: Reservation) -> bool:
    return all(unused_elsewhere(path / layout.path) for layout in reservation.layouts)


def _may_be_unused(path: Path, reservation: Reservation) -> bool:
    """Return whether no process has a set's files open, or nobody can say, which recycling reports."""
    try:
        return _are_unused(path, reservation)
    except OSError:
        return True


def _copy_small_files(reservation: Reservation, path: Path) -> None:
    """Copy `config.json`, the tokenizer and the index, of some 10 MB, into a set. Raises OSError."""
    with touching(reservation.files, "copying"):
        for file in reservation.files.iterdir():
            write_file(path / file.name, file.read_bytes())


def _keeps_only(path: Path, layouts: tuple[FileLayout, ...]) -> bool:
    """Reduce a version's folder to these files, and return whether it has them, in these sizes.

    A job that returns to its epoch may have other shapes. The removals are synced: a power cut that undoes the version's
    retirement must not bring it back with what is written into its folder later.
    """
    kept = {layout.path: layout for layout in layouts}
    for file in path.iterdir():
        if file.name not in kept:
            file.unlink()
    sync(path)
    sizes = {file.name: file.stat().st_size for file in path.iterdir()}
    return all(sizes.get(name) == layout.size for name, layout in kept.items())
