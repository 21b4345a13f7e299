"""Assembly of ingest: publishers, registration, and the upload of versions into the store.

A new job's claim takes effect once its slots tile the model and its capacity is reserved. It then fences every earlier job of the
model: their UPLOADING versions are aborted, their calls refused.

A version is aborted once a rank cannot be expected to seal its slot: the rank's lease has expired, it has started a later step,
or its process was replaced. An abort applies to every rank, and only ranks that have received it retry the step.
"""

import time
from collections.abc import Callable

from resharder.server.ingest.exchange import MaximaExchange
from resharder.server.ingest.homes import HomeNodes, NoNodes, Replicate
from resharder.server.ingest.publishers import Publishers
from resharder.server.ingest.shared import IngestObserver, IngestShared
from resharder.server.ingest.steps import Steps
from resharder.server.ingest.uploads import Uploads
from resharder.server.ingest.version_waits import VersionWaits
from resharder.server.store.store import Store


class Intake:
    """Parts of ingest.

    Attributes:
        store: The store.
        nodes: Nodes into whose files ranks may write.
        publishers: Claims, registration and leases.
        steps: Versions by step.
        uploads: UPLOADING versions.
        exchange: Exchanges of maxima among ranks that cast to FP8.
        waits: Calls that wait for a version.

    Args:
        store: The store.
        lease_seconds: Duration of a rank's lease.
        chunk_bytes: Size of the chunks that ranks send.
        writer_patience: Seconds to wait for the last writer to close a version's files.
        threads: Threads of a verification.
        replicas: Holders that every piece of a version must have before it is READY: 1, or more to have the daemon copy before
            what ranks have written on nodes.
        replicate: Function that has nodes hold verified versions.
        clock: Monotonic clock in seconds.
        nodes: Nodes into whose files ranks may write; None for none.
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
        replicas: int = 1,
        replicate: Replicate = lambda versions, stopped: None,
        clock: Callable[[], float] = time.monotonic,
        nodes: HomeNodes | None = None,
        audience: Callable[[str, int], tuple[int, int]] = lambda model, number: (0, 0),
    ) -> None:
        self.store = store
        self.nodes: HomeNodes = nodes or NoNodes()
        self._shared = IngestShared(store, clock, self.nodes)
        self.uploads = Uploads(self._shared, writer_patience, replicas, replicate)
        self.publishers = Publishers(self._shared, self.uploads, lease_seconds)
        self.exchange = MaximaExchange(self._shared, self.publishers)
        self.steps = Steps(self._shared, self.publishers, self.uploads, chunk_bytes, threads)
        self.waits = VersionWaits(self._shared, audience)

    def observe(self, observer: IngestObserver) -> None:
        """Report all later events to an observer."""
        self._shared.observers.append(observer)

    @property
    def draining(self) -> bool:
        """Whether new versions are refused because the daemon is shutting down."""
        return self._shared.draining
