"""The end of versions: by retention, for capacity, or at an operator's command."""

import errno
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import NamedTuple

import structlog
from resharder.converters.failpoints import failpoint
from resharder.server.infra.filesystem import is_gone, make_folder, move
from resharder.server.infra.medium import medium_errors
from resharder.server.state.errors import DaemonError, InvalidArgument
from resharder.server.state.version import LOST, READY, RETIRED, UPLOADING, VersionRecord
from resharder.server.store.catalogue import Catalogue
from resharder.server.store.file_pool import FilePool
from resharder.server.store.folder import StoreFolder
from resharder.server.store.history import History
from resharder.server.store.manifest_cache import ManifestCache
from resharder.server.store.model_state import StoredModel
from resharder.server.store.retention import Retention

RESTORED = "restored"
"""Holder of an adopted version that retention would drop at once."""
_log = structlog.get_logger("resharder.store")


class Retirement(NamedTuple):
    """Result of an operator's command to drop versions. After a dry run, `retired` are the versions that would be dropped."""

    retired: tuple[VersionRecord, ...]
    kept: tuple[VersionRecord, ...]  # in use, UPLOADING, or the newest READY one
    freed_bytes: int


class Retirer:
    """Retirement of versions. Thread-safe.

    Callers of methods other than `retire` must hold the lock of the catalogue, and notify its subscribers afterwards.
    """

    def __init__(
        self,
        folder: StoreFolder,
        catalogue: Catalogue,
        pool: FilePool,
        retention: Retention,
        history: History,
        manifests: ManifestCache,
        clock: Callable[[], float],
    ) -> None:
        self._folder, self._catalogue, self._pool = folder, catalogue, pool
        self._retention, self._history, self._manifests, self._clock = retention, history, manifests, clock

    @medium_errors()
    def retire(self, name: str, numbers: Collection[int] = (), keep: int = 0, dry_run: bool = False) -> Retirement:
        """Drop unused READY versions: `numbers`, or without them all but the newest `keep`.

        Raises InvalidArgument (KEEP), ResourceNotFound (MODEL_UNKNOWN, VERSION_UNKNOWN), Unavailable (STORE_FAILED),
        ResourceExhausted (STORE_FULL, NO_DESCRIPTORS).
        """
        if not numbers and keep < 1:
            raise InvalidArgument("KEEP", f"expected the numbers of versions, or to keep the newest 1 at least, got {keep}")
        with self._catalogue.changed:
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
            with self._catalogue.changed:
                if model.records[record.number].state != READY or _used(model, record.number):
                    continue
                done = self._retired(record, "retired by an operator")
                try:
                    self.end(model, record, done)
                except (OSError, DaemonError) as error:
                    failed = failed or error
                    continue
                self._catalogue.changed.notify_all()
            self._catalogue.notify_subscribers([done])
            yield done
        if failed is not None:
            raise failed

    @medium_errors()
    def lose(self, name: str, number: int, reason: str) -> VersionRecord:
        """Retire a READY version that lacks pieces which no node can deliver, pinned or not; return any other as it is.

        Raises ResourceNotFound (MODEL_UNKNOWN, VERSION_UNKNOWN), Unavailable (STORE_FAILED), ResourceExhausted (STORE_FULL,
        NO_DESCRIPTORS).
        """
        with self._catalogue.changed:
            model, record = self._catalogue.model(name), self._catalogue.get(name, number)
            if number not in model.partial:
                return record
            done = self._retired(record, f"{LOST}: {reason}")
            self.end(model, record, done)
            self._catalogue.changed.notify_all()
        _log.error("version_lost", version=record.name, reason=reason)
        self._catalogue.notify_subscribers([done])
        return done

    def retain(self, model: StoredModel) -> list[VersionRecord]:
        """Retire the versions beyond retention.

        A version whose files cannot be moved stays READY until the next call, with the reason in its record.
        """
        retired: list[VersionRecord] = []
        self._retain(model, retired)
        return retired

    def free_capacity(self, retired: list[VersionRecord]) -> bool:
        """Retire versions of a model that only yielding pins keep, and add them to `retired`.

        Returns whether capacity becomes free, by them or by earlier removals.
        """
        for model in self._catalogue.stored():
            before = len(retired)
            self._retain(model, retired, despite_yielding=True)
            if len(retired) > before:
                return True
        return any(model.leaving for model in self._catalogue.stored())

    def _retain(self, model: StoredModel, retired: list[VersionRecord], *, despite_yielding: bool = False) -> None:
        pins = {(number, holder) for number, holders in model.holders.items() for holder in holders}
        pinned = {number for number, _ in (pins - model.yielding if despite_yielding else pins)}
        for record in self._retention.surplus(model.of(READY), pinned, model.partial):
            done = self._retired(record, "newer versions took its place")
            try:
                self.end(model, record, done)
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

    def end(self, model: StoredModel, record: VersionRecord, done: VersionRecord) -> None:
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
        if (partial := model.partial.get(done.number)) is not None:
            model.put_partial(done.number, None)
            partial.end()
        model.yielding -= {(record.number, holder) for holder in model.holders.pop(record.number, ())}
        self._manifests.remove(model.name, done.number)
        self._history.add(done)
        model.forget_old()
        self._pool.take_back(model, record.epoch, path, record.size_bytes)


def _used(model: StoredModel, number: int) -> bool:
    return bool(model.holders.get(number, frozenset()) - {RESTORED})
