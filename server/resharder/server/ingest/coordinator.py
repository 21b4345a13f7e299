"""Publishers, epochs, slots and chunks: the way into the store.

A new job fences every earlier one of its model: their UPLOADING versions are aborted, their calls refused. A version is aborted
as soon as a rank cannot be expected to seal its slot: it is silent for the lease, has started a later step, or its process was
replaced by another. What is aborted is aborted for every rank, and only ranks that have learnt of it try the step again.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

import structlog
from resharder.converters.geometry.layout import ITEM_SIZES, TensorSpec
from resharder.converters.storage.digest import compile_for
from resharder.converters.storage.files import lay_out
from resharder.converters.wire.chunk_frame import ChunkHeader
from resharder.server.infra.change_signal import ChangeSignal, Waiting
from resharder.server.infra.failpoints import failpoint
from resharder.server.infra.medium import MEDIUM, medium_error
from resharder.server.ingest.packed_boxes import PackedBoxes
from resharder.server.ingest.publisher import ACTIVE, FENCED, MAX_WORLD, REGISTERING, PublisherRecord, check_files
from resharder.server.ingest.upload import ProofFailed, Upload, hash_digests
from resharder.server.state.errors import (
    AlreadyExists,
    DaemonError,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    Reason,
    ResourceExhausted,
    ResourceNotFound,
    Unavailable,
)
from resharder.server.state.timing import Timing, timed
from resharder.server.state.version import ABORTED, READY, RETIRED, UPLOADING, VersionRecord
from resharder.server.store.model_state import check_model_name
from resharder.server.store.store import Store

MAX_UPLOADING = 2
_LOOK = 2.0  # seconds; between looks whether a caller that waits is still there
_OPENING = 20.0  # seconds that a rank waits while another one's call opens the same version
_CLOSED: dict[str, Reason] = {
    UPLOADING: "VERSION_CLOSED", READY: "VERSION_READY", RETIRED: "VERSION_RETIRED", ABORTED: "VERSION_ABORTED",
}  # fmt: skip
_log = structlog.get_logger("resharder.intake")
Phase = Literal["registration", "upload", "verify", "commit"]


class IngestObserver:
    """Observer of publishing. Methods are called with locks held and must not block."""

    def publish_phase(self, phase: Phase, model: str, seconds: float) -> None: ...
    def received(self, model: str, transport: str, size: int) -> None: ...
    def slot_sealed(self, transport: str, size: int, seconds: float) -> None: ...
    def rank_lost(self, model: str) -> None: ...
    def version_ended(self, upload: Upload, record: VersionRecord) -> None:
        """Called when a version is no longer UPLOADING."""


class Intake:
    """Thread-safe. `_lock` guards publishers and the table of UPLOADING versions, and `_changed` hears of what changes in them.

    Locks are taken in this order: the fleets', `_lock`, the store's, that of news. Who only looks, renews a lease or waits for a
    version takes none of the first three. The fleets are asked while none of them is held.

    `audience(model, number)` counts the servers that serve this version or a newer one, and those that follow
    the model.
    """

    def __init__(
        self,
        store: Store,
        *,
        lease_seconds: float = 15.0,
        chunk_bytes: int = 1 << 20,
        writer_patience: float = 10.0,
        threads: int = 2,
        clock: Callable[[], float] = time.monotonic,
        audience: Callable[[str, int], tuple[int, int]] = lambda model, number: (0, 0),
    ) -> None:
        self.store, self.lease_seconds, self.chunk_bytes = store, lease_seconds, chunk_bytes
        self._audience = audience
        self._observers: list[IngestObserver] = []
        self._patience, self._clock = writer_patience, clock
        self._lock, self._changed = threading.RLock(), ChangeSignal()
        self._publishers: dict[str, PublisherRecord] = {}
        self._staged: dict[tuple[str, int], Upload] = {}
        self._creating: set[tuple[str, int, int]] = set()
        self._draining = False
        self._versions_changed, self._serving_changed = ChangeSignal(), ChangeSignal()
        self._threads = threads
        store.catalogue.subscribe(lambda record: self.wake())

    def observe(self, observer: IngestObserver) -> None:
        """Report everything that follows to an observer."""
        self._observers.append(observer)

    def wake(self) -> None:
        """Lets everyone who waits for a version look again."""
        self._versions_changed.notify()
        self._serving_changed.notify()

    def wake_for_serving(self) -> None:
        """As `wake`, those who wait until versions are served; the fleets call it when a server serves another one."""
        self._serving_changed.notify()

    # Publishers

    def create_publisher(self, model: str, job: str, world_size: int, files: Mapping[str, bytes]) -> PublisherRecord:
        """The publisher of the job, made and earlier ones fenced if it is new."""
        check_model_name(model)
        check_files(files)
        if not job or len(job) > 256:
            raise InvalidArgument("JOB", f"expected a job of 1 to 256 characters, got {len(job)}")
        if not 1 <= world_size <= MAX_WORLD:
            raise InvalidArgument("WORLD_SIZE", f"expected 1 to {MAX_WORLD} ranks, got {world_size}")
        with self._lock:
            self._check_not_draining()
            publisher = self._publishers.get(model)
            if publisher is None or publisher.job != job:
                publisher = self._claim(model, job, world_size)
            if publisher.world_size != world_size:
                raise AlreadyExists(
                    "WORLD_SIZE", f"{publisher.name}: job {job!r} has {publisher.world_size} ranks, this one says {world_size}"
                )
            if publisher.state == REGISTERING and files and not publisher.files:
                publisher.files = dict(files)
            return publisher

    def _claim(self, model: str, job: str, world_size: int) -> PublisherRecord:
        before = self.store.epochs.claim(model)
        if before is None or before.job != job:
            stale = self.store.epochs.of_job(model, job)
            if stale is not None:
                raise FailedPrecondition("STALE_EPOCH", f"job {job!r} had epoch {stale} of {model!r}, a later job took it over")
            before = self.store.epochs.begin(model, job, world_size)
            self._fence(model)
            _log.info("publisher_created", model=model, job=job, epoch=before.epoch, world_size=world_size)
        publisher = PublisherRecord(model, before.job, before.epoch, before.world_size, created=self._clock())
        self._publishers = self._publishers | {model: publisher}
        return publisher

    def _fence(self, model: str) -> None:
        earlier = self._publishers.get(model)
        if earlier is None:
            return
        earlier.state = FENCED
        _log.info("publisher_fenced", model=model, job=earlier.job, epoch=earlier.epoch, reason="a later job took the model over")
        for staged in [s for s in self._staged.values() if s.record.model == model]:
            self._abort(staged, "a later job took the model over")
        self._changed.notify()

    def publisher(self, name: str, rank: int | None = None) -> PublisherRecord:
        """By its name; `rank`'s lease is renewed. Raises FailedPrecondition (STALE_EPOCH), NotFound (PUBLISHER_UNKNOWN)."""
        model, epoch = parse_name(name, "publishers")
        publisher = self._publishers.get(model)
        claim = self.store.epochs.claim(model)
        if claim is not None and epoch < claim.epoch:
            raise FailedPrecondition("STALE_EPOCH", f"{model}: epoch {epoch} is over, job {claim.job!r} has epoch {claim.epoch}")
        if publisher is None or publisher.epoch != epoch:
            raise ResourceNotFound(
                "PUBLISHER_UNKNOWN", f"models/{model}/publishers/{epoch} is not known: create and register it again"
            )
        if rank is not None:
            publisher.check_rank(rank)
            publisher.seen[rank] = self._clock()
        return publisher

    def publishers(self) -> list[PublisherRecord]:
        return list(self._publishers.values())

    def live_ranks(self, publisher: PublisherRecord) -> int:
        """How many ranks were heard of within the lease."""
        now = self._clock()
        return sum(now - seen <= self.lease_seconds for seen in list(publisher.seen.values()))

    def register(
        self, name: str, rank: int, fingerprint: str, specs: Sequence[TensorSpec], boxes: PackedBoxes, process: str = ""
    ) -> PublisherRecord:
        """One rank's slot, `boxes` speaking of `specs`. The last rank's call decides for all. `process`: a nonce of the rank's
        process; a new one ends the versions that the former process has begun and not sealed."""
        self._replace(name, rank, process)
        with self._lock:
            publisher = self.publisher(name, rank)
            publisher.check_usable()
            try:
                if not publisher.is_registered(rank, fingerprint):
                    publisher.add_slot(rank, fingerprint, specs, boxes)
            except FailedPrecondition as error:
                publisher.reject(error)
                raise
            finally:
                self._changed.notify()
            if not publisher.is_complete:
                return publisher
            publisher.activating, publisher.stalled = True, None
        self._activate(publisher)
        return publisher

    def _replace(self, name: str, rank: int, process: str) -> None:
        with self._lock:
            publisher = self.publisher(name, rank)
            if not publisher.is_replaced(rank, process, self._clock()):
                return
        self._abort_left(publisher, rank)

    def _abort_left(self, publisher: PublisherRecord, rank: int, step: int | None = None) -> None:
        process = publisher.processes.get(rank, "")
        with self._lock:
            left = [s for s in self._staged.values() if s.publisher is publisher and s.is_left(rank, process, step)]
        for staged in left:
            self._abort(staged, f"the process of rank {rank} was replaced by another")

    def _activate(self, publisher: PublisherRecord) -> None:
        """Long for large models, and nothing else of the publisher can happen meanwhile: so without the lock. Where a medium
        fails, every rank is told, and the next one that registers tries again."""
        try:
            self.store.capacity.check_size(sum(spec.size for spec in publisher.specs))
            assigned, boxes = publisher.check_and_assign()
            layouts = lay_out(publisher.specs)
            compile_for(ITEM_SIZES[spec.dtype] for spec in publisher.specs)  # now, and not in the first version's proof
            with self._lock:
                publisher.check_usable()
                self.store.epochs.reserve(publisher.model, publisher.epoch, layouts, publisher.files)
                publisher.activate(assigned, boxes)
                self._changed.notify()
            for observer in self._observers:
                observer.publish_phase("registration", publisher.model, self._clock() - publisher.created)
            _log.info("publisher_active", model=publisher.model, epoch=publisher.epoch, tensors=len(publisher.specs))
        except Exception as error:
            known = _registration_error(error)
            with self._lock:
                publisher.activating = False
                if known.reason in MEDIUM:
                    publisher.stalled = known
                elif publisher.state == REGISTERING:
                    publisher.reject(known)
                self._changed.notify()
            _log.warning("publisher_rejected", model=publisher.model, epoch=publisher.epoch, reason=str(error))
            raise known from error

    def assignment(self, name: str, rank: int, wait_seconds: float) -> Waiting[tuple[PublisherRecord, list[int]]]:
        """Positions of the boxes that the rank sends. Raises DeadlineExceeded (NOT_REGISTERED), naming missing ranks."""
        deadline = self._clock() + wait_seconds
        while True:
            seen = self._changed.count
            publisher = self.publisher(name, rank)
            publisher.check_usable()
            if publisher.state == ACTIVE:
                return publisher, publisher.assigned[rank]
            if publisher.stalled is not None:
                raise type(publisher.stalled)(publisher.stalled.reason, str(publisher.stalled))
            left = deadline - self._clock()
            if left <= 0:
                missing = [r for r in range(publisher.world_size) if r not in publisher.registered]
                raise DeadlineExceeded("NOT_REGISTERED", f"{name}: {len(missing)} ranks have not registered: {missing[:8]}")
            yield self._changed.pause(seen, min(left, 1.0))

    # Versions

    def create_version(self, name: str, rank: int, step: int, after: int | None = None) -> Waiting[VersionRecord]:
        """The version of (epoch, step): UPLOADING, or as far as it has come; a new one where there is none.

        `after`: the newest version of the step that the rank has begun before, None: it has begun all. A later one that was
        aborted is the answer: the rank has not learnt of it yet, and must not deliver what it meant for that one to another.
        """
        if step < 0:
            raise InvalidArgument("STEP", f"expected a step of 0 or more, got {step}")
        self._start(name, rank, step)
        deadline = self._clock() + _OPENING
        while True:
            seen = self._changed.count
            with self._lock:
                publisher = self.publisher(name, rank)
                publisher.check_active()
                key = (publisher.model, publisher.epoch, step)
                if key not in self._creating:  # else another rank came first: its version is this one
                    known = self._version_of(*key, after)
                    if known is not None:
                        if staged := self._staged.get((known.model, known.number)):
                            staged.begun[rank] = publisher.processes.get(rank, "")
                        return known
                    self._check_may_open(publisher, rank, step)
                    self._creating.add(key)
                    break
            if (left := deadline - self._clock()) <= 0:
                raise ResourceExhausted(
                    "TOO_MANY_UPLOADING", f"{publisher.model}: step {step} is being opened for another rank: try again"
                )
            yield self._changed.pause(seen, min(left, _LOOK))
        try:
            return self._begin(publisher, rank, step)
        finally:
            with self._lock:
                self._creating.discard(key)
                self._changed.notify()

    def _start(self, name: str, rank: int, step: int) -> None:
        """The rank is at `step`: it will not seal slots of earlier ones any more."""
        with self._lock:
            publisher = self.publisher(name, rank)
            publisher.check_active()
            publisher.started[rank] = step
        self._abort_left(publisher, rank, step)
        self._abort_overtaken(publisher, [rank])

    def _abort_overtaken(self, publisher: PublisherRecord, ranks: Sequence[int] | None = None) -> None:
        """Versions that wait for one of `ranks`, or of all, in vain."""
        with self._lock:
            ours = [s for s in self._staged.values() if s.publisher is publisher]
            late = [(s, publisher.overtaken(s.record.step, s.open_ranks(ranks))) for s in ours]
        for staged, reason in late:
            if reason:
                self._abort(staged, reason)

    def _check_may_open(self, publisher: PublisherRecord, rank: int, step: int) -> None:
        self._check_not_draining()
        late = publisher.overtaken(step, (other for other in publisher.senders() if other != rank))
        if late:
            raise FailedPrecondition("VERSION_ABORTED", f"{publisher.model}: expected no earlier step than other ranks': {late}")
        others = [s.record for s in self._staged.values() if s.record.model == publisher.model]
        coming = sum(1 for model, *_ in self._creating if model == publisher.model)
        if len(others) + coming >= MAX_UPLOADING:
            steps = ", ".join(f"{r.name} (step {r.step})" for r in others)
            raise ResourceExhausted(
                "TOO_MANY_UPLOADING", f"{publisher.model}: {MAX_UPLOADING} versions are UPLOADING already: {steps}"
            )

    def _begin(self, publisher: PublisherRecord, rank: int, step: int) -> VersionRecord:
        record = self.store.lifecycle.begin(publisher.model, publisher.epoch, step, publisher.job)
        with self._lock:
            if publisher.state != ACTIVE:
                self.store.lifecycle.abort(record.model, record.number, "a later job took the model over")
                publisher.check_usable()
            folder, layouts, now = self.store.folder.path(record), self.store.lifecycle.layouts(record), self._clock()
            staged = Upload(
                record, publisher, folder, layouts, chunk_bytes=self.chunk_bytes, shared=self.store.folder.shared, now=now
            )
            staged.begun[rank] = publisher.processes.get(rank, "")
            self._staged[record.model, record.number] = staged
        _log.info("version_created", version=record.name, step=step, epoch=record.epoch)
        self._abort_overtaken(publisher)  # a rank may have gone on while the store made room
        return self.store.catalogue.get(record.model, record.number)

    def _version_of(self, model: str, epoch: int, step: int, after: int | None) -> VersionRecord | None:
        """A complete version first, then an aborted one after `after`, then one that is UPLOADING."""
        same = [r for r in self.store.catalogue.versions(model) if (r.epoch, r.step) == (epoch, step)]
        live = [r for r in same if r.state != ABORTED]
        if live and live[-1].state != UPLOADING:
            return live[-1]
        untold = [r for r in same if r.state == ABORTED and after is not None and r.number > after]
        return next(reversed(untold or live), None)

    def staged(self, model: str, number: int, epoch: int) -> Upload:
        """An UPLOADING version, for a call of `epoch`. Raises what keeps the call from going on otherwise."""
        staged = self._staged.get((model, number))
        if staged is None or staged.publisher.state == FENCED or staged.record.epoch != epoch:
            record = self.store.catalogue.get(model, number)
            self._check_epoch(record, epoch)
            raise _not_staging(record)
        return staged

    def _check_epoch(self, record: VersionRecord, epoch: int) -> None:
        claim = self.store.epochs.claim(record.model)
        if epoch != record.epoch or (claim is not None and epoch < claim.epoch):
            newest = claim.epoch if claim else 0
            raise FailedPrecondition(
                "STALE_EPOCH", f"{record.name} is of epoch {record.epoch}, the newest epoch is {newest}, the call is of {epoch}"
            )

    def land(self, model: str, header: ChunkHeader, data: memoryview) -> None:
        staged = self.staged(model, header.version, header.epoch)
        staged.land(header, data)
        for observer in self._observers:
            observer.received(model, "grpc", len(data))
        staged.publisher.seen[header.rank] = self._clock()

    def missing(self, model: str, number: int, epoch: int, rank: int) -> list[int]:
        """Numbers of the chunks that have not arrived; none where the version is READY."""
        record = self.store.catalogue.get(model, number)
        self._check_epoch(record, epoch)
        if record.state in (READY, RETIRED):
            return []
        staged = self.staged(model, number, epoch)
        missing = staged.missing(rank)
        staged.publisher.seen[rank] = self._clock()
        return missing

    def seal(
        self,
        model: str,
        number: int,
        epoch: int,
        rank: int,
        digests: Sequence[int],
        mapped: bool,
        timings: tuple[Timing, ...] = (),
        trace: str = "",
    ) -> VersionRecord:
        """The rank's word that everything is delivered, and what took how long. The last one's starts the proof behind it."""
        record = self.store.catalogue.get(model, number)
        self._check_epoch(record, epoch)
        staged = self._staged.get((model, number))
        if staged is None or record.state != "UPLOADING":
            return self._compare(self.store.catalogue.get(model, number), rank, digests)
        fresh = rank in staged.open_ranks()
        last = staged.seal(rank, digests, mapped, timings, trace)
        staged.publisher.seen[rank] = now = self._clock()
        if fresh:
            self._observe_seal(staged, rank, mapped, now - staged.created)
        failpoint("seal.after-slot")
        if last:
            for observer in self._observers:
                observer.publish_phase("upload", model, now - staged.created)
            threading.Thread(target=self._commit, args=(staged,), name="commit").start()
        return self.store.catalogue.get(model, number)

    def _observe_seal(self, staged: Upload, rank: int, mapped: bool, seconds: float) -> None:
        """What was written into mapped files is first heard of with the seal."""
        size, transport = staged.slot(rank).size_bytes, "shared-memory" if mapped else "grpc"
        if mapped:
            for observer in self._observers:
                observer.received(staged.record.model, transport, size)
        for observer in self._observers:
            observer.slot_sealed(transport, size, seconds)

    @contextmanager
    def _timed(self, phase: Phase, staged: Upload) -> Iterator[None]:
        with timed(staged.timings, phase):
            yield
        for observer in self._observers:
            observer.publish_phase(phase, staged.record.model, staged.timings[-1].seconds)

    def _compare(self, record: VersionRecord, rank: int, digests: Sequence[int]) -> VersionRecord:
        if record.state not in (READY, RETIRED) or not record.slots:
            raise _not_staging(record)
        if dict(record.slots).get(rank) != hash_digests(digests):
            raise AlreadyExists(
                "SLOT_DIFFERS", f"{record.name} (step {record.step}) is {record.state} with other bytes of rank {rank}"
            )
        return record

    def _commit(self, staged: Upload) -> None:
        record = staged.record
        try:
            failpoint("commit.before-proof")
            with self._timed("verify", staged):
                digests = staged.prove(self._threads, self._patience)
            failpoint("commit.after-proof")
            with self._timed("commit", staged):
                self.store.lifecycle.commit(record, digests, staged.slot_digests())
        except ProofFailed as error:
            self.store.lifecycle.abort(record.model, record.number, str(error))
        except (DaemonError, OSError) as error:
            known = error if isinstance(error, DaemonError) else medium_error(error)
            if self.store.catalogue.get(record.model, record.number).state != ABORTED:  # else its files went away under the proof
                _log.error("commit_failed", version=record.name, reason=known.reason, error=str(known))
                self.store.lifecycle.abort(record.model, record.number, f"the commit failed: {known.reason}: {known}")
        except Exception as error:
            if self.store.catalogue.get(record.model, record.number).state != ABORTED:
                _log.error("commit_failed", version=record.name, exc_info=error)
                self.store.lifecycle.abort(record.model, record.number, f"the commit failed: {error!r}")
        finally:
            self._forget(staged)

    def _forget(self, staged: Upload) -> None:
        with self._lock:
            known = self._staged.pop((staged.record.model, staged.record.number), None)
            self._changed.notify()
        if known is not None:
            record = self.store.catalogue.get(staged.record.model, staged.record.number)
            for observer in self._observers:
                observer.version_ended(staged, record)

    def _abort(self, staged: Upload, reason: str) -> VersionRecord:
        staged.close(aborted=True)
        done = self.store.lifecycle.abort(staged.record.model, staged.record.number, reason)
        self._forget(staged)
        return done

    def abort(self, model: str, number: int, epoch: int, reason: str) -> VersionRecord:
        """ABORTED, if it is UPLOADING; else as it is."""
        record = self.store.catalogue.get(model, number)
        self._check_epoch(record, epoch)
        staged = self._staged.get((model, number))
        return self._abort(staged, reason or "aborted by its publisher") if staged else record

    def progress(self, record: VersionRecord) -> list[tuple[int, bool, int, int]]:
        """(rank, sealed, bytes, bytes received) of every slot; empty where the version is not UPLOADING."""
        staged = self._staged.get((record.model, record.number))
        return staged.progress() if staged else []

    def wait(self, model: str, number: int, wait_seconds: float, serving: bool) -> Waiting[VersionRecord]:
        """The version once it is READY (`serving`: and served by all who follow it), ABORTED or RETIRED, or when time is over."""
        deadline = self._clock() + wait_seconds
        changed = self._serving_changed if serving else self._versions_changed
        while True:
            seen = changed.count
            record = self.store.catalogue.get(model, number)
            left = deadline - self._clock()
            if left <= 0 or self._settled(record, serving):
                return record
            yield changed.pause(seen, min(left, _LOOK))

    def _settled(self, record: VersionRecord, serving: bool) -> bool:
        if record.state != READY or not serving:
            return record.state in (READY, ABORTED, RETIRED)
        served, following = self._audience(record.model, record.number)
        return served >= following

    # Time

    def expire(self) -> None:
        """Aborts the versions of ranks that are at a later step, or silent for longer than the lease. Called again and again."""
        now = self._clock()
        for publisher in self.publishers():
            self._abort_overtaken(publisher)
        for staged in list(self._staged.values()):
            for rank in staged.open_ranks():
                silent = now - max(staged.created, staged.publisher.seen.get(rank, 0.0))
                if silent > self.lease_seconds:
                    reason = f"rank {rank} was silent for {silent:.1f} s, its lease is {self.lease_seconds} s"
                    for observer in self._observers:
                        observer.rank_lost(staged.record.model)
                    self._abort(staged, reason)
                    break

    @property
    def draining(self) -> bool:
        """It takes no new versions any more."""
        return self._draining

    def drain(self, seconds: float) -> None:
        """Takes no new versions and lets open ones finish, for at most `seconds`."""
        self._draining = True
        deadline = self._clock() + seconds
        while (self._staged or self._creating) and (left := deadline - self._clock()) > 0:
            self._changed.wait(self._changed.count, min(left, 0.1))

    def _check_not_draining(self) -> None:
        if self._draining:
            raise Unavailable("DRAINING", "the daemon is going down and takes no new versions")


def parse_name(name: str, kind: str) -> tuple[str, int]:
    """(model, number) of `models/{model}/{kind}/{number}`. Raises InvalidArgument (RESOURCE_NAME)."""
    parts = name.split("/")
    if (
        len(parts) == 4
        and parts[0] == "models"
        and parts[2] == kind
        and parts[3].isascii()
        and parts[3].isdigit()
        and len(parts[3]) < 19
    ):
        return check_model_name(parts[1]), int(parts[3])
    raise InvalidArgument("RESOURCE_NAME", f"expected models/MODEL/{kind}/NUMBER, got {name[:200]!r}")


def _registration_error(error: Exception) -> DaemonError:
    if isinstance(error, DaemonError):
        return error
    return medium_error(error) if isinstance(error, OSError) else FailedPrecondition("REGISTRATION_FAILED", repr(error))


def _not_staging(record: VersionRecord) -> FailedPrecondition:
    why = f": {record.reason}" if record.reason else ""
    return FailedPrecondition(_CLOSED[record.state], f"{record.name} is {record.state}{why}")
