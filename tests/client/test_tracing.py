"""What clients measure for traces, and how a trainer's own are linked."""

import subprocess
import sys
import time

import pytest
from opentelemetry.sdk.trace import TracerProvider
from resharder.client import tracing

VERSION = f"00-{'a' * 32}-{'b' * 16}-01"


def test_a_phase_is_measured_however_it_ends() -> None:
    timings: tracing.Timings = []
    before = time.time()
    with tracing.timed(timings, "create"):
        pass
    with pytest.raises(RuntimeError), tracing.timed(timings, "deliver"):
        raise RuntimeError("the daemon is gone")
    assert [timing.phase for timing in timings] == ["create", "deliver"]
    assert all(before - 1 <= timing.start_time.ToNanoseconds() / 1e9 and timing.seconds >= 0 for timing in timings)


def test_a_trainer_within_a_span_says_which() -> None:
    with TracerProvider().get_tracer("trainer").start_as_current_span("training step") as step:
        context = step.get_span_context()
        metadata = tracing.metadata()
        tracing.link(VERSION)
        tracing.link("")
    assert metadata == (("traceparent", f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"),)
    (link,) = step.links  # type: ignore[attr-defined]
    assert (f"{link.context.trace_id:x}", f"{link.context.span_id:x}") == ("a" * 32, "b" * 16)


def test_a_trainer_outside_of_any_span_says_nothing() -> None:
    tracing.link(VERSION)
    assert tracing.metadata() == ()


def test_a_trainer_without_opentelemetry_imports_none() -> None:
    program = """
import sys
from resharder.client import tracing
tracing.link("00-" + "a" * 32 + "-" + "b" * 16 + "-01")
assert tracing.metadata() == ()
assert not [name for name in sys.modules if name.startswith("opentelemetry")]
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
