"""The life of a version: UPLOADING, then READY, pinned and RETIRED, or ABORTED.

Every change of a version's state is a rename of its folder, and one line of the history. A version is READY after `commit` by a
publisher or `adopt` from an archive. It is RETIRED by retention, for capacity, at an operator's command, or because it is lost.
"""

import errno
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import structlog
from resharder.converters.failpoints import failpoint
from resharder.converters.storage.files import INDEX_FILE, FileLayout
from resharder.converters.units import size_text
from resharder.server.infra.filesystem import (
    copy_file,
    is_gone,
    link,
    make_durable_folder,
    make_folder,
    move,
    sync,
    touching,
    unwritten_elsewhere,
    write_file,
    write_zeros,
)
from resharder.server.infra.medium import medium_error, medium_errors
from resharder.server.state.errors import (
    AlreadyExists,
    DaemonError,
    FailedPrecondition,
    InvalidArgument,
    ResourceExhausted,
    ResourceNotFound,
    Unavailable,
)
from resharder.server.state.version import ABORTED, LOST, READY, RETIRED, UPLOADING, VersionRecord, kind_of
from resharder.server.store import manifest, model_files
from resharder.server.store.catalogue import Catalogue, Reservation, StoredModel
from resharder.server.store.file_pool import FilePool
from resharder.server.store.folder import StoreFolder, sync_or_undo
from resharder.server.store.history import History
from resharder.server.store.manifest import MANIFEST_FILE, BadManifest, Manifest, ManifestCache
from resharder.server.store.partial import MissingPieces, VerifiedVersion, remove_leftovers
from resharder.server.store.renames import rename_together
from resharder.server.store.retention import Capacity, Retention

RESTORED = "restored"
"""Holder of an adopted version that retention would drop at once."""
_log = structlog.get_logger("resharder.store")


class ProvenVersion(NamedTuple):
    """UPLOADING version whose bytes are verified: the digest of each tensor, and the hash of each rank's digests."""

    record: VersionRecord
    digests: Mapping[str, int]
    slots: tuple[tuple[int, str], ...]
    missing: MissingPieces | None = None
    """Pieces of which the nodes' bytes are verified, and that the store lacks; None if it has all."""
    unsent_bytes: int = 0
    """See VersionRecord."""


class SharedFiles(NamedTuple):
    """Files of frozen tensors that a version shares: those of version `base`, by the numbers of their inodes with their bytes.

    A `base` of 0 is none.
    """

    base: int = 0
    inodes: Mapping[int, int] = MappingProxyType({})


class Retirement(NamedTuple):
    """Result of an operator's command to drop versions. After a dry run, `retired` are the versions that would be dropped."""

    retired: tuple[VersionRecord, ...]
    kept: tuple[VersionRecord, ...]  # in use, UPLOADING, or the newest READY one
    freed_bytes: int


class VersionLifecycle:
    """Transitions of versions. Thread-safe; files are written, synced and verified without the lock.

    The catalogue's lock guards the state of models. `_retain`, `_free_capacity` and `_end` are called with it, and their callers
    emit the catalogue's `version_changed` afterwards, without it. Callers of `settle` and `adopt` hold no lock.
    """

    def __init__(
        self,
        folder: StoreFolder,
        catalogue: Catalogue,
        capacity: Capacity,
        pool: FilePool,
        retention: Retention,
        history: History,
        manifests: ManifestCache,
        clock: Callable[[], float],
    ) -> None:
        self._folder, self._catalogue, self._capacity, self._pool = folder, catalogue, capacity, pool
        self._retention, self._history, self._manifests, self._clock = retention, history, manifests, clock
        self._changed = catalogue.changed

    # UPLOADING

    @medium_errors()
    def begin(
        self,
        name: str,
        epoch: int,
        step: int,
        job: str,
        *,
        skipped: bool = False,
        warnings: Sequence[str] = (),
        base: str = "",
        base_version: int = 0,
    ) -> VersionRecord:
        """Create an UPLOADING version in files of the pool. Blocks until a set of files and capacity are free.

        `skipped` has no effect on the first version of a model, which no READY one precedes. `warnings`, `base` and
        `base_version`: see `VersionRecord`.

        Raises FailedPrecondition (STALE_EPOCH), ResourceExhausted (NO_ROOM, STORE_FULL, NO_DESCRIPTORS), Unavailable
        (STORE_FAILED, DRAINING).
        """
        self._folder.check()
        said = {"skipped": skipped, "warnings": tuple(warnings), "base": base, "base_version": base_version}
        retired: list[VersionRecord] = []
        try:
            with self._changed:
                model = self._catalogue.model(name)
                reservation = model.reserved(epoch)
                reservation.failure = None  # the medium may work again
                self._pool.remove_stuck(model)
                path = self._take_set(model, reservation, retired)
                try:
                    with self._frozen_added(model, reservation, path, retired) as shared:
                        record = self._start(model, reservation, path, step, job, said, shared)
                except BaseException:
                    self._pool.discard(model, path, reservation.size)
                    self._changed.notify_all()
                    raise
                self._pool.top_up(model)
                self._changed.notify_all()
        finally:
            for each in retired:
                self._catalogue.version_changed.emit(each)
        return record

    def _take_set(self, model: StoredModel, reservation: Reservation, retired: list[VersionRecord]) -> Path:
        """Return a set of files, waiting for one. Versions that are retired for it are added to `retired`.

        Held sets are waited for only if there is no room for another one.
        """
        while not reservation.free:
            if not reservation.pending:
                held, failure = bool(reservation.held), reservation.failure
                if failure is not None and not held:
                    reservation.failure = None
                    raise medium_error(failure)
                if failure is None and self._capacity.within_limit(model, reservation.size):
                    reservation.make()
                elif not self._pool.give_up() and not self._free_capacity(retired):
                    why = f"no room for another version of {size_text(reservation.size)}"
                    raise ResourceExhausted("NO_ROOM", f"{model.name}: {why}; {self._capacity.holdings()}")
                elif held and not reservation.held:
                    reservation.failure = None  # what was given up may be the room that the last set lacked
            self._catalogue.wait()
            model.reserved(reservation.epoch)
        return reservation.free.pop(0)

    @contextmanager
    def _frozen_added(
        self, model: StoredModel, reservation: Reservation, path: Path, retired: list[VersionRecord]
    ) -> Iterator[SharedFiles]:
        """Add files of frozen tensors to a set that a version is about to get: those of the newest READY one, or new ones.

        New ones are laid out without the lock. They and the set count as in use meanwhile.
        """
        if not reservation.frozen or (shared := self._share(model, reservation, path)).base:
            yield shared if reservation.frozen else SharedFiles()
            return
        size = 0
        reservation.pending += 1
        try:
            self._await_capacity(model, reservation.frozen_bytes, retired)
            size = reservation.frozen_bytes
            model.arriving += size
            self._changed.release()
            try:
                for file in reservation.frozen:
                    (path / file.path).unlink(missing_ok=True)
                    write_zeros(path / file.path, file.header, file.size)
            finally:
                self._changed.acquire()
        finally:
            model.arriving -= size
            reservation.pending -= 1
        model.reserved(reservation.epoch)  # another job may have taken over
        yield SharedFiles()

    def _share(self, model: StoredModel, reservation: Reservation, path: Path) -> SharedFiles:
        """Link the frozen files of the newest READY version of the epoch into a set; a no-op if they cannot be shared."""
        ready = [record for record in model.of(READY) if record.epoch == reservation.epoch]
        base = max(ready, key=lambda record: record.number, default=None)
        if base is None or base.number in model.verified or base.number in model.unshared:
            return SharedFiles()
        folder, inodes = self._folder.path(base), dict[int, int]()
        try:
            for file in reservation.frozen:
                source, target = folder / file.path, path / file.path
                found = source.stat()
                with source.open("rb") as opened:
                    if found.st_size != file.size or opened.read(len(file.header)) != file.header:
                        return SharedFiles()  # of a job that has returned with other tensors
                if self._folder.shared and not unwritten_elsewhere(source):
                    return SharedFiles()
                target.unlink(missing_ok=True)
                link(source, target)
                inodes[found.st_ino] = found.st_size
        except OSError as error:  # such as a filesystem without hard links
            _log.warning("not_shared", version=base.name, error=str(error))
            return SharedFiles()
        model.shared[base.number] = {**model.shared.get(base.number, {}), **inodes}
        return SharedFiles(base.number, inodes)

    def _start(
        self,
        model: StoredModel,
        reservation: Reservation,
        path: Path,
        step: int,
        job: str,
        said: Mapping[str, Any],
        shared: SharedFiles,
    ) -> VersionRecord:
        model.number += 1
        model.write_claim()
        failpoint("begin.after-number")
        tensors, size = sum(len(layout.tensors) for layout in reservation.layouts), reservation.version_bytes
        now = round(self._clock(), 6)
        record = VersionRecord(model.name, model.number, UPLOADING, reservation.epoch, step, job, size, tensors, now)
        record = replace(record, **said)
        record = replace(record, skipped=record.skipped and bool(model.of(READY)))
        make_folder(model.folder / "staging")
        move(path, self._folder.path(record))
        failpoint("begin.after-rename")
        model.put(record)
        if shared.base:
            model.shared[record.number] = shared.inodes
            model.frozen_from[record.number] = shared.base
        return record

    def frozen_from(self, record: VersionRecord) -> int:
        """Return the number of the version whose files of frozen tensors an UPLOADING one has; 0 if they are its own."""
        return self._catalogue.model(record.model).frozen_from.get(record.number, 0)

    @medium_errors()
    def thaw(self, record: VersionRecord, files: Collection[str]) -> None:
        """Replace files that an UPLOADING version shares by copies of its own, which ranks may write.

        Raises ResourceExhausted (NO_ROOM, STORE_FULL, NO_DESCRIPTORS), FailedPrecondition (VERSION_ABORTED), Unavailable
        (STORE_FAILED, DRAINING). The version has the shared files then.
        """
        folder, retired = self._folder.path(record), list[VersionRecord]()
        size = sum(layout.size for layout in self.layouts(record) if layout.path in files)
        try:
            with self._changed:
                (model,) = self._uploading_models(record)
                self._await_capacity(model, size, retired)
                model.arriving += size
        finally:
            for each in retired:
                self._catalogue.version_changed.emit(each)
        try:
            for name in files:
                copy_file(folder / name, folder / f"{name}.part")
            with self._changed:
                self._uploading_models(record)
                for name in files:
                    inode = (folder / name).stat().st_ino
                    move(folder / f"{name}.part", folder / name)
                    model.shared[record.number] = {i: n for i, n in model.shared[record.number].items() if i != inode}
        except OSError:
            for name in files:
                with suppress(OSError):
                    (folder / f"{name}.part").unlink(missing_ok=True)
            with self._changed:
                self._uploading_models(record)  # or it was aborted meanwhile, and its folder has moved
            raise
        finally:
            with self._changed:
                model.arriving -= size
                self._changed.notify_all()

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
            if reservation is None or not same or not reservation.free:
                return None
            if reservation.frozen:  # a worker that prepares them maps all files of the next version
                self._share(self._catalogue.model(name), reservation, reservation.free[0])
            return reservation.free[0]

    def abort(self, name: str, number: int, reason: str, *, reuse: bool = True) -> VersionRecord:
        """Make an UPLOADING version ABORTED and remove its files; return any other version as it is.

        With `reuse`, a later version may be written into the files; without, none shares the files that this one shares.
        A failing medium does not prevent the abort.

        Raises ResourceNotFound (MODEL_UNKNOWN, VERSION_UNKNOWN).
        """
        with self._changed:
            model = self._catalogue.model(name)
            record = self._catalogue.get(name, number)
            if record.state != UPLOADING:
                return record
            failpoint("abort.record")
            if not reuse and number in model.frozen_from:
                model.unshared.add(model.frozen_from[number])
            done = replace(record, state=ABORTED, reason=reason, end_time=round(self._clock(), 6))
            self._end(model, record, done, reuse=reuse)
            self._changed.notify_all()
        self._catalogue.version_changed.emit(done)
        return done

    # READY

    @medium_errors()
    def commit(
        self,
        record: VersionRecord,
        digests: Mapping[str, int],
        slots: tuple[tuple[int, str], ...],
        *others: ProvenVersion,
        missing: MissingPieces | None = None,
        unsent_bytes: int = 0,
        before_ready: Callable[[Sequence[VerifiedVersion]], object] = lambda versions: None,
    ) -> VersionRecord:
        """Make an UPLOADING version READY, together with `others`: all or none.

        Their bytes must be complete and verified, and no process may still write to them. Of a version with `missing`, this
        holds for the bytes in the store and those on the nodes together. `before_ready` is called with all versions once their
        manifests are written, and may have missing pieces fetched; the versions stay UPLOADING if it raises. Pieces may still
        be missing at READY: `partials` has the version until they have been fetched.

        Raises FailedPrecondition (STALE_EPOCH, VERSION_ABORTED), Unavailable (STORE_FAILED), ResourceExhausted (STORE_FULL,
        NO_DESCRIPTORS).
        """
        self._folder.check()
        proven = (ProvenVersion(record, digests, slots, missing, unsent_bytes), *others)
        ready = [self._write_manifest(self._folder.path(each.record), each) for each in proven]
        verified = [self._verified(each, done) for each, done in zip(proven, ready, strict=True)]
        path = self._folder.path
        with self._waiting(verified):
            before_ready(verified)
            lacking = [self._settled(each) for each in verified]
            with self._changed, ExitStack() as moving:
                models = self._uploading(verified)
                for each in verified:
                    moving.enter_context(each.moving(path(each.record)))
                moves = [(path(each.record), path(done)) for each, done in zip(proven, ready, strict=True)]
                rename_together(self._folder.root, moves)
                for model, done, left in zip(models, ready, lacking, strict=True):
                    model.put(done)
                    model.put_verified(done.number, left)
                    model.frozen_from.pop(done.number, None)
                retired = list[VersionRecord]()
                for model, done in zip(models, ready, strict=True):
                    self._history.add(done)
                    failpoint("commit.after-history")
                    retired += self._retain(model)
                self._changed.notify_all()
        for done in [*ready, *retired]:
            self._catalogue.version_changed.emit(done)
        return ready[0]

    @contextmanager
    def _waiting(self, verified: Sequence[VerifiedVersion]) -> Iterator[None]:
        """Let holders read verified versions until they are READY, or the body raises."""
        with self._changed:
            for model, each in zip(self._uploading(verified), verified, strict=True):
                model.put_verified(each.record.number, each)
        try:
            yield
        except BaseException:
            with self._changed:
                for each in verified:
                    model = self._catalogue.model(each.record.model)
                    if model.records[each.record.number].state == UPLOADING:
                        model.put_verified(each.record.number, None)
            raise

    def _uploading(self, versions: Iterable[VerifiedVersion]) -> list[StoredModel]:
        """Return the models of UPLOADING versions. Raises FailedPrecondition (VERSION_ABORTED). Callers hold the lock."""
        return self._uploading_models(*(each.record for each in versions))

    def _uploading_models(self, *records: VersionRecord) -> list[StoredModel]:
        found = list[StoredModel]()
        for each in records:
            found.append(self._catalogue.model(each.model))
            if (current := found[-1].records[each.number]).state != UPLOADING:
                raise FailedPrecondition("VERSION_ABORTED", f"{current.name} was aborted: {current.reason}")
        return found

    def _write_manifest(self, folder: Path, proven: ProvenVersion) -> VersionRecord:
        """Sync the version's files, write its manifest, and return the READY record."""
        record = proven.record
        layouts = {layout.path: layout for layout in self.layouts(record)}
        with touching(folder, "reading"):
            names = [path.name for path in folder.iterdir() if path.name not in layouts]
            content = {name: (folder / name).read_bytes() for name in names} | {k: v.header for k, v in layouts.items()}
        sizes = {name: len(content[name]) for name in names} | {k: v.size for k, v in layouts.items()}
        ready_time = round(self._clock(), 6)
        record = replace(record, slots=proven.slots, ready_time=ready_time, unsent_bytes=proven.unsent_bytes)
        encoded, fingerprint = manifest.encode(record, content, sizes, proven.digests, whole=proven.missing is None)
        for name in layouts:
            sync(folder / name)
        sync(folder)  # shared files have no other entry of this version
        if proven.missing is not None:
            proven.missing.check(self.layouts(proven.record))
            proven.missing.write(folder)
        failpoint("commit.before-manifest")
        write_file(folder / MANIFEST_FILE, encoded)
        failpoint("commit.after-manifest")
        return replace(record, state=READY, fingerprint=fingerprint)

    def _verified(self, proven: ProvenVersion, ready: VersionRecord) -> VerifiedVersion:
        """Return a version whose manifest is written, in the folder that it has until it is READY."""
        folder, missing = self._folder.path(proven.record), proven.missing
        found = Manifest(ready, self.layouts(proven.record), dict(proven.digests), (), whole=missing is None)
        return VerifiedVersion(folder, found, missing, durable=False)

    def _settled(self, version: VerifiedVersion) -> VerifiedVersion | None:
        """Make the pieces of an UPLOADING version durable, and return it if it lacks some; None if it is whole."""
        if not version.is_partial:
            return None
        version.make_durable()
        if not version.is_whole():
            return version
        version.complete()
        remove_leftovers(version.folder)
        return None

    def partials(self, state: str = READY) -> list[VerifiedVersion]:
        """Return the READY or UPLOADING versions that lack pieces, the one that was verified last first."""
        models = self._catalogue.stored()
        found = [(model.records[number], each) for model in models for number, each in model.verified.items() if each.is_partial]
        lacking = [each for record, each in found if record.state == state]
        return sorted(lacking, key=lambda each: (each.record.ready_time, each.record.number), reverse=True)

    def settle(self, partial: VerifiedVersion) -> bool:
        """Make a READY version whole whose pieces have all arrived. Returns whether it is settled.

        A version whose files do not have their headers is lost (`lose`). Raises OSError, DaemonError; the next call repeats what
        has failed.
        """
        record = partial.record
        if not partial.is_whole():
            return False
        try:
            partial.complete()
        except BadManifest as error:
            self.lose(record.model, record.number, str(error))
            return True
        with self._changed:
            model = self._catalogue.model(record.model)
            if model.records[record.number].state != READY:
                return True
            model.put_verified(record.number, None)
            self._changed.notify_all()
        _log.info("version_whole", version=record.name)
        try:
            remove_leftovers(partial.folder)
        except OSError as error:  # the next start removes them
            _log.warning("not_removed", version=record.name, error=str(error))
        return True

    @medium_errors()
    def adopt(self, name: str, number: int, fingerprint: str, size: int, write: Callable[[Path], None]) -> VersionRecord:
        """Make an archived version READY under its own number.

        `write(folder)` writes its files, `size` bytes of safetensors, and the manifest. Sizes, headers, small files and the
        digest of every tensor are verified afterwards. A version that is READY already is returned unchanged.

        Raises AlreadyExists (VERSION_DIFFERS), ResourceExhausted (NO_ROOM, STORE_FULL, NO_DESCRIPTORS), DataLoss (CHECKSUM),
        FailedPrecondition (BASE: those here have another base), Unavailable (STORE_FAILED, DRAINING), and the errors
        of `write`; nothing is left behind then.
        """
        changed, retired = self._changed, list[VersionRecord]()
        if not self._capacity.hold:
            raise ResourceExhausted("NO_ROOM", f"this daemon's host holds none of {name}: restore it with a daemon of hold: all")
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
            for each in retired:
                self._catalogue.version_changed.emit(each)
        try:
            write(part)
            failpoint("adopt.before-proof")
            found = manifest.verify(part, name, number, fingerprint)
            failpoint("adopt.before-rename")
            with changed:
                self._complete_adoption(model, part, found)
        finally:
            shutil.rmtree(part, ignore_errors=True)
            with changed:
                model.arriving -= size
                if not is_gone(part):
                    model.stuck[part] = size
                changed.notify_all()
        self._catalogue.version_changed.emit(found.record)
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
            if not self._pool.give_up() and not self._free_capacity(retired):
                raise ResourceExhausted(
                    "NO_ROOM", f"{model.name}: no room for a version of {size_text(size)}; {self._capacity.holdings()}"
                )
            self._catalogue.wait()

    def _complete_adoption(self, model: StoredModel, part: Path, found: Manifest) -> None:
        record = found.record
        if (base := self._catalogue.base(model.name)) is not None and base != record.base:
            raise FailedPrecondition(
                "BASE",
                f"{record.name} is {kind_of(record.base)}, the versions of {model.name!r} here are those of {kind_of(base)}",
            )
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
        if record in self._retention.surplus(ready, partial=model.verified):
            self.pin(model.name, record.number, RESTORED, yielding=True)

    def pin(self, name: str, number: int, holder: str, *, yielding: bool = False) -> VersionRecord:
        """Protect a READY version from retirement until `release`; with `yielding`, only until the store needs its capacity.

        Raises ResourceNotFound (MODEL_UNKNOWN, VERSION_UNKNOWN, VERSION_GONE).
        """
        with self._changed:
            record = self._catalogue.get(name, number)
            if record.state != READY:
                raise gone(record)
            model = self._catalogue.model(name)
            model.holders[number] = model.holders.get(number, frozenset()) | {holder}
            if yielding:
                model.yielding.add((number, holder))
            return record

    def release(self, name: str, number: int, holder: str) -> None:
        """Remove a pin, and retire what retention no longer keeps. A no-op if the holder has not pinned the version."""
        with self._changed:
            model = self._catalogue.find(name)
            if model is None:
                return
            holders = model.holders.get(number, frozenset()) - {holder}
            model.yielding.discard((number, holder))
            if holders:
                model.holders[number] = holders
                return
            model.holders.pop(number, None)
            retired = self._retain(model)
            self._changed.notify_all()
        for each in retired:
            self._catalogue.version_changed.emit(each)

    def holders(self, name: str, number: int) -> list[str]:
        """Return the names of the holders that pin the version."""
        model = self._catalogue.find(name)
        return sorted(model.holders.get(number, ())) if model else []

    # RETIRED

    @medium_errors()
    def retire(self, name: str, numbers: Collection[int] = (), keep: int = 0, dry_run: bool = False) -> Retirement:
        """Drop unused READY versions: `numbers`, or without them all but the newest `keep`.

        Raises InvalidArgument (KEEP), ResourceNotFound (MODEL_UNKNOWN, VERSION_UNKNOWN), Unavailable (STORE_FAILED),
        ResourceExhausted (STORE_FULL, NO_DESCRIPTORS).
        """
        if not numbers and keep < 1:
            raise InvalidArgument("KEEP", f"expected the numbers of versions, or to keep the newest 1 at least, got {keep}")
        with self._changed:
            model = self._catalogue.model(name)
            ready = sorted(r.number for r in model.of(READY))
            records = [self._catalogue.get(name, number) for number in sorted(numbers or ready[:-keep])]
            asked = [record for record in records if record.state in (READY, UPLOADING)]
            free = [r for r in asked if r.state == READY and r.number != ready[-1] and not _used(model, r.number)]
        retired = tuple(free) if dry_run else tuple(self._retire(model, free))
        gone = {record.number for record in retired}
        kept = tuple(record for record in asked if record.number not in gone)
        return Retirement(retired, kept, sum(record.size_bytes for record in retired))

    def _retire(self, model: StoredModel, records: Collection[VersionRecord]) -> Iterator[VersionRecord]:
        """Retire the versions one by one, and raise the first error after all: one that cannot be moved does not keep others."""
        failed: OSError | DaemonError | None = None
        for record in records:
            with self._changed:
                if model.records[record.number].state != READY or _used(model, record.number):
                    continue
                done = self._retired(record, "retired by an operator")
                try:
                    self._end(model, record, done)
                except (OSError, DaemonError) as error:
                    failed = failed or error
                    continue
                self._changed.notify_all()
            self._catalogue.version_changed.emit(done)
            yield done
        if failed is not None:
            raise failed

    @medium_errors()
    def lose(self, name: str, number: int, reason: str) -> VersionRecord:
        """Retire a READY version that lacks pieces which no node can deliver, pinned or not; return any other as it is.

        Raises ResourceNotFound (MODEL_UNKNOWN, VERSION_UNKNOWN), Unavailable (STORE_FAILED), ResourceExhausted (STORE_FULL,
        NO_DESCRIPTORS).
        """
        with self._changed:
            model, record = self._catalogue.model(name), self._catalogue.get(name, number)
            if record.state != READY or number not in model.verified:
                return record
            done = self._retired(record, f"{LOST}: {reason}")
            self._end(model, record, done)
            self._changed.notify_all()
        _log.error("version_lost", version=record.name, reason=reason)
        self._catalogue.version_changed.emit(done)
        return done

    def _retain(self, model: StoredModel) -> list[VersionRecord]:
        """Retire the versions beyond retention.

        A version whose files cannot be moved stays READY until the next call, with the reason in its record.
        """
        retired: list[VersionRecord] = []
        self._drop_surplus(model, retired)
        return retired

    def _free_capacity(self, retired: list[VersionRecord]) -> bool:
        """Retire versions of a model that only yielding pins keep, and add them to `retired`.

        Returns whether capacity becomes free, by them or by earlier removals.
        """
        for model in self._catalogue.stored():
            before = len(retired)
            self._drop_surplus(model, retired, despite_yielding=True)
            if len(retired) > before:
                return True
        return any(model.leaving for model in self._catalogue.stored())

    def _drop_surplus(self, model: StoredModel, retired: list[VersionRecord], *, despite_yielding: bool = False) -> None:
        pins = {(number, holder) for number, holders in model.holders.items() for holder in holders}
        pinned = {number for number, _ in (pins - model.yielding if despite_yielding else pins)}
        surplus = self._retention.surplus(model.of(READY), pinned, model.verified)
        model.put(*(replace(record, reason="") for record in model.of(READY) if record.reason and record not in surplus))
        for record in surplus:
            done = self._retired(record, "newer versions took its place")
            try:
                self._end(model, record, done)
            except (OSError, DaemonError) as error:
                self._keep(model, record, error)
                continue
            retired.append(done)

    def _keep(self, model: StoredModel, record: VersionRecord, error: OSError | DaemonError) -> None:
        """Record why a version beyond retention is still READY, and log it once."""
        why = str(error)
        if isinstance(error, OSError):
            why = f"{errno.errorcode.get(error.errno or 0, type(error).__name__)}, {error.strerror or error}"
        path = self._folder.path(record)
        reason = f"beyond retention, but {path} cannot be moved ({why}): remove what protects it; the next version tries again"
        if record.reason != reason:
            model.put(replace(record, reason=reason))
            _log.error("version_not_retired", version=record.name, folder=str(path), error=why)

    def _retired(self, record: VersionRecord, reason: str) -> VersionRecord:
        return replace(record, state=RETIRED, reason=reason, end_time=round(self._clock(), 6))

    def _end(self, model: StoredModel, record: VersionRecord, done: VersionRecord, *, reuse: bool = True) -> None:
        """Replace `record` by `done`, RETIRED or ABORTED, and free its files.

        Raises OSError for a READY version that cannot be moved; it is still READY. Files of an UPLOADING version that cannot be
        moved are freed in place, since a starting daemon does not restore them, and so are those of a READY one whose folder
        somebody has removed. Raises Unavailable (STORE_FAILED) for a READY version of a store that was removed.
        """
        path = self._folder.path(done)
        if record.state == READY:
            self._folder.check()
        try:
            make_folder(path.parent)
            failpoint("leave.before-rename")
            move(self._folder.path(record), path)
        except OSError:
            if record.state == READY and not is_gone(self._folder.path(record)):
                raise
            path = self._folder.path(record)
        failpoint("leave.after-rename")
        model.put(done)
        model.shared.pop(done.number, None)
        model.unshared.discard(done.number)
        model.frozen_from.pop(done.number, None)
        if (verified := model.verified.get(done.number)) is not None:
            model.put_verified(done.number, None)
            verified.end()
        model.yielding -= {(record.number, holder) for holder in model.holders.pop(record.number, ())}
        self._manifests.remove(model.name, done.number)
        self._history.add(done)
        model.forget_old()
        if reuse:
            self._pool.take_back(model, record.epoch, path, record.size_bytes)
        else:
            self._pool.discard(model, path, record.size_bytes)


def gone(record: VersionRecord) -> ResourceNotFound:
    """Return the refusal of a version that is not READY."""
    return ResourceNotFound("VERSION_GONE", f"{record.name} is {record.state}, not READY")


def _used(model: StoredModel, number: int) -> bool:
    return bool(model.holders.get(number, frozenset()) - {RESTORED})
