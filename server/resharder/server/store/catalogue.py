"""The catalogue of a store: models, the state of each in memory, records of their versions, and the lock that guards them."""

import json
import shutil
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Condition

from resharder.converters.json_input import check_fields, is_count, is_text, parse_json
from resharder.converters.signal import Signal
from resharder.converters.storage.files import FileLayout
from resharder.server.holding.part_files import PartFile
from resharder.server.holding.set_pool import SetHost, SetPool
from resharder.server.infra.filesystem import make_durable_folder, write_file
from resharder.server.state.errors import FailedPrecondition, ResourceNotFound, Unavailable
from resharder.server.state.version import (
    ABORTED,
    LAST_NUMBER,
    READY,
    RETIRED,
    UPLOADING,
    VersionRecord,
    check_model_name,
)
from resharder.server.store.partial import VerifiedVersion

_SWEPT = ("pool", "staging", "retired")
_HISTORY = 1000  # RETIRED and ABORTED versions listed of a model


@dataclass(frozen=True)
class Claim:
    """Claim of the newest job on a model."""

    job: str
    epoch: int
    world_size: int


class Reservation(SetPool):
    """Files and capacity reserved for the versions of `epoch`, which uses `sets` sets of files in turn.

    Without `hold`, the files are holes behind their headers. `frozen` are files that versions may share. No set has them: a
    version gets them when it begins, and they are removed with it, never used again.
    """

    def __init__(
        self,
        epoch: int,
        sets: int,
        model: "StoredModel",
        changed: Condition,
        numbers: Iterator[int],
        host: SetHost,
        layouts: tuple[FileLayout, ...],
        small: Path,
        *,
        hold: bool,
        frozen: tuple[FileLayout, ...] = (),
    ) -> None:
        path, holes = model.folder / "pool" / str(epoch), () if hold else tuple(PartFile(layout, ()) for layout in layouts)
        given = changed, model.background, path, numbers
        self.frozen = frozen if hold else ()
        paths = {file.path for file in self.frozen}
        files = tuple(file for file in layouts if file.path not in paths) if hold else ()
        super().__init__(*given, "pool.write", host, files, holes, small)
        self.epoch, self.sets, self.layouts = epoch, sets, layouts

    @property
    def version_bytes(self) -> int:
        """Bytes of a version."""
        return sum(layout.size for layout in self.layouts)

    @property
    def frozen_bytes(self) -> int:
        """Bytes of the files that a version may share."""
        return sum(layout.size for layout in self.frozen)


@dataclass
class StoredModel:
    """One model: the claim in effect, the records of its versions, their holders, and the bytes that it occupies.

    Guarded by the catalogue's lock. `records` is replaced, never modified, so that queries need no lock.
    """

    name: str
    folder: Path
    hold: bool = True  # whether the store has the bytes of its versions
    claim: Claim | None = None
    jobs: dict[str, int] = field(default_factory=dict)  # epoch of each job
    coming: dict[int, Claim] = field(default_factory=dict)  # claims that have not taken effect, by epoch
    number: int = 0  # the last version number assigned
    epoch: int = 0
    records: dict[int, VersionRecord] = field(default_factory=dict)
    verified: dict[int, VerifiedVersion] = field(default_factory=dict)
    """UPLOADING versions that wait for READY, and READY ones that lack pieces; replaced, never modified."""
    shared: dict[int, Mapping[int, int]] = field(default_factory=dict)
    """Bytes of the files that each UPLOADING or READY version may share, by the number of the inode."""
    frozen_from: dict[int, int] = field(default_factory=dict)  # of each UPLOADING version that shares files: of which one
    unshared: set[int] = field(default_factory=set)  # versions whose files were not what ranks sealed as unchanged
    holders: dict[int, frozenset[str]] = field(default_factory=dict)
    reservation: Reservation | None = None
    yielding: set[tuple[int, str]] = field(default_factory=set)  # (number, holder) of pins that end when capacity is needed
    leaving: int = 0  # bytes of sets that are being removed
    stuck: dict[Path, int] = field(default_factory=dict)  # folders that could not be removed, and their bytes
    arriving: int = 0  # bytes of versions that are being adopted
    published: bool = False  # whether it has config.json and its other small files
    expected: bool = False  # whether versions of it are about to be restored from an archive
    background: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(2, thread_name_prefix="store"))

    def put(self, *records: VersionRecord) -> None:
        """Add records, or replace those of the same numbers."""
        self.records = self.records | {record.number: record for record in records}

    def of(self, state: str) -> list[VersionRecord]:
        """Return the records in a state."""
        return [record for record in self.records.values() if record.state == state]

    def put_verified(self, number: int, found: VerifiedVersion | None) -> None:
        """Add a version that waits for READY or lacks pieces, or with None remove one."""
        others = {n: other for n, other in self.verified.items() if n != number}
        self.verified = others | {number: found} if found is not None else others

    def reserved(self, epoch: int) -> Reservation:
        """Return the reservation of the epoch. Raises FailedPrecondition (STALE_EPOCH) if a later one has replaced it."""
        found = self.reservation
        if found is None or found.epoch != epoch:
            raise FailedPrecondition("STALE_EPOCH", f"{self.name}: epoch {epoch} has no reserved capacity: {self.taken_over()}")
        return found

    def taken_over(self) -> str:
        """Return what an earlier job is told that the claim in effect has fenced."""
        return taken_over(self.name, self.claim.job) if self.claim is not None else f"no job has claimed {self.name!r}"

    @property
    def files_epoch(self) -> int | None:
        """Newest epoch whose small files may be the model's; None for any. Later ones are of a claim that did not take effect."""
        return max([self.claim.epoch, *(r.epoch for r in self.of(READY))]) if self.claim is not None else None

    def sets(self, reservation: Reservation) -> int:
        """Return the number of sets of files that the reservation's epoch has, including those in use, but not the held ones."""
        live = sum(1 for r in self.records.values() if r.epoch == reservation.epoch and r.state in (READY, UPLOADING))
        return live + len(reservation.free) + reservation.pending

    def used(self) -> int:
        """Return the bytes that the model occupies."""
        ready = sum(record.size_bytes for record in self.of(READY) if self.hold or record.number not in self.verified)
        more = self.unpublished() + self.held() + self.leaving + sum(self.stuck.values()) + self.arriving
        return ready + more - self._counted_twice()

    def _counted_twice(self) -> int:
        """Return the bytes of files by which the sizes of versions that share them exceed what they occupy."""
        found: dict[int, int] = {}
        twice = 0
        for inodes in self.shared.values():
            for inode, size in inodes.items():
                twice += size if inode in found else 0
                found[inode] = size
        return twice

    def held(self) -> int:
        """Return the bytes of retired sets that a process has open."""
        return self.reservation.size * len(self.reservation.held) if self.reservation else 0

    def lent(self) -> int:
        """Return the bytes of free, held and pending sets beyond those that are reserved. Others may have them."""
        reserved = self.reservation
        if reserved is None:
            return 0
        beyond = self.sets(reserved) + len(reserved.held) - reserved.sets
        return reserved.size * max(0, min(reserved.count(), beyond))

    def unpublished(self) -> int:
        """Return the bytes of UPLOADING versions and of the files laid out for later ones."""
        reserved = self.reservation
        ahead = reserved.size * (len(reserved.free) + reserved.pending) if reserved else 0
        return (sum(record.size_bytes for record in self.of(UPLOADING)) if self.hold else 0) + ahead

    def reserved_bytes(self) -> int:
        """Return the bytes that the model may occupy under its reservation."""
        if self.reservation is None:
            return 0
        return (self.reservation.size + self.reservation.frozen_bytes) * self.reservation.sets  # all of it may change

    def forget_old(self) -> None:
        """Drop the oldest RETIRED and ABORTED records, beyond the newest 1000."""
        past = sorted(number for number, record in self.records.items() if record.state in (RETIRED, ABORTED))
        if old := past[:-_HISTORY]:
            self.records = {number: record for number, record in self.records.items() if number not in old}

    def sweep(self) -> None:
        """Remove all files except READY versions and the model's small files."""
        for leftover in _SWEPT:
            shutil.rmtree(self.folder / leftover, ignore_errors=True)

    def unswept(self) -> dict[Path, int]:
        """Return the folders that `sweep` could not remove, and their bytes. Raises OSError."""
        left = [path for kind in _SWEPT if (self.folder / kind).exists() for path in (self.folder / kind).iterdir()]
        return {path: sum(file.stat().st_size for file in path.iterdir()) for path in left}

    def write_claim(self, claim: Claim | None = None, *, epoch: int | None = None, jobs: Mapping[str, int] | None = None) -> None:
        """Write the last numbers assigned, with the arguments in place of the current ones. Raises MediumRefused."""
        claim = claim or self.claim
        content = {
            "version": self.number,
            "epoch": self.epoch if epoch is None else epoch,
            "claim": asdict(claim) if claim else None,
            "jobs": dict(self.jobs if jobs is None else jobs),
        }
        write_file(self.folder / "claim.json", json.dumps(content).encode())


def taken_over(model: str, job: str) -> str:
    """Return what the ranks of a job are told that a newer one has fenced."""
    return f"job {job!r} has taken over model {model!r}; to take it back, start this job again with a new job id"


def parse_claim(content: bytes) -> tuple[int, int, dict[str, int], Claim | None]:
    """Return the last version number, the last epoch, the epochs of jobs and the newest claim of a `claim.json`.

    Raises ValueError, KeyError, TypeError or AttributeError for other content.
    """
    found = parse_json(content)
    number, epoch, jobs = found["version"], found["epoch"], found["jobs"]
    if not (is_count(number) and is_count(epoch) and all(is_text(job) and is_count(its) for job, its in jobs.items())):
        raise ValueError("expected integers of 0 or more as version, epoch and epochs of jobs")
    claim = Claim(**found["claim"]) if found["claim"] else None
    if claim is not None:
        check_fields(claim)
    if (highest := max(number, epoch, *jobs.values(), claim.epoch if claim else 0)) > LAST_NUMBER:
        raise ValueError(f"expected numbers and epochs of at most {LAST_NUMBER}, got {highest}")
    return number, epoch, jobs, claim


class Catalogue:
    """Models and their versions. Thread-safe.

    The reentrant lock of `changed` guards all that a `StoredModel` contains; `changed` is notified of every change for which a
    thread may wait. Queries take no lock: mappings and records are replaced, never modified.
    """

    def __init__(self, root: Path, models: dict[str, StoredModel], *, hold: bool = True) -> None:
        self.changed = Condition()
        self._folder, self._models, self._hold = root / "models", models, hold
        self.version_changed: Signal[VersionRecord] = Signal()
        """Emitted after every READY, RETIRED and ABORTED, without the lock."""
        self.closed = False

    # Queries

    def models(self) -> list[str]:
        """Return the names of models that have had an ACTIVE publisher, have a READY version, or await a restored one."""
        return sorted(m.name for m in self._models.values() if m.published or m.expected or m.of(READY))

    def versions(self, name: str) -> list[VersionRecord]:
        """Return the versions of a model, oldest first, including recent RETIRED and ABORTED ones.

        Raises ResourceNotFound (MODEL_UNKNOWN).
        """
        return sorted(self.model(name).records.values(), key=lambda r: r.number)

    def get(self, name: str, number: int) -> VersionRecord:
        """Return the record of a version. Raises ResourceNotFound (MODEL_UNKNOWN, VERSION_UNKNOWN)."""
        record = self.model(name).records.get(number)
        if record is None:
            raise ResourceNotFound("VERSION_UNKNOWN", f"there is no models/{name}/versions/{number}")
        return record

    def newest(self, name: str) -> VersionRecord | None:
        """Return the newest READY version; None if there is none or the model is unknown."""
        model = self.find(name)
        return max(model.of(READY), key=lambda r: r.number, default=None) if model else None

    def base(self, name: str) -> str | None:
        """Return the base of a model's versions, empty for a model of its own; None if none of its versions was ever READY."""
        model = self.find(name)
        past = [record for record in model.records.values() if record.state in (READY, RETIRED)] if model else []
        return max(past, key=lambda record: record.number).base if past else None

    def newest_number(self, name: str) -> int:
        """Return the greatest version number assigned; 0 for an unknown model."""
        model = self.find(name)
        return model.number if model else 0

    def used_bytes(self) -> int:
        """Return the bytes of all versions and of the files laid out for future ones. Takes the lock."""
        with self.changed:
            return sum(model.used() for model in self._models.values())

    # Models

    def stored(self) -> Collection[StoredModel]:
        """Return all models, including those without a version."""
        return self._models.values()

    def find(self, name: str) -> StoredModel | None:
        """Return the model, or None if it is unknown."""
        return self._models.get(name)

    def model(self, name: str) -> StoredModel:
        """Return the model. Raises InvalidArgument (MODEL_NAME), ResourceNotFound (MODEL_UNKNOWN)."""
        model = self._models.get(check_model_name(name))
        if model is None:
            raise ResourceNotFound("MODEL_UNKNOWN", f"there is no model {name!r}; the daemon has {self.models()}")
        return model

    def add_model(self, name: str) -> StoredModel:
        """Return the model, with a new folder if it is unknown. Callers must hold the lock. Raises OSError."""
        if name not in self._models:
            added = StoredModel(check_model_name(name), make_durable_folder(self._folder / name), self._hold)
            self._models = self._models | {name: added}
        return self._models[name]

    # Changes

    def wait(self) -> None:
        """Block until a change, with the lock released. Callers must hold it. Raises Unavailable (DRAINING) after `close`."""
        self.changed.wait()
        if self.closed:
            raise Unavailable("DRAINING", "the daemon is shutting down and accepts no new versions")

    def close(self) -> None:
        """Let current and later calls of `wait` raise."""
        with self.changed:
            self.closed = True
            for model in self.stored():
                if model.reservation is not None:
                    model.reservation.over = True
            self.changed.notify_all()
