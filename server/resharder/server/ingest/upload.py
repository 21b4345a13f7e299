"""An UPLOADING version: received chunks, sealed slots, and verification before READY.

The life of an upload, in the store and on nodes alike:

    slot      open --SealSlot of its rank--> sealed
    file      open --closed by all its ranks----> proven, unless a process opens it for writing
                `--after the last SealSlot------> proven once no process has it open for writing
    set       laid out --> free --a version begins--> its files --the version has ended--> free again
                                                                   `--> held while a process has one open
    version   open --all slots sealed--> committing --the proofs are what the slots declare--> READY
                `--aborted, fenced, a rank silent or at a later step--`--they differ--> ABORTED

Slots are here, files in `holding/file_proofs.py`, sets in `holding/set_pool.py`; a version's folder in `store/lifecycle.py`,
and on a node in `node/file_sets.py`. The calls of the ranks are in `intake.py`.
"""

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash
from blake3 import blake3
from resharder.converters.geometry.layout import box_size
from resharder.converters.storage.digest import MASK
from resharder.converters.storage.files import FileLayout
from resharder.converters.storage.writable_files import WritableFiles
from resharder.converters.wire.chunk_frame import ChunkHeader
from resharder.converters.wire.pieces import number_pieces
from resharder.server.holding.file_proofs import FileProofs, ProofFailed
from resharder.server.holding.held_files import pieces_of
from resharder.server.holding.part_files import FileProof, GatheredBoxes
from resharder.server.infra.checksums import part_checksums
from resharder.server.infra.filesystem import touching
from resharder.server.ingest.boxes import Slot
from resharder.server.ingest.publisher import PublisherRecord
from resharder.server.nodes.homes import HomeLost, HomeRegister, NodeHome
from resharder.server.state.errors import AlreadyExists, DataLoss, FailedPrecondition, InvalidArgument
from resharder.server.state.timing import Timing
from resharder.server.state.version import VersionRecord
from resharder.server.store.digests import begin_digests
from resharder.server.store.partial import MissingPieces

MAPPED = "shared-memory"
"""Transport of slots that ranks write into mapped files."""
AT_HOME = "node"
"""Transport of slots of which ranks write boxes into a node's files."""


@dataclass(frozen=True)
class SlotDelivery:
    """Report of a rank with its seal.

    `trace` is the W3C traceparent of the trainer's span, or empty; `home_bytes` are those in a node's files, `unsent_bytes` those
    of boxes that it did not send, since they are unchanged.
    """

    timings: tuple[Timing, ...]
    transport: str
    size_bytes: int
    trace: str
    home_bytes: int = 0
    unsent_bytes: int = 0


class VersionGroup(NamedTuple):
    """Versions that become READY together: those of one step of a job, one of each model that it publishes together."""

    job: str
    step: int
    models: frozenset[str]


class Proof(NamedTuple):
    """Verified digest of every tensor of a version, and the pieces that nodes alone hold; None if the daemon holds all."""

    digests: dict[str, int]
    missing: MissingPieces | None = None


_LEAST_SECONDS, _BYTES_PER_SECOND = 60.0, 100 << 20  # for a node's proof


class HomeFiles:
    """The files of one UPLOADING version whose homes are nodes.

    Args:
        nodes: The nodes.
        version: Resource name of the version.
        homes: Its homes.
        files: All of its files.
    """

    def __init__(self, nodes: HomeRegister, version: str, homes: Iterable[NodeHome], files: Iterable[FileLayout]) -> None:
        self._nodes, self._version, self.homes = nodes, version, tuple(homes)
        paths = {path for home in self.homes for path in home.files}
        self.files = tuple(file for file in files if file.path in paths)
        self.paths = frozenset(paths)

    def of(self, host: str | None) -> NodeHome | None:
        """Return the home of ranks on a host; None if they send all boxes to the daemon."""
        return next((home for home in self.homes if home.node == host), None)

    def closed(self, files: Collection[str]) -> None:
        """Have the nodes verify some of their files, which all ranks have closed."""
        if files:
            self._nodes.closed(self._version, files)

    def verify(self, unchanged: Mapping[str, Sequence[GatheredBoxes]]) -> None:
        """Have the nodes verify their files: all ranks have sealed. `unchanged`: see `HomeRegister.verify`."""
        if self.files:
            self._nodes.verify(self._version, unchanged)

    def digests(self) -> dict[str, int]:
        """Wait for the nodes, and return the digest that each reports of each tensor in its files. Raises HomeLost."""
        proofs, found = self._proofs(), dict[str, int]()
        for file in self.files:
            found |= zip(file.by_name, proofs[file.path].digests, strict=True)
        return found

    def missing(self, folder: Path, files: Sequence[FileLayout], there: Collection[str]) -> MissingPieces:
        """Return the pieces of these files, as pieces of a version with `files`, the others of which are in `folder`.

        So are those of `there`. Raises HomeLost, OSError.
        """
        proofs, numbering = self._proofs(), number_pieces(files)
        own = {file.path: part_checksums(folder / file.path, file.size) for file in files if file.path not in self.paths}
        checksums = [value for file in files for value in own.get(file.path) or proofs[file.path].checksums]
        held = pieces_of(numbering, [file for file in files if file.path in own or file.path in there])
        return MissingPieces(held, tuple(checksums), frozenset(home.node for home in self.homes if home.files))

    def _proofs(self) -> Mapping[str, FileProof]:
        if not self.files:
            return {}
        size = sum(file.size for file in self.files)
        return self._nodes.proofs(self._version, max(_LEAST_SECONDS, size / _BYTES_PER_SECOND))


class ReleasedFiles:
    """Files of a version and the ranks that still write into them. `writers` has these ranks by file."""

    def __init__(self, writers: Mapping[str, Collection[int]]) -> None:
        self._writers = {file: set(ranks) for file, ranks in writers.items()}

    def release(self, rank: int, files: Sequence[str]) -> list[str]:
        """Record that a rank has closed files, and return the files whose last writer it was.

        Raises InvalidArgument (MODEL_FILE) for a file that the version does not have; nothing has changed then.
        """
        if unknown := [file for file in files if file not in self._writers]:
            raise InvalidArgument("MODEL_FILE", f"expected files of the version, got {unknown[0][:200]!r}")
        complete = []
        for file in files:
            if rank in self._writers[file]:
                self._writers[file].remove(rank)
                if not self._writers[file]:
                    complete.append(file)
        return complete


class Upload:
    """UPLOADING version: its received chunks and sealed slots. Thread-safe.

    `_lock` guards the bitmaps, the seals and the number of copies in progress; copies run outside it.
    """

    def __init__(
        self,
        record: VersionRecord,
        publisher: PublisherRecord,
        folder: Path,
        files: Sequence[FileLayout],
        *,
        chunk_bytes: int,
        shared: bool,
        threads: int,
        now: float,
        homes: HomeFiles,
        frozen_from: int = 0,
    ) -> None:
        """Create an upload. `frozen_from`: see Version in `resources.proto`."""
        self.record, self.publisher, self.folder, self.created, self.homes = record, publisher, folder, now, homes
        self.group = VersionGroup(publisher.job, record.step, frozenset({publisher.model, *publisher.together}))
        self.proof: Proof | None = None  # once it is verified; guarded by the intake's lock
        self.deliveries: dict[int, SlotDelivery] = {}
        self.timings: list[Timing] = []  # of the daemon's own phases
        self.begun: dict[int, str] = {}  # rank -> its process that was given the version; guarded by the intake's lock
        self._files, self._chunk_bytes, self.frozen_from = files, chunk_bytes, frozen_from
        self._frozen = {file.path: file for file in files if publisher.is_frozen(file)}
        self._linked = {*self._frozen} if frozen_from else set[str]()  # files that are those of `frozen_from`
        self._unchanged: set[int] = set()  # ranks that have left their frozen boxes as they are
        self._thawing = threading.Lock()
        self._lock = threading.Condition()
        self._writable: WritableFiles | None = None
        self._landing = 0
        self._closed = self._aborted = False
        self._received: dict[int, npt.NDArray[np.bool_]] = {}
        self._transports: dict[int, str] = {}  # of each rank's last chunk
        self._sealed = {rank: _digests([]) for rank, boxes in publisher.boxes.items() if not len(boxes)}
        self._released: ReleasedFiles | None = None  # from the first release on
        self._proofs = FileProofs(folder, files, begin_digests, threads, shared=shared)

    def slot(self, rank: int) -> Slot:
        """Return the boxes and chunks that a rank sends to the daemon, cut at first use."""
        home = self.homes.of(self.publisher.hosts.get(rank))
        return self.publisher.slot(rank, self._chunk_bytes, home.gathers if home is not None else None)

    def _size(self, rank: int) -> int:
        """Return the bytes of a rank's boxes, those in a node's files included."""
        return self.publisher.slot(rank, self._chunk_bytes).size_bytes

    def land(self, header: ChunkHeader, data: memoryview, transport: str = "grpc") -> None:
        """Write a chunk to the version's files. All checks precede the first write; a repeated chunk is accepted.

        Raises InvalidArgument (RANK, CHUNK_INDEX, CHUNK_LENGTH), DataLoss (CHECKSUM), FailedPrecondition (VERSION_ABORTED,
        VERSION_CLOSED), MediumRefused.
        """
        self.publisher.check_rank(header.rank)
        slot = self.slot(header.rank)
        if header.index >= slot.chunks:
            raise InvalidArgument("CHUNK_INDEX", f"rank {header.rank} has {slot.chunks} chunks, got number {header.index}")
        expected = int(slot.sizes[header.index])
        if len(data) != expected:
            raise InvalidArgument(
                "CHUNK_LENGTH", f"rank {header.rank} chunk {header.index}: expected {expected} bytes, got {len(data)}"
            )
        found = xxhash.xxh3_64_intdigest(data)
        if found != header.checksum:
            raise DataLoss(
                "CHECKSUM", f"rank {header.rank} chunk {header.index}: expected xxh3 {header.checksum:016x}, got {found:016x}"
            )
        if header.index < slot.frozen_chunks and self._shared(header.rank):
            raise InvalidArgument(
                "CHUNK_INDEX",
                f"rank {header.rank} chunk {header.index} is of a file that {self.record.name} shares with version "
                f"{self.frozen_from}: call ThawFiles first",
            )
        files = self._enter(header.rank)
        if files is None:
            return
        try:
            with touching(self.folder, "writing", len(data)):
                self._copy(files, slot, header.index, data)
        finally:
            with self._lock:
                self._landing -= 1
                self._lock.notify_all()
        with self._lock:
            self._bitmap(header.rank)[header.index] = True
            self._transports[header.rank] = transport

    def _enter(self, rank: int) -> WritableFiles | None:
        """Return the writable files, or None if the slot is sealed."""
        with self._lock:
            self._check_open()
            if rank in self._sealed:
                return None
            if self._writable is None:
                self._proofs.drop()  # the kernel lets this process open no leased file for writing either
                with touching(self.folder, "mapping"):
                    own = [file for file in self._files if file.path not in self._linked]
                    self._writable = WritableFiles(self.folder, own)
            self._landing += 1
            return self._writable

    def _copy(self, files: WritableFiles, slot: Slot, chunk: int, data: memoryview) -> None:
        at = 0
        for position, box in slot.parts(chunk):
            spec = self.publisher.specs[int(slot.boxes.tensors[position])]
            size = box_size(box) * int(slot.item_sizes[position])
            files.put_bytes(spec, box, data[at : at + size])
            at += size

    def _check_open(self) -> None:
        if self._aborted:
            raise FailedPrecondition("VERSION_ABORTED", f"{self.record.name} is aborted, and takes no more bytes")
        if self._closed:
            raise FailedPrecondition("VERSION_CLOSED", f"{self.record.name} is complete, and takes no more bytes")

    def _bitmap(self, rank: int) -> npt.NDArray[np.bool_]:
        if rank not in self._received:
            self._received[rank] = np.zeros(self.slot(rank).chunks, bool)
        return self._received[rank]

    def missing(self, rank: int) -> list[int]:
        """Return the indices of a rank's chunks that have not arrived; none after its seal. Raises InvalidArgument (RANK)."""
        self.publisher.check_rank(rank)
        with self._lock:
            return [] if rank in self._sealed else [int(i) for i in np.flatnonzero(~self._bitmap(rank))]

    def _shared(self, rank: int) -> list[str]:
        """Return the files of a rank's frozen boxes that the version shares."""
        return sorted(self._frozen_files(rank) & self._linked) if self._linked else []

    def _frozen_files(self, rank: int) -> set[str]:
        """Return the files of a rank's frozen boxes."""
        tensors = {int(number) for number in self.publisher.boxes[rank].tensors} & self.publisher.frozen
        names = {self.publisher.specs[number].name for number in tensors}
        return {path for path, file in self._frozen.items() if not names.isdisjoint(file.by_name)}

    def thaw(self, rank: int, replace: Callable[[Collection[str]], object]) -> None:
        """Let a rank write its frozen boxes; a no-op if it may, or has sealed.

        `replace` replaces shared files by copies.

        Raises InvalidArgument (RANK), FailedPrecondition (VERSION_ABORTED, VERSION_CLOSED), and the errors of `replace`.
        """
        self.publisher.check_rank(rank)
        with self._lock:
            self._check_open()
            if rank in self._sealed:
                return
            self._landing += 1
        try:
            with self._thawing:
                if not (paths := self._shared(rank)):
                    return
                self._proofs.forget(paths)
                replace(paths)
                with self._lock:
                    if self._writable is not None:
                        with touching(self.folder, "mapping"):
                            for path in paths:
                                self._writable.add(self.folder, self._frozen[path])
                    self._linked -= {*paths}
        finally:
            with self._lock:
                self._landing -= 1
                self._lock.notify_all()

    def release(self, rank: int, files: Sequence[str], *, unchanged: bool = False) -> None:
        """Record that a rank has written and closed files, and digest files that all of their writers have closed.

        With `unchanged`, the files of its frozen boxes are among them, if the version shares them. A no-op after the last seal.
        Raises InvalidArgument (RANK, MODEL_FILE).
        """
        self.publisher.check_rank(rank)
        with self._lock:
            if self._closed:
                return
            files = [*files, *(self._shared(rank) if unchanged else ())]
            if self._released is None:
                self._released = ReleasedFiles(self._writers())
            complete = self._released.release(rank, files)
            late = {*self._frozen} if self.frozen_from else set[str]()  # nodes may have to complete them by those of the base
            self.homes.closed(self.homes.paths.intersection(complete) - late)
            if self._writable is None:
                self._proofs.begin([file for file in complete if file not in self._elsewhere])

    def _writers(self) -> dict[str, list[int]]:
        """Return the ranks that send boxes into each file."""
        file_of = {placed.spec.name: i for i, file in enumerate(self._files) for placed in file.tensors}
        numbers = np.array([file_of[spec.name] for spec in self.publisher.specs], np.int64)
        writers: dict[str, list[int]] = {file.path: [] for file in self._files}
        for rank, boxes in self.publisher.boxes.items():
            for i in np.unique(numbers[boxes.tensors]).tolist():
                writers[self._files[i].path].append(rank)
        return writers

    def seal(
        self,
        rank: int,
        digests: Sequence[int],
        mapped: bool,
        timings: tuple[Timing, ...] = (),
        trace: str = "",
        *,
        unchanged: bool = False,
    ) -> bool:
        """Seal a slot and return whether it was the last open one. An identical repeated seal returns False.

        `unchanged`: whether the rank has left its frozen boxes as they are in `frozen_from`.

        Raises InvalidArgument (RANK, DIGESTS), FailedPrecondition (MISSING_CHUNKS, VERSION_ABORTED, VERSION_CLOSED),
        AlreadyExists (SLOT_DIFFERS).
        """
        self.publisher.check_rank(rank)
        boxes = len(self.publisher.boxes[rank])
        if len(digests) != boxes:
            raise InvalidArgument("DIGESTS", f"rank {rank} delivers {boxes} boxes, got {len(digests)} digests")
        packed = _digests(digests)
        with self._lock:
            if rank in self._sealed:
                if not np.array_equal(self._sealed[rank], packed):
                    raise AlreadyExists(
                        "SLOT_DIFFERS",
                        f"{self.record.name}: rank {rank} has sealed other bytes before: publish these as another step",
                    )
                return False
            self._check_open()
            self._check_frozen(rank, unchanged=unchanged)
            slot = self.slot(rank)
            first = slot.frozen_chunks if unchanged else 0
            missing = 0 if mapped else int(np.count_nonzero(~self._bitmap(rank)[first:]))
            if missing:
                raise FailedPrecondition(
                    "MISSING_CHUNKS",
                    f"{self.record.name}: {missing} of {self.slot(rank).chunks} chunks of rank {rank} are missing",
                )
            self._sealed[rank] = packed
            whole, sent = self.publisher.slot(rank, self._chunk_bytes), slot.size_bytes
            size, unsent = whole.size_bytes, whole.frozen_bytes if unchanged else 0
            home = size - sent - (whole.frozen_bytes - slot.frozen_bytes if unchanged else 0)
            self._unchanged |= {rank} if unchanged else set()
            transport = AT_HOME if size > sent else MAPPED if mapped else self._transports.get(rank, "grpc")
            self.deliveries[rank] = SlotDelivery(timings, transport, size - unsent, trace, home, unsent)
            if len(self._sealed) < self.publisher.world_size:
                return False
            self._closed = True
            return True

    def _check_frozen(self, rank: int, *, unchanged: bool) -> None:
        """Raise InvalidArgument (DIGESTS) for a rank that has sent nothing of what is not there, or written what is shared."""
        home = self.homes.of(self.publisher.hosts.get(rank))
        alone = home is not None and not home.shares and not self._frozen_files(rank).isdisjoint(home.files)
        if unchanged and (not self.frozen_from or alone):
            raise InvalidArgument("DIGESTS", f"rank {rank} calls its frozen boxes unchanged, and {self.record.name} shares none")
        if not unchanged and (shared := self._shared(rank)):
            raise InvalidArgument(
                "DIGESTS",
                f"rank {rank} has sent boxes of {shared[0]}, which {self.record.name} shares with version {self.frozen_from}: "
                "call ThawFiles first",
            )

    @property
    def unsent_bytes(self) -> int:
        """Bytes that no rank has sent, since they are those of the version before. Call after the last seal."""
        return sum(delivery.unsent_bytes for delivery in self.deliveries.values())

    def open_ranks(self, among: Iterable[int] | None = None) -> list[int]:
        """Return the ranks that have not sealed their slots, of `among` or of all."""
        with self._lock:
            asked = range(self.publisher.world_size) if among is None else among
            return [rank for rank in asked if rank not in self._sealed]

    def progress(self) -> list[tuple[int, bool, int, int]]:
        """Return (rank, sealed, bytes, received bytes) of every slot."""
        with self._lock:
            sealed, arrived = set(self._sealed), {rank: bits.copy() for rank, bits in self._received.items()}
        found = []
        for rank in range(self.publisher.world_size):
            size = self._size(rank)
            received = int(self.slot(rank).sizes[arrived[rank]].sum()) if rank in arrived else 0
            found.append((rank, rank in sealed, size, size if rank in sealed else received))
        return found

    def close(self, *, aborted: bool = False) -> None:
        """Refuse further writes, wait for those in progress, and close the daemon's own writable files."""
        with self._lock:
            self._closed, self._aborted = True, self._aborted or aborted
            self._lock.wait_for(lambda: self._landing == 0)
            files, self._writable = self._writable, None
        if files is not None:
            files.close()
        if aborted:
            self._proofs.drop()

    @property
    def aborted(self) -> bool:
        return self._aborted

    def slot_digests(self) -> tuple[tuple[int, str], ...]:
        """Return each rank with the BLAKE3 of its slot's digests, for the version's record. Call after the last seal."""
        return tuple((rank, hash_digests(values)) for rank, values in sorted(self._sealed.items()))

    def prove(self, patience: float) -> Proof:
        """Close the upload, wait for the last writer to close the files, and return the verified digest of every tensor.

        Digests that were taken early, of files that no process has opened for writing since, are not taken again. Files on nodes
        are verified there.

        Args:
            patience: Seconds to wait for other processes that have the files open for writing.

        Raises ProofFailed, OSError.
        """
        self.close()
        self.homes.verify(self._unchanged_at_home())
        taken = self._digest([file for file in self._files if file.path not in self._elsewhere], patience)
        sent = self._sent_digests()
        _compare(taken, sent, "the store holds")
        try:
            at_home = self.homes.digests()
            _compare(at_home, sent, "a node holds")
            with touching(self.folder, "verifying"):
                missing = self.homes.missing(self.folder, self._files, self._linked) if self.homes.files else None
        except HomeLost as error:
            raise ProofFailed(str(error)) from error
        taken |= at_home
        return Proof({name: taken[name] for file in self._files for name in file.by_name}, missing)

    @property
    def _elsewhere(self) -> set[str]:
        """Files that the store lacks: those on nodes, apart from those that the version shares."""
        return {*self.homes.paths} - self._linked

    def _unchanged_at_home(self) -> dict[str, list[GatheredBoxes]]:
        """Return the boxes on each node that ranks have left as they are in `frozen_from`; no boxes of a whole file."""
        found: dict[str, list[GatheredBoxes]] = {}
        for home in self.homes.homes if self._unchanged else ():
            ranks = [rank for rank in sorted(self._unchanged) if self.publisher.hosts.get(rank) == home.node]
            for path in sorted({*home.files} & self._frozen.keys()):
                if path in self._linked:
                    boxes = []
                else:
                    numbers = [self.publisher.numbers[name] for name in self._frozen[path].by_name]
                    boxes = [
                        (self.publisher.specs[int(mine.tensors[position])].name, mine.box(position))
                        for mine in (self.publisher.boxes[rank] for rank in ranks)
                        for position in np.flatnonzero(np.isin(mine.tensors, numbers)).tolist()
                    ]
                if boxes or path in self._linked:
                    found.setdefault(home.node, []).append(GatheredBoxes(path, "", tuple(boxes)))
        return found

    def _digest(self, files: Sequence[FileLayout], patience: float) -> dict[str, int]:
        """Return the digest of each tensor in files."""
        with touching(self.folder, "verifying"):
            proofs = self._proofs.prove(files, patience)
        return {name: value for digests in proofs.values() for name, value in digests.items()}

    def _sent_digests(self) -> dict[str, int]:
        """Return the sum of the ranks' digests of each tensor."""
        totals = np.zeros(len(self.publisher.specs), np.uint64)
        for rank, digests in self._sealed.items():
            np.add.at(totals, self.publisher.boxes[rank].tensors, digests)
        return {spec.name: int(total) & MASK for spec, total in zip(self.publisher.specs, totals, strict=True)}


def _compare(found: Mapping[str, int], sent: Mapping[str, int], where: str) -> None:
    """Raise ProofFailed if a tensor has another digest than the ranks' boxes of it."""
    wrong = sorted(name for name in found if found[name] != sent[name])
    if wrong:
        first = f"{wrong[0]}: the ranks' digests add up to {sent[wrong[0]]:016x}, {where} {found[wrong[0]]:016x}"
        raise ProofFailed(f"{len(wrong)} of {len(found)} tensors are not what was sent: {', '.join(wrong[:8])}. {first}")


def _digests(values: Sequence[int]) -> npt.NDArray[np.uint64]:
    return np.array(values, np.uint64)


def hash_digests(values: Sequence[int] | npt.NDArray[np.uint64]) -> str:
    """Return the BLAKE3 of a slot's digests, hexadecimal."""
    return str(blake3(np.asarray(values, "<u8").tobytes()).hexdigest())
