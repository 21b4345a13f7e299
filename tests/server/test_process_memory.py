"""Garbage of calls: each leaves a cycle of grpc.aio to the collector."""

import gc
from collections.abc import Iterator
from types import SimpleNamespace

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from resharder.server.infra.process_memory import configure_collections

from tests.support.serving import serving

CALLS, AT_ONCE = 8_000, 50


@pytest.fixture
def collections() -> Iterator[None]:
    """The collector's settings of the daemon, and a heap without garbage."""
    before = gc.get_threshold()
    gc.collect()
    configure_collections()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


@pytest.mark.full
def test_few_calls_wait_for_the_collector(collections: None) -> None:
    most = 0
    world = SimpleNamespace(model_of=lambda server: "")
    with serving({}, world) as address, grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for done in range(0, CALLS, AT_ONCE):
            for pending in [stub.Check.future(health_pb2.HealthCheckRequest(), timeout=60) for _ in range(AT_ONCE)]:
                assert pending.result().status == health_pb2.HealthCheckResponse.SERVING
            if done % 500 == 0:
                most = max(most, sum(type(one).__name__ == "_HandlerCallDetails" for one in gc.get_objects()))
    assert 50 < most < CALLS // 3, f"expected garbage of fewer than {CALLS // 3} calls, got that of {most}"
