"""Collection of spans: publishes that ended, workers that booted, installs that ended."""

import time
from collections.abc import Callable, Iterable
from functools import partial

from resharder.server.ingest.upload import Upload
from resharder.server.observability.tracing.ids import Tracing
from resharder.server.observability.tracing.spans import Span, boot_spans, control_spans, install_spans, version_spans
from resharder.server.state.server import Server
from resharder.server.state.version import VersionRecord
from resharder.server.store.catalogue import Catalogue
from resharder.v1 import resources_pb2


class Traced:
    """Spans of what ingest and fleets emit, for a trace exporter."""

    def __init__(
        self,
        tracing: Tracing,
        catalogue: Catalogue,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._tracing, self._catalogue = tracing, catalogue
        self._clock, self._wall = clock, wall

    def version_ended(self, upload: Upload, record: VersionRecord) -> None:
        """Add the spans of a version's publish."""
        now = self._wall()
        self._tracing.add(lambda: record, lambda: version_spans(record, upload.deliveries, upload.timings, now))

    def server_stepped(self, before: Server, after: Server) -> None:
        """Add the spans of an install that ended, or of a boot, between two states of a server."""
        ended, known = after.ended, before.ended
        if ended is not None and ended is not known:
            reported = len(known.timings) if known is not None and known.id == ended.id else None
            if reported is None:
                self._add(after.model, ended.version, partial(install_spans, after, ended, self._wall() - self._clock()))
            else:
                self._add(after.model, ended.version, partial(control_spans, ended, ended.timings[reported:]))
        if before.booting and after.boot_version:
            for worker in after.workers.values():
                was = before.workers.get(worker.rank)
                fresh = was is None or was.process != worker.process
                if fresh and worker.state == resources_pb2.Worker.BOOTED and worker.version == after.boot_version:
                    self._add(after.model, worker.version, partial(boot_spans, after, worker))

    def _add(self, model: str, version: int, spans: Callable[[], Iterable[Span]]) -> None:
        self._tracing.add(partial(self._catalogue.get, model, version), spans)
