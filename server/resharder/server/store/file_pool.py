"""Files for future versions: a pool of sets for the epoch in effect of each model, and the removal of folders.

`pool/<epoch>-<n>/` has the files of one version: the safetensors files with headers written and pages allocated, and copies of
the model's small files. No version waits for a held set where the limit leaves room for another one.
"""

import shutil
from itertools import count
from pathlib import Path

import structlog
from resharder.converters.storage.files import FileLayout
from resharder.server.holding.set_pool import SetHost
from resharder.server.infra.filesystem import is_gone
from resharder.server.store.catalogue import Catalogue, Reservation, StoredModel
from resharder.server.store.retention import Capacity

_log = structlog.get_logger("resharder.store")


class FilePool:
    """Sets of files of all models.

    Callers must hold the lock of the catalogue. Its `changed` is notified when background work ends.
    """

    def __init__(self, catalogue: Catalogue, capacity: Capacity, *, hold: bool) -> None:
        self._catalogue, self._changed, self._capacity, self._hold = catalogue, catalogue.changed, capacity, hold
        self._numbers = count(1)

    def reserve(
        self,
        model: StoredModel,
        epoch: int,
        sets: int,
        layouts: tuple[FileLayout, ...],
        small: Path,
        frozen: tuple[FileLayout, ...] = (),
    ) -> None:
        """Reserve files for the versions of an epoch, in place of those of the epoch before, and begin to lay them out.

        Args:
            model: The model.
            epoch: The epoch.
            sets: Sets of files that it uses in turn.
            layouts: The safetensors files of a version.
            small: Folder of the small files of a version.
            frozen: Those of `layouts` that versions may share.
        """
        self.remove_stuck(model)
        if model.reservation is not None:
            model.reservation.end()
        host = SetHost(
            lambda: self._wants_another(model),
            lambda path: self.discard(model, path, reservation.size),
            lambda: self.top_up(model),
            lambda failure: self._settled(model, failure),
        )
        given = epoch, sets, model, self._changed, self._numbers, host, layouts, small
        reservation = Reservation(*given, hold=self._hold, frozen=frozen)
        model.reservation = reservation
        self._changed.notify_all()
        self.top_up(model)

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
        if reservation is None or reservation.free or reservation.pending:
            return
        if model.sets(reservation) < reservation.sets and self._capacity.within_limit(model, reservation.size):
            reservation.make()

    def take_back(self, model: StoredModel, epoch: int, path: Path, size: int) -> None:
        """Use the files of a version of `epoch` again, or discard them."""
        reservation = model.reservation
        if reservation is not None and reservation.epoch == epoch:
            reservation.take_back(path)
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
            found |= reservation.give_up()
            while reservation.free and model.lent():
                self.discard(model, reservation.free.pop(), reservation.size)
                found = True
            found |= bool(reservation.held or model.lent())
        return found

    def _wants_another(self, model: StoredModel) -> bool:
        """Return whether the epoch uses another set in turn: as many as reserved, or the only free one, if there is room."""
        reservation = model.reservation
        if reservation is None or model.sets(reservation) < reservation.sets:
            return reservation is not None
        return not reservation.free and self._capacity.within_limit(model, reservation.size)

    def _settled(self, model: StoredModel, failure: OSError | None) -> None:
        if failure is not None:
            _log.error("layout_failed", model=model.name, error=str(failure))
        self._changed.notify_all()

    # In the background, without the lock

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
