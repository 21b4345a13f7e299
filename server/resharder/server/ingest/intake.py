"""Intake of versions from trainers: the life of an upload, from a job's claim of a model to READY or ABORTED.

    CreatePublisher     a claim of the job: the model's next epoch
    RegisterSlot        the last rank's call checks that the slots tile the model and reserves capacity. The claim takes effect:
                        every earlier job of the model is fenced, its UPLOADING versions are aborted, its calls refused
    GetAssignment       waits for that, and returns the boxes that the rank sends

    CreateVersion       the first rank's call begins the version of its step: UPLOADING
    ExchangeMaxima      among ranks that cast to FP8
    bytes               chunks, or mapped files, or files on nodes; ReleaseFiles has closed files digested early
    SealSlot            the last rank's call starts the commit on a thread of its own:
    commit              the ranks' digests add up to the files' ones -> READY, with the versions of its group
    AbortVersion        or whatever keeps a rank from sealing its slot -> ABORTED, with its group

    WaitVersion         returns once the version is READY or ABORTED, or served

A version is aborted once a rank cannot be expected to seal its slot: the rank's lease has expired, it has started a later step,
or its process was replaced. An abort applies to every rank, and only ranks that have received it retry the step.
"""

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Literal

import numpy as np
import structlog
from resharder.converters.failpoints import failpoint
from resharder.converters.geometry.layout import ITEM_SIZES, TensorSpec
from resharder.converters.signal import Signal
from resharder.converters.storage.digest import compile_for
from resharder.converters.wire.chunk_frame import ChunkHeader
from resharder.server.holding.file_proofs import ProofFailed
from resharder.server.infra.change_signal import ChangeSignal, Waiting
from resharder.server.infra.medium import MEDIUM, medium_error
from resharder.server.ingest.boxes import PackedBoxes
from resharder.server.ingest.maxima import Floats, RankBlocks, VersionMaxima
from resharder.server.ingest.publisher import (
    ACTIVE,
    CHECKED,
    FENCED,
    MAX_WARNING_LENGTH,
    MAX_WARNINGS,
    MAX_WORLD,
    NO_FILES,
    REGISTERING,
    REJECTED,
    PublisherRecord,
    check_files,
    current,
    ranks_at_home,
)
from resharder.server.ingest.upload import AT_HOME, MAPPED, HomeFiles, Proof, Upload, hash_digests
from resharder.server.nodes.decisions import ReplicasShort
from resharder.server.nodes.homes import HomeRegister, NodeHome, Readable
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
    listed,
)
from resharder.server.state.timing import Timing, timed
from resharder.server.state.version import (
    ABORTED,
    LAST_NUMBER,
    READY,
    RETIRED,
    UPLOADING,
    VersionRecord,
    check_model_name,
    kind_of,
    parse_name,
)
from resharder.server.store.catalogue import taken_over
from resharder.server.store.epochs import NewEpoch
from resharder.server.store.lifecycle import ProvenVersion
from resharder.server.store.partial import VerifiedVersion
from resharder.server.store.store import Store

Phase = Literal["registration", "upload", "verify", "commit"]
MAX_UPLOADING = 2
"""UPLOADING versions of a model."""
CLOSED: dict[str, Reason] = {
    UPLOADING: "VERSION_CLOSED", READY: "VERSION_READY", RETIRED: "VERSION_RETIRED", ABORTED: "VERSION_ABORTED",
}  # fmt: skip
"""Reason to refuse an upload, by the state of its version."""
_FORGOTTEN_SECONDS = 600.0
"""Silence of all ranks after which a registration that was not completed is forgotten, or one that was rejected."""
_LOOK = 2.0  # longest pause of a waiting call, in seconds
_OPENING = 20.0  # seconds that a rank waits while another rank's call begins the same version
_log = structlog.get_logger("resharder.intake")


class Intake:
    """Publishers of all models, the UPLOADING versions of their steps, and the calls that wait for either. Thread-safe.

    Attributes:
        store: The store.
        nodes: Nodes into whose files ranks may write.
        lock: Guards the publishers and the UPLOADING versions. Lock order: the fleets', `lock`, the store's, a change signal's.
            Queries, lease renewals and waits for a version take none of the first three. The fleets are called without any.
        lease_seconds: Duration of a rank's lease.
        chunk_bytes: Size of the chunks that ranks send.
        draining: Whether new versions are refused because the daemon is shutting down.

    Args:
        store: The store.
        lease_seconds: Duration of a rank's lease.
        chunk_bytes: Size of the chunks that ranks send.
        writer_patience: Seconds to wait for the last writer to close a version's files.
        threads: Threads that digest a version.
        replicate: Function that returns once verified versions have their holders. Raises ReplicasShort, also once its second
            argument returns True: a version is aborted.
        clock: Monotonic clock in seconds.
        nodes: Nodes into whose files ranks may write; None for none.
        read_only: Whether publishers are refused, because the versions are those of an archive that the daemon follows.
        audience: Function of a model and a version's number that counts the servers that serve this version or a newer one,
            and all that follow the model.
    """

    def __init__(
        self,
        store: Store,
        *,
        lease_seconds: float = 15.0,
        chunk_bytes: int = 1 << 20,
        writer_patience: float = 10.0,
        threads: int = 2,
        replicate: Callable[[Sequence[VerifiedVersion], Callable[[], bool]], object] = lambda versions, stopped: None,
        clock: Callable[[], float] = time.monotonic,
        nodes: HomeRegister | None = None,
        audience: Callable[[str, int], tuple[int, int]] = lambda model, number: (0, 0),
        read_only: bool = False,
    ) -> None:
        self.store, self._clock, self._audience, self._read_only = store, clock, audience, read_only
        self.nodes = nodes or HomeRegister()
        self.lease_seconds, self.chunk_bytes, self._threads = lease_seconds, chunk_bytes, threads
        self._patience, self._replicate = writer_patience, replicate
        self.lock, self.draining = threading.RLock(), False
        # Emitted with locks held.
        self.phase_ended: Signal[Phase, str, float] = Signal()  # phase of a publish, model, seconds
        self.received: Signal[str, str, int] = Signal()  # model, transport, bytes of a chunk, or of a sealed slot in mapped files
        self.slot_sealed: Signal[str, int, float] = Signal()  # transport, bytes, seconds since its version began
        self.rank_lost: Signal[str] = Signal()  # model of a rank with an open slot whose lease has expired
        self.version_ended: Signal[Upload, VersionRecord] = Signal()  # no longer UPLOADING
        self._by_model: dict[str, tuple[PublisherRecord, ...]] = {}  # by epoch, without fenced ones; replaced, never modified
        self._creating: set[tuple[str, int, int]] = set()  # model, epoch and step of versions that a rank's call is beginning
        self._open: dict[tuple[str, int], Upload] = {}  # UPLOADING versions by model and number
        self._changed, self._versions_changed, self._serving_changed = ChangeSignal(), ChangeSignal(), ChangeSignal()
        store.catalogue.version_changed.connect(lambda record: self._version_changed())

    # Claims

    def create_publisher(
        self, model: str, job: str, world_size: int, files: Mapping[str, bytes], together: Collection[str] = (), base: str = ""
    ) -> PublisherRecord:
        """Return the publisher of a job; create it if it is new.

        Args:
            model: Name of the model.
            job: Id of the job.
            world_size: Ranks of the job.
            files: Contents of config.json and tokenizer files by path; from one rank at least.
            together: Other models of the job, whose versions of a step are READY together with this model's.
            base: Model that this one, an adapter, is loaded beside; it need not have a version. Empty for a model of its own.

        Raises:
            InvalidArgument: MODEL_NAME, MODEL_FILE, JOB, WORLD_SIZE.
            AlreadyExists: WORLD_SIZE.
            FailedPrecondition: READ_ONLY; STALE_EPOCH; BASE: the model and the base contradict what is known of either.
            Unavailable: DRAINING.
        """
        check_model_name(model)
        if self._read_only:
            raise FailedPrecondition(
                "READ_ONLY",
                f"this daemon follows an archive, and takes no versions: publish {model!r} to the daemon that archives it",
            )
        if base:
            check_model_name(base)
        check_files(files, base)
        models = frozenset(check_model_name(other) for other in together) - {model}
        if not job or len(job) > 256:
            raise InvalidArgument("JOB", f"expected a job of 1 to 256 characters, got {len(job)}")
        if not 1 <= world_size <= MAX_WORLD:
            raise InvalidArgument("WORLD_SIZE", f"expected 1 to {MAX_WORLD} ranks, got {world_size}")
        with self.lock:
            self._check_not_draining()
            found = self._of_job(model, job)
            if found is None:
                self._check_base(model, base)
            publisher = found or self._add(model, job, world_size, models, base)
            if publisher.base != base:
                raise FailedPrecondition(
                    "BASE", f"{publisher.name}: job {job!r} publishes {kind_of(publisher.base)}, this call {kind_of(base)}"
                )
            if publisher.together != models:
                known, given = sorted(publisher.together), sorted(models)
                raise InvalidArgument("JOB", f"{publisher.name}: job {job!r} publishes it with {known}, this call with {given}")
            if publisher.world_size != world_size:
                raise AlreadyExists(
                    "WORLD_SIZE", f"{publisher.name}: job {job!r} has {publisher.world_size} ranks, this call has {world_size}"
                )
            if publisher.state == REGISTERING and files and not publisher.files:
                publisher.files = dict(files)
            return publisher

    def _of_job(self, model: str, job: str) -> PublisherRecord | None:
        return next((publisher for publisher in self._by_model.get(model, ()) if publisher.job == job), None)

    def _check_base(self, model: str, base: str) -> None:
        """Raise FailedPrecondition (BASE) unless a model can be an adapter of `base`, or of its own if that is empty.

        What a model is, its versions that were READY decide, and the publishers before there are any.
        """
        known = {name: self.store.catalogue.base(name) for name in {*self.store.catalogue.models(), *self._by_model}}
        for name, publisher in current(self.publishers()).items():
            if known[name] is None and publisher.state in (REGISTERING, ACTIVE):
                known[name] = publisher.base
        if model == base:
            raise FailedPrecondition("BASE", f"{model!r} cannot be its own base: give the adapter another name")
        if known.get(base):
            raise FailedPrecondition(
                "BASE", f"the base {base!r} is {kind_of(known[base])}: name the model that both are loaded beside as base"
            )
        if (was := self.store.catalogue.base(model)) is not None and was != base:
            raise FailedPrecondition(
                "BASE",
                f"the versions of {model!r} are those of {kind_of(was)}, and a job would publish {kind_of(base)}: "
                "publish under another name",
            )
        if base and (adapters := sorted(name for name, of in known.items() if of == model)):
            raise FailedPrecondition(
                "BASE",
                f"{model!r} is the base of {adapters[0]!r}, and cannot be an adapter itself: give the adapter another name",
            )

    def _add(self, model: str, job: str, world_size: int, together: frozenset[str], base: str) -> PublisherRecord:
        claim = self.store.epochs.begin(model, job, world_size)
        publisher = PublisherRecord(model, job, claim.epoch, claim.world_size, together, self._clock(), base)
        known = sorted((*self._by_model.get(model, ()), publisher), key=lambda each: each.epoch)
        self._by_model = self._by_model | {model: tuple(known)}
        _log.info("publisher_created", model=model, job=job, epoch=claim.epoch, world_size=world_size)
        return publisher

    def publisher(self, name: str, rank: int | None = None) -> PublisherRecord:
        """Return a publisher by name, and renew the lease of `rank`.

        Raises:
            FailedPrecondition: STALE_EPOCH.
            ResourceNotFound: PUBLISHER_UNKNOWN.
        """
        model, epoch = parse_name(name, "publishers")
        publisher = next((each for each in self._by_model.get(model, ()) if each.epoch == epoch), None)
        claim = self.store.epochs.claim(model)
        if claim is not None and epoch < claim.epoch:
            raise FailedPrecondition("STALE_EPOCH", f"{model}: epoch {epoch} is over: {taken_over(model, claim.job)}")
        if publisher is None:
            raise ResourceNotFound(
                "PUBLISHER_UNKNOWN", f"models/{model}/publishers/{epoch} is unknown: create and register it again"
            )
        if rank is not None:
            publisher.check_rank(rank)
            publisher.seen[rank] = self._clock()
        return publisher

    def publishers(self) -> list[PublisherRecord]:
        """Return the publishers of all models: those that publish, and those that register or were rejected since."""
        return [publisher for known in list(self._by_model.values()) for publisher in known]

    def live_ranks(self, publisher: PublisherRecord) -> int:
        """Return the number of ranks within their lease."""
        now = self._clock()
        return sum(now - seen <= self.lease_seconds for seen in list(publisher.seen.values()))

    # Registration

    def register_slot(
        self,
        name: str,
        rank: int,
        fingerprint: str,
        specs: Sequence[TensorSpec],
        boxes: PackedBoxes,
        process: str = "",
        shared: RankBlocks | None = None,
        readable: Readable = MappingProxyType({}),
        *,
        gathers: bool = False,
        warnings: Sequence[str] = (),
        frozen: Collection[int] = (),
    ) -> PublisherRecord:
        """Register one rank's slot. The last rank's call checks all slots and reserves capacity.

        Args:
            name: Name of the publisher.
            rank: The rank.
            fingerprint: Fingerprint of the request. A repeated one changes nothing.
            specs: Tensors of which the rank has boxes.
            boxes: The rank's boxes, replicas included, by position in `specs`.
            process: Nonce of the rank's process. A new one aborts versions that the former process has begun and not sealed.
            shared: Blocks that the rank shares with others, by position in `specs`; None if it casts nothing.
            readable: Nonce files that it has read. Its host in the first registration decides which files it writes.
            gathers: Whether it can write boxes that other nodes gather.
            warnings: Texts for the record of its versions.
            frozen: Positions in `specs` of tensors that it does not expect to change.
        """
        self._replace(name, rank, process)
        host = self.nodes.host_of(readable)
        with self.lock:
            publisher = self.publisher(name, rank)
            publisher.check_usable()
            publisher.readable[rank] = readable
            publisher.warnings[rank] = [text[:MAX_WARNING_LENGTH] for text in warnings[:MAX_WARNINGS]]
            if host is not None and publisher.state == REGISTERING and not publisher.activating:
                publisher.hosts[rank] = host
                publisher.gatherers |= {rank} if gathers else set()
            try:
                if not publisher.is_registered(rank, fingerprint):
                    publisher.add_slot(rank, fingerprint, specs, boxes, shared, frozen)
            except FailedPrecondition as error:
                publisher.reject(error)
                raise
            finally:
                self._changed.emit()
            if not publisher.is_complete:
                return publisher
            publisher.activating, publisher.stalled = True, None
        self._activate(publisher)
        return publisher

    def _replace(self, name: str, rank: int, process: str) -> None:
        with self.lock:
            publisher = self.publisher(name, rank)
            if not publisher.is_replaced(rank, process, self._clock()):
                return
        self._abort_left(publisher, rank)

    def _activate(self, publisher: PublisherRecord) -> None:
        """Check the slots and reserve capacity, without the lock, because this takes long for large models.

        If a medium fails, every rank gets the error, and the next rank that registers tries again.
        """
        try:
            self.store.capacity.check_size(publisher.model, sum(spec.size for spec in publisher.specs))
            checked = publisher.check()
            compile_for(ITEM_SIZES[spec.dtype] for spec in publisher.specs)  # now rather than in the first verification
            with self.lock:
                publisher.check_usable()
                self._check_base(publisher.model, publisher.base)  # another job may have published meanwhile
                publisher.checked = checked
                for each in [publisher, *self._partners(publisher)]:
                    if due := self._due(each):
                        self._take_effect(*due)
                self._changed.emit()
        except Exception as error:
            known = _registration_error(error)
            with self.lock:
                publisher.activating, publisher.checked = False, None
                if known.reason in MEDIUM:
                    publisher.stalled = known
                elif publisher.state == REGISTERING:
                    publisher.reject(known)
                self._changed.emit()
            _log.warning("publisher_rejected", model=publisher.model, epoch=publisher.epoch, reason=str(error))
            raise known from error

    def _partners(self, publisher: PublisherRecord) -> list[PublisherRecord]:
        """Return the publishers of the other models that the job publishes together with this one."""
        found = (self._of_job(model, publisher.job) for model in sorted(publisher.together))
        return [partner for partner in found if partner is not None]

    def _due(self, publisher: PublisherRecord) -> list[PublisherRecord]:
        """Return the publishers whose claims take effect now, at the same time; none while one of them is not checked.

        Raises the error of a partner that was rejected.
        """
        if publisher.checked is None:
            return []
        claim = self.store.epochs.claim(publisher.model)
        if claim is not None and claim.epoch == publisher.epoch:  # the daemon has restarted since it took effect
            return [publisher]
        partners = self._partners(publisher)
        for partner in partners:
            partner.check_usable()
        waiting = len(partners) < len(publisher.together) or any(p.state != ACTIVE and p.checked is None for p in partners)
        return [] if waiting else [publisher, *(partner for partner in partners if partner.state != ACTIVE)]

    def _take_effect(self, *publishers: PublisherRecord) -> None:
        """Reserve capacity for publishers whose slots are checked, fence the earlier ones, and make these ACTIVE."""
        checked = [(each, each.checked) for each in publishers if each.checked is not None]
        wanted = (NewEpoch(each.model, each.epoch, found.files, each.files, found.frozen) for each, found in checked)
        self.store.epochs.reserve(*wanted)
        for publisher, found in checked:
            self._fence_earlier(publisher)
            publisher.activate(found)
            homes, gathered = publisher.file_homes(found.files), publisher.gathered_boxes(found.files)
            self.nodes.reserve(publisher.name, found.files, homes, gathered, [file.path for file in found.frozen])
            self.phase_ended.emit("registration", publisher.model, self._clock() - publisher.created)
            tensors = len(publisher.specs)
            _log.info("publisher_active", model=publisher.model, job=publisher.job, epoch=publisher.epoch, tensors=tensors)

    def report_readable(self, publisher: PublisherRecord, rank: int, readable: Readable) -> None:
        """Record nonce files as a rank has found them now; a no-op for a rank that reports none."""
        if readable and publisher.readable.get(rank) != readable:
            with self.lock:
                publisher.readable[rank] = readable

    def assignment(self, name: str, rank: int, wait_seconds: float) -> Waiting[tuple[PublisherRecord, list[int]]]:
        """Return the publisher and the positions of the boxes that a rank sends, after all ranks have registered.

        Raises:
            DeadlineExceeded: NOT_REGISTERED, with the missing ranks, after `wait_seconds`.
            ResourceNotFound: PUBLISHER_UNKNOWN, if this rank has registered with, or rank 0 has sent the model's files to, an
                earlier daemon only.
        """
        deadline = self._clock() + wait_seconds
        while True:
            seen = self._changed.count
            publisher = self.publisher(name, rank)
            publisher.check_usable()
            if publisher.state == ACTIVE:
                return publisher, publisher.assigned[rank]
            if publisher.stalled is not None:
                raise type(publisher.stalled)(publisher.stalled.reason, str(publisher.stalled))
            publisher.check_registered_here(rank)
            for partner in self._partners(publisher):
                partner.check_usable()
            left = deadline - self._clock()
            if left <= 0:
                raise DeadlineExceeded("NOT_REGISTERED", f"{name}: {self._waits_for(publisher)}")
            yield self._changed.pause(seen, min(left, 1.0))

    def _waits_for(self, publisher: PublisherRecord) -> str:
        """Return what a registration lacks."""
        if missing := [rank for rank in range(publisher.world_size) if rank not in publisher.registered]:
            return f"{len(missing)} ranks have not registered: {missing[:8]}"
        if publisher.checked is not None:
            done = {partner.model for partner in self._partners(publisher) if partner.state == ACTIVE or partner.checked}
            return f"its job publishes it together with {sorted(publisher.together - done)}, which not all ranks have registered"
        return CHECKED if publisher.activating else NO_FILES

    def _fence_earlier(self, newest: PublisherRecord) -> None:
        known = self._by_model.get(newest.model, ())
        earlier = [publisher for publisher in known if publisher.epoch < newest.epoch]
        if not earlier:
            return
        for publisher in earlier:
            publisher.fence(newest.job)
            self.nodes.reserve(publisher.name, (), {})
            _log.info("publisher_fenced", model=publisher.model, job=publisher.job, epoch=publisher.epoch, by=newest.job)
        self._by_model = self._by_model | {newest.model: tuple(each for each in known if each not in earlier)}
        self._abort_model(newest.model, f"job {newest.job!r} has taken over the model")

    # The version of a step

    def create_version(
        self, name: str, rank: int, step: int, after: int | None = None, *, skipped: bool = False, base_version: int = 0
    ) -> Waiting[VersionRecord]:
        """Return the version of a publisher's step, and begin it if there is none.

        Concurrent calls for the same step get the same version: one begins it, the others wait.

        Args:
            name: Name of the publisher.
            rank: The rank.
            step: The step.
            after: Newest version of the step that the rank has begun before; None: all. A later aborted version is
                returned, so that a rank never delivers into a version other than the one it began.
            skipped: Whether LATEST skips a version that this call begins.
            base_version: See VersionRecord.

        Raises:
            InvalidArgument: STEP, BASE: no version that the base can have.
            AlreadyExists: BASE: another rank has named another version of the base.
            FailedPrecondition: VERSION_ABORTED, if another rank is at a later step.
            ResourceExhausted: TOO_MANY_UPLOADING, NO_ROOM.
        """
        if step < 0:
            raise InvalidArgument("STEP", f"expected a step of 0 or more, got {step}")
        self._start_step(name, rank, step)
        deadline = self._clock() + _OPENING
        while True:
            seen = self._changed.count
            with self.lock:
                publisher = self.publisher(name, rank)
                publisher.check_active()
                self._check_base_version(publisher, base_version)
                key = (publisher.model, publisher.epoch, step)
                if key not in self._creating:  # otherwise another rank's call is beginning it
                    known = self._version_of(*key, after)
                    if known is not None:
                        self._check_same_base_version(known, rank, base_version)
                        if upload := self.upload(known.model, known.number):
                            upload.begun[rank] = publisher.processes.get(rank, "")
                        return known
                    if publisher.is_due(rank, step):
                        self._check_may_open(publisher, rank, step)
                        self._creating.add(key)
                        break
            if (left := deadline - self._clock()) <= 0:
                raise ResourceExhausted(
                    "TOO_MANY_UPLOADING", f"{publisher.model}: step {step} is to be created for another rank: try again"
                )
            yield self._changed.pause(seen, min(left, _LOOK))
        try:
            return self._begin_version(publisher, rank, step, skipped, base_version)
        finally:
            with self.lock:
                self._creating.discard(key)
                self._changed.emit()

    def _start_step(self, name: str, rank: int, step: int) -> None:
        """Record that a rank is at `step`, and abort earlier versions whose slots it has not sealed."""
        with self.lock:
            publisher = self.publisher(name, rank)
            publisher.check_active()
            publisher.started[rank] = step
        self._abort_left(publisher, rank, step)
        self._abort_overtaken(publisher, [rank])

    def _check_may_open(self, publisher: PublisherRecord, rank: int, step: int) -> None:
        self._check_not_draining()
        late = publisher.overtaken(step, (other for other in publisher.senders() if other != rank))
        if late:
            raise FailedPrecondition(
                "VERSION_ABORTED", f"{publisher.model}: this step is earlier than that of other ranks: {late}"
            )
        others = [upload.record for upload in self.uploads(publisher.model)]
        coming = sum(1 for model, *_ in self._creating if model == publisher.model)
        if len(others) + coming >= MAX_UPLOADING:
            steps = ", ".join(f"{r.name} (step {r.step})" for r in others)
            raise ResourceExhausted(
                "TOO_MANY_UPLOADING", f"{publisher.model}: {MAX_UPLOADING} versions are UPLOADING already: {steps}"
            )

    def _check_base_version(self, publisher: PublisherRecord, number: int) -> None:
        """Raise InvalidArgument (BASE) for a version that the base of a publisher's model cannot have."""
        base, newest = publisher.base, self.store.catalogue.newest_number(publisher.base)
        if number and not base:
            raise InvalidArgument("BASE", f"{publisher.model!r} has no base: leave base_version out")
        if not 0 <= number <= (newest or LAST_NUMBER):
            raise InvalidArgument(
                "BASE", f"expected a version of {base!r} up to {newest}, its newest one, as base_version, got {number}"
            )

    def _check_same_base_version(self, record: VersionRecord, rank: int, number: int) -> None:
        """Raise AlreadyExists (BASE) if the rank that began an UPLOADING version has named another version of its base."""
        if record.state == UPLOADING and record.base_version != number:
            raise AlreadyExists(
                "BASE",
                f"{record.name} (step {record.step}): rank {rank} names {number or 'none'} of {record.base!r}, another rank "
                f"{record.base_version or 'none'}: pass the same base_version on all ranks",
            )

    def _begin_version(self, publisher: PublisherRecord, rank: int, step: int, skipped: bool, base_version: int) -> VersionRecord:
        store = self.store
        record = store.lifecycle.begin(
            publisher.model,
            publisher.epoch,
            step,
            publisher.job,
            skipped=skipped,
            warnings=publisher.version_warnings(),
            base=publisher.base,
            base_version=base_version,
        )
        homes = self._take_homes(publisher, record)
        if not store.hold and (lacking := self._without_home(record, homes)):
            reason = (
                f"no node takes {len(lacking)} of the version's files, {lacking[0]} for one, and this daemon's host holds none "
                "(hold: none): give the nodes of the ranks' hosts room for it, and see `resharder nodes`"
            )
            store.lifecycle.abort(record.model, record.number, reason)
            raise ResourceExhausted("NO_ROOM", f"{record.name}: {reason}")
        with self.lock:
            if publisher.state != ACTIVE:
                store.lifecycle.abort(record.model, record.number, "a newer job has taken over the model")
                publisher.check_usable()
            folder, layouts = store.folder.path(record), store.lifecycle.layouts(record)
            upload = Upload(
                record,
                publisher,
                folder,
                layouts,
                chunk_bytes=self.chunk_bytes,
                shared=store.folder.shared,
                threads=self._threads,
                now=self._clock(),
                homes=HomeFiles(self.nodes, record.name, homes, layouts),
                frozen_from=store.lifecycle.frozen_from(record),
            )
            upload.begun[rank] = publisher.processes.get(rank, "")
            self._open[record.model, record.number] = upload
        _log.info("version_created", version=record.name, step=step, epoch=record.epoch)
        self._abort_overtaken(publisher)  # a rank may have started a later step while the store freed capacity
        return store.catalogue.get(record.model, record.number)

    def _without_home(self, record: VersionRecord, homes: Iterable[NodeHome]) -> list[str]:
        """Return the files of a version that ranks would write into the store."""
        at_home = {path for home in homes for path in home.files}
        return [file.path for file in self.store.lifecycle.layouts(record) if file.path not in at_home]

    def _take_homes(self, publisher: PublisherRecord, record: VersionRecord) -> tuple[NodeHome, ...]:
        """Take files for a version on the nodes of the ranks' hosts, where these ranks have read the nodes' present nonces."""
        with self.lock:
            ranks = ranks_at_home(publisher.homes, publisher.boxes, publisher.hosts)
            read = {node: [publisher.readable.get(rank, {}) for rank in there] for node, there in ranks.items()}
        number = self.store.lifecycle.frozen_from(record)
        base = f"models/{record.model}/versions/{number}" if number else ""
        return self.nodes.take(publisher.name, record.name, read, base) if read else ()

    def _version_of(self, model: str, epoch: int, step: int, after: int | None) -> VersionRecord | None:
        """Return a complete version first, then an aborted one after `after`, then an UPLOADING one."""
        same = [r for r in self.store.catalogue.versions(model) if (r.epoch, r.step) == (epoch, step)]
        live = [r for r in same if r.state != ABORTED]
        if live and live[-1].state != UPLOADING:
            return live[-1]
        unknown = [r for r in same if r.state == ABORTED and after is not None and r.number > after]
        return next(reversed(unknown or live), None)

    def exchange_maxima(
        self, model: str, number: int, epoch: int, rank: int, values: Floats, wait_seconds: float
    ) -> Waiting[Floats]:
        """Return the maxima of the blocks that a rank receives, once all ranks that contribute to them have called.

        Args:
            model: Model of the version.
            number: Number of the version.
            epoch: Epoch of the caller.
            rank: The rank.
            values: Maxima of the blocks to which it contributes, in the order of its registration.
            wait_seconds: Bound on the wait.

        Raises:
            InvalidArgument: MAXIMA, RANK.
            AlreadyExists: SLOT_DIFFERS: the rank has contributed other values.
            FailedPrecondition: STALE_EPOCH, NOT_REGISTERED, VERSION_ABORTED.
            ResourceNotFound: VERSION_UNKNOWN, PUBLISHER_UNKNOWN.
            DeadlineExceeded: MAXIMA_MISSING, with the missing ranks, after `wait_seconds`.
        """
        deadline = self._clock() + wait_seconds
        record = self.store.catalogue.get(model, number)
        self._check_epoch(record, epoch)
        publisher = self.publisher(f"models/{model}/publishers/{epoch}", rank)
        publisher.check_active()
        with self.lock:
            maxima = self._maxima_of(publisher, record)
            self._contribute(maxima, record, rank, np.array(values, np.float32))
            self._changed.emit()
        while True:
            seen = self._changed.count
            self.publisher(publisher.name)  # raises if a newer job has claimed the model
            with self.lock:
                missing = maxima.missing(rank)
                if not missing:
                    return maxima.of(rank)
            if (now := self.store.catalogue.get(model, number)).state == ABORTED:
                raise _not_uploading(now)
            left = deadline - self._clock()
            if left <= 0:
                raise DeadlineExceeded("MAXIMA_MISSING", f"{record.name}: ranks without maxima: {listed(missing)}")
            yield self._changed.pause(seen, min(left, 1.0))

    def _maxima_of(self, publisher: PublisherRecord, record: VersionRecord) -> VersionMaxima:
        if record.number not in publisher.maxima:
            states = {each.number: each.state for each in self.store.catalogue.versions(record.model)}
            kept = {n: each for n, each in publisher.maxima.items() if states.get(n) in (UPLOADING, READY)}
            publisher.maxima = kept | {record.number: VersionMaxima(publisher.shared)}
        return publisher.maxima[record.number]

    def _contribute(self, maxima: VersionMaxima, record: VersionRecord, rank: int, values: Floats) -> None:
        try:
            same = maxima.contribute(rank, values)
        except ValueError as error:
            raise InvalidArgument("MAXIMA", f"{record.name}: {error}") from error
        if not same:
            raise AlreadyExists(
                "SLOT_DIFFERS", f"{record.name} (step {record.step}): rank {rank} has brought other maxima before"
            )

    # Upload

    def upload(self, model: str, number: int) -> Upload | None:
        """Return the upload of a version; None unless it is UPLOADING."""
        return self._open.get((model, number))

    def uploads(self, model: str = "") -> list[Upload]:
        return [upload for upload in list(self._open.values()) if model in ("", upload.record.model)]

    def open_upload(self, model: str, number: int, epoch: int) -> Upload:
        """Return the upload of an UPLOADING version for a call of `epoch`.

        Raises:
            FailedPrecondition: STALE_EPOCH, or the reason of the version's state.
            ResourceNotFound: VERSION_UNKNOWN.
        """
        upload = self._open.get((model, number))
        if upload is None or upload.publisher.state == FENCED or upload.record.epoch != epoch:
            record = self.store.catalogue.get(model, number)
            self._check_epoch(record, epoch)
            raise _not_uploading(record)
        return upload

    def land(self, model: str, header: ChunkHeader, data: memoryview, *, transport: str = "grpc") -> None:
        """Write a chunk, and renew the lease of its rank. Raises the errors of `open_upload` and `Upload.land`."""
        upload = self.open_upload(model, header.version, header.epoch)
        upload.land(header, data, transport)
        self.received.emit(model, transport, len(data))
        upload.publisher.seen[header.rank] = self._clock()

    def missing_chunks(self, model: str, number: int, epoch: int, rank: int) -> list[int]:
        """Return the indices of a rank's chunks that have not arrived; none if the version is READY."""
        record = self.store.catalogue.get(model, number)
        self._check_epoch(record, epoch)
        if record.state in (READY, RETIRED):
            return []
        upload = self.open_upload(model, number, epoch)
        missing = upload.missing(rank)
        upload.publisher.seen[rank] = self._clock()
        return missing

    def thaw_files(self, model: str, number: int, epoch: int, rank: int) -> None:
        """Give a version files of its own for the frozen boxes of a rank, and renew the rank's lease.

        Raises the errors of `open_upload`, `Upload.thaw` and `VersionLifecycle.thaw`. A no-op if the version is READY.
        """
        record = self.store.catalogue.get(model, number)
        self._check_epoch(record, epoch)
        if record.state in (READY, RETIRED):
            return
        upload = self.open_upload(model, number, epoch)
        upload.thaw(rank, lambda paths: self.store.lifecycle.thaw(upload.record, paths))
        upload.publisher.seen[rank] = self._clock()

    def release_files(
        self, model: str, number: int, epoch: int, rank: int, files: Sequence[str], *, unchanged: bool = False
    ) -> None:
        """Record that a rank has written and closed files of a version, and renew its lease; a no-op unless it is UPLOADING.

        Raises FailedPrecondition (STALE_EPOCH), ResourceNotFound (MODEL_UNKNOWN, VERSION_UNKNOWN), InvalidArgument (RANK,
        MODEL_FILE).
        """
        self._check_epoch(self.store.catalogue.get(model, number), epoch)
        upload = self._open.get((model, number))
        if upload is not None:
            upload.release(rank, files, unchanged=unchanged)
            upload.publisher.seen[rank] = self._clock()

    def seal_slot(
        self,
        model: str,
        number: int,
        epoch: int,
        rank: int,
        digests: Sequence[int],
        mapped: bool,
        timings: tuple[Timing, ...] = (),
        trace: str = "",
        *,
        unchanged: bool = False,
    ) -> VersionRecord:
        """Declare a rank's slot complete. The last seal starts verification and commit on another thread.

        A seal of a READY or RETIRED version is compared with the original one, so that ranks can repeat it.

        Args:
            model: Model of the version.
            number: Number of the version.
            epoch: Epoch of the caller.
            rank: The rank.
            digests: Digests of the boxes that the rank sends, in order.
            mapped: Whether the rank wrote into mapped files rather than sending chunks.
            timings: Durations of the rank's phases.
            trace: The caller's W3C traceparent.
            unchanged: See SealSlotRequest.
        """
        record = self.store.catalogue.get(model, number)
        self._check_epoch(record, epoch)
        upload = self._open.get((model, number))
        if upload is None or record.state != UPLOADING:
            return _same_slot(self.store.catalogue.get(model, number), rank, digests)
        fresh = rank in upload.open_ranks()
        last = upload.seal(rank, digests, mapped, timings, trace, unchanged=unchanged)
        upload.publisher.seen[rank] = now = self._clock()
        if fresh:
            self._note_seal(upload, rank, now - upload.created)
        failpoint("seal.after-slot")
        if last:
            self.phase_ended.emit("upload", model, now - upload.created)
            threading.Thread(target=self._commit, args=(upload,), name="commit").start()
        return self.store.catalogue.get(model, number)

    def _note_seal(self, upload: Upload, rank: int, seconds: float) -> None:
        """Emit a sealed slot; bytes written into mapped files count with the seal."""
        delivery = upload.deliveries[rank]
        if delivery.transport == MAPPED:
            self.received.emit(upload.record.model, delivery.transport, delivery.size_bytes)
        elif delivery.home_bytes:
            self.received.emit(upload.record.model, AT_HOME, delivery.home_bytes)
        self.slot_sealed.emit(delivery.transport, delivery.size_bytes, seconds)

    # Commit

    @contextmanager
    def _timed(self, phase: Phase, upload: Upload) -> Iterator[None]:
        with timed(upload.timings, phase):
            yield
        self.phase_ended.emit(phase, upload.record.model, upload.timings[-1].seconds)

    def _commit(self, upload: Upload) -> None:
        """Verify a version, and make it READY with all versions of its group if it is the last of them."""
        try:
            failpoint("commit.before-proof")
            with self._timed("verify", upload):
                proof = upload.prove(self._patience)
            failpoint("commit.after-proof")
            group = self._proven_group(upload, proof)
            if group:
                first, *others = (
                    ProvenVersion(each.record, found.digests, each.slot_digests(), found.missing, each.unsent_bytes)
                    for each, found in group
                )
                with self._timed("commit", upload):
                    self.store.lifecycle.commit(
                        first.record,
                        first.digests,
                        first.slots,
                        *others,
                        missing=first.missing,
                        unsent_bytes=first.unsent_bytes,
                        before_ready=lambda versions: self._replicate(versions, lambda: any(each.aborted for each, _ in group)),
                    )
                for each, _ in group:
                    self._forget(each)
        except ProofFailed as error:
            self._abort(upload, str(error), reuse=False)  # where bytes did not arrive once, they may not arrive again
        except ReplicasShort as error:
            self._abort(upload, str(error))
        except (DaemonError, OSError) as error:
            known = error if isinstance(error, DaemonError) else medium_error(error)
            self._commit_failed(upload, f"{known.reason}: {known}", error)
        except Exception as error:
            self._commit_failed(upload, repr(error), error)

    def _commit_failed(self, upload: Upload, reason: str, error: Exception) -> None:
        record = upload.record
        if self.store.catalogue.get(record.model, record.number).state != ABORTED:  # an abort has removed the files
            unknown = None if isinstance(error, DaemonError | OSError) else error
            _log.error("commit_failed", version=record.name, error=reason, exc_info=unknown)
        self._abort(upload, f"the commit failed: {reason}")

    # Abort

    def _forget(self, upload: Upload) -> None:
        with self.lock:
            known = self._open.pop((upload.record.model, upload.record.number), None)
            self._changed.emit()
        if known is not None:
            record = self.store.catalogue.get(upload.record.model, upload.record.number)
            self.version_ended.emit(upload, record)

    def _abort(self, upload: Upload, reason: str, *, reuse: bool = True) -> VersionRecord:
        """Abort a version and the others of its group. `reuse`: whether later versions may be written into its files."""
        also = f"{upload.record.name} of the same step was aborted: {reason}"
        for each, why in [(upload, reason), *((other, also) for other in self._others(upload))]:
            each.close(aborted=True)
            self.store.lifecycle.abort(each.record.model, each.record.number, why, reuse=reuse or each is not upload)
            self._forget(each)
        return self.store.catalogue.get(upload.record.model, upload.record.number)

    def abort_version(self, model: str, number: int, epoch: int, reason: str) -> VersionRecord:
        """Abort a version if it is UPLOADING, and return its record.

        Raises FailedPrecondition (STALE_EPOCH), ResourceNotFound (MODEL_UNKNOWN, VERSION_UNKNOWN).
        """
        record = self.store.catalogue.get(model, number)
        self._check_epoch(record, epoch)
        upload = self._open.get((model, number))
        return self._abort(upload, reason or "aborted by its publisher") if upload else record

    def _abort_model(self, model: str, reason: str) -> None:
        """Abort all UPLOADING versions of a model."""
        for upload in self.uploads(model):
            self._abort(upload, reason)

    def _abort_left(self, publisher: PublisherRecord, rank: int, step: int | None = None) -> None:
        """Abort versions that a former process of a rank has begun and not sealed.

        Args:
            publisher: The publisher.
            rank: The rank.
            step: Step that the rank starts now. A slot that the former process sealed for it or a later step counts as left.
        """
        process = publisher.processes.get(rank, "")
        with self.lock:
            ours = [upload for upload in self._open.values() if upload.publisher is publisher]
            left = [upload for upload in ours if self._is_left(upload, rank, process, step)]
        for upload in left:
            self._abort(upload, f"the process of rank {rank} was replaced by another")

    def _is_left(self, upload: Upload, rank: int, process: str, step: int | None) -> bool:
        """Return whether a former process of the rank has begun the version and left it incomplete.

        It is incomplete without the rank's slot, or with a stale one because the rank has returned to `step`.
        """
        if upload.begun.get(rank, process) == process:
            return False
        back = step is not None and upload.record.step >= step
        return bool(self._open_ranks(upload, None if back else [rank]))

    def _abort_overtaken(self, publisher: PublisherRecord, ranks: Sequence[int] | None = None) -> None:
        """Abort versions that wait for a rank that has started a later step: one of `ranks`, or any."""
        with self.lock:
            ours = [upload for upload in self._open.values() if upload.publisher is publisher]
            late = [(upload, publisher.overtaken(upload.record.step, self._open_ranks(upload, ranks))) for upload in ours]
        for upload, reason in late:
            if reason:
                self._abort(upload, reason)

    def _expire_uploads(self) -> None:
        """Abort the versions of ranks that are silent for longer than their lease, and versions that have lost a home."""
        now = self._clock()
        for upload in self.uploads():
            if reason := self.nodes.problem(upload.record.name):
                self._abort(upload, reason)
                continue
            for rank in self._open_ranks(upload):
                silent = now - max(upload.created, upload.publisher.seen.get(rank, 0.0))
                if silent > self.lease_seconds:
                    self.rank_lost.emit(upload.record.model)
                    self._abort(
                        upload, f"rank {rank} was silent for {silent:.1f} s, longer than its lease of {self.lease_seconds} s"
                    )
                    break

    def expire(self) -> None:
        """Abort the versions of ranks that are at a later step, or silent for longer than the lease. Called periodically.

        Forgets publishers that are not ACTIVE and of which no rank has called for long, but for the rejected one of a model that
        nobody publishes.
        """
        for publisher in self.publishers():
            self._abort_overtaken(publisher)
        self._expire_uploads()
        with self.lock:
            now, shown = self._clock(), current(self.publishers())
            for model, known in self._by_model.items():
                kept = tuple(
                    each
                    for each in known
                    if each.state == ACTIVE
                    or each.silent_for(now) < _FORGOTTEN_SECONDS
                    or (each.activating and each.checked is None)
                    or (each.state == REJECTED and each is shown[model])
                )
                self._by_model = self._by_model | {model: kept}

    # Groups: versions of one step that become READY together, one of each model that a job publishes together

    def _group(self, upload: Upload) -> dict[str, Upload]:
        """Return the UPLOADING versions of a version's group by model. One may have begun later than the others, or never."""
        return {each.record.model: each for each in self._open.values() if each.group == upload.group}

    def _others(self, upload: Upload) -> list[Upload]:
        """Return the other UPLOADING versions of a version's group."""
        with self.lock:
            return [other for other in self._group(upload).values() if other is not upload]

    def _proven_group(self, upload: Upload, proof: Proof) -> list[tuple[Upload, Proof]]:
        """Record a verified version. Return all versions of its group with their proofs once all are verified, else none."""
        with self.lock:
            upload.proof, group = proof, self._group(upload)
            proven = [(each, each.proof) for each in group.values() if each.proof is not None]
            complete = group.get(upload.record.model) is upload and len(proven) == len(upload.group.models)
            return proven if complete else []

    def _open_ranks(self, upload: Upload, among: Iterable[int] | None = None) -> list[int]:
        """Return the ranks that have yet to seal a slot before the version can be READY, of `among` or of all."""
        with self.lock:
            group = self._group(upload)
            asked = range(upload.publisher.world_size) if among is None else list(among)
            if len(group) < len(upload.group.models):
                return list(asked)
            return sorted({rank for each in group.values() for rank in each.open_ranks(asked)})

    # Queries and waits

    def progress(self, record: VersionRecord) -> list[tuple[int, bool, int, int]]:
        """Return (rank, sealed, bytes, received bytes) of every slot; nothing unless the version is UPLOADING."""
        upload = self._open.get((record.model, record.number))
        return upload.progress() if upload else []

    def _version_changed(self) -> None:
        """Notify every waiting call."""
        self._versions_changed.emit()
        self._serving_changed.emit()

    def serving_changed(self) -> None:
        """Notify calls that wait until a version is served."""
        self._serving_changed.emit()

    def wait_version(self, model: str, number: int, wait_seconds: float, serving: bool) -> Waiting[VersionRecord]:
        """Return a version that is READY (with `serving`: served by all that follow the model), ABORTED or RETIRED.

        After `wait_seconds`, return it in any state.
        """
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

    def drain(self, seconds: float) -> None:
        """Refuse new versions and wait until open ones end, for at most `seconds`."""
        self.draining = True
        deadline = self._clock() + seconds
        while (self._open or self._creating) and (left := deadline - self._clock()) > 0:
            self._changed.wait(self._changed.count, min(left, 0.1))

    def _check_not_draining(self) -> None:
        """Raise Unavailable (DRAINING) if the daemon is shutting down."""
        if self.draining:
            raise Unavailable("DRAINING", "the daemon is shutting down and accepts no new versions")

    def _check_epoch(self, record: VersionRecord, epoch: int) -> None:
        """Raise FailedPrecondition (STALE_EPOCH) unless a version is of this epoch and the epoch is the model's newest."""
        claim = self.store.epochs.claim(record.model)
        if epoch != record.epoch or (claim is not None and epoch < claim.epoch):
            why = f": {taken_over(record.model, claim.job)}" if claim is not None and epoch < claim.epoch else ""
            raise FailedPrecondition("STALE_EPOCH", f"{record.name} is of epoch {record.epoch}, the call is of {epoch}{why}")


def _same_slot(record: VersionRecord, rank: int, digests: Sequence[int]) -> VersionRecord:
    """Return a complete version if it has these digests of a rank's slot."""
    if record.state not in (READY, RETIRED) or not record.slots:
        raise _not_uploading(record)
    if dict(record.slots).get(rank) != hash_digests(digests):
        raise AlreadyExists(
            "SLOT_DIFFERS",
            f"{record.name} (step {record.step}) is {record.state} with other bytes of rank {rank}: publish them as another step",
        )
    return record


def _not_uploading(record: VersionRecord) -> FailedPrecondition:
    """Return the error of a call for a version that is not UPLOADING, with the reason of its state."""
    why = f": {record.reason}" if record.reason else ""
    return FailedPrecondition(CLOSED[record.state], f"{record.name} is {record.state}{why}")


def _registration_error(error: Exception) -> DaemonError:
    if isinstance(error, DaemonError):
        return error
    return medium_error(error) if isinstance(error, OSError) else FailedPrecondition("REGISTRATION_FAILED", repr(error))
