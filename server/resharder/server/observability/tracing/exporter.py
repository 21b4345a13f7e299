"""Export of spans by OpenTelemetry's SDK, which samples, batches and sends them according to OTEL_* variables.

Needs the extra `otel`.
"""

import importlib.metadata
import logging
import os
from collections.abc import Mapping

import structlog
from opentelemetry.context import Context
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, StatusCode, TraceFlags, set_span_in_context
from resharder.server.observability.tracing.spans import Span

_log = structlog.get_logger("resharder.otlp")
_QUEUE = 1 << 14  # spans; a server of several thousand workers ends its install at once


class Exporter:
    """Exporter of spans with given ids. `add` must be called from one thread only."""

    def __init__(self) -> None:
        logging.getLogger("opentelemetry").addHandler(_ToOurLog())
        release = importlib.metadata.version("resharder")
        about = Resource({"service.name": "resharderd", "service.version": release}).merge(OTELResourceDetector().detect())
        self._ids = _GivenIds()
        self._provider = TracerProvider(resource=about, id_generator=self._ids, shutdown_on_exit=False)
        queue = None if os.environ.get("OTEL_BSP_MAX_QUEUE_SIZE") else _QUEUE
        self._provider.add_span_processor(BatchSpanProcessor(_otlp(), max_queue_size=queue))
        self._tracer = self._provider.get_tracer("resharder", release)

    def keeps(self, trace_id: int) -> bool:
        """Return whether the sampler accepts the trace. The decision depends on the id alone, so it is always the same."""
        return self._provider.sampler.should_sample(None, trace_id, "version").decision == Decision.RECORD_AND_SAMPLE

    def add(self, span: Span, about: Mapping[str, str | int], trace_id: int, span_id: int, parent_id: int | None) -> None:
        """Queue a span for export. `about` has the attributes that all spans of the trace share."""
        self._ids.next = trace_id, span_id
        context = Context()
        if parent_id is not None:
            context = set_span_in_context(NonRecordingSpan(_context(trace_id, parent_id)), context)
        made = self._tracer.start_span(
            span.name,
            context,
            attributes={**about, **span.attributes},
            links=[Link(_linked(span.link))] if span.link else [],
            start_time=_nanoseconds(span.start),
        )
        if span.error:
            made.set_status(StatusCode.ERROR, span.error)
        made.end(_nanoseconds(span.end))

    def close(self) -> None:
        """Send queued spans and stop the SDK's thread. Blocks for as long as the SDK's timeouts allow."""
        self._provider.shutdown()


class _ToOurLog(logging.Handler):
    """Handler that turns the SDK's log records (an unreachable collector) into events of the daemon's log."""

    def emit(self, record: logging.LogRecord) -> None:
        _log.log(record.levelno, "traces", reason=record.getMessage())


class _GivenIds(IdGenerator):
    next = (0, 0)

    def generate_trace_id(self) -> int:
        return self.next[0]

    def generate_span_id(self) -> int:
        return self.next[1]

    def is_trace_id_random(self) -> bool:
        return True  # equivalent to a hash


def _context(trace_id: int, span_id: int) -> SpanContext:
    return SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def _linked(traceparent: str) -> SpanContext:
    _, trace_id, span_id, _ = traceparent.split("-")
    return _context(int(trace_id, 16), int(span_id, 16))


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def _otlp() -> SpanExporter:
    """Return the exporter for the protocol in the environment, by default gRPC."""
    named = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL") or "grpc"
    if named == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as OverHttp

    return OverHttp()
