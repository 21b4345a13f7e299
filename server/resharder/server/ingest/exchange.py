"""Exchange of maxima among the ranks of a version: each call brings a rank's maxima and waits for the others."""

import numpy as np
from resharder.server.infra.change_signal import Waiting
from resharder.server.ingest.maxima import Floats, VersionMaxima
from resharder.server.ingest.publisher import PublisherRecord
from resharder.server.ingest.publishers import Publishers
from resharder.server.ingest.shared import IngestShared
from resharder.server.ingest.uploads import not_uploading
from resharder.server.state.errors import AlreadyExists, DeadlineExceeded, InvalidArgument, listed
from resharder.server.state.version import ABORTED, READY, UPLOADING, VersionRecord


class MaximaExchange:
    """Exchanges of all publishers. Thread-safe.

    Contributions stay as long as their version is UPLOADING or READY, so that a rank that repeats a step gets the same answer.
    """

    def __init__(self, shared: IngestShared, publishers: Publishers) -> None:
        self._shared, self._store, self._publishers = shared, shared.store, publishers

    def exchange(self, model: str, number: int, epoch: int, rank: int, values: Floats, wait_seconds: float) -> Waiting[Floats]:
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
        deadline = self._shared.clock() + wait_seconds
        record = self._store.catalogue.get(model, number)
        self._shared.check_epoch(record, epoch)
        publisher = self._publishers.get(f"models/{model}/publishers/{epoch}", rank)
        publisher.check_active()
        with self._shared.lock:
            maxima = self._maxima_of(publisher, record)
            self._contribute(maxima, record, rank, np.array(values, np.float32))
            self._shared.changed.notify()
        while True:
            seen = self._shared.changed.count
            self._publishers.get(publisher.name)  # raises if a newer job has claimed the model
            with self._shared.lock:
                missing = maxima.missing(rank)
                if not missing:
                    return maxima.of(rank)
            if (now := self._store.catalogue.get(model, number)).state == ABORTED:
                raise not_uploading(now)
            left = deadline - self._shared.clock()
            if left <= 0:
                raise DeadlineExceeded("MAXIMA_MISSING", f"{record.name}: ranks without maxima: {listed(missing)}")
            yield self._shared.changed.pause(seen, min(left, 1.0))

    def _maxima_of(self, publisher: PublisherRecord, record: VersionRecord) -> VersionMaxima:
        if record.number not in publisher.maxima:
            states = {each.number: each.state for each in self._store.catalogue.versions(record.model)}
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
