"""Archive of versions in a folder or bucket: every n-th one, or on command; and restoration.

One thread writes in the background. Of each model, only the newest version waits, and it gives way if the store needs its
capacity, so a slow archive never delays a publish. A version is written as a delta of the one before it while the store still
has that one, and in full otherwise, or once `full_every` versions depend on each other.
"""

import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

import structlog
from resharder.converters.failpoints import failpoint
from resharder.converters.units import size_text
from resharder.converters.wire.pieces import PieceSpan
from resharder.server.archive.archived import MARKER, Archived, BaseVersion, place_of
from resharder.server.archive.checkpoints import Base, BaseDiffers, Checkpoints, Held, Source, Way, check_same
from resharder.server.archive.remote import Remote
from resharder.server.infra.backoff import backoff
from resharder.server.state.errors import AlreadyExists, DaemonError, DataLoss, FailedPrecondition, ResourceNotFound, Unavailable
from resharder.server.state.version import READY, RETIRED, VersionRecord, check_model_name
from resharder.server.store.manifest import MANIFEST_FILE
from resharder.server.store.store import Store

_HOLDER, _BASE_HOLDER = "archive", "archive-base"
_TRIES = 5
_PATIENCE = 30.0  # seconds that a starting daemon waits for its archive
_log = structlog.get_logger("resharder.archive")


class Archive:
    """Archive of one store. Thread-safe.

    `_changed` guards the queue and the version being written; no I/O happens under it. The store's lock may be taken under it,
    never the reverse.

    Args:
        store: Store of the versions.
        url: Folder, or URL of a bucket (`s3://bucket/prefix`).
        every: Archive every n-th READY version of a model; 0: on command only.
        full_every: Longest chain of a full version and deltas; 1: no deltas.
        keep: Versions of each model that are kept, besides the bases that they need; 0: all.
        read_only: Whether nothing is written to the archive.
        pause: Seconds before a failed operation is retried, doubling.
        report: Called with a resource's name, `archived`, `restored` or `failed`, and the reason, after each.

    Raises:
        FailedPrecondition: NO_ARCHIVE.
    """

    def __init__(
        self,
        store: Store,
        url: str,
        every: int = 0,
        *,
        full_every: int = 16,
        keep: int = 0,
        read_only: bool = False,
        pause: float = 1.0,
        report: Callable[[str, str, str], object] = lambda name, what, reason: None,
    ) -> None:
        self.store, self.every, self._report = store, every, report
        self._full_every, self._keep_count, self._read_only = full_every, keep, read_only
        self._pause = pause
        self.closed, self._looked = threading.Event(), threading.Event()
        self.checkpoints = Checkpoints(Remote(url), self.closed)
        self._changed = threading.Condition()
        self._waiting: dict[str, VersionRecord] = {}
        self._writing: VersionRecord | None = None
        self._newest: dict[str, int] = {}  # newest archived number of each model
        self._one = threading.Lock()  # one write at a time
        self._bases: dict[str, int] = {}  # version of each model that is pinned for the next delta; guarded by _one
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """URL of the archive, with its scheme."""
        return self.checkpoints.url

    def start(self, restore: bool = True) -> None:
        """Read the archive, so that its numbers and epochs are not reused, and return after that or after 30 seconds.

        Args:
            restore: Restore the newest version of each model without a READY version, in the background.
        """
        self.store.catalogue.version_changed.connect(self._on_version)
        self._thread = threading.Thread(target=self._run, args=(restore,), name="archive", daemon=True)
        self._thread.start()
        if not self._looked.wait(_PATIENCE):
            _log.error("archive_not_seen", url=self.url, seconds=_PATIENCE)

    def close(self) -> None:
        """Stop writing and restoring, and wait up to 30 seconds for the thread. Later versions are not archived."""
        self.closed.set()
        with self._changed:
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(30)
        for model, number in dict(self._bases).items():
            self.store.lifecycle.release(model, number, _BASE_HOLDER)

    # Calls of operators

    def archive_now(self, model: str, number: int) -> Archived:
        """Archive a version, blocking until every file was read back. A damaged copy is written again.

        Raises:
            FailedPrecondition: READ_ONLY.
            ResourceNotFound: MODEL_UNKNOWN, VERSION_UNKNOWN, VERSION_GONE.
            AlreadyExists: VERSION_DIFFERS.
            DataLoss: CHECKSUM.
            Unavailable: ARCHIVE_FAILED.
        """
        if self._read_only:
            raise FailedPrecondition(
                "READ_ONLY", f"this daemon follows {self.url}: archive the version with the daemon that writes there"
            )
        holder = f"{_HOLDER}-{secrets.token_hex(4)}"
        record = self.store.lifecycle.pin(model, number, holder, yielding=True)
        try:
            return self._keep(record, sure=True)
        finally:
            self.store.lifecycle.release(model, number, holder)

    def archived(self, model: str = "") -> list[Archived]:
        """Return the complete versions of one model or of all, newest first. Raises InvalidArgument
        (MODEL_NAME), Unavailable (ARCHIVE_FAILED).
        """
        models = [check_model_name(model)] if model else self.checkpoints.models()
        found = (self.checkpoints.find(name, number) for name in models for number in self.checkpoints.numbers(name))
        return [archived for archived in found if archived is not None]

    def restore(self, model: str, number: int, fingerprint: str = "") -> VersionRecord:
        """Restore a version, READY under its own number and verified. With a fingerprint, only that version.

        Raises ResourceNotFound (NOT_ARCHIVED), DataLoss (CHECKSUM), Unavailable (ARCHIVE_FAILED), AlreadyExists
        (VERSION_DIFFERS), and the errors of `VersionLifecycle.adopt`.
        """
        archived = self.checkpoints.find(model, number)
        if archived is None:
            raise ResourceNotFound(
                "NOT_ARCHIVED",
                f"{self.url} has no complete models/{model}/versions/{number}: {place_of(model, number)}/{MARKER} is missing or "
                "damaged; `resharder archived` lists what it has",
            )
        if fingerprint and archived.fingerprint != fingerprint:
            raise AlreadyExists(
                "VERSION_DIFFERS", f"{archived.url} is another {archived.name}, not the one with fingerprint {fingerprint}"
            )
        ways: list[Way] = []

        def write(folder: Path) -> None:
            ways.append(self.checkpoints.fetch(archived, folder, self._held(model)))

        record = self.store.lifecycle.adopt(model, number, archived.fingerprint, archived.size_bytes, write)
        for way in ways:  # none if it was READY already
            self._report(record.name, "restored", f"from {archived.url}, {_told(way)}")
        return record

    # Background work

    def _run(self, restore: bool) -> None:
        while not self._looked.is_set():
            try:
                missing = self._look(restore)
                self._looked.set()
            except DaemonError as error:
                _log.error("archive_unreachable", url=self.url, reason=str(error))
                if self.closed.wait(10 * self._pause):
                    return
        for model in missing:
            self._bring_back(model)
        while (record := self._next()) is not None:
            self._work(record)

    def _look(self, restore: bool) -> list[str]:
        """Return the models to restore, after reserving the numbers and epochs of all archived
        versions, incomplete ones included.
        """
        missing = []
        for model in self.checkpoints.models():
            numbers = self.checkpoints.numbers(model)
            found = (self.checkpoints.find(model, number) for number in numbers)
            newest = next((archived for archived in found if archived is not None), None)
            coming = restore and newest is not None and self.store.catalogue.newest(model) is None
            self.store.epochs.expect(model, numbers[0], newest.epoch if newest else 0, coming=coming)
            self._newest[model] = newest.number if newest else 0
            missing += [model] if coming else []
            self._mend_latest(model, numbers)
        for model in self.store.catalogue.models():
            if (record := self.store.catalogue.newest(model)) is not None:
                self._on_version(record)
        return missing

    def _mend_latest(self, model: str, numbers: list[int]) -> None:
        """Let latest.json name the newest version: an earlier release has not written it, or a daemon was killed before."""
        try:
            found = (self.checkpoints.find(model, number) for number in numbers)
            newest = next((archived for archived in found if archived is not None and not archived.skipped), None)
            if newest is not None:
                self.checkpoints.point_at(newest)
        except Unavailable as error:  # as where this daemon may only read
            _log.warning("archive_not_pointed", model=model, reason=str(error))

    def _bring_back(self, model: str) -> None:
        """Restore the newest complete version of a model, unless a trainer has published meanwhile."""
        try:
            for number in self.checkpoints.numbers(model):
                if self.store.catalogue.newest(model) is not None or self.closed.is_set():
                    break
                try:
                    self._again(partial(self.restore, model, number))
                except (DataLoss, ResourceNotFound) as error:
                    self.failed(f"models/{model}/versions/{number}", "not restored", error)
        except Exception as error:
            self.failed(f"models/{model}", "not restored", error)
        finally:
            self.store.epochs.expect(model, 0, 0, coming=False)

    def _on_version(self, record: VersionRecord) -> None:
        if record.state != READY or not self.every:
            return
        with self._changed:
            if not self._due(record):
                return
            try:
                self.store.lifecycle.pin(record.model, record.number, _HOLDER, yielding=True)
            except ResourceNotFound:  # retired already
                return
            overtaken = self._waiting.get(record.model)
            self._waiting[record.model] = record
            self._changed.notify_all()
        if overtaken is not None:
            self.store.lifecycle.release(overtaken.model, overtaken.number, _HOLDER)

    def _due(self, record: VersionRecord) -> bool:
        taken = [r.number for r in (self._writing, self._waiting.get(record.model)) if r is not None and r.model == record.model]
        last = max([self._newest.get(record.model, 0), *taken])
        later = [
            r
            for r in self.store.catalogue.versions(record.model)
            if last < r.number <= record.number and r.state in (READY, RETIRED)
        ]
        return len(later) >= self.every

    def _next(self) -> VersionRecord | None:
        """Return the version that has waited longest; None after `close`."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._waiting) or self.closed.is_set())
            if self.closed.is_set():
                return None
            self._writing = record = self._waiting.pop(next(iter(self._waiting)))
            return record

    def _work(self, record: VersionRecord) -> None:
        try:
            self._again(partial(self._keep, record, sure=False), lambda: record.model in self._waiting)
        except Exception as error:
            self.failed(record.name, "not archived", error)
        finally:
            with self._changed:
                self._writing = None
            self.store.lifecycle.release(record.model, record.number, _HOLDER)

    def _again(self, act: Callable[[], object], overtaken: Callable[[], bool] = lambda: False) -> None:
        """Repeat an operation while the archive or the store's medium fails, or the daemon fetches the version from nodes."""
        number = 0
        while True:
            try:
                act()
                return
            except Unavailable as error:
                number += error.reason != "PIECES_ELSEWHERE"
                known = error.reason in ("ARCHIVE_FAILED", "STORE_FAILED", "PIECES_ELSEWHERE")
                if not known or number == _TRIES or overtaken() or self.closed.is_set():
                    raise
                _log.warning("archive_tried", tries=number, reason=str(error))
            self.closed.wait(backoff(max(number, 1), self._pause))

    def failed(self, name: str, what: str, error: Exception) -> None:
        """Report a failure, unless the archive is closed."""
        if not self.closed.is_set():
            self._report(name, "failed", f"{what}: {error}")

    def _keep(self, record: VersionRecord, *, sure: bool) -> Archived:
        """Return a version's copy in the archive, written if it is missing; with `sure`, its bytes are verified as well."""
        with self._one:
            there = self.checkpoints.find(record.model, record.number)
            if there is not None:
                check_same(there, record)
            damaged = there is not None and sure and self._is_damaged(there)
            kept = there if there is not None and not damaged else self._write(record, in_full=damaged)
            self._newest[record.model] = max(record.number, self._newest.get(record.model, 0))
            if not kept.skipped:
                failpoint("archive.before-latest")
                self.checkpoints.point_at(kept)
            if self.every and self._full_every > 1:
                self._hold_base(record)
            if self._keep_count and record.number == self._newest[record.model]:
                for removed in self.checkpoints.retain(record.model, self._keep_count):
                    _log.info("archive_removed", version=removed.name, url=removed.url)
        return kept

    def _is_damaged(self, archived: Archived) -> bool:
        """Read a version, with all that it is restored from."""
        try:
            return any(self.checkpoints.damaged(link) for link in self.checkpoints.chain(archived))
        except DataLoss as error:
            _log.warning("archive_damaged", version=archived.name, reason=str(error))
            return True

    def _write(self, record: VersionRecord, *, in_full: bool) -> Archived:
        self.store.reader.await_whole(record.model, record.number)
        archived = None if in_full else self._write_delta(record)
        if archived is None:
            archived = self.checkpoints.write(self._source(record))
        how = " and ".join((["in full"] if archived.full else []) + (["as a delta"] if archived.base else []))
        size = sum(each.size for each in archived.objects.values())
        self._report(record.name, "archived", f"to {archived.url}, {how}: {size_text(size)}")
        return archived

    def _write_delta(self, record: VersionRecord) -> Archived | None:
        """Write a version as a delta of the newest older one in the archive, and in full as well if it would need too many
        others; None if the store no longer has that one, or has other bytes.
        """
        there = self._newest_before(record)
        if there is None:
            return None
        holder = f"{_BASE_HOLDER}-{secrets.token_hex(4)}"
        try:
            base = self.store.lifecycle.pin(there.model, there.number, holder, yielding=True)
            if base.fingerprint != there.fingerprint or self._layout(base) != self._layout(record):
                return None
            self.store.reader.await_whole(base.model, base.number)
            pieces = self.checkpoints.pieces(there, delta=not there.full)
            base_files = Base(there, pieces, self._source(base))
            return self.checkpoints.write(self._source(record), base_files, full=there.depth + 1 >= self._full_every)
        except (ResourceNotFound, BaseDiffers) as error:
            _log.info("archive_in_full", version=record.name, reason=str(error))
            return None
        except DataLoss as error:  # the base's pieces, or what was written
            _log.warning("archive_in_full", version=record.name, reason=str(error))
            return None
        finally:
            self.store.lifecycle.release(there.model, there.number, holder)

    def _newest_before(self, record: VersionRecord) -> Archived | None:
        for number in self.checkpoints.numbers(record.model):
            if number < record.number and (there := self.checkpoints.find(record.model, number)) is not None:
                return there if there.folder and self._full_every > 1 else None
        return None

    def _layout(self, record: VersionRecord) -> dict[str, int]:
        return {file.path: file.size for file in self.store.reader.manifest(record.model, record.number).files}

    def _source(self, record: VersionRecord) -> Source:
        reader, version = self.store.reader, (record.model, record.number)
        manifest = reader.manifest(*version)
        sizes = {file.path: file.size for file in manifest.files}

        def reading(name: str, start: int, end: int) -> AbstractContextManager[None]:
            spans = [PieceSpan(name, start, min(end, sizes[name]))] if start < sizes.get(name, 0) else []
            return reader.reading(*version, spans)

        names = [*(file.path for file in manifest.files), *manifest.other_files, MANIFEST_FILE]
        contents = {MANIFEST_FILE: reader.manifest_content(*version)}
        return Source(record, self.store.folder.path(record), names, reading, contents)

    def _held(self, model: str) -> Held:
        """Return the whole READY versions of the store, of which the archive's may be deltas."""
        reader = self.store.reader
        ready = [record for record in self.store.catalogue.versions(model) if record.state == READY]
        whole = [record for record in ready if reader.partial(model, record.number) is None]
        return {BaseVersion(record.number, record.fingerprint): partial(self._pinned, record) for record in whole}

    @contextmanager
    def _pinned(self, record: VersionRecord) -> Iterator[Source]:
        """Pin a version, until the store needs its capacity. Raises ResourceNotFound (VERSION_GONE)."""
        holder = f"{_BASE_HOLDER}-{secrets.token_hex(4)}"
        self.store.lifecycle.pin(record.model, record.number, holder, yielding=True)
        try:
            yield self._source(record)
        finally:
            self.store.lifecycle.release(record.model, record.number, holder)

    def _hold_base(self, record: VersionRecord) -> None:
        """Pin the newest archived version for the next delta, until the store needs its capacity."""
        held = self._bases.get(record.model, 0)
        if record.number <= held:
            return
        try:
            self.store.lifecycle.pin(record.model, record.number, _BASE_HOLDER, yielding=True)
        except ResourceNotFound:  # retired already
            return
        self._bases[record.model] = record.number
        self.store.lifecycle.release(record.model, held, _BASE_HOLDER)


def _told(way: Way) -> str:
    """Return a way as a part of a sentence."""
    deltas, size = sum(link.delta for link in way.links), size_text(way.size)
    start = "in full" if way.base is None else f"from version {way.base.number} of the store"
    more = f" and {deltas} delta{'s' if deltas > 1 else ''}" if deltas else ""
    return f"{start}{more}: {size}"


def needed(archive: Archive | None) -> Archive:
    """Return the archive. Raises FailedPrecondition (NO_ARCHIVE) if the daemon has none."""
    if archive is None:
        raise FailedPrecondition("NO_ARCHIVE", "this daemon has no archive: start it with archive_url")
    return archive
