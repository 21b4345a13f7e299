"""A model of the store: what is known of it, and what of that lies on its medium."""

import json
import os
import re
import shutil
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import structlog
from resharder.converters.storage.files import FileLayout
from resharder.server.infra.filesystem import touching, write_at, write_file
from resharder.server.state.errors import InvalidArgument
from resharder.server.store import manifest, model_files
from resharder.server.store.manifest import ABORTED, READY, RETIRED, UPLOADING, VersionRecord
from resharder.server.store.redigest import renew

MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HISTORY = 1000  # RETIRED and ABORTED versions remembered of a model
_JOURNAL_BYTES = 8 << 20
_log = structlog.get_logger("resharder.store")


@dataclass(frozen=True)
class Claim:
    """The newest job's claim on a model."""

    job: str
    epoch: int
    world_size: int


@dataclass
class Room:
    """What the versions of one epoch are made of."""

    epoch: int
    files: Path  # config.json, tokenizer, index
    layouts: tuple[FileLayout, ...]
    size: int  # bytes of one version's safetensors files
    sets: int  # how many are used in turn
    pool: list[Path] = field(default_factory=list)
    pending: int = 0  # sets being made, taken for a version, or on their way out
    failure: OSError | None = None  # of the last set that was to be made


@dataclass
class StoredModel:
    name: str
    folder: Path
    claim: Claim | None = None
    jobs: dict[str, int] = field(default_factory=dict)
    number: int = 0
    epoch: int = 0
    records: dict[int, VersionRecord] = field(default_factory=dict)
    holders: dict[int, frozenset[str]] = field(default_factory=dict)
    room: Room | None = None
    yielding: set[tuple[int, str]] = field(default_factory=set)  # (number, holder) that let go when room is needed
    leaving: int = 0  # bytes of retired sets that are still there
    stuck: dict[Path, int] = field(default_factory=dict)  # folders that could not be removed, and their bytes
    arriving: int = 0  # bytes of versions that come back
    published: bool = False  # it has config.json and so on
    expected: bool = False  # versions of it are about to come back
    background: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(2, thread_name_prefix="store"))

    def put(self, *records: VersionRecord) -> None:
        self.records = self.records | {record.number: record for record in records}

    def of(self, state: str) -> list[VersionRecord]:
        return [record for record in self.records.values() if record.state == state]

    def sets(self, room: Room) -> int:
        live = sum(1 for r in self.records.values() if r.epoch == room.epoch and r.state in (READY, UPLOADING))
        return live + len(room.pool) + room.pending

    def used(self) -> int:
        live = sum(r.size_bytes for r in self.records.values() if r.state in (READY, UPLOADING))
        ahead = self.room.size * (len(self.room.pool) + self.room.pending) if self.room else 0
        return live + ahead + self.leaving + sum(self.stuck.values()) + self.arriving

    def committed(self) -> int:
        return max(self.used(), self.room.size * self.room.sets if self.room else 0)

    def forget_old(self) -> None:
        past = sorted(number for number, record in self.records.items() if record.state in (RETIRED, ABORTED))
        if old := past[:-_HISTORY]:
            self.records = {number: record for number, record in self.records.items() if number not in old}

    def sweep(self) -> None:
        """Leaves READY versions and what they need."""
        for leftover in ("pool", "staging", "retired"):
            shutil.rmtree(self.folder / leftover, ignore_errors=True)

    def write_claim(self, claim: Claim | None = None, jobs: Mapping[str, int] | None = None) -> None:
        """The last numbers given out, and `claim` and `jobs` instead of those it has. Raises MediumRefused."""
        claim = claim or self.claim
        said, epoch = (asdict(claim), max(self.epoch, claim.epoch)) if claim else (None, self.epoch)
        content = {"version": self.number, "epoch": epoch, "claim": said, "jobs": dict(self.jobs if jobs is None else jobs)}
        write_file(self.folder / "claim.json", json.dumps(content).encode())


def check_model_name(name: str) -> str:
    """The name. Raises InvalidArgument for one that is none."""
    if not MODEL_NAME.fullmatch(name):
        raise InvalidArgument(
            "MODEL_NAME",
            f"expected a model name of at most 64 letters, digits, '.', '_' and '-' that starts with a letter or digit, "
            f"got {name!r}",
        )
    return name


def recovered(folder: Path) -> StoredModel:
    """As a daemon of an earlier time left it; what was half done goes. Raises OSError where something cannot be read: that is not
    taken for gone."""
    model = StoredModel(folder.name, folder)
    model.sweep()
    with suppress(FileNotFoundError, ValueError, KeyError):
        said = json.loads((folder / "claim.json").read_bytes())
        model.number, model.epoch, model.jobs = int(said["version"]), int(said["epoch"]), dict(said["jobs"])
        if said["claim"]:
            model.claim = Claim(**said["claim"])
    for version in sorted((folder / "versions").glob("[0-9]*")):
        try:
            renew(version)
            record = manifest.read(version).record
            if record.model != model.name or record.number != int(version.name):
                raise manifest.BadManifest(f"{version.name}: its manifest is that of {record.name}")
            model.put(record)
        except ValueError as error:
            _log.error("version_dropped", model=model.name, folder=version.name, error=str(error))
            shutil.rmtree(version)
    model.number = max([model.number, *model.records])
    model.epoch = max([model.epoch, *(r.epoch for r in model.records.values())])
    model_files.drop_unfinished(folder)
    model.published = bool(model_files.folders(folder))
    _log.info("model_recovered", model=model.name, ready=sorted(model.records), epoch=model.epoch)
    return model


class History:
    """`history.jsonl` of the store at `root`. A line that the medium refuses is logged, and goes before the next one."""

    def __init__(self, root: Path) -> None:
        self._path = root / "history.jsonl"
        self._late: deque[bytes] = deque(maxlen=_HISTORY)
        self._torn = False

    def add(self, record: VersionRecord) -> None:
        content: dict[str, Any] = {k: v for k, v in asdict(record).items() if k != "slots"}
        self._late.append(json.dumps(content).encode() + b"\n")
        self.flush()

    def flush(self) -> None:
        if not self._late:
            return
        try:
            with touching(self._path, "appending to"):
                self._append()
        except OSError as error:
            _log.error("history_not_written", lines=len(self._late), error=str(error))

    def _append(self) -> None:
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            size = os.fstat(descriptor).st_size
            torn, self._torn = self._torn, True
            write_at(descriptor, (b"\n" if torn else b"") + b"".join(self._late), size)
            self._torn = False
            self._late.clear()
        finally:
            os.close(descriptor)
        if size > _JOURNAL_BYTES:
            self._path.replace(self._path.with_suffix(".1.jsonl"))


def remembered(root: Path) -> Iterator[VersionRecord]:
    path = root / "history.jsonl"
    for line in path.read_bytes().splitlines() if path.exists() else []:
        with suppress(ValueError, TypeError, KeyError):
            yield VersionRecord.of(json.loads(line))
