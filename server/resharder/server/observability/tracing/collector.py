"""What becomes spans: versions that are UPLOADING no longer, workers that booted, installs that ended."""

import time
from collections.abc import Callable, Iterable
from functools import partial

from resharder.server.fleets import fleets as fleets_fleets
from resharder.server.fleets.fleets import Fleets
from resharder.server.ingest.coordinator import Intake
from resharder.server.ingest.upload import Upload
from resharder.server.observability.tracing.ids import Tracing
from resharder.server.observability.tracing.spans import Span, boot_spans, control_spans, install_spans, version_spans
from resharder.server.state.server import Server, WorkerState
from resharder.server.state.version import VersionRecord
from resharder.server.store.catalogue import Catalogue


class Traced(fleets_fleets.FleetObserver):
    """Made once; it is heard of only where there is something to send."""

    def __init__(self, tracing: Tracing, catalogue: Catalogue, intake: Intake, fleets: Fleets) -> None:
        self._tracing, self._catalogue = tracing, catalogue
        if tracing.on:
            intake.ended = self._version_ended
            fleets.observers.append(self)

    def _version_ended(self, staged: Upload, record: VersionRecord) -> None:
        now = time.time()
        self._tracing.add(lambda: record, lambda: version_spans(record, staged.deliveries, staged.timings, now))

    def server_stepped(self, before: Server, after: Server) -> None:
        ended, known = after.ended, before.ended
        if ended is not None and ended is not known:
            said = len(known.timings) if known is not None and known.id == ended.id else None
            if said is None:
                self._add(after.model, ended.version, partial(install_spans, after, ended, time.time() - time.monotonic()))
            else:
                self._add(after.model, ended.version, partial(control_spans, ended, ended.timings[said:]))
        if before.booting and after.boot_version:
            for worker in after.workers.values():
                was = before.workers.get(worker.rank)
                fresh = was is None or was.process != worker.process
                if fresh and worker.state == WorkerState.BOOTED and worker.version == after.boot_version:
                    self._add(after.model, worker.version, partial(boot_spans, after, worker))

    def _add(self, model: str, version: int, spans: Callable[[], Iterable[Span]]) -> None:
        self._tracing.add(partial(self._catalogue.get, model, version), spans)
