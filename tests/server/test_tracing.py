"""The traces that a real daemon sends to a collector: real publishers, servers that speak the wire."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from resharder.server.observability.tracing.ids import Tracing, trace_id, traceparent_of
from resharder.server.state.timing import Timing, timings_from_proto, timings_to_proto
from resharder.server.state.version import UPLOADING, VersionRecord
from resharder.v1 import resources_pb2, server_pb2

from tests.client.models import connected, parts, publish_all, spread, weights
from tests.support.collector import Collector, Span
from tests.support.daemon import Daemon
from tests.support.observing import wait_serving, wait_until
from tests.support.ports import free_port
from tests.support.simulated_server import SimulatedServer

Order, Worker = server_pb2.Order, resources_pb2.Worker
_CONTROL = {Order.APPLY: ["pause", "reset"], Order.RESUME: ["resume"]}
_WORKER = {Worker.BOOTED: ["stage", "load"], Worker.STAGED: ["stage"], Worker.APPLIED: ["stage", "verify", "apply"]}


class Timed(SimulatedServer):
    """Two workers, and all say how long things took."""

    def _report_control(self, **fields: Any) -> None:
        fields |= {"world_size": 2} if "world_size" in fields else {}
        super()._report_control(**fields, timings=_timings(_CONTROL.get(fields.get("done", 0), [])))

    def _worker(self, state: int, version: int, install: str = "") -> resources_pb2.Worker:
        worker = super()._worker(state, version, install)
        worker.timings.extend(_timings(_WORKER[state]))
        return worker

    def _report(self, worker: resources_pb2.Worker) -> None:
        for rank in range(2):
            ranked = resources_pb2.Worker()
            ranked.CopyFrom(worker)
            ranked.rank, ranked.process = rank, f"{worker.process}-{rank}"
            super()._report(ranked)


def _timings(phases: list[str]) -> list[resources_pb2.Timing]:
    made = [resources_pb2.Timing(phase=phase, seconds=0.25) for phase in phases]
    for timing in made:
        timing.start_time.GetCurrentTime()
    return made


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with Collector() as running:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", running.endpoint)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        yield running


@pytest.fixture
def daemon(collector: Collector) -> Iterator[Daemon]:
    with Daemon() as running:
        yield running


def publish(daemon: Daemon, step: int, ranks: int = 2, job: str = "job") -> str:
    """The traceparent of a version that is READY."""
    publishers = connected(daemon.endpoint, ranks, job)
    handles = publish_all(publishers, step, weights(step))
    handles[0].wait_ready(60)
    for publisher in publishers:
        publisher.close()
    assert len({handle.trace for handle in handles}) == 1
    return handles[0].trace


def wait_trace(collector: Collector, traceparent: str, names: list[str]) -> list[Span]:
    """The spans of the trace, once they are those."""
    trace = traceparent.split("-")[1]

    def found(spans: list[Span]) -> list[Span]:
        return [span for span in spans if span.trace == trace]

    wanted = f"the spans {sorted(names)} in {traceparent}"
    return found(collector.wait_for(lambda spans: sorted(s.name for s in found(spans)) == sorted(names), wanted))


def ways(spans: list[Span]) -> set[str]:
    """The parent and the owner of each span."""
    by_id = {span.id: span for span in spans}

    def way(span: Span) -> str:
        label = span.name + (f" {span.attributes['rank']}" if "rank" in span.attributes else "")
        return f"{way(by_id[span.parent])} / {label}" if span.parent else label

    return {way(span) for span in spans}


PUBLISHED = [*["publish", "create", "deliver"] * 2, "verify", "commit", "version"]
INSTALLED = ["install", *["stage", "verify", "apply"] * 2, "pause", "reset", "resume"]


def test_one_trace_follows_a_version_from_every_rank_through_the_daemon_into_every_worker(
    daemon: Daemon, collector: Collector
) -> None:
    booted = publish(daemon, 1)
    with Timed(daemon, "left"):
        wait_serving(daemon, 1)
        installed = publish(daemon, 2)
        wait_serving(daemon, 2)
        spans = wait_trace(collector, installed, PUBLISHED + INSTALLED)
        first = wait_trace(collector, booted, [*PUBLISHED, *["boot", "stage", "load"] * 2])
    published = {
        "version",
        *(f"version / publish {rank}{phase}" for rank in (0, 1) for phase in ("", " / create", " / deliver")),
        "version / verify",
        "version / commit",
    }
    assert ways(spans) == published | {
        "version / install",
        *(f"version / install / {phase} {rank}" for rank in (0, 1) for phase in ("stage", "verify", "apply")),
        *(f"version / install / {phase}" for phase in ("pause", "reset", "resume")),
    }
    assert ways(first) == published | {
        f"version / boot {rank}{phase}" for rank in (0, 1) for phase in ("", " / stage", " / load")
    }
    (root,) = [span for span in spans if span.name == "version"]
    assert installed == f"00-{root.trace}-{root.id}-01"
    assert len({span.id for span in spans}) == len(spans)
    for span in spans:
        assert (span.service, span.error) == ("resharderd", None)
        assert {key: span.attributes[key] for key in ("model", "version", "step")} == {"model": "policy", "version": 2, "step": 2}
        assert root.start <= span.start <= span.end
    (install,) = [span for span in spans if span.name == "install"]
    assert (install.attributes["server"], install.attributes["fleet"]) == ("left", "policy")
    assert {round((span.end - span.start) / 1e6) for span in spans if span.parent == install.id} == {250}  # milliseconds


def test_an_install_by_a_daemon_that_was_started_again_is_in_the_trace_of_its_publish(
    daemon: Daemon, collector: Collector
) -> None:
    trace = publish(daemon, 1)
    wait_trace(collector, trace, PUBLISHED)
    daemon.kill()
    daemon.start()
    with Timed(daemon, "left"):
        spans = wait_trace(collector, trace, [*PUBLISHED, *["boot", "stage", "load"] * 2])
    assert {f"version / boot {rank}" for rank in (0, 1)} < ways(spans)


def test_what_failed_says_why(daemon: Daemon, collector: Collector) -> None:
    publish(daemon, 1)
    with Timed(daemon, "left") as server:
        server.broken = {2}
        trace = publish(daemon, 2).split("-")[1]
        spans = collector.wait_for(lambda spans: any(s.name == "install" for s in spans), "an install that failed")
    failed = next(span for span in spans if span.name == "install")
    assert (failed.trace, failed.attributes["state"]) == (trace, "FAILED")
    assert failed.error == "the control side could not stage it: RESHARDER_STAGING_DIR has no space left for version 2"


def test_a_version_that_was_aborted_says_why(daemon: Daemon, collector: Collector) -> None:
    first, second = connected(daemon.endpoint, 2, "job")
    trace = first.publish_tensors(1, parts(weights(1), spread(2)[0])).trace
    first.abort("the loss was no number")
    spans = wait_trace(collector, trace, ["version", "publish", "create", "deliver"])
    (version,) = [span for span in spans if span.name == "version"]
    assert (version.error, version.attributes["state"]) == ("the loss was no number", "ABORTED")
    first.close()
    second.close()


def test_a_trainer_with_traces_of_its_own_has_them_linked(daemon: Daemon, collector: Collector) -> None:
    (publisher,) = connected(daemon.endpoint, 1, "job")
    with TracerProvider().get_tracer("trainer").start_as_current_span("training step") as step:
        handle = publisher.publish_tensors(1, parts(weights(1), spread(1)[0]))
    publisher.close()
    spans = wait_trace(collector, handle.trace, ["version", "publish", "create", "deliver", "verify", "commit"])
    (published,) = [span for span in spans if span.name == "publish"]
    here = step.get_span_context()
    assert published.links == ((f"{here.trace_id:032x}", f"{here.span_id:016x}"),)
    (link,) = step.links  # type: ignore[attr-defined]
    assert handle.trace == f"00-{link.context.trace_id:032x}-{link.context.span_id:016x}-01"


@pytest.mark.full
def test_a_collector_that_is_away_stops_nobody_and_is_one_event_a_line_in_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    nobody = f"127.0.0.1:{free_port()}"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{nobody}")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    with Daemon(log_format="json") as daemon:
        assert publish(daemon, 1)
        with Timed(daemon, "left"):
            publish(daemon, 2)
            wait_serving(daemon, 2)
        wait_until(lambda: nobody in daemon.log.read_text(), "the daemon says that nobody took its traces")
        assert daemon.stop() == 0
        events = [json.loads(line) for line in daemon.log.read_text().splitlines()]
    assert "traces" in {event["event"] for event in events}


def test_without_the_variables_there_are_no_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    with Daemon() as daemon:
        assert publish(daemon, 1) == ""


_OFF = """
import sys
sys.modules.update({missing})
from resharder.server.observability.tracing.ids import Tracing
assert not Tracing().on
assert not any(name.startswith("opentelemetry.") for name, module in sys.modules.items() if module)
"""


@pytest.mark.parametrize(
    ("variables", "missing", "message"),
    [
        ({}, "", ""),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_SDK_DISABLED": "true"}, "", ""),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_TRACES_EXPORTER": "none"}, "", ""),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}, "{'opentelemetry': None}", "pip install '.[otel]'"),
    ],
)
def test_opentelemetry_is_not_even_imported_where_it_is_off_or_missing(
    variables: dict[str, str], missing: str, message: str
) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")} | variables
    done = subprocess.run(
        [sys.executable, "-c", _OFF.format(missing=missing or "{}")], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert message in done.stdout + done.stderr


def record(number: int) -> VersionRecord:
    return VersionRecord("policy", number, UPLOADING, 1, number, "job", 1, 1, 1e9 + number / 7)


def test_a_sampler_decides_for_whole_traces_and_again_the_same_after_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.5")
    lives = [Tracing(), Tracing()]
    first, second = ([tracing.traceparent(record(number)) for number in range(200)] for tracing in lives)
    for tracing in lives:
        tracing.close()
    assert first == second
    assert 50 < sum(map(bool, first)) < 150
    assert all(parent.split("-")[1] == f"{trace_id(record(number)):032x}" for number, parent in enumerate(first) if parent)


def test_a_version_of_the_same_number_in_another_store_has_another_trace() -> None:
    assert trace_id(record(1)) != trace_id(VersionRecord("policy", 1, UPLOADING, 1, 1, "job", 1, 1, 2e9))


@pytest.mark.parametrize(
    ("came", "taken"),
    [
        ([("traceparent", f"00-{'a' * 32}-{'b' * 16}-01")], True),
        ([("other", "x"), ("traceparent", f"00-{'a' * 32}-{'b' * 16}-00")], True),
        ([], False),
        (None, False),
        ([("traceparent", b"\xff")], False),
        ([("traceparent", f"00-{'0' * 32}-{'b' * 16}-01")], False),
        ([("traceparent", f"00-{'a' * 32}-{'0' * 16}-01")], False),
        ([("traceparent", f"00-{'A' * 32}-{'b' * 16}-01")], False),
        ([("traceparent", f"00-{'a' * 32}-{'b' * 16}-01\n")], False),
        ([("traceparent", "9" * 100_000)], False),
    ],
)
def test_a_trace_context_that_is_none_is_left_out(came: Any, taken: bool) -> None:
    assert bool(traceparent_of(came)) is taken


def test_timings_come_as_they_went() -> None:
    timings = (Timing("stage", 1_700_000_000.25, 0.5), Timing("apply", 1_700_000_001.0, 0.0))
    assert timings_from_proto(timings_to_proto(timings)) == timings


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0, 1e300])
def test_a_duration_that_is_none_is_left_out(seconds: float) -> None:
    message = timings_to_proto([Timing("stage", 1.7e9, 1.0)])[0]
    message.seconds = seconds
    assert timings_from_proto([message]) == ()


def test_timings_are_bounded() -> None:
    (message,) = timings_to_proto([Timing("x" * 1000, 1.7e9, 1.0)])
    late = resources_pb2.Timing(phase="late", seconds=1.0)
    late.start_time.seconds = 1 << 62
    timings = timings_from_proto([late, resources_pb2.Timing(seconds=1.0), *[message] * 100])
    assert 0 < len(timings) <= 32
    assert all(len(timing.phase) <= 64 for timing in timings)
