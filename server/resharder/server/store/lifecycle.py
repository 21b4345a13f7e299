"""The life of a version from UPLOADING to READY or ABORTED."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from resharder.converters.failpoints import failpoint
from resharder.converters.storage.files import FileLayout
from resharder.server.infra.filesystem import make_folder, move, sync, touching, write_file
from resharder.server.infra.medium import medium_error, medium_errors
from resharder.server.state.errors import FailedPrecondition, ResourceExhausted
from resharder.server.state.version import ABORTED, READY, UPLOADING, VersionRecord
from resharder.server.store import manifest
from resharder.server.store.capacity import Capacity
from resharder.server.store.catalogue import Catalogue
from resharder.server.store.file_pool import FilePool
from resharder.server.store.folder import StoreFolder
from resharder.server.store.history import History
from resharder.server.store.manifest import MANIFEST_FILE, Manifest
from resharder.server.store.model_state import Reservation, StoredModel
from resharder.server.store.partial import MissingPieces, PartialVersion
from resharder.server.store.renames import rename_together
from resharder.server.store.retirement import Retirer
from resharder.server.store.verified import VerifiedVersion


class ProvenVersion(NamedTuple):
    """UPLOADING version whose bytes are verified: the digest of each tensor, and the hash of each rank's digests."""

    record: VersionRecord
    digests: Mapping[str, int]
    slots: tuple[tuple[int, str], ...]
    missing: MissingPieces | None = None
    """Pieces of which the nodes' bytes are verified, and that the store lacks; None if it has all."""


class VersionLifecycle:
    """Transitions of versions: begin, commit, abort. Thread-safe; files are written and synced without the lock."""

    def __init__(
        self,
        folder: StoreFolder,
        catalogue: Catalogue,
        capacity: Capacity,
        pool: FilePool,
        retirer: Retirer,
        history: History,
        clock: Callable[[], float],
    ) -> None:
        self._folder, self._catalogue, self._capacity, self._pool = folder, catalogue, capacity, pool
        self._retirer, self._history, self._clock = retirer, history, clock
        self._changed = catalogue.changed

    @medium_errors()
    def begin(
        self, name: str, epoch: int, step: int, job: str, *, set_aside: bool = False, warnings: Sequence[str] = ()
    ) -> VersionRecord:
        """Create an UPLOADING version in files of the pool. Blocks until a set of files and capacity are free.

        `set_aside` has no effect on the first version of a model, which no READY one precedes. `warnings`: see `VersionRecord`.

        Raises FailedPrecondition (STALE_EPOCH), ResourceExhausted (NO_ROOM, STORE_FULL, NO_DESCRIPTORS), Unavailable
        (STORE_FAILED, DRAINING).
        """
        self._folder.check()
        retired: list[VersionRecord] = []
        try:
            with self._changed:
                model = self._catalogue.model(name)
                reservation = model.reserved(epoch)
                reservation.failure = None  # the medium may work again
                self._pool.remove_stuck(model)
                path = self._take_set(model, reservation, retired)
                try:
                    record = self._start(model, reservation, path, step, job, set_aside, tuple(warnings))
                except BaseException:
                    self._pool.discard(model, path, reservation.size)
                    self._changed.notify_all()
                    raise
                self._pool.top_up(model)
                self._changed.notify_all()
        finally:
            self._catalogue.notify_subscribers(retired)
        return record

    def _take_set(self, model: StoredModel, reservation: Reservation, retired: list[VersionRecord]) -> Path:
        """Return a set of files, waiting for one. Versions that are retired for it are added to `retired`."""
        while not reservation.pool:
            if not reservation.pending and (reservation.failure or not self._capacity.within_limit(model, reservation.size)):
                failure, reservation.failure = reservation.failure, None
                if failure is not None:
                    raise medium_error(failure)
                if not self._retirer.free_capacity(retired):
                    why = f"no capacity for another version of {reservation.size} bytes"
                    raise ResourceExhausted("NO_ROOM", f"{model.name}: {why}; {self._capacity.holdings()}")
            elif not reservation.pending:
                self._pool.make_set(model, reservation)
            self._catalogue.wait()
            model.reserved(reservation.epoch)
        return reservation.pool.pop(0)

    def _start(
        self,
        model: StoredModel,
        reservation: Reservation,
        path: Path,
        step: int,
        job: str,
        set_aside: bool,
        warnings: tuple[str, ...],
    ) -> VersionRecord:
        model.number += 1
        model.write_claim()
        failpoint("begin.after-number")
        tensors = sum(len(layout.tensors) for layout in reservation.layouts)
        now = round(self._clock(), 6)
        record = VersionRecord(model.name, model.number, UPLOADING, reservation.epoch, step, job, reservation.size, tensors, now)
        record = replace(record, set_aside=set_aside and bool(model.of(READY)), warnings=warnings)
        make_folder(model.folder / "staging")
        move(path, self._folder.path(record))
        failpoint("begin.after-rename")
        model.put(record)
        return record

    def layouts(self, record: VersionRecord) -> tuple[FileLayout, ...]:
        """Return the file layouts of an UPLOADING version. Raises FailedPrecondition (STALE_EPOCH)."""
        return self._catalogue.model(record.model).reserved(record.epoch).layouts

    def next_files(self, name: str, number: int) -> Path | None:
        """Return the files laid out for the version after a READY one; None without any, or if they have another layout.

        Raises ResourceNotFound (MODEL_UNKNOWN, VERSION_UNKNOWN).
        """
        with self._changed:
            reservation = self._catalogue.model(name).reservation
            same = reservation is not None and self._catalogue.get(name, number).epoch == reservation.epoch
            return reservation.pool[0] if reservation is not None and same and reservation.pool else None

    @medium_errors()
    def commit(
        self,
        record: VersionRecord,
        digests: Mapping[str, int],
        slots: tuple[tuple[int, str], ...],
        *others: ProvenVersion,
        missing: MissingPieces | None = None,
        before_ready: Callable[[Sequence[VerifiedVersion]], object] = lambda versions: None,
    ) -> VersionRecord:
        """Make an UPLOADING version READY, together with `others`: all or none.

        Their bytes must be complete and verified, and no process may still write to them. Of a version with `missing`, this
        holds for the bytes in the store and those on the nodes together; it is READY without the missing pieces, and
        `PartialVersions` has it until they have been fetched. `before_ready` is called with all versions once their manifests are
        written; the versions stay UPLOADING if it raises.

        Raises FailedPrecondition (STALE_EPOCH, VERSION_ABORTED), Unavailable (STORE_FAILED), ResourceExhausted (STORE_FULL,
        NO_DESCRIPTORS).
        """
        self._folder.check()
        proven = (ProvenVersion(record, digests, slots, missing), *others)
        ready = [self._write_manifest(self._folder.path(each.record), each) for each in proven]
        partial = [self._partial(each, done) for each, done in zip(proven, ready, strict=True)]
        before_ready([self._verified(each, done) for each, done in zip(proven, ready, strict=True)])
        with self._changed:
            models = [self._catalogue.model(each.record.model) for each in proven]
            for model, each in zip(models, proven, strict=True):
                current = model.records[each.record.number]
                if current.state != UPLOADING:
                    raise FailedPrecondition("VERSION_ABORTED", f"{current.name} was aborted: {current.reason}")
            path = self._folder.path
            rename_together(self._folder.root, [(path(each.record), path(r)) for each, r in zip(proven, ready, strict=True)])
            for model, done, lacking in zip(models, ready, partial, strict=True):
                model.put(done)
                model.put_partial(done.number, lacking)
            retired = list[VersionRecord]()
            for model, done in zip(models, ready, strict=True):
                self._history.add(done)
                failpoint("commit.after-history")
                retired += self._retirer.retain(model)
            self._changed.notify_all()
        self._catalogue.notify_subscribers([*ready, *retired])
        return ready[0]

    def _write_manifest(self, folder: Path, proven: ProvenVersion) -> VersionRecord:
        """Sync the version's files, write its manifest, and return the READY record."""
        record = proven.record
        layouts = {layout.path: layout for layout in self.layouts(record)}
        with touching(folder, "reading"):
            names = [path.name for path in folder.iterdir() if path.name not in layouts]
            content = {name: (folder / name).read_bytes() for name in names} | {k: v.header for k, v in layouts.items()}
        sizes = {name: len(content[name]) for name in names} | {k: v.size for k, v in layouts.items()}
        record = replace(record, slots=proven.slots, ready_time=round(self._clock(), 6))
        encoded, fingerprint = manifest.encode(record, content, sizes, proven.digests, whole=proven.missing is None)
        for name in layouts:
            sync(folder / name)
        if proven.missing is not None:
            proven.missing.check(self.layouts(proven.record))
            proven.missing.write(folder)
        failpoint("commit.before-manifest")
        write_file(folder / MANIFEST_FILE, encoded)
        failpoint("commit.after-manifest")
        return replace(record, state=READY, fingerprint=fingerprint)

    def _partial(self, proven: ProvenVersion, ready: VersionRecord) -> PartialVersion | None:
        """Return what the store lacks of a version whose manifest is written; None for a whole one."""
        if proven.missing is None:
            return None
        return PartialVersion(self._folder.path(ready), self._verified(proven, ready).manifest, proven.missing)

    def _verified(self, proven: ProvenVersion, ready: VersionRecord) -> VerifiedVersion:
        """Return a version whose manifest is written, in the folder that it has until it is READY."""
        found = Manifest(ready, self.layouts(proven.record), dict(proven.digests), (), whole=proven.missing is None)
        return VerifiedVersion(found, self._folder.path(proven.record))

    def abort(self, name: str, number: int, reason: str) -> VersionRecord:
        """Make an UPLOADING version ABORTED and remove its files; return any other version as it is.

        A failing medium does not prevent the abort. Raises ResourceNotFound (MODEL_UNKNOWN, VERSION_UNKNOWN).
        """
        with self._changed:
            model = self._catalogue.model(name)
            record = self._catalogue.get(name, number)
            if record.state != UPLOADING:
                return record
            failpoint("abort.record")
            done = replace(record, state=ABORTED, reason=reason, end_time=round(self._clock(), 6))
            self._retirer.end(model, record, done)
            self._changed.notify_all()
        self._catalogue.notify_subscribers([done])
        return done
