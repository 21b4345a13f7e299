"""Publishers: claims of a model by jobs, registration of their ranks' slots, leases."""

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

import numpy as np
import structlog
from resharder.converters.errors import LayoutError
from resharder.converters.geometry.layout import ITEM_SIZES, Box, TensorSpec
from resharder.converters.storage.digest import compile_for
from resharder.converters.storage.files import FileLayout, lay_out
from resharder.server.infra.change_signal import Waiting
from resharder.server.infra.medium import MEDIUM, medium_error
from resharder.server.ingest.assignment import Assigned
from resharder.server.ingest.homes import GatheredBoxes, Readable
from resharder.server.ingest.maxima import RankBlocks, SharedPlan, plan_shared
from resharder.server.ingest.packed_boxes import PackedBoxes
from resharder.server.ingest.publisher import (
    ACTIVE,
    CHECKED,
    MAX_WARNING_LENGTH,
    MAX_WARNINGS,
    MAX_WORLD,
    NO_FILES,
    REGISTERING,
    REJECTED,
    CheckedLayout,
    PublisherRecord,
    check_files,
    current,
)
from resharder.server.ingest.shared import IngestShared, parse_name
from resharder.server.ingest.uploads import Uploads
from resharder.server.state.errors import (
    AlreadyExists,
    DaemonError,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    ResourceNotFound,
)
from resharder.server.store.epochs import NewEpoch
from resharder.server.store.model_state import check_model_name, taken_over

_log = structlog.get_logger("resharder.intake")
_FORGOTTEN_SECONDS = 600.0
"""Silence of all ranks after which a registration that was not completed is forgotten, or one that was rejected."""


class Publishers:
    """Publishers of each model: the one whose claim is in effect, and later ones that register. Thread-safe.

    A claim takes effect when all slots are checked and capacity is reserved. It then fences all earlier ones; until then the
    publisher before it goes on. `lease_seconds` is the duration of a rank's lease.
    """

    def __init__(self, shared: IngestShared, uploads: Uploads, lease_seconds: float) -> None:
        self._shared, self._uploads, self._store, self._nodes = shared, uploads, shared.store, shared.nodes
        self.lease_seconds = lease_seconds
        self._by_model: dict[str, tuple[PublisherRecord, ...]] = {}  # by epoch, without fenced ones; replaced, never modified

    def create(
        self, model: str, job: str, world_size: int, files: Mapping[str, bytes], together: Collection[str] = ()
    ) -> PublisherRecord:
        """Return the publisher of a job; create it if it is new.

        Args:
            model: Name of the model.
            job: Id of the job.
            world_size: Ranks of the job.
            files: Contents of config.json and tokenizer files by path; from one rank at least.
            together: Other models of the job, whose versions of a step are READY together with this model's.

        Raises:
            InvalidArgument: MODEL_NAME, MODEL_FILE, JOB, WORLD_SIZE.
            AlreadyExists: WORLD_SIZE.
            FailedPrecondition: STALE_EPOCH.
            Unavailable: DRAINING.
        """
        check_model_name(model)
        check_files(files)
        models = frozenset(check_model_name(other) for other in together) - {model}
        if not job or len(job) > 256:
            raise InvalidArgument("JOB", f"expected a job of 1 to 256 characters, got {len(job)}")
        if not 1 <= world_size <= MAX_WORLD:
            raise InvalidArgument("WORLD_SIZE", f"expected 1 to {MAX_WORLD} ranks, got {world_size}")
        with self._shared.lock:
            self._shared.check_not_draining()
            publisher = self._of_job(model, job) or self._add(model, job, world_size, models)
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

    def _add(self, model: str, job: str, world_size: int, together: frozenset[str]) -> PublisherRecord:
        claim = self._store.epochs.begin(model, job, world_size)
        publisher = PublisherRecord(model, job, claim.epoch, claim.world_size, together, self._shared.clock())
        known = sorted((*self._by_model.get(model, ()), publisher), key=lambda each: each.epoch)
        self._by_model = self._by_model | {model: tuple(known)}
        _log.info("publisher_created", model=model, job=job, epoch=claim.epoch, world_size=world_size)
        return publisher

    def _fence_earlier(self, newest: PublisherRecord) -> None:
        known = self._by_model.get(newest.model, ())
        earlier = [publisher for publisher in known if publisher.epoch < newest.epoch]
        if not earlier:
            return
        for publisher in earlier:
            publisher.fence(newest.job)
            self._nodes.reserve(publisher.name, (), {})
            _log.info("publisher_fenced", model=publisher.model, job=publisher.job, epoch=publisher.epoch, by=newest.job)
        self._by_model = self._by_model | {newest.model: tuple(each for each in known if each not in earlier)}
        self._uploads.abort_model(newest.model, f"job {newest.job!r} has taken over the model")

    def get(self, name: str, rank: int | None = None) -> PublisherRecord:
        """Return a publisher by name, and renew the lease of `rank`.

        Raises:
            FailedPrecondition: STALE_EPOCH.
            ResourceNotFound: PUBLISHER_UNKNOWN.
        """
        model, epoch = parse_name(name, "publishers")
        publisher = next((each for each in self._by_model.get(model, ()) if each.epoch == epoch), None)
        claim = self._store.epochs.claim(model)
        if claim is not None and epoch < claim.epoch:
            raise FailedPrecondition("STALE_EPOCH", f"{model}: epoch {epoch} is over: {taken_over(model, claim.job)}")
        if publisher is None:
            raise ResourceNotFound(
                "PUBLISHER_UNKNOWN", f"models/{model}/publishers/{epoch} is unknown: create and register it again"
            )
        if rank is not None:
            publisher.check_rank(rank)
            publisher.seen[rank] = self._shared.clock()
        return publisher

    def all(self) -> list[PublisherRecord]:
        """Return the publishers of all models: those that publish, and those that register or were rejected since."""
        return [publisher for known in list(self._by_model.values()) for publisher in known]

    def live_ranks(self, publisher: PublisherRecord) -> int:
        """Return the number of ranks within their lease."""
        now = self._shared.clock()
        return sum(now - seen <= self.lease_seconds for seen in list(publisher.seen.values()))

    def register(
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
        """
        self._replace(name, rank, process)
        host = self._nodes.host_of(readable)
        with self._shared.lock:
            publisher = self.get(name, rank)
            publisher.check_usable()
            publisher.readable[rank] = readable
            publisher.warnings[rank] = [text[:MAX_WARNING_LENGTH] for text in warnings[:MAX_WARNINGS]]
            if host is not None and publisher.state == REGISTERING and not publisher.activating:
                publisher.hosts[rank] = host
                publisher.gatherers |= {rank} if gathers else set()
            try:
                if not publisher.is_registered(rank, fingerprint):
                    publisher.add_slot(rank, fingerprint, specs, boxes, shared)
            except FailedPrecondition as error:
                publisher.reject(error)
                raise
            finally:
                self._shared.changed.notify()
            if not publisher.is_complete:
                return publisher
            publisher.activating, publisher.stalled = True, None
        self._activate(publisher)
        return publisher

    def _replace(self, name: str, rank: int, process: str) -> None:
        with self._shared.lock:
            publisher = self.get(name, rank)
            if not publisher.is_replaced(rank, process, self._shared.clock()):
                return
        self._uploads.abort_left(publisher, rank)

    def _activate(self, publisher: PublisherRecord) -> None:
        """Check the slots and reserve capacity, without the lock, because this takes long for large models.

        If a medium fails, every rank gets the error, and the next rank that registers tries again.
        """
        try:
            self._store.capacity.check_size(sum(spec.size for spec in publisher.specs))
            assigned, shared = publisher.check_and_assign(), _planned(publisher)
            layouts = lay_out(publisher.specs, homes=_groups(publisher.specs, assigned))
            compile_for(ITEM_SIZES[spec.dtype] for spec in publisher.specs)  # now rather than in the first verification
            with self._shared.lock:
                publisher.check_usable()
                publisher.checked = CheckedLayout(assigned, shared, layouts)
                for each in [publisher, *self._partners(publisher)]:
                    if due := self._due(each):
                        self._take_effect(*due)
                self._shared.changed.notify()
        except Exception as error:
            known = _registration_error(error)
            with self._shared.lock:
                publisher.activating, publisher.checked = False, None
                if known.reason in MEDIUM:
                    publisher.stalled = known
                elif publisher.state == REGISTERING:
                    publisher.reject(known)
                self._shared.changed.notify()
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
        claim = self._store.epochs.claim(publisher.model)
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
        first, *others = (NewEpoch(each.model, each.epoch, found.files, each.files) for each, found in checked)
        self._store.epochs.reserve(*first, *others)
        for publisher, found in checked:
            self._fence_earlier(publisher)
            publisher.activate(found)
            homes = _homes_of(found.files, publisher)
            gathered = _gathered_of(found.files, publisher, found.assigned.gathered)
            self._nodes.reserve(publisher.name, found.files, homes, gathered)
            for observer in self._shared.observers:
                observer.publish_phase("registration", publisher.model, self._shared.clock() - publisher.created)
            tensors = len(publisher.specs)
            _log.info("publisher_active", model=publisher.model, job=publisher.job, epoch=publisher.epoch, tensors=tensors)

    def report_readable(self, publisher: PublisherRecord, rank: int, readable: Readable) -> None:
        """Record nonce files as a rank has found them now; a no-op for a rank that reports none."""
        if readable and publisher.readable.get(rank) != readable:
            with self._shared.lock:
                publisher.readable[rank] = readable

    def assignment(self, name: str, rank: int, wait_seconds: float) -> Waiting[tuple[PublisherRecord, list[int]]]:
        """Return the publisher and the positions of the boxes that a rank sends, after all ranks have registered.

        Raises:
            DeadlineExceeded: NOT_REGISTERED, with the missing ranks, after `wait_seconds`.
            ResourceNotFound: PUBLISHER_UNKNOWN, if this rank has registered with, or rank 0 has sent the model's files to, an
                earlier daemon only.
        """
        deadline = self._shared.clock() + wait_seconds
        while True:
            seen = self._shared.changed.count
            publisher = self.get(name, rank)
            publisher.check_usable()
            if publisher.state == ACTIVE:
                return publisher, publisher.assigned[rank]
            if publisher.stalled is not None:
                raise type(publisher.stalled)(publisher.stalled.reason, str(publisher.stalled))
            publisher.check_registered_here(rank)
            for partner in self._partners(publisher):
                partner.check_usable()
            left = deadline - self._shared.clock()
            if left <= 0:
                raise DeadlineExceeded("NOT_REGISTERED", f"{name}: {self._waits_for(publisher)}")
            yield self._shared.changed.pause(seen, min(left, 1.0))

    def _waits_for(self, publisher: PublisherRecord) -> str:
        """Return what a registration lacks."""
        if missing := [rank for rank in range(publisher.world_size) if rank not in publisher.registered]:
            return f"{len(missing)} ranks have not registered: {missing[:8]}"
        if publisher.checked is not None:
            done = {partner.model for partner in self._partners(publisher) if partner.state == ACTIVE or partner.checked}
            return f"its job publishes it together with {sorted(publisher.together - done)}, which not all ranks have registered"
        return CHECKED if publisher.activating else NO_FILES

    def expire(self) -> None:
        """Abort the versions of ranks that are at a later step, or silent for longer than the lease. Called periodically.

        Forgets publishers that are not ACTIVE and of which no rank has called for long, but for the rejected one of a model that
        nobody publishes.
        """
        for publisher in self.all():
            self._uploads.abort_overtaken(publisher)
        self._uploads.expire(self.lease_seconds)
        with self._shared.lock:
            now, shown = self._shared.clock(), current(self.all())
            for model, known in self._by_model.items():
                kept = tuple(
                    each
                    for each in known
                    if each.state == ACTIVE
                    or each.silent_for(now) < _FORGOTTEN_SECONDS
                    or (each.state == REJECTED and each is shown[model])
                )
                self._by_model = self._by_model | {model: kept}


def _homes_of(files: Sequence[FileLayout], publisher: PublisherRecord) -> dict[str, str]:
    """Return the node of each file whose home may be one, by path."""
    found = {file.path: publisher.homes.get(publisher.numbers[next(iter(file.by_name))]) for file in files}
    return {path: node for path, node in found.items() if node is not None}


def _groups(specs: Sequence[TensorSpec], assigned: Assigned) -> dict[str, str]:
    """Return a group for each tensor whose home may be a node, by its name: no file has tensors of two groups."""
    return {specs[n].name: f"{node}/{n in assigned.gathered}" for n, node in assigned.homes.items()}


def _gathered_of(files: Sequence[FileLayout], publisher: PublisherRecord, gathered: Collection[int]) -> tuple[GatheredBoxes, ...]:
    """Return the boxes that ranks write on a node which is not the home of their file."""
    if not gathered:
        return ()
    paths = {name: file.path for file in files for name in file.by_name}
    found: dict[tuple[str, str], list[tuple[str, Box]]] = {}
    same: dict[Box, Box] = {}  # ranks repeat the same boxes
    for rank, boxes in publisher.boxes.items():
        for position in np.flatnonzero(np.isin(boxes.tensors, [*gathered])).tolist():
            number, host = int(boxes.tensors[position]), publisher.hosts[rank]
            if host != publisher.homes[number]:
                name, box = publisher.specs[number].name, boxes.box(position)
                found.setdefault((paths[name], host), []).append((name, same.setdefault(box, box)))
    return tuple(GatheredBoxes(path, node, tuple(boxes)) for (path, node), boxes in sorted(found.items()))


def _planned(publisher: PublisherRecord) -> SharedPlan:
    try:
        return plan_shared(publisher.blocks)
    except LayoutError as error:
        raise FailedPrecondition("LAYOUT_MISMATCH", f"{publisher.name}: {error}") from error


def _registration_error(error: Exception) -> DaemonError:
    if isinstance(error, DaemonError):
        return error
    return medium_error(error) if isinstance(error, OSError) else FailedPrecondition("REGISTRATION_FAILED", repr(error))
