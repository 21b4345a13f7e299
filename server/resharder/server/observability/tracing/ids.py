"""One OpenTelemetry trace for each version, from `publish` to its last install; exported if OTEL_EXPORTER_OTLP_ENDPOINT is set.

Only the daemon creates spans, from timings in messages that ranks and servers send anyway: no rank and no GPU worker has an
exporter, a thread for it, or a connection to a collector, and no span is lost or doubled when workers are forked or killed.

Ids are hashes, not random: of the version's record, which its manifest contains, for a trace, and of its path for a span. An
install that follows days later, under a restarted daemon, therefore belongs to the trace of its publish, and a span that is sent
twice is one span.
"""

import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import structlog
from blake3 import blake3
from resharder.converters.extras import install_line
from resharder.server.observability.tracing.spans import ROOT, Span
from resharder.server.state.version import VersionRecord

if TYPE_CHECKING:
    from resharder.server.observability.tracing.exporter import Exporter

_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_FLUSH_SECONDS = 5.0
_log = structlog.get_logger("resharder.tracing")


class Tracing:
    """Thread-safe and non-blocking. Does nothing without an exporter."""

    def __init__(self) -> None:
        self._exporter = _exporter(os.environ)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tracing") if self._exporter else None

    @property
    def on(self) -> bool:
        """Whether spans are exported."""
        return self._exporter is not None

    def traceparent(self, record: VersionRecord) -> str:
        """Return the traceparent of a version's first span; empty if its trace is not recorded."""
        if self._exporter is None or not self._exporter.keeps(trace_id(record)):
            return ""
        return f"00-{trace_id(record):032x}-{span_id(record, ROOT):016x}-01"

    def add(self, version: Callable[[], VersionRecord], spans: Callable[[], Iterable[Span]]) -> None:
        """Add the spans of a version. Both functions are called later, on the exporter's thread."""
        if self._thread is not None and self._exporter is not None:
            self._thread.submit(_add, self._exporter, version, spans)

    def close(self) -> None:
        """Send pending spans, for a few seconds at most."""
        if self._thread is not None and self._exporter is not None:
            self._thread.shutdown()
            last = threading.Thread(target=self._exporter.close, name="tracing-end", daemon=True)
            last.start()
            last.join(_FLUSH_SECONDS)


def _add(exporter: "Exporter", version: Callable[[], VersionRecord], spans: Callable[[], Iterable[Span]]) -> None:
    try:
        record = version()
        if exporter.keeps(trace_id(record)):
            about: dict[str, str | int] = {
                "resharder.model": record.model,
                "resharder.version": record.number,
                "resharder.step": record.step,
            }
            for span in spans():
                parent = span_id(record, span.parent) if span.parent else None
                exporter.add(span, about, trace_id(record), span_id(record, span.path), parent)
    except Exception as error:
        _log.error("spans_failed", exc_info=error)


def trace_id(record: VersionRecord) -> int:
    """Return the trace id of a version. Numbers restart with a new store, and jobs may as well; the time differs."""
    return _hashed(f"{record.name} {record.epoch} {record.create_time!r} {record.job}", 16)


def span_id(record: VersionRecord, path: str) -> int:
    """Return the id of a span, a hash of its version and path: 64 bits, never 0."""
    return _hashed(f"{trace_id(record)} {path}", 8)


def _hashed(text: str, size: int) -> int:
    return int.from_bytes(blake3(text.encode()).digest(size)) or 1


def traceparent_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """Return the W3C trace context of a call; empty if it has none, or an invalid one."""
    found = next((value for key, value in metadata or () if key == "traceparent"), "")
    return found if isinstance(found, str) and _TRACEPARENT.fullmatch(found) else ""


def _exporter(environment: Mapping[str, str]) -> "Exporter | None":
    given = {name: value for name, value in environment.items() if value}
    if not {"OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"} & given.keys():
        return None
    if given.get("OTEL_SDK_DISABLED", "").lower() == "true" or given.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp":
        return None
    try:
        from resharder.server.observability.tracing.exporter import Exporter
    except ImportError as error:
        _log.warning("no_traces", reason=f"an OTLP endpoint is set, but {error}: {install_line('otel')}")
        return None
    return Exporter()
