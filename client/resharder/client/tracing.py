"""Durations of phases, for reports from which the daemon creates traces (docs/tracing.md), and links between a version's trace
and a trainer's own.

OpenTelemetry is never imported here. Without it in the trainer, there are no links.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

from resharder.v1 import resources_pb2

Timings = list[resources_pb2.Timing]


@contextmanager
def timed(timings: Timings, phase: str) -> Iterator[None]:
    """Append the start time and duration of a block to `timings`, also if the block raises."""
    timing = resources_pb2.Timing(phase=phase)
    timing.start_time.GetCurrentTime()
    began = monotonic()
    try:
        yield
    finally:
        timing.seconds = monotonic() - began
        timings.append(timing)


def metadata() -> tuple[tuple[str, str], ...]:
    """Return gRPC metadata with the W3C trace context of this thread's span, if any."""
    span = _current()
    if span is None:
        return ()
    context = span.get_span_context()
    return (("traceparent", f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"),)


def link(traceparent: str) -> None:
    """Link this thread's span, if any, to the first span of a version's trace."""
    span = _current()
    if span is None or not traceparent:
        return
    trace = sys.modules["opentelemetry.trace"]
    _, trace_id, span_id, flags = traceparent.split("-")
    there = trace.SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=trace.TraceFlags(int(flags, 16)))
    span.add_link(there)


def _current() -> Any:
    """Return OpenTelemetry's current span; None without OpenTelemetry or outside of a span."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return None
    span = trace.get_current_span()
    return span if span.get_span_context().is_valid else None
