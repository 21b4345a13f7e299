"""Snapshots of the registry, which nodes keep: what a daemon on another host needs to go on with a model, beside pieces.

A model's snapshot names files of the daemon's folder, by path and by the hashes of their blocks: its claim and small files, its
fleets, and of each READY version the manifest, the small files, the headers and the checksums of all pieces. A version is in it
as one of which the daemon lacks every piece. A snapshot with other files has a higher revision. Nodes are told the revisions in
their orders, fetch the blocks that they lack, and report what they keep.

    <root>/checksums/<fingerprint>/pieces.json    checksums of a whole version, which the next start does not compute again

With several replicas, a version is READY once nodes keep a snapshot with it (`await_keepers`), so that its registry and each of
its pieces are on as many hosts.
"""

import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import structlog
from blake3 import blake3
from resharder.converters.failpoints import failpoint
from resharder.converters.wire.pieces import Bitmap, PieceSpan, number_pieces
from resharder.converters.wire.term import Term
from resharder.server.infra.change_signal import ChangeSignal
from resharder.server.infra.checksums import checksum_of
from resharder.server.infra.filesystem import make_folder, matching, write_file
from resharder.server.nodes.decisions import ReplicasShort
from resharder.server.nodes.known_node import id_of
from resharder.server.standby.seals import seal_of
from resharder.server.state.errors import DaemonError, ResourceNotFound
from resharder.server.state.version import READY, VersionRecord
from resharder.server.store import manifest, model_files
from resharder.server.store.catalogue import Catalogue, StoredModel
from resharder.server.store.manifest import MANIFEST_FILE, BadManifest, Manifest
from resharder.server.store.partial import PIECES_FILE, MissingPieces, VerifiedVersion, read_missing
from resharder.v1 import node_pb2

BLOCK_BYTES = 1 << 20
_ANSWER_BYTES = 8 << 20  # of blocks in one answer
_LOOK_SECONDS = 1.0  # between two looks at the folder
_COUNTER_BITS = 32  # of a revision: snapshots of one process
_CHECKSUMS = "checksums"  # folder, with those of each whole version in a folder that is named after its fingerprint
_SHARED = ("drained_nodes.json", "fleets/starts")
_log = structlog.get_logger("resharder.standby")

KeepChecksum = Callable[[tuple[str, str, int], Callable[[], int]], int]
"""Function that returns the checksum of a version's fingerprint, file and first byte, computed by its argument if it is new."""


@dataclass
class _Keeper:
    """A live node that keeps snapshots, and the revision that it keeps of each model."""

    kept: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class _File:
    """A file of a snapshot: its size, and the blocks of its content by their hashes."""

    size: int
    blocks: Mapping[bytes, bytes]

    @classmethod
    def of(cls, content: bytes, size: int | None = None) -> "_File":
        parts = (content[at : at + BLOCK_BYTES] for at in range(0, len(content), BLOCK_BYTES))
        return cls(len(content) if size is None else size, {blake3(part).digest(): part for part in parts})


class Snapshots:
    """Snapshots of all models, and who keeps them. Thread-safe. Call `start`, then `close`.

    Nothing is read before a node keeps snapshots.

    Args:
        root: The daemon's folder.
        catalogue: The store's models.
        following: Function that returns the model of every fleet.
        checksum: Function that keeps checksums of pieces.
        term: Term of the daemon.
        start: Number of the daemon's start on its folder.
        keepers: Nodes that keep the registry with a version at READY; 0: READY waits for none.
        key: Key of seals; None for none.
        patience: Seconds without a further keeper after which a version that waits for them fails.
    """

    def __init__(
        self,
        root: Path,
        catalogue: Catalogue,
        following: Callable[[], Mapping[str, str]],
        checksum: KeepChecksum,
        term: Term,
        start: int,
        keepers: int,
        patience: float,
        key: bytes | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._root, self._catalogue, self._following = root, catalogue, following
        self._checksum, self._term, self._needed, self._patience, self._clock = checksum, term, keepers, patience, clock
        self._key = key
        self.changed = ChangeSignal()
        """Emitted when a snapshot has a new revision."""
        self._kept = ChangeSignal()
        self._building, self._lock = threading.Lock(), threading.Lock()
        self._newest, self._snapshots = start << _COUNTER_BITS, dict[str, node_pb2.Snapshot]()
        self._blocks: dict[bytes, bytes] = {}
        self._keepers: dict[str, _Keeper] = {}
        self._files: dict[Path, tuple[tuple[int, ...], _File]] = {}  # small files as they were read last, by path
        self._versions: dict[str, dict[str, _File]] = {}  # by fingerprint
        self._closed, self._due = False, ChangeSignal()
        self._thread = threading.Thread(target=self._loop, name="snapshots", daemon=True)

    def start(self) -> None:
        """Look at the folder from now on."""
        self._thread.start()

    def close(self) -> None:
        """End the loop."""
        self._closed = True
        self._due.emit()
        if self._thread.is_alive():
            self._thread.join()

    # Nodes

    def reported(self, report: node_pb2.SyncNodeRequest) -> None:
        """Record which snapshots a node keeps."""
        if not report.keeps_snapshots:
            return
        with self._lock:
            first, keeper = not self._keepers, self._keepers.setdefault(id_of(report), _Keeper())
            own = [each for each in report.snapshots if (each.registry, each.term) == (self._term.registry, self._term.number)]
            kept = {each.model: each.revision for each in own}
            differs, keeper.kept = kept != keeper.kept, kept
        if first:
            self._due.emit()
        if differs:
            self._kept.emit()

    def gone(self, *nodes: str) -> None:
        """Forget nodes that are lost or have left."""
        with self._lock:
            for id in nodes:
                self._keepers.pop(id, None)

    def revisions(self) -> list[node_pb2.SnapshotRevision]:
        """Return the newest revision of each model's snapshot, by model."""
        with self._lock:
            return [
                node_pb2.SnapshotRevision(model=model, revision=each.revision, registry=each.registry, term=each.term)
                for model, each in sorted(self._snapshots.items())
            ]

    def copies(self) -> dict[str, int]:
        """Return how many nodes keep the newest snapshot of each model."""
        with self._lock:
            kept = [keeper.kept for keeper in self._keepers.values()]
            return {m: sum(has.get(m) == each.revision for has in kept) for m, each in sorted(self._snapshots.items())}

    def get(self, model: str, known: Iterable[bytes]) -> node_pb2.GetSnapshotResponse:
        """Return a model's snapshot, and some of the blocks that are not `known`. Raises ResourceNotFound (MODEL_UNKNOWN)."""
        has = set(known)
        with self._lock:
            found = self._snapshots.get(model)
            if found is None:
                raise ResourceNotFound("MODEL_UNKNOWN", f"there is no snapshot of the registry of model {model!r}")
            blocks, size = list[bytes](), 0
            for digest in {digest: None for file in found.files for digest in file.blocks if digest not in has}:
                blocks.append(self._blocks[digest])
                size += len(blocks[-1])
                if size >= _ANSWER_BYTES:
                    break
            return node_pb2.GetSnapshotResponse(snapshot=found, blocks=blocks)

    # READY

    def await_keepers(self, versions: Collection[VerifiedVersion], problem: Callable[[], str]) -> None:
        """Wait until enough nodes keep snapshots with verified versions: all that keep any, if those are fewer.

        Args:
            versions: The versions.
            problem: Function that returns why these cannot be READY; empty if they can.

        Raises:
            ReplicasShort: `problem` returns one, or no further node keeps them.
        """
        if not self._needed:
            return
        before, since, wanted = -1, self._clock(), dict[str, int]()
        while True:
            seen = self._kept.count
            if why := problem():
                raise ReplicasShort(why)
            wanted = wanted or self._including(versions)
            kept, needed = self._keeping(wanted)
            if kept >= needed:
                failpoint("snapshot.kept")
                return
            if kept != before:
                before, since = kept, self._clock()
            elif self._clock() - since >= self._patience:
                raise ReplicasShort(
                    f"{kept} of {needed} nodes keep the registry with it: nothing has changed for {self._patience:g} s"
                )
            self._kept.wait(seen, _LOOK_SECONDS / 4)

    def _including(self, versions: Collection[VerifiedVersion]) -> dict[str, int]:
        """Return the revisions of snapshots that include versions, by model; empty if there are none yet."""
        self.refresh()
        manifests = {f"{_folder_of(each.manifest.record)}/{MANIFEST_FILE}" for each in versions}
        with self._lock:
            found = [each for model in {each.manifest.record.model for each in versions} if (each := self._snapshots.get(model))]
            if manifests <= {file.path for each in found for file in each.files}:
                return {each.model: each.revision for each in found}
            return {}

    def _keeping(self, wanted: Mapping[str, int]) -> tuple[int, int]:
        """Return how many nodes keep these revisions or later ones, and how many should."""
        with self._lock:
            kept = [keeper.kept for keeper in self._keepers.values()]
        found = sum(all(each.get(model, 0) >= revision for model, revision in wanted.items()) for each in kept) if wanted else 0
        return found, min(self._needed, len(kept))

    # Snapshots

    def refresh(self) -> None:
        """Read what has changed in the folder, and begin a new revision of each snapshot with other files."""
        with self._lock:
            if not self._keepers:
                return
        with self._building:
            fleets, found = self._following(), dict[str, dict[str, _File]]()
            for model in self._catalogue.stored():
                try:
                    found[model.name] = dict(self._model(model, [fleet for fleet, its in fleets.items() if its == model.name]))
                except (OSError, DaemonError, ValueError) as error:  # a version that has just ended, or a medium that fails
                    _log.debug("no_snapshot", model=model.name, reason=str(error))
            self._forget_files()
            changed = self._replace(found)
        if changed:
            self.changed.emit()

    def _replace(self, found: Mapping[str, Mapping[str, _File]]) -> bool:
        changed = False
        with self._lock:
            for model, files in found.items():
                listed = [
                    node_pb2.SnapshotFile(path=path, size_bytes=file.size, blocks=file.blocks) for path, file in files.items()
                ]
                if model in self._snapshots and listed == list(self._snapshots[model].files):
                    continue
                self._newest, changed = self._newest + 1, True
                made = self._snapshots[model] = node_pb2.Snapshot(
                    model=model, registry=self._term.registry, term=self._term.number, revision=self._newest, files=listed
                )
                made.seal = seal_of(made, self._key) if self._key is not None else b""
                self._blocks |= {digest: block for file in files.values() for digest, block in file.blocks.items()}
            used = {digest for each in self._snapshots.values() for file in each.files for digest in file.blocks}
            self._blocks = {digest: block for digest, block in self._blocks.items() if digest in used}
        return changed

    def _model(self, model: StoredModel, fleets: Sequence[str]) -> Iterator[tuple[str, _File]]:
        paths = [model.folder / "claim.json", *(self._root / f"fleets/{fleet}.json" for fleet in fleets)]
        paths += [self._root / name for name in _SHARED]
        for folder in model_files.folders(model.folder, model.files_epoch)[-1:]:
            paths += sorted(folder.iterdir())
        for path in paths:
            if (file := self._small(path)) is not None:
                yield str(path.relative_to(self._root)), file
        verified = model.verified.copy()
        versions = {number: (each.record, each.folder) for number, each in verified.items()}
        versions |= {each.number: (each, self._root / _folder_of(each)) for each in model.of(READY)}
        for number, (record, folder) in sorted(versions.items()):
            if record.fingerprint not in self._versions:
                self._versions[record.fingerprint] = self._version(folder, verified.get(number))
            for name, file in self._versions[record.fingerprint].items():
                yield f"{_folder_of(record)}/{name}", file

    def _small(self, path: Path) -> _File | None:
        """Return a small file, read again if it has changed; None if there is none."""
        try:
            stat = path.stat()
            identity = stat.st_dev, stat.st_ino, stat.st_mtime_ns, stat.st_size
            known = self._files.get(path)
            if known is None or known[0] != identity:
                known = self._files[path] = identity, _File.of(path.read_bytes())
            return known[1]
        except FileNotFoundError:
            return None

    def _version(self, folder: Path, verified: VerifiedVersion | None) -> dict[str, _File]:
        """Return the files of a version as of one of which every piece is missing."""
        content = manifest.load(folder)
        found = manifest.parse(folder, content)
        files = {name: _File.of((folder / name).read_bytes()) for name in found.other_files}
        files |= {each.path: _File.of(each.header, each.size) for each in found.files}
        pieces = self._pieces(folder, found, verified)
        return files | {MANIFEST_FILE: _File.of(manifest.encode_partial(content)), PIECES_FILE: _File.of(pieces.encode())}

    def _pieces(self, folder: Path, found: Manifest, verified: VerifiedVersion | None) -> MissingPieces:
        """Return the checksums of a version's pieces. Computed ones are kept in a file, for the next start of the daemon."""
        if verified is not None and verified.is_partial:
            return self._missing(found, lambda parts: [verified.checksum(part) for part in parts])
        known = self._root / _CHECKSUMS / found.record.fingerprint
        try:
            return read_missing(known, found.files)
        except BadManifest:
            computed = self._missing(found, lambda parts: self._compute(folder, found.record.fingerprint, parts))
        with suppress(OSError):
            write_file(make_folder(known) / PIECES_FILE, computed.encode())
        return computed

    def _missing(self, found: Manifest, checksums: Callable[[Sequence[PieceSpan]], Iterable[int]]) -> MissingPieces:
        numbering = number_pieces(found.files)
        parts = [part for piece in range(numbering.count) for part in numbering.parts(piece)]
        return MissingPieces(Bitmap(numbering.count), tuple(checksums(parts)), frozenset())

    def _compute(self, folder: Path, fingerprint: str, parts: Sequence[PieceSpan]) -> list[int]:
        computed = []
        for part in parts:
            with open(folder / part.file, "rb", buffering=0) as file:
                read = _reading(file.fileno(), part.start, part.end)
                computed.append(self._checksum((fingerprint, part.file, part.start), read))
        return computed

    def _forget_files(self) -> None:
        """Forget versions that have ended, and small files that are gone."""
        present = {record.fingerprint for model in self._catalogue.stored() for record in model.of(READY)}
        present |= {each.record.fingerprint for model in self._catalogue.stored() for each in model.verified.copy().values()}
        self._versions = {fingerprint: files for fingerprint, files in self._versions.items() if fingerprint in present}
        self._files = {path: file for path, file in self._files.items() if path.exists()}
        for folder in matching(self._root / _CHECKSUMS, "*"):
            if folder.name not in present:
                shutil.rmtree(folder, ignore_errors=True)

    def _loop(self) -> None:
        while not self._closed:
            seen = self._due.count
            try:
                self.refresh()
            except Exception as error:
                _log.error("snapshots_failed", exc_info=error)
            self._due.wait(seen, _LOOK_SECONDS)


def _folder_of(record: VersionRecord) -> str:
    """Return the path of a READY version's folder from the daemon's."""
    return f"models/{record.model}/versions/{record.number:08}"


def _reading(descriptor: int, start: int, end: int) -> Callable[[], int]:
    return lambda: checksum_of(descriptor, start, end)
