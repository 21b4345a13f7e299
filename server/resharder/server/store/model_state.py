"""In-memory state of a model in the store."""

import json
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

from resharder.converters.json_input import check_fields, is_count, is_text, parse_json
from resharder.converters.storage.files import FileLayout
from resharder.server.infra.filesystem import write_file
from resharder.server.state.errors import FailedPrecondition
from resharder.server.state.version import ABORTED, LAST_NUMBER, READY, RETIRED, UPLOADING, VersionRecord
from resharder.server.store.partial import PartialVersion

_SWEPT = ("pool", "staging", "retired")
_HISTORY = 1000  # RETIRED and ABORTED versions listed of a model


@dataclass(frozen=True)
class Claim:
    """Claim of the newest job on a model."""

    job: str
    epoch: int
    world_size: int


@dataclass
class Reservation:
    """Files and capacity reserved for the versions of one epoch."""

    epoch: int
    files: Path  # config.json, tokenizer, index
    layouts: tuple[FileLayout, ...]
    size: int  # bytes of one version's safetensors files
    sets: int  # sets of files used in turn
    pool: list[Path] = field(default_factory=list)
    pending: int = 0  # sets being laid out or recycled
    failure: OSError | None = None  # of the last set that was laid out


@dataclass
class StoredModel:
    """One model: the claim in effect, the records of its versions, their holders, and the bytes that it occupies.

    Guarded by the catalogue's lock. `records` is replaced, never modified, so that queries need no lock.
    """

    name: str
    folder: Path
    claim: Claim | None = None
    jobs: dict[str, int] = field(default_factory=dict)  # epoch of each job
    coming: dict[int, Claim] = field(default_factory=dict)  # claims that have not taken effect, by epoch
    number: int = 0  # the last version number assigned
    epoch: int = 0
    records: dict[int, VersionRecord] = field(default_factory=dict)
    partial: dict[int, PartialVersion] = field(default_factory=dict)  # READY versions that lack pieces; replaced, never modified
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

    def put_partial(self, number: int, partial: PartialVersion | None) -> None:
        """Add a READY version that lacks pieces, or with None remove one that is whole or no longer READY."""
        others = {n: other for n, other in self.partial.items() if n != number}
        self.partial = others | {number: partial} if partial is not None else others

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
        """Return the number of sets of files that the reservation's epoch has, including those in use."""
        live = sum(1 for r in self.records.values() if r.epoch == reservation.epoch and r.state in (READY, UPLOADING))
        return live + len(reservation.pool) + reservation.pending

    def used(self) -> int:
        """Return the bytes that the model occupies."""
        live = sum(r.size_bytes for r in self.records.values() if r.state in (READY, UPLOADING))
        reserved = self.reservation
        ahead = reserved.size * (len(reserved.pool) + reserved.pending) if reserved else 0
        return live + ahead + self.leaving + sum(self.stuck.values()) + self.arriving

    def committed(self) -> int:
        """Return the bytes that the model occupies or may occupy under its reservation."""
        return max(self.used(), self.reservation.size * self.reservation.sets if self.reservation else 0)

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
