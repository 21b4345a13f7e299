"""Versions by step: the version of a rank's step, and the begin of a new one."""

import structlog
from resharder.server.infra.change_signal import Waiting
from resharder.server.ingest.homes import HomeFiles, NodeHome, ranks_at_home
from resharder.server.ingest.publisher import ACTIVE, PublisherRecord
from resharder.server.ingest.publishers import Publishers
from resharder.server.ingest.shared import IngestShared
from resharder.server.ingest.upload import Upload
from resharder.server.ingest.uploads import Uploads
from resharder.server.state.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from resharder.server.state.version import ABORTED, UPLOADING, VersionRecord

MAX_UPLOADING = 2
"""UPLOADING versions of a model."""
_LOOK = 2.0  # longest pause of a waiting call, in seconds
_OPENING = 20.0  # seconds that a rank waits while another rank's call begins the same version
_log = structlog.get_logger("resharder.intake")


class Steps:
    """Versions of all publishers by step. Thread-safe.

    Args:
        shared: State that the parts of ingest share.
        publishers: Publishers of all models.
        uploads: UPLOADING versions.
        chunk_bytes: Size of the chunks that ranks send.
        threads: Threads that digest a version.
    """

    def __init__(self, shared: IngestShared, publishers: Publishers, uploads: Uploads, chunk_bytes: int, threads: int) -> None:
        self._shared, self._store = shared, shared.store
        self._publishers, self._uploads, self.chunk_bytes = publishers, uploads, chunk_bytes
        self._threads = threads
        self._creating: set[tuple[str, int, int]] = set()

    def create(
        self, name: str, rank: int, step: int, after: int | None = None, *, set_aside: bool = False
    ) -> Waiting[VersionRecord]:
        """Return the version of a publisher's step, and begin it if there is none.

        Concurrent calls for the same step get the same version: one begins it, the others wait.

        Args:
            name: Name of the publisher.
            rank: The rank.
            step: The step.
            after: Newest version of the step that the rank has begun before; None: all. A later aborted version is
                returned, so that a rank never delivers into a version other than the one it began.
            set_aside: Whether LATEST skips a version that this call begins.

        Raises:
            InvalidArgument: STEP.
            FailedPrecondition: VERSION_ABORTED, if another rank is at a later step.
            ResourceExhausted: TOO_MANY_UPLOADING, NO_ROOM.
        """
        if step < 0:
            raise InvalidArgument("STEP", f"expected a step of 0 or more, got {step}")
        self._start(name, rank, step)
        shared = self._shared
        deadline = shared.clock() + _OPENING
        while True:
            seen = shared.changed.count
            with shared.lock:
                publisher = self._publishers.get(name, rank)
                publisher.check_active()
                key = (publisher.model, publisher.epoch, step)
                if key not in self._creating:  # otherwise another rank's call is beginning it
                    known = self._version_of(*key, after)
                    if known is not None:
                        if upload := self._uploads.find(known.model, known.number):
                            upload.begun[rank] = publisher.processes.get(rank, "")
                        return known
                    if publisher.is_due(rank, step):
                        self._check_may_open(publisher, rank, step)
                        self._creating.add(key)
                        break
            if (left := deadline - shared.clock()) <= 0:
                raise ResourceExhausted(
                    "TOO_MANY_UPLOADING", f"{publisher.model}: step {step} is to be created for another rank: try again"
                )
            yield shared.changed.pause(seen, min(left, _LOOK))
        try:
            return self._begin(publisher, rank, step, set_aside)
        finally:
            with shared.lock:
                self._creating.discard(key)
                shared.changed.notify()

    def _start(self, name: str, rank: int, step: int) -> None:
        """Record that a rank is at `step`, and abort earlier versions whose slots it has not sealed."""
        with self._shared.lock:
            publisher = self._publishers.get(name, rank)
            publisher.check_active()
            publisher.started[rank] = step
        self._uploads.abort_left(publisher, rank, step)
        self._uploads.abort_overtaken(publisher, [rank])

    def _check_may_open(self, publisher: PublisherRecord, rank: int, step: int) -> None:
        self._shared.check_not_draining()
        late = publisher.overtaken(step, (other for other in publisher.senders() if other != rank))
        if late:
            raise FailedPrecondition("VERSION_ABORTED", f"{publisher.model}: expected no earlier step than other ranks': {late}")
        others = [upload.record for upload in self._uploads.of_model(publisher.model)]
        coming = sum(1 for model, *_ in self._creating if model == publisher.model)
        if len(others) + coming >= MAX_UPLOADING:
            steps = ", ".join(f"{r.name} (step {r.step})" for r in others)
            raise ResourceExhausted(
                "TOO_MANY_UPLOADING", f"{publisher.model}: {MAX_UPLOADING} versions are UPLOADING already: {steps}"
            )

    def _begin(self, publisher: PublisherRecord, rank: int, step: int, set_aside: bool) -> VersionRecord:
        store, shared = self._store, self._shared
        record = store.lifecycle.begin(
            publisher.model, publisher.epoch, step, publisher.job, set_aside=set_aside, warnings=publisher.version_warnings()
        )
        homes = self._take_homes(publisher, record)
        with shared.lock:
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
                now=shared.clock(),
                homes=HomeFiles(shared.nodes, record.name, homes, layouts),
            )
            upload.begun[rank] = publisher.processes.get(rank, "")
            self._uploads.add(upload)
        _log.info("version_created", version=record.name, step=step, epoch=record.epoch)
        self._uploads.abort_overtaken(publisher)  # a rank may have started a later step while the store freed capacity
        return store.catalogue.get(record.model, record.number)

    def _take_homes(self, publisher: PublisherRecord, record: VersionRecord) -> tuple[NodeHome, ...]:
        """Take files for a version on the nodes of the ranks' hosts, where these ranks have read the nodes' present nonces."""
        with self._shared.lock:
            ranks = ranks_at_home(publisher.homes, publisher.boxes, publisher.hosts)
            read = {node: [publisher.readable.get(rank, {}) for rank in there] for node, there in ranks.items()}
        return self._shared.nodes.take(publisher.name, record.name, read) if read else ()

    def _version_of(self, model: str, epoch: int, step: int, after: int | None) -> VersionRecord | None:
        """Return a complete version first, then an aborted one after `after`, then an UPLOADING one."""
        same = [r for r in self._store.catalogue.versions(model) if (r.epoch, r.step) == (epoch, step)]
        live = [r for r in same if r.state != ABORTED]
        if live and live[-1].state != UPLOADING:
            return live[-1]
        unknown = [r for r in same if r.state == ABORTED and after is not None and r.number > after]
        return next(reversed(unknown or live), None)

    def drain(self, seconds: float) -> None:
        """Refuse new versions and wait until open ones end, for at most `seconds`."""
        shared = self._shared
        shared.draining = True
        deadline = shared.clock() + seconds
        while (self._uploads.any() or self._creating) and (left := deadline - shared.clock()) > 0:
            shared.changed.wait(shared.changed.count, min(left, 0.1))
