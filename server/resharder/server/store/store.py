"""Versions as checkpoint folders, in shared memory or on disk. The folders are the truth; the journal is history.

    <root>/models/<model>/claim.json            the last version number and epoch given out, and the epochs' jobs
                          files/<epoch>.<n>/    config.json, tokenizer, index of the newest ACTIVE publisher
                          pool/<epoch>-<n>/     safetensors files, headers written and pages there, for versions to come
                          staging/<number>/     UPLOADING
                          versions/<number>/    READY: a complete checkpoint and resharder.json
                          retired/<number>/     on their way out

A version's files move pool -> staging -> versions -> retired -> pool by rename. They go back to the pool only within their epoch
and only when the kernel says that nobody has them open or mapped; otherwise they are unlinked.
"""

import fcntl
import os
import secrets
import shutil
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import structlog
from resharder.converters.storage.files import INDEX_FILE, FileLayout, MappedFiles, index_json
from resharder.server.infra.failpoints import failpoint
from resharder.server.infra.filesystem import make_folder, move, sync, touching, unused_elsewhere, write_file
from resharder.server.infra.medium import medium_error, medium_errors
from resharder.server.state.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    ResourceExhausted,
    ResourceNotFound,
    Unavailable,
)
from resharder.server.store import manifest, model_files
from resharder.server.store.archived_digests import proven
from resharder.server.store.file_pool import Pool
from resharder.server.store.manifest import ABORTED, MANIFEST_FILE, READY, RETIRED, UPLOADING, Manifest, VersionRecord
from resharder.server.store.model_state import (
    MODEL_NAME,
    Claim,
    History,
    Room,
    StoredModel,
    check_model_name,
    recovered,
    remembered,
)
from resharder.server.store.retention import surplus, wanted_sets

_RESTORED = "restored"  # the holder of a version that came back and that retention would drop again at once
_log = structlog.get_logger("resharder.store")


class Retirement(NamedTuple):
    """What an operator's wish to drop versions came to. With a dry run `retired` are those that would be."""

    retired: tuple[VersionRecord, ...]
    kept: tuple[VersionRecord, ...]  # in use, UPLOADING, or the newest READY one
    freed_bytes: int


class Store:
    """Thread-safe. `_lock` guards everything in `_models`; what takes long (writing pages, unlinking) runs outside of it. To look
    at claims, versions and holders takes no lock: they are replaced, never changed.

    Where a file operation fails, a call raises Unavailable (STORE_FAILED) or ResourceExhausted (STORE_FULL, NO_DESCRIPTORS), and
    memory and medium are as they were, but for numbers that are not given out again. What must not fail, because it follows from
    what is done already, is logged and tried again later: history, retention, the removal of files.
    """

    def __init__(
        self,
        root: Path,
        *,
        limit_bytes: int = 0,
        keep_count: int = 3,
        keep_bytes: int = 0,
        shared: bool = True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        with medium_errors():
            self.root = make_folder(root)
        self.keep_count, self.keep_bytes = keep_count, keep_bytes
        self.shared = shared  # whether clients on this host may map the files
        self._clock = clock
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._models: dict[str, StoredModel] = {}
        self._history = History(root)
        self._pool = Pool(root, self._changed, lambda: self._models.values())
        self._manifests: OrderedDict[tuple[str, int], Manifest] = OrderedDict()
        self._subscribers: list[Callable[[VersionRecord], None]] = []
        self._closed = False
        self.nonce_file = root / "nonce"
        self.nonce = secrets.token_bytes(32)
        with medium_errors():
            self._guard = self._lock_folder()
            try:
                self._open(limit_bytes)
            except BaseException:
                os.close(self._guard)
                raise

    def _open(self, limit_bytes: int) -> None:
        root = self.root
        write_file(self.nonce_file, self.nonce)
        if self.shared and not unused_elsewhere(self.nonce_file):
            raise FailedPrecondition(
                "STORE_FILESYSTEM",
                f"{root}: this filesystem does not say who has files open (file leases), so clients must not map them: "
                "choose another folder, or shared_memory=false",
            )
        self._recover()
        with touching(root, "measuring"):
            room = os.statvfs(root)
        self._pool.limit_bytes = limit_bytes or int(0.8 * (room.f_bavail * room.f_frsize + self.used_bytes()))

    @property
    def limit_bytes(self) -> int:
        """That all versions may take."""
        return self._pool.limit_bytes

    def _lock_folder(self) -> int:
        owner = self.root.stat().st_uid
        if owner != os.geteuid():  # /dev/shm is everybody's
            raise FailedPrecondition("STORE_OWNER", f"{self.root} belongs to user {owner}, expected {os.geteuid()}")
        self.root.chmod(0o700)
        with touching(self.root / "lock", "opening"):
            descriptor = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise FailedPrecondition("STORE_LOCKED", f"another daemon uses the store {self.root}") from None
        return descriptor

    def close(self) -> None:
        """Leaves nothing behind but READY versions and what they need."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for model in self._models.values():
            model.background.shutdown(wait=False, cancel_futures=True)
        for model in self._models.values():
            model.background.shutdown(wait=True)
            model.sweep()
        self._history.flush()
        with suppress(OSError):
            os.close(self._guard)

    # Recovery

    def _recover(self) -> None:
        for folder in sorted(make_folder(self.root / "models").iterdir()):
            if MODEL_NAME.fullmatch(folder.name):
                self._models = self._models | {folder.name: recovered(folder)}
        for record in remembered(self.root):
            model = self._models.get(record.model)
            if model is not None and (record.number not in model.records or model.records[record.number].state != READY):
                if record.state == READY:
                    record = replace(record, state=RETIRED, reason="gone when the daemon started")
                model.put(record)
        for model in self._models.values():
            model.forget_old()

    # Claims

    def claim(self, name: str) -> Claim | None:
        """The newest job's claim, from before the last restart too."""
        model = self._models.get(name)
        return model.claim if model else None

    def job_epoch(self, name: str, job: str) -> int | None:
        """The epoch that the job once got."""
        with self._lock:
            model = self._models.get(name)
            return model.jobs.get(job) if model else None

    @medium_errors()
    def new_claim(self, name: str, job: str, world_size: int) -> Claim:
        """The next epoch of the model, on its medium before it is used. The pool of earlier epochs goes."""
        check_model_name(name)
        with self._lock:
            model = self._make_model(name)
            claim = Claim(job, model.epoch + 1, world_size)
            jobs = dict([*model.jobs.items(), (job, claim.epoch)][-100:])
            try:
                model.write_claim(claim, jobs)
            except OSError:
                with suppress(OSError):  # it may stand there, where its folder's fsync is what failed
                    model.write_claim()
                raise
            model.claim, model.epoch, model.jobs = claim, claim.epoch, jobs
            self._pool.drop(model)
            return claim

    def _make_model(self, name: str) -> StoredModel:
        if name not in self._models:
            made = StoredModel(check_model_name(name), make_folder(self.root / "models" / name))
            self._models = self._models | {name: made}
        return self._models[name]

    # Room

    @medium_errors()
    def reserve(self, name: str, epoch: int, layouts: tuple[FileLayout, ...], files: Mapping[str, bytes]) -> None:
        """Room for the versions of an epoch, and the model's small files. Faulting pages in begins behind the caller.

        Raises ResourceExhausted (NO_ROOM) with who holds what; nothing is changed then.
        """
        size = sum(layout.size for layout in layouts)
        with self._lock:
            model = self._model(name)
            sets = wanted_sets(size, self.keep_count, self.keep_bytes)
            self._pool.check(model, size, sets)
            content = dict(files)
            if len(layouts) > 1:
                content[INDEX_FILE] = index_json(layouts)
            written = model_files.write(model.folder, epoch, content)
            model.published = True
            self._pool.drop(model)
            model.room = Room(epoch, written, layouts, size, sets)
            self._pool.top_up(model)

    def check_size(self, size: int) -> None:
        """Raises ResourceExhausted (NO_ROOM) where versions of `size` bytes cannot fit whatever else goes."""
        sets = wanted_sets(size, self.keep_count, self.keep_bytes)
        if size * sets > self.limit_bytes:
            raise ResourceExhausted("NO_ROOM", f"{sets} versions of {size} bytes do not fit in {self.limit_bytes} bytes")

    # A version's way

    @medium_errors()
    def begin(self, name: str, epoch: int, step: int, job: str) -> VersionRecord:
        """A new UPLOADING version in files of the pool. Raises FailedPrecondition (STALE_EPOCH), ResourceExhausted (NO_ROOM), and
        STORE_FULL, STORE_FAILED where none can be laid out."""
        retired: list[VersionRecord] = []
        try:
            with self._changed:
                model = self._model(name)
                room = self._room_of(model, epoch)
                room.failure = None  # the medium may work again
                self._pool.remove_stuck(model)
                path = self._take_set(model, room, retired)
                room.pending += 1
            try:
                with touching(room.files, "copying"):
                    for file in room.files.iterdir():
                        write_file(path / file.name, file.read_bytes())
                with self._changed:
                    self._room_of(model, epoch)
                    record = self._start(model, room, path, step, job)
                    room.pending -= 1
            except BaseException:
                with self._changed:
                    room.pending -= 1
                    self._pool.discard(model, path, room.size)
                    self._changed.notify_all()
                    self._room_of(model, epoch)  # where a later job took the files away, that is the reason
                raise
            with self._changed:
                self._pool.top_up(model)
                self._changed.notify_all()
        finally:
            self._tell(retired)
        return record

    def _start(self, model: StoredModel, room: Room, path: Path, step: int, job: str) -> VersionRecord:
        model.number += 1
        model.write_claim()
        failpoint("begin.after-number")
        now = round(self._clock(), 6)
        record = VersionRecord(model.name, model.number, UPLOADING, room.epoch, step, job, room.size, _count(room.layouts), now)
        make_folder(model.folder / "staging")
        move(path, self.folder(record))
        failpoint("begin.after-rename")
        model.put(record)
        return record

    def _room_of(self, model: StoredModel, epoch: int) -> Room:
        room = model.room
        if room is None or room.epoch != epoch:
            raise FailedPrecondition("STALE_EPOCH", f"{model.name}: epoch {epoch} has no room, the newest epoch is {model.epoch}")
        return room

    def _take_set(self, model: StoredModel, room: Room, retired: list[VersionRecord]) -> Path:
        """`retired` gets the versions that gave way."""
        while not room.pool:
            if not room.pending and (room.failure or not self._pool.has_room(model, room.size)):
                failure, room.failure = room.failure, None
                if failure is not None:
                    raise medium_error(failure)
                if not self._give_way(retired):
                    why = f"no room for another version of {room.size} bytes"
                    raise ResourceExhausted("NO_ROOM", f"{model.name}: {why}; {self._pool.holdings()}")
            elif not room.pending:
                self._pool.make_set(model, room)
            self._wait()
            self._room_of(model, room.epoch)
        return room.pool.pop()

    def _wait(self) -> None:
        """Until something has changed. Raises Unavailable (DRAINING)."""
        self._changed.wait()
        if self._closed:
            raise Unavailable("DRAINING", "the daemon is going down and takes no new versions")

    def folder(self, record: VersionRecord) -> Path:
        """Where the version's files are; they are there while it is UPLOADING or READY."""
        kind = {UPLOADING: "staging", READY: "versions"}.get(record.state, "retired")
        return self.root / "models" / record.model / kind / f"{record.number:08}"

    def layouts(self, record: VersionRecord) -> tuple[FileLayout, ...]:
        """Of an UPLOADING version."""
        return self._room_of(self._model(record.model), record.epoch).layouts

    @medium_errors()
    def commit(self, record: VersionRecord, digests: Mapping[str, int], slots: tuple[tuple[int, str], ...]) -> VersionRecord:
        """Makes an UPLOADING version READY. Its bytes must be complete and proven, its last writer gone."""
        folder = self.folder(record)
        layouts = {layout.path: layout for layout in self.layouts(record)}
        with touching(folder, "reading"):
            names = [path.name for path in folder.iterdir() if path.name not in layouts]
            content = {name: (folder / name).read_bytes() for name in names} | {k: v.header for k, v in layouts.items()}
        sizes = {name: len(content[name]) for name in names} | {k: v.size for k, v in layouts.items()}
        record = replace(record, slots=slots, ready_time=round(self._clock(), 6))
        encoded, fingerprint = manifest.encode(record, content, sizes, digests)
        done = replace(record, state=READY, fingerprint=fingerprint)
        for name in layouts:
            sync(folder / name)
        failpoint("commit.before-manifest")
        write_file(folder / MANIFEST_FILE, encoded)
        failpoint("commit.after-manifest")
        with self._changed:
            model = self._model(record.model)
            if model.records[record.number].state != UPLOADING:
                raise FailedPrecondition("VERSION_ABORTED", f"{record.name} was aborted: {model.records[record.number].reason}")
            parent = make_folder(model.folder / "versions")
            failpoint("commit.before-rename")
            move(folder, self.folder(done))
            failpoint("commit.after-rename")
            self._sync_or_undo(parent, folder, self.folder(done))
            failpoint("commit.after-sync")
            model.put(done)
            self._history.add(done)
            failpoint("commit.after-history")
            retired = self._retain_or_later(model)
            self._changed.notify_all()
        self._tell([done, *retired])
        return done

    def _sync_or_undo(self, parent: Path, source: Path, target: Path) -> None:
        """After `source` became `target`. Where both the sync and the way back fail, the version stands, durable or not."""
        try:
            sync(parent)
        except OSError as error:
            try:
                move(target, source)
            except OSError:
                _log.error("version_not_synced", folder=str(target), error=str(error))
                return
            raise

    def abort(self, name: str, number: int, reason: str) -> VersionRecord:
        """An UPLOADING version becomes ABORTED, its files leave; any other is returned as it is. No medium keeps it from that."""
        with self._changed:
            model = self._model(name)
            record = self.get(name, number)
            if record.state != UPLOADING:
                return record
            done = replace(record, state=ABORTED, reason=reason)
            self._leave(model, record, done)
            self._changed.notify_all()
        self._tell([done])
        return done

    def _retain_or_later(self, model: StoredModel) -> list[VersionRecord]:
        """What cannot leave stays READY until the next call."""
        retired: list[VersionRecord] = []
        try:
            self._retain(model, retired)
        except OSError as error:
            _log.error("version_not_retired", model=model.name, error=str(error))
        return retired

    def _retain(self, model: StoredModel, retired: list[VersionRecord], *, all_that_yield: bool = False) -> None:
        """`retired` gets those that left. Raises OSError."""
        ready = sorted(model.of(READY), key=lambda r: r.number)
        holds = {(number, holder) for number, holders in model.holders.items() for holder in holders}
        held = {number for number, _ in (holds - model.yielding if all_that_yield else holds)}
        for record in surplus(ready, held, self.keep_count, self.keep_bytes):
            done = replace(record, state=RETIRED, reason="newer versions took its place")
            self._leave(model, record, done)
            retired.append(done)

    def _leave(self, model: StoredModel, record: VersionRecord, done: VersionRecord) -> None:
        """Raises OSError for a READY version that cannot leave its folder; it is READY still. An UPLOADING one may leave from
        where it is: no daemon that starts takes it for a version."""
        path = self.folder(done)
        try:
            make_folder(path.parent)
            failpoint("leave.before-rename")
            move(self.folder(record), path)
        except OSError:
            if record.state == READY:
                raise
            path = self.folder(record)
        failpoint("leave.after-rename")
        model.put(done)
        model.yielding -= {(record.number, holder) for holder in model.holders.pop(record.number, ())}
        self._manifests.pop((model.name, done.number), None)
        self._history.add(done)
        model.forget_old()
        self._pool.take_back(model, record.epoch, path, record.size_bytes)

    def _give_way(self, retired: list[VersionRecord]) -> bool:
        """Whether room becomes free that was not: versions that only yielding holders keep go, or others are on their way out."""
        for model in self._models.values():
            before = len(retired)
            self._retain(model, retired, all_that_yield=True)
            if len(retired) > before:
                return True
        return any(model.leaving for model in self._models.values())

    # Versions that an operator drops, and those that come back

    @medium_errors()
    def retire(self, name: str, numbers: Collection[int] = (), keep: int = 0, dry_run: bool = False) -> Retirement:
        """Drops READY versions that nobody uses: `numbers`, or without them all but the newest `keep`.

        Raises InvalidArgument (KEEP), NotFound (MODEL_UNKNOWN, VERSION_UNKNOWN).
        """
        if not numbers and keep < 1:
            raise InvalidArgument("KEEP", f"expected the numbers of versions, or to keep the newest 1 at least, got {keep}")
        with self._changed:
            model = self._model(name)
            ready = sorted(r.number for r in model.of(READY))
            records = [self.get(name, number) for number in sorted(numbers or ready[:-keep])]
            asked = [record for record in records if record.state in (READY, UPLOADING)]
            free = [r for r in asked if r.state == READY and r.number != ready[-1] and not self._used(model, r.number)]
        retired = tuple(free) if dry_run else tuple(self._retire(model, free))
        gone = {record.number for record in retired}
        kept = tuple(record for record in asked if record.number not in gone)
        return Retirement(retired, kept, sum(record.size_bytes for record in retired))

    def _retire(self, model: StoredModel, records: Collection[VersionRecord]) -> Iterator[VersionRecord]:
        """One after the other, so that those before one that cannot leave are told."""
        for record in records:
            with self._changed:
                if model.records[record.number].state != READY or self._used(model, record.number):
                    continue
                done = replace(record, state=RETIRED, reason="retired by an operator")
                self._leave(model, record, done)
                self._changed.notify_all()
            self._tell([done])
            yield done

    def _used(self, model: StoredModel, number: int) -> bool:
        return bool(model.holders.get(number, frozenset()) - {_RESTORED})

    @medium_errors()
    def expect(self, name: str, number: int, epoch: int, *, coming: bool) -> None:
        """The model has had these numbers elsewhere: later ones are greater. `coming`: versions of it are about to come back."""
        with self._lock:
            model = self._make_model(name)
            model.number, model.epoch = max(model.number, number), max(model.epoch, epoch)
            model.expected = coming
            model.write_claim()

    @medium_errors()
    def adopt(self, name: str, number: int, fingerprint: str, size: int, write: Callable[[Path], None]) -> VersionRecord:
        """A version of an earlier time becomes READY under its own number. `write(folder)` puts its files there, `size` bytes of
        safetensors, and the manifest; sizes, headers, small files and the digest of every tensor are proven afterwards.

        The same version, READY already, is returned as it is. Raises AlreadyExists (VERSION_DIFFERS), ResourceExhausted
        (NO_ROOM), DataLoss (CHECKSUM), and what `write` raises; nothing is left behind then.
        """
        retired: list[VersionRecord] = []
        try:
            with self._changed:
                model = self._make_model(name)
                part, past = (model.folder / kind for kind in (f"staging/{number:08}.back", f"retired/{number:08}"))
                self._pool.remove_stuck(model)
                while (part.exists() or past.exists()) and not model.stuck.keys() & {part, past}:
                    self._wait()
                if model.stuck.keys() & {part, past}:
                    raise Unavailable("STORE_FAILED", f"{part} or {past} cannot be removed; try again once this medium works")
                known = model.records.get(number)
                if known is not None and known.fingerprint != fingerprint:
                    raise AlreadyExists(
                        "VERSION_DIFFERS", f"{known.name} is {known.state} here, with fingerprint {known.fingerprint!r}"
                    )
                if known is not None and known.state == READY:
                    return known
                model.number = max(model.number, number)
                model.write_claim()
                self._make_room(model, size, retired)
                make_folder(part)
                model.arriving += size
        finally:
            self._tell(retired)
        try:
            write(part)
            failpoint("adopt.before-proof")
            found = proven(part, name, number, fingerprint)
            failpoint("adopt.before-rename")
            with self._changed:
                self._come_back(model, part, found)
        finally:
            shutil.rmtree(part, ignore_errors=True)
            with self._changed:
                model.arriving -= size
                if os.path.lexists(part):
                    model.stuck[part] = size
                self._changed.notify_all()
        self._tell([found.record])
        return found.record

    def _make_room(self, model: StoredModel, size: int, retired: list[VersionRecord]) -> None:
        while not self._pool.fits(model, size):
            if not self._give_way(retired):
                raise ResourceExhausted(
                    "NO_ROOM", f"{model.name}: no room for a version of {size} bytes; {self._pool.holdings()}"
                )
            self._wait()

    def _come_back(self, model: StoredModel, part: Path, found: Manifest) -> None:
        record = found.record
        ready = [*model.of(READY), record]
        model.epoch = max(model.epoch, record.epoch)
        model.write_claim()
        if not model_files.folders(model.folder):
            names = [path for path in found.other_files if path != INDEX_FILE]
            model_files.write(model.folder, record.epoch, {name: (part / name).read_bytes() for name in names})
            model.published = True
        parent = make_folder(model.folder / "versions")
        move(part, self.folder(record))
        failpoint("adopt.after-rename")
        self._sync_or_undo(parent, part, self.folder(record))
        model.put(record)
        model.expected = False
        self._history.add(record)
        if record in surplus(sorted(ready, key=lambda r: r.number), (), self.keep_count, self.keep_bytes):
            self.hold(model.name, record.number, _RESTORED, yielding=True)

    # What others ask

    def models(self) -> list[str]:
        """Those that have ever had an ACTIVE publisher, and those of which versions are about to come back."""
        return sorted(m.name for m in self._models.values() if m.published or m.expected or m.of(READY))

    @medium_errors()
    def model_files(self, name: str) -> dict[str, bytes]:
        """config.json, tokenizer files: those of the newest ACTIVE publisher. Raises NotFound (MODEL_UNKNOWN)."""
        with self._lock:
            folders = model_files.folders(self._model(name).folder)
            if not folders:
                raise ResourceNotFound("MODEL_UNKNOWN", f"model {name!r} has no publisher yet; there are {self.models()}")
            with touching(folders[-1], "reading"):
                return {file.name: file.read_bytes() for file in folders[-1].iterdir() if file.name != INDEX_FILE}

    def versions(self, name: str) -> list[VersionRecord]:
        """Oldest first, RETIRED and ABORTED ones of recent history too. Raises NotFound (MODEL_UNKNOWN)."""
        return sorted(self._model(name).records.values(), key=lambda r: r.number)

    def get(self, name: str, number: int) -> VersionRecord:
        """Raises NotFound (MODEL_UNKNOWN, VERSION_UNKNOWN)."""
        record = self._model(name).records.get(number)
        if record is None:
            raise ResourceNotFound("VERSION_UNKNOWN", f"models/{name}/versions/{number} is not known")
        return record

    def newest(self, name: str) -> VersionRecord | None:
        """The newest READY version; None also for a model that is not known."""
        model = self._models.get(name)
        return max(model.of(READY), key=lambda r: r.number, default=None) if model else None

    def newest_number(self, name: str) -> int:
        """The greatest number that was given out; 0 for a model that is not known."""
        model = self._models.get(name)
        return model.number if model else 0

    def hold(self, name: str, number: int, holder: str, *, yielding: bool = False) -> VersionRecord:
        """Keeps a READY version from being dropped until `release` with the same holder; `yielding`: or until the store needs its
        room. Raises NotFound (VERSION_GONE)."""
        with self._lock:
            record = self.get(name, number)
            if record.state != READY:
                raise ResourceNotFound("VERSION_GONE", f"{record.name} is {record.state}, not READY")
            model = self._model(name)
            model.holders[number] = model.holders.get(number, frozenset()) | {holder}
            if yielding:
                model.yielding.add((number, holder))
            return record

    def release(self, name: str, number: int, holder: str) -> None:
        """Not to hold it is no error."""
        with self._changed:
            model = self._models.get(name)
            if model is None:
                return
            holders = model.holders.get(number, frozenset()) - {holder}
            model.yielding.discard((number, holder))
            if holders:
                model.holders[number] = holders
                return
            model.holders.pop(number, None)
            retired = self._retain_or_later(model)
            self._changed.notify_all()
        self._tell(retired)

    def holders(self, name: str, number: int) -> list[str]:
        model = self._models.get(name)
        return sorted(model.holders.get(number, ())) if model else []

    @medium_errors()
    def manifest(self, name: str, number: int) -> Manifest:
        """Raises NotFound (VERSION_GONE) where the version is not READY."""
        holder = f"manifest-{secrets.token_hex(4)}"
        record = self.hold(name, number, holder)
        try:
            with self._lock:
                known = self._manifests.get((name, number))
            if known is None:
                with touching(self.folder(record), "reading"):
                    known = manifest.read(self.folder(record))
                with self._lock:
                    self._manifests[name, number] = known
                    while len(self._manifests) > 2:  # a large one takes some 50 MiB
                        self._manifests.popitem(last=False)
            return known
        finally:
            self.release(name, number, holder)

    @contextmanager
    def open(self, name: str, number: int) -> Iterator[MappedFiles]:
        """The READY version's tensors, read-only, held meanwhile. Arrays must not outlive the context."""
        holder = f"reader-{secrets.token_hex(4)}"
        record = self.hold(name, number, holder)
        try:
            with MappedFiles(self.folder(record), self.manifest(name, number).files) as files:
                yield files
        finally:
            self.release(name, number, holder)

    def used_bytes(self) -> int:
        with self._lock:
            return sum(model.used() for model in self._models.values())

    def subscribe(self, callback: Callable[[VersionRecord], None]) -> None:
        """`callback(record)` after every READY, RETIRED and ABORTED, outside of the store's lock."""
        self._subscribers.append(callback)

    def _tell(self, records: list[VersionRecord]) -> None:
        for record in records:
            for callback in self._subscribers:
                callback(record)

    def _model(self, name: str) -> StoredModel:
        model = self._models.get(check_model_name(name))
        if model is None:
            raise ResourceNotFound("MODEL_UNKNOWN", f"model {name!r} is not known; there are {self.models()}")
        return model


def _count(layouts: tuple[FileLayout, ...]) -> int:
    return sum(len(layout.tensors) for layout in layouts)
