"""Files for future versions: laid out ahead of need, handed to versions, and recycled once no process has them open.

`pool/<epoch>-<n>/` has the files of one version: the safetensors files with headers written and pages allocated, and copies of
the model's small files.
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

_ATTEMPTS, _PAUSE = 20, 0.25  # checks whether a retired version's files are unused, and seconds between them
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
            for path in reservation.pool:
                self.discard(model, path, reservation.size)
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
        if reservation is not None and reservation.epoch == epoch and model.sets(reservation) < reservation.sets:
            reservation.pending += 1
            model.background.submit(self._recycle, model, reservation, path)
        else:
            self.discard(model, path, size)

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
        """Return the files to the pool once no process can read or write them, or discard them after a few seconds.

        A worker unmaps a version after it has installed the next one. Without the wait, most sets would be laid out anew, which
        takes as much of the memory's bandwidth as a version's delivery at the same time.
        """
        try:
            with touching(path, "cleaning"):
                failpoint("pool.recycle")
                safe = _keeps_only(path, reservation.layouts) and self._released(model, reservation, path)
                for layout in reservation.layouts if safe else ():
                    write_header(path / layout.path, layout.header)
            if safe:
                _copy_small_files(reservation, path)
        except OSError as error:
            safe = False
            _log.error("recycling_failed", model=model.name, error=str(error))
        with self._changed:
            reservation.pending -= 1
            if not (safe and model.reservation is reservation and self._put_back(model, reservation, path)):
                self.discard(model, path, reservation.size)
                self.top_up(model)
            self._changed.notify_all()

    def _released(self, model: StoredModel, reservation: Reservation, path: Path) -> bool:
        """Wait until no process has the files open or mapped. False after a few seconds, or without further need of them."""
        for _ in range(_ATTEMPTS):
            if all(unused_elsewhere(path / layout.path) for layout in reservation.layouts):
                return True
            if self._catalogue.closed or model.reservation is not reservation:
                return False
            time.sleep(_PAUSE)
        return False

    def _put_back(self, model: StoredModel, reservation: Reservation, path: Path) -> bool:
        back = self._next_path(model, reservation)
        try:
            make_folder(back.parent)
            move(path, back)
        except OSError as error:
            _log.error("recycling_failed", model=model.name, error=str(error))
            return False
        reservation.pool.append(back)
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
