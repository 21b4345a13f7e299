"""Adoption of versions from an archive: written to the store, verified, and READY again under their own numbers."""

import shutil
from collections.abc import Callable
from pathlib import Path

from resharder.converters.failpoints import failpoint
from resharder.converters.storage.files import INDEX_FILE
from resharder.server.infra.filesystem import is_gone, make_durable_folder, make_folder, move
from resharder.server.infra.medium import medium_errors
from resharder.server.state.errors import AlreadyExists, ResourceExhausted, Unavailable
from resharder.server.state.version import READY, VersionRecord
from resharder.server.store import model_files
from resharder.server.store.capacity import Capacity
from resharder.server.store.catalogue import Catalogue
from resharder.server.store.file_pool import FilePool
from resharder.server.store.folder import StoreFolder, sync_or_undo
from resharder.server.store.history import History
from resharder.server.store.manifest import Manifest
from resharder.server.store.model_state import StoredModel
from resharder.server.store.pins import VersionPins
from resharder.server.store.retention import Retention
from resharder.server.store.retirement import RESTORED, Retirer
from resharder.server.store.verification import verify


class Adopter:
    """Adoption of archived versions. Thread-safe; files are written and verified without the lock."""

    def __init__(
        self,
        folder: StoreFolder,
        catalogue: Catalogue,
        capacity: Capacity,
        pool: FilePool,
        retention: Retention,
        retirer: Retirer,
        pins: VersionPins,
        history: History,
    ) -> None:
        self._folder, self._catalogue, self._capacity, self._pool = folder, catalogue, capacity, pool
        self._retention, self._retirer, self._pins, self._history = retention, retirer, pins, history

    @medium_errors()
    def adopt(self, name: str, number: int, fingerprint: str, size: int, write: Callable[[Path], None]) -> VersionRecord:
        """Make an archived version READY under its own number.

        `write(folder)` writes its files, `size` bytes of safetensors, and the manifest. Sizes, headers, small files and the
        digest of every tensor are verified afterwards. A version that is READY already is returned unchanged.

        Raises AlreadyExists (VERSION_DIFFERS), ResourceExhausted (NO_ROOM, STORE_FULL, NO_DESCRIPTORS), DataLoss (CHECKSUM),
        Unavailable (STORE_FAILED, DRAINING), and the errors of `write`; nothing is left behind then.
        """
        changed, retired = self._catalogue.changed, list[VersionRecord]()
        try:
            with changed:
                model = self._catalogue.add_model(name)
                part = self._free_folder(model, number)
                known = model.records.get(number)
                if known is not None and known.fingerprint != fingerprint:
                    raise AlreadyExists(
                        "VERSION_DIFFERS", f"{known.name} is {known.state} here, with fingerprint {known.fingerprint!r}"
                    )
                if known is not None and known.state == READY:
                    return known
                model.number = max(model.number, number)
                model.write_claim()
                self._await_capacity(model, size, retired)
                make_folder(part)
                model.arriving += size
        finally:
            self._catalogue.notify_subscribers(retired)
        try:
            write(part)
            failpoint("adopt.before-proof")
            found = verify(part, name, number, fingerprint)
            failpoint("adopt.before-rename")
            with changed:
                self._complete(model, part, found)
        finally:
            shutil.rmtree(part, ignore_errors=True)
            with changed:
                model.arriving -= size
                if not is_gone(part):
                    model.stuck[part] = size
                changed.notify_all()
        self._catalogue.notify_subscribers([found.record])
        return found.record

    def _free_folder(self, model: StoredModel, number: int) -> Path:
        """Return the folder to write to, after no earlier version or adoption of the number occupies one."""
        part, past = (model.folder / kind for kind in (f"staging/{number:08}.back", f"retired/{number:08}"))
        self._pool.remove_stuck(model)
        while (part.exists() or past.exists()) and not model.stuck.keys() & {part, past}:
            self._catalogue.wait()
        if model.stuck.keys() & {part, past}:
            raise Unavailable("STORE_FAILED", f"{part} or {past} cannot be removed; try again once this medium works")
        return part

    def _await_capacity(self, model: StoredModel, size: int, retired: list[VersionRecord]) -> None:
        while not self._capacity.fits(model, size):
            if not self._retirer.free_capacity(retired):
                raise ResourceExhausted(
                    "NO_ROOM", f"{model.name}: no capacity for a version of {size} bytes; {self._capacity.holdings()}"
                )
            self._catalogue.wait()

    def _complete(self, model: StoredModel, part: Path, found: Manifest) -> None:
        record = found.record
        ready = [*model.of(READY), record]
        model.epoch = max(model.epoch, record.epoch)
        model.write_claim()
        if not model_files.folders(model.folder, model.files_epoch):
            names = [path for path in found.other_files if path != INDEX_FILE]
            small = {name: (part / name).read_bytes() for name in names}
            model_files.write(model.folder, record.epoch, small, model.files_epoch)
            model.published = True
        target = self._folder.path(record)
        make_durable_folder(target.parent)
        move(part, target)
        failpoint("adopt.after-rename")
        sync_or_undo(part, target)
        model.put(record)
        model.expected = False
        self._history.add(record)
        if record in self._retention.surplus(ready, partial=model.partial):
            self._pins.pin(model.name, record.number, RESTORED, yielding=True)
