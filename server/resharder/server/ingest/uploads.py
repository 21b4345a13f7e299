"""UPLOADING versions: their slots, the commit after the last seal, and aborts."""

import threading
from collections.abc import Iterable, Sequence

import structlog
from resharder.converters.failpoints import failpoint
from resharder.converters.wire.chunk_frame import ChunkHeader
from resharder.server.ingest.committer import Committer
from resharder.server.ingest.homes import Replicate
from resharder.server.ingest.publisher import FENCED, PublisherRecord
from resharder.server.ingest.shared import IngestObserver, IngestShared
from resharder.server.ingest.upload import AT_HOME, MAPPED, Upload, hash_digests
from resharder.server.ingest.version_group import VersionGroups
from resharder.server.state.errors import AlreadyExists, FailedPrecondition, Reason
from resharder.server.state.timing import Timing
from resharder.server.state.version import ABORTED, READY, RETIRED, UPLOADING, VersionRecord

CLOSED: dict[str, Reason] = {
    UPLOADING: "VERSION_CLOSED", READY: "VERSION_READY", RETIRED: "VERSION_RETIRED", ABORTED: "VERSION_ABORTED",
}  # fmt: skip
"""Reason to refuse an upload, by the state of its version."""
_log = structlog.get_logger("resharder.intake")


class Uploads:
    """UPLOADING versions of all models. Thread-safe.

    Args:
        shared: State that the parts of ingest share.
        writer_patience: Seconds to wait for the last writer to close a version's files.
        replicas: Holders that every piece of a version must have before it is READY.
        replicate: As of `Committer`.
    """

    def __init__(
        self,
        shared: IngestShared,
        writer_patience: float,
        replicas: int,
        replicate: Replicate,
    ) -> None:
        self._shared, self._store = shared, shared.store
        self._open: dict[tuple[str, int], Upload] = {}
        self._groups = VersionGroups(shared.lock)
        self._committer = Committer(shared, self._groups, writer_patience, replicas, replicate, self._forget, self._abort)

    def add(self, upload: Upload) -> None:
        """Add a version that a rank has begun. Callers hold the shared lock."""
        self._open[upload.record.model, upload.record.number] = upload
        self._groups.add(upload)

    def find(self, model: str, number: int) -> Upload | None:
        """Return the upload of a version; None unless it is UPLOADING."""
        return self._open.get((model, number))

    def of_model(self, model: str) -> list[Upload]:
        """Return the uploads of a model."""
        return [upload for upload in list(self._open.values()) if upload.record.model == model]

    def any(self) -> bool:
        """Return whether a version is UPLOADING."""
        return bool(self._open)

    def get(self, model: str, number: int, epoch: int) -> Upload:
        """Return the upload of an UPLOADING version for a call of `epoch`.

        Raises:
            FailedPrecondition: STALE_EPOCH, or the reason of the version's state.
            ResourceNotFound: VERSION_UNKNOWN.
        """
        upload = self._open.get((model, number))
        if upload is None or upload.publisher.state == FENCED or upload.record.epoch != epoch:
            record = self._store.catalogue.get(model, number)
            self._shared.check_epoch(record, epoch)
            raise not_uploading(record)
        return upload

    def land(self, model: str, header: ChunkHeader, data: memoryview, *, transport: str = "grpc") -> None:
        """Write a chunk, and renew the lease of its rank. Raises the errors of `get` and `Upload.land`."""
        upload = self.get(model, header.version, header.epoch)
        upload.land(header, data, transport)
        for observer in self._shared.observers:
            observer.received(model, transport, len(data))
        upload.publisher.seen[header.rank] = self._shared.clock()

    def missing(self, model: str, number: int, epoch: int, rank: int) -> list[int]:
        """Return the indices of a rank's chunks that have not arrived; none if the version is READY."""
        record = self._store.catalogue.get(model, number)
        self._shared.check_epoch(record, epoch)
        if record.state in (READY, RETIRED):
            return []
        upload = self.get(model, number, epoch)
        missing = upload.missing(rank)
        upload.publisher.seen[rank] = self._shared.clock()
        return missing

    def release(self, model: str, number: int, epoch: int, rank: int, files: Sequence[str]) -> None:
        """Record that a rank has written and closed files of a version, and renew its lease; a no-op unless it is UPLOADING.

        Raises FailedPrecondition (STALE_EPOCH), ResourceNotFound (MODEL_UNKNOWN, VERSION_UNKNOWN), InvalidArgument (RANK,
        MODEL_FILE).
        """
        self._shared.check_epoch(self._store.catalogue.get(model, number), epoch)
        upload = self._open.get((model, number))
        if upload is not None:
            upload.release(rank, files)
            upload.publisher.seen[rank] = self._shared.clock()

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
        """
        record = self._store.catalogue.get(model, number)
        self._shared.check_epoch(record, epoch)
        upload = self._open.get((model, number))
        if upload is None or record.state != UPLOADING:
            return _compare(self._store.catalogue.get(model, number), rank, digests)
        fresh = rank in upload.open_ranks()
        last = upload.seal(rank, digests, mapped, timings, trace)
        upload.publisher.seen[rank] = now = self._shared.clock()
        if fresh:
            _observe_seal(self._shared.observers, upload, rank, now - upload.created)
        failpoint("seal.after-slot")
        if last:
            for observer in self._shared.observers:
                observer.publish_phase("upload", model, now - upload.created)
            threading.Thread(target=self._committer.commit, args=(upload,), name="commit").start()
        return self._store.catalogue.get(model, number)

    def _forget(self, upload: Upload) -> None:
        with self._shared.lock:
            known = self._open.pop((upload.record.model, upload.record.number), None)
            self._groups.remove(upload)
            self._shared.changed.notify()
        if known is not None:
            record = self._store.catalogue.get(upload.record.model, upload.record.number)
            for observer in self._shared.observers:
                observer.version_ended(upload, record)

    def _abort(self, upload: Upload, reason: str) -> VersionRecord:
        """Abort a version and the others of its group."""
        also = f"{upload.record.name} of the same step was aborted: {reason}"
        for each, why in [(upload, reason), *((other, also) for other in self._groups.others(upload))]:
            each.close(aborted=True)
            self._store.lifecycle.abort(each.record.model, each.record.number, why)
            self._forget(each)
        return self._store.catalogue.get(upload.record.model, upload.record.number)

    def abort(self, model: str, number: int, epoch: int, reason: str) -> VersionRecord:
        """Abort a version if it is UPLOADING, and return its record.

        Raises FailedPrecondition (STALE_EPOCH), ResourceNotFound (MODEL_UNKNOWN, VERSION_UNKNOWN).
        """
        record = self._store.catalogue.get(model, number)
        self._shared.check_epoch(record, epoch)
        upload = self._open.get((model, number))
        return self._abort(upload, reason or "aborted by its publisher") if upload else record

    def abort_model(self, model: str, reason: str) -> None:
        """Abort all UPLOADING versions of a model."""
        for upload in self.of_model(model):
            self._abort(upload, reason)

    def abort_left(self, publisher: PublisherRecord, rank: int, step: int | None = None) -> None:
        """Abort versions that a former process of a rank has begun and not sealed.

        Args:
            publisher: The publisher.
            rank: The rank.
            step: Step that the rank starts now. A slot that the former process sealed for it or a later step counts as left.
        """
        process = publisher.processes.get(rank, "")
        with self._shared.lock:
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
        return bool(self._groups.open_ranks(upload, None if back else [rank]))

    def abort_overtaken(self, publisher: PublisherRecord, ranks: Sequence[int] | None = None) -> None:
        """Abort versions that wait for a rank that has started a later step: one of `ranks`, or any."""
        with self._shared.lock:
            ours = [upload for upload in self._open.values() if upload.publisher is publisher]
            late = [(upload, publisher.overtaken(upload.record.step, self._groups.open_ranks(upload, ranks))) for upload in ours]
        for upload, reason in late:
            if reason:
                self._abort(upload, reason)

    def expire(self, lease_seconds: float) -> None:
        """Abort the versions of ranks that are silent for longer than their lease, and versions that have lost a home."""
        now = self._shared.clock()
        for upload in list(self._open.values()):
            if reason := self._shared.nodes.problem(upload.record.name):
                self._abort(upload, reason)
                continue
            for rank in self._groups.open_ranks(upload):
                silent = now - max(upload.created, upload.publisher.seen.get(rank, 0.0))
                if silent > lease_seconds:
                    for observer in self._shared.observers:
                        observer.rank_lost(upload.record.model)
                    self._abort(upload, f"rank {rank} was silent for {silent:.1f} s, its lease is {lease_seconds} s")
                    break

    def progress(self, record: VersionRecord) -> list[tuple[int, bool, int, int]]:
        """Return (rank, sealed, bytes, received bytes) of every slot; nothing unless the version is UPLOADING."""
        upload = self._open.get((record.model, record.number))
        return upload.progress() if upload else []


def _observe_seal(observers: Iterable[IngestObserver], upload: Upload, rank: int, seconds: float) -> None:
    """Report a sealed slot; bytes written into mapped files count with the seal."""
    delivery = upload.deliveries[rank]
    for observer in observers:
        if delivery.transport == MAPPED:
            observer.received(upload.record.model, delivery.transport, delivery.size_bytes)
        elif delivery.home_bytes:
            observer.received(upload.record.model, AT_HOME, delivery.home_bytes)
        observer.slot_sealed(delivery.transport, delivery.size_bytes, seconds)


def _compare(record: VersionRecord, rank: int, digests: Sequence[int]) -> VersionRecord:
    """Return a complete version if it has these digests of a rank's slot."""
    if record.state not in (READY, RETIRED) or not record.slots:
        raise not_uploading(record)
    if dict(record.slots).get(rank) != hash_digests(digests):
        raise AlreadyExists(
            "SLOT_DIFFERS", f"{record.name} (step {record.step}) is {record.state} with other bytes of rank {rank}"
        )
    return record


def not_uploading(record: VersionRecord) -> FailedPrecondition:
    """Return the error of a call for a version that is not UPLOADING, with the reason of its state."""
    why = f": {record.reason}" if record.reason else ""
    return FailedPrecondition(CLOSED[record.state], f"{record.name} is {record.state}{why}")
