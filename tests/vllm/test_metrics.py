"""What the plugin counts, behind a gate, as Prometheus gets it from one API server and from several."""

import asyncio
import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, make_asgi_app
from resharder.client.inference.control.gate import LEASE_ENDED, Gate, GateMiddleware, ServerLease
from resharder.client.inference.control.metrics import Numbers
from resharder.client.inference.control.orders import Outcome
from resharder.client.inference.vllm.route_rules import ROUTES
from resharder.v1 import resources_pb2
from resharder.v1.server_pb2 import Order
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route
from starlette.testclient import TestClient

Look = Callable[..., float | None]


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def look(registry: CollectorRegistry) -> Look:
    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"resharder_vllm_{name}", labels)

    return value


def positions(look: Look) -> Mapping[str, float | None]:
    return {position: look("gate_position", position=position) for position in ("open", "held", "shut")}


def test_the_gate_says_where_it_stands_and_which_version_requests_get(registry: CollectorRegistry, look: Look) -> None:
    gate = Gate()
    Numbers(registry).connect(gate)
    assert (look("served_version"), positions(look)) == (0, {"open": 0, "held": 0, "shut": 1})
    gate.open(7)
    assert (look("served_version"), positions(look)) == (7, {"open": 1, "held": 0, "shut": 0})
    gate.hold("version 8 is being installed")
    assert (look("served_version"), positions(look)) == (7, {"open": 0, "held": 1, "shut": 0})
    gate.shut("installing version 8 failed")
    assert (look("served_version"), positions(look)) == (0, {"open": 0, "held": 0, "shut": 1})


def test_requests_that_are_turned_away_are_counted_by_why_and_health_checks_are_not(
    registry: CollectorRegistry, look: Look
) -> None:
    lease, ahead = ServerLease(lambda: ahead[0]), [0.0]
    gate = Gate(hold_seconds=0, lease=lease)
    Numbers(registry).connect(gate)

    async def fine(request: Request) -> PlainTextResponse:
        return PlainTextResponse("fine")

    app = Starlette(routes=[Route("/v1/completions", fine), Route("/health", fine), Mount("/metrics", make_asgi_app(registry))])
    app.add_middleware(GateMiddleware, gate=gate, routes=ROUTES, installed=lambda: 1)
    with TestClient(app) as client:
        assert client.get("/v1/completions").status_code == 503
        assert client.get("/health").status_code == 503
        gate.open(1)
        assert client.get("/v1/completions").status_code == 200
        gate.hold("version 2 is being installed")
        assert client.get("/v1/completions").status_code == 503
        lease.renew(10, strict=True)
        gate.open(2)
        ahead[0] = 11
        answer = client.get("/v1/completions")
        assert (answer.status_code, LEASE_ENDED in answer.text) == (503, True)
        page = client.get("/metrics/").text
    counts = {reason: look("requests_refused_total", reason=reason) for reason in ("shut", "late", "lease_ended")}
    assert counts == {"shut": 1, "late": 1, "lease_ended": 1}
    assert 'resharder_vllm_requests_refused_total{reason="late"} 1.0' in page
    assert look("request_wait_seconds_count") == 1, "the one that came while the gate was held"


def test_a_request_that_waits_for_an_install_is_counted_with_how_long(registry: CollectorRegistry, look: Look) -> None:
    clock = [100.0]
    gate = Gate(hold_seconds=60, clock=lambda: clock[0])
    Numbers(registry).connect(gate)

    async def scenario() -> None:
        gate.open(1)
        await gate.enter()
        gate.hold("version 2 is being installed")
        waiting = asyncio.create_task(gate.enter())
        await asyncio.sleep(0)
        clock[0] += 0.75
        gate.open(2)
        await waiting

    asyncio.run(scenario())
    assert (look("request_wait_seconds_count"), look("request_wait_seconds_sum")) == (1, 0.75)


def timed(**phases: float) -> tuple[resources_pb2.Timing, ...]:
    return tuple(resources_pb2.Timing(phase=phase, seconds=seconds) for phase, seconds in phases.items())


def test_an_install_is_counted_once_in_all_its_phases_though_its_orders_come_again(
    registry: CollectorRegistry, look: Look
) -> None:
    numbers = Numbers(registry)
    applied = Outcome(Order.APPLY, "life-1", timings=timed(pause=0.25, workers=1.25, reset=0.5))
    resumed = Outcome(Order.RESUME, "life-1", pause_seconds=3.0, timings=timed(resume=0.125))
    for _ in range(2):
        numbers.carried_out(applied)
        numbers.carried_out(resumed)
    numbers.carried_out(Outcome(Order.APPLY, "life-2", ok=False, error="a worker failed"))
    numbers.carried_out(Outcome(Order.CLOSE, ""))
    sums = {phase: look("install_phase_seconds_sum", phase=phase) for phase in ("pause", "apply", "reset", "resume")}
    assert sums == {"pause": 0.25, "apply": 1.25, "reset": 0.5, "resume": 0.125}
    assert look("install_phase_seconds_count", phase="apply") == 1
    assert (look("pause_seconds_count"), look("pause_seconds_sum")) == (1, 3.0)
    assert [look("installs_total", outcome=outcome) for outcome in ("applied", "failed")] == [1, 1]


def test_the_lease_says_when_it_ends(registry: CollectorRegistry, look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 1_000_000.0)
    lease = ServerLease(lambda: 40.0)
    lease.renewed.connect(Numbers(registry).renewed)
    lease.renew(55.0)
    assert look("lease_expiry_timestamp_seconds") == 1_000_015.0
    lease.renew(50.0)
    assert look("lease_expiry_timestamp_seconds") == 1_000_015.0, "an answer that came late does not shorten it"


# One API server of several: told where its gate stands, it waits until it is read.
PROCESS = """
import sys
from resharder.client.inference.control.gate import Gate
from resharder.client.inference.control.metrics import numbers
gate = Gate()
numbers().connect(gate)
numbers().refused("shut")
numbers().waited(0.5)
numbers().renewed(float(sys.argv[2]))
gate.open(int(sys.argv[1]))
print("there", flush=True)
sys.stdin.readline()
"""
READER = """
from prometheus_client import generate_latest
from vllm.v1.metrics.prometheus import get_prometheus_registry
print(generate_latest(get_prometheus_registry()).decode())
"""


@pytest.mark.full
def test_what_several_api_servers_count_comes_together_in_vllms_registry(tmp_path: Path) -> None:
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    several = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, *arguments],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for arguments in (("4", "1000"), ("5", "10"))
    ]
    try:
        for process in several:
            assert process.stdout is not None
            assert process.stdout.readline() == "there\n"
        page = subprocess.run([sys.executable, "-c", READER], env=environment, capture_output=True, text=True, check=True).stdout
    finally:
        for process in several:
            process.communicate("\n")
    found = dict(line.rsplit(" ", 1) for line in page.splitlines() if line.startswith("resharder_vllm_"))
    assert found["resharder_vllm_served_version"] == "4.0", "the lowest"
    assert found['resharder_vllm_gate_position{position="open"}'] == "2.0"
    assert found['resharder_vllm_requests_refused_total{reason="shut"}'] == "2.0"
    assert (found["resharder_vllm_request_wait_seconds_count"], found["resharder_vllm_request_wait_seconds_sum"]) == (
        "2.0",
        "1.0",
    )
    assert found[f'resharder_vllm_build_info{{release="{importlib.metadata.version("resharder")}"}}'] == "1.0"
