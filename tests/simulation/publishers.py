"""Trainer ranks as the SDK's calls make them: they register, publish step after step, retry, stop, die and are replaced."""

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import xxhash
from resharder.client.trainer.session import Attempts
from resharder.converters.geometry.chunking import cut_chunks
from resharder.converters.geometry.layout import ITEM_SIZES, box_index
from resharder.converters.storage.files import BITS
from resharder.converters.wire.chunk_frame import ChunkHeader
from resharder.server.infra.change_signal import Pause
from resharder.server.ingest.publisher import PublisherRecord
from resharder.server.state.version import ABORTED, READY, RETIRED, UPLOADING, VersionRecord

from tests.simulation.daemon import LEASE, UNREACHABLE, Answer, SimulatedDaemon
from tests.simulation.filesystem import MappedArray
from tests.simulation.medium import Medium
from tests.simulation.models import FILES, Model, Weights, digest_of, layouts, packed, part, weights
from tests.simulation.schedule import NOW, Process, Wait

NAME = "policy"
_PATIENCE = 20  # refusals for want of capacity
Steps = Generator[Wait, None, Any]


class Records(Protocol):
    """Reports of ranks to the invariants."""

    def answered(self, answer: Answer) -> None: ...
    def delivers(self, record: VersionRecord, rank: int, variant: str, positions: Sequence[int]) -> None: ...
    def claims(self, job: str) -> None: ...
    def takes_over(self, job: str) -> AbstractContextManager[None]: ...
    def claimed(self, job: str, epoch: int) -> None: ...
    def is_fenced(self, job: str) -> None: ...
    def begins(self, record: VersionRecord, after: int, versions: Sequence[VersionRecord]) -> None: ...


@dataclass
class Job:
    """A job: its name, model and habits. `target` is the step that its ranks publish up to."""

    name: str
    model: Model
    target: int
    mapped: bool
    varies: bool  # whether each process of a rank computes other weights
    waits: bool  # whether a rank waits for READY before its next step
    fenced: bool = False
    insists: bool = False  # whether no rank skips the last step
    torn: bool = False  # whether no rank holds the first tensor, so that the daemon refuses the job
    stalls: float = 0.0  # chance that a rank is stopped, for up to three leases, before it writes a box


class Rank:
    """One process of a rank. `first` is the step that it begins with."""

    def __init__(
        self, daemon: SimulatedDaemon, medium: Medium, records: Records, job: Job, rank: int, serial: int, first: int
    ) -> None:
        self.daemon, self.medium, self.records, self.job, self.rank = daemon, medium, records, job, rank
        self.schedule, self.random = daemon.schedule, daemon.schedule.random
        self.process = Process(f"{job.name} rank {rank} process {serial}")
        self.variant = self.process.name if job.varies else ""
        self.attempts = Attempts()
        self.step = first
        self.publisher, self.refusals = "", 0
        self.positions: Sequence[int] = ()
        self.frozen_from = 0  # of the version that was created last
        self.known: dict[int, list[int]] = {}  # digests of the frozen boxes of each version that it has sealed

    def start(self) -> None:
        self.schedule.follow(self.process.name, self.process, self._run())
        self.schedule.follow(f"{self.process.name} lease", self.process, self._renew())

    def end(self) -> None:
        """Kill the process."""
        self.schedule.kill(self.process)
        self.medium.files.end_process(self.process.name)

    # Calls

    def _call(self, name: str, function: Any, patience: float = 8.0) -> Generator[Wait, None, Answer]:
        """Call until there is an answer."""
        while True:
            answer = yield from self.daemon.call(name, function, patience)
            if answer.reason != UNREACHABLE:
                if answer.reason == "STALE_EPOCH":
                    self.records.is_fenced(self.job.name)
                    self.job.fenced = True
                if answer.reason == "LAYOUT_MISMATCH":
                    assert self.job.torn, f"{self.job.name} is refused, and its slots tile the model"
                    self.job.fenced = True
                return answer
            yield None, self.schedule.now + self.random.random()

    def _renew(self) -> Steps:
        while not self.job.fenced:
            yield None, self.schedule.now + LEASE / 3
            if self.publisher:
                yield from self.daemon.call("RenewLease", partial(_renew, name=self.publisher, rank=self.rank), 2.0)

    # Life

    def _run(self) -> Steps:
        while not self.job.fenced:
            if self.step > self.job.target:
                yield (lambda: self.step <= self.job.target or self.job.fenced), None
                continue
            if not self.publisher and not (yield from self._register()):
                yield None, self.schedule.now + self.random.random()
                continue
            done = yield from self._publish(self.step)
            if done:
                self.step += 1
            else:
                yield None, self.schedule.now + self.random.random() * 0.5

    def _register(self) -> Generator[Wait, None, bool]:
        job, rank = self.job, self.rank
        files = FILES if rank == 0 else {}

        def create(daemon: SimulatedDaemon) -> PublisherRecord:
            self.records.claims(job.name)
            return daemon.intake.create_publisher(NAME, job.name, job.model.world_size, files)

        answer = yield from self._call("CreatePublisher", create)
        if not answer.ok:
            return False
        publisher, epoch = answer.result.name, answer.result.epoch
        self.records.claimed(job.name, epoch)

        def register(daemon: SimulatedDaemon) -> int:
            boxes = packed(job.model, rank, torn=job.torn)
            with nullcontext() if job.torn else self.records.takes_over(job.name):
                slot = f"rank {rank}", job.model.specs, boxes, self.process.name
                daemon.intake.register_slot(publisher, rank, *slot, frozen=job.model.frozen)
            return daemon.store.catalogue.newest_number(NAME)

        answer = yield from self._call("RegisterSlot", register)
        if not answer.ok:
            return False
        self.attempts.registered(answer.result)
        answer = yield from self._call("GetAssignment", lambda d: d.intake.assignment(publisher, rank, 2.0), patience=10.0)
        if not answer.ok:
            return False
        self.positions, self.publisher = answer.result[1], publisher
        return True

    def _publish(self, step: int) -> Generator[Wait, None, bool]:
        """Return whether the rank goes on with the next step."""
        after, publisher = self.attempts.after(step), self.publisher

        def create(daemon: SimulatedDaemon) -> Generator[Pause, None, VersionRecord]:
            record = yield from daemon.intake.create_version(publisher, self.rank, step, after)
            self.records.begins(record, after, daemon.store.catalogue.versions(NAME))
            upload = daemon.intake.upload(NAME, record.number)
            self.frozen_from = upload.frozen_from if upload is not None else 0
            return record

        answer = yield from self._call("CreateVersion", create, patience=30.0)
        if answer.reason in ("PUBLISHER_UNKNOWN", "NOT_REGISTERED"):
            self.publisher = ""
            return False
        if answer.reason == "TOO_MANY_UPLOADING":
            self.refusals += 1
            return self.refusals % _PATIENCE == 0 and self.step < self.job.target  # the trainer gives up the step
        if not answer.ok:
            return answer.reason == "VERSION_ABORTED" and self._skips()
        record: VersionRecord = answer.result
        self.records.answered(answer)
        self.attempts.begun(step, record.number)
        if record.state == ABORTED:
            return self._skips()
        if self.positions and record.state in (UPLOADING, READY, RETIRED):
            values = weights(self.job.model, self.job.name, step, self.variant)
            if not (yield from self._deliver(record, values)):
                return False
        if not (self.job.waits or step == self.job.target):
            return True
        return (yield from self._wait(record.number))

    def _skips(self) -> bool:
        """Whether the trainer gives up an aborted step. In the end it tries the last one until it is READY."""
        return self.random.random() < 0.4 and (self.step < self.job.target or not self.job.insists)

    def _wait(self, number: int) -> Generator[Wait, None, bool]:
        for _ in range(20):
            answer = yield from self._call("WaitVersion", lambda d: d.intake.wait_version(NAME, number, 3.0, False), patience=6.0)
            if not answer.ok:
                self.publisher = ""
                return False
            self.records.answered(answer)
            if answer.result.state in (READY, RETIRED):
                return True
            if answer.result.state == ABORTED:
                return False
        return False

    # Delivery

    def _deliver(self, record: VersionRecord, values: Weights) -> Generator[Wait, None, bool]:
        """Send the rank's part and seal it; a failed delivery aborts the version, as in the SDK."""
        mapped, unchanged = self.job.mapped, False
        digests = [digest_of(values, self.job.model, self.rank, position) for position in self.positions]
        frozen = [digest for digest, at in zip(digests, self.positions, strict=True) if self._is_frozen(at)]
        if record.state == UPLOADING:
            unchanged = bool(frozen and self.frozen_from and self.known.get(self.frozen_from) == frozen)
            if not (yield from self._prepare_frozen(record, frozen, unchanged)):
                yield from self._abort(record)
                return False
            sent = yield from self._write(record, values, unchanged) if mapped else self._send(record, values, unchanged)
            if not sent:
                yield from self._abort(record)
                return False
        self.records.delivers(record, self.rank, self.variant, self.positions)
        answer = yield from self._call(
            "SealSlot",
            lambda d: d.intake.seal_slot(NAME, record.number, record.epoch, self.rank, digests, mapped, unchanged=unchanged),
        )
        if answer.ok:
            self.known[record.number] = frozen
            self.daemon.counts["slots with unchanged boxes"] += unchanged
            self.records.answered(answer)
            return True
        if answer.reason == "SLOT_DIFFERS":
            return self.job.varies  # another process of the rank has published the step
        if answer.reason == "VERSION_RETIRED":
            return True  # a daemon that was restarted has no digests of retired versions
        if answer.reason not in ("VERSION_UNKNOWN", "MODEL_UNKNOWN"):
            yield from self._abort(record)
        return False

    def _is_frozen(self, position: int) -> bool:
        return self.job.model.held[self.rank][position][0] in self.job.model.frozen

    def _prepare_frozen(self, record: VersionRecord, frozen: Sequence[int], unchanged: bool) -> Generator[Wait, None, bool]:
        """Report that frozen boxes stay as they are, or have their files replaced by ones that the rank may write."""
        if unchanged:
            if self.random.random() < 0.7:
                release = partial(_release, record=record, rank=self.rank, unchanged=True)
                yield from self.daemon.call("ReleaseFiles", release, self.random.choice((0.1, 2.0)))
        elif frozen and self.frozen_from:
            thaw = partial(_thaw, record=record, rank=self.rank)
            self.daemon.counts["files thawed"] += 1
            return (yield from self._call("ThawFiles", thaw)).ok
        return True

    def _abort(self, record: VersionRecord) -> Steps:
        answer = yield from self.daemon.call(
            "AbortVersion", lambda d: d.intake.abort_version(NAME, record.number, record.epoch, "a failed delivery"), 2.0
        )
        if answer.ok:
            self.records.answered(answer)

    def _send(self, record: VersionRecord, values: Weights, unchanged: bool) -> Generator[Wait, None, bool]:
        """Send the missing chunks."""
        model, number, epoch = self.job.model, record.number, record.epoch
        held = [model.held[self.rank][position] for position in self.positions]
        frozen, boxes = ([each for each in held if (each[0] in model.frozen) == wanted] for wanted in (True, False))
        cut = [
            [(box, part) for p, part in chunk for box in [some[p]]]
            for some in (frozen, boxes)
            for chunk in cut_chunks(
                [box for _, box, _ in some], [ITEM_SIZES[model.specs[t].dtype] for t, _, _ in some], model.chunk_bytes
            )
        ]
        first = len(
            cut_chunks([b for _, b, _ in frozen], [ITEM_SIZES[model.specs[t].dtype] for t, _, _ in frozen], model.chunk_bytes)
        )
        missing: list[int] = list(range(first if unchanged else 0, len(cut)))
        for _ in range(4):
            for index in missing:
                parts = ((values[model.specs[tensor].name], box) for (tensor, _, _), box in cut[index])
                data = b"".join((array[box_index(box)] if box else array).tobytes() for array, box in parts)
                header = ChunkHeader(number, epoch, self.rank, index, xxhash.xxh3_64_intdigest(data))
                land = partial(_land, header=header, data=data)
                answer = yield from self.daemon.call("UploadChunks", land, 4.0)
                if answer.reason == "STALE_EPOCH":
                    self.job.fenced = True
                if answer.reason not in ("OK", UNREACHABLE):
                    return False
            if self.random.random() < 0.1:
                return True  # the daemon refuses the seal if a chunk was lost
            answer = yield from self._call("ListMissingChunks", lambda d: d.intake.missing_chunks(NAME, number, epoch, self.rank))
            if not answer.ok:
                return False
            missing = [index for index in answer.result if not unchanged or index >= first]
            if not missing:
                return True
        return False

    def _write(self, record: VersionRecord, values: Weights, unchanged: bool) -> Generator[Wait, None, bool]:
        """Write the rank's boxes into the version's files."""
        files, owner, model = self.medium.files, self.process.name, self.job.model
        folder = str(self.daemon.store.folder.path(record))
        maps: list[MappedArray] = []
        try:
            sent = {model.specs[t].name for t, _, _ in (model.held[self.rank][position] for position in self.positions)}
            still = {model.specs[number].name for number in model.frozen}
            for layout in layouts(model):
                if not still.isdisjoint(layout.by_name) and (unchanged or sent.isdisjoint(layout.by_name)):
                    continue  # others may share it, and a rank opens files of its own boxes alone
                inode = files.find(f"{folder}/{layout.path}")
                if len(inode.data) != layout.size:
                    return False
                mapped = files.map(inode, owner, True)
                maps.append(mapped)
                yield NOW
                for spec, offset in layout.tensors:
                    array = mapped[offset : offset + spec.size].view(BITS[ITEM_SIZES[spec.dtype]]).reshape(spec.shape)
                    for position in self.positions:
                        tensor, box, _ = model.held[self.rank][position]
                        if model.specs[tensor] == spec:
                            if self.random.random() < self.job.stalls:
                                self.process.stopped_until = self.schedule.now + self.random.random() * 3 * LEASE
                                yield NOW
                            array[box_index(box) if box else ...] = part(values, model, self.rank, position)
                            yield NOW
                if self.random.random() < 0.8:
                    maps.pop()
                    mapped.close()
                    yield from self._release(record, layout.path)
                    if self.random.random() < 0.03:  # a fault: the rank writes into the file after all
                        late = files.map(inode, owner, True)
                        maps.append(late)
                        yield NOW
                        late[-1] ^= 1
        except FileNotFoundError:
            return False
        finally:
            for mapped in maps:
                mapped.close()
        return True

    def _release(self, record: VersionRecord, file: str) -> Steps:
        """Report a file, which may take a while or fail: the rank goes on without an answer, as in the SDK."""
        release = partial(_release, record=record, rank=self.rank, file=file)
        yield from self.daemon.call("ReleaseFiles", release, self.random.choice((0.1, 2.0)))


def _release(daemon: SimulatedDaemon, record: VersionRecord, rank: int, file: str = "", unchanged: bool = False) -> None:
    files = [file] if file else []
    daemon.intake.release_files(NAME, record.number, record.epoch, rank, files, unchanged=unchanged)


def _thaw(daemon: SimulatedDaemon, record: VersionRecord, rank: int) -> None:
    daemon.intake.thaw_files(NAME, record.number, record.epoch, rank)


def _land(daemon: SimulatedDaemon, header: ChunkHeader, data: bytes) -> None:
    daemon.intake.land(NAME, header, memoryview(data))


def _renew(daemon: SimulatedDaemon, name: str, rank: int) -> None:
    daemon.intake.publisher(name, rank)
