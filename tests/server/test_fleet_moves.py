"""Whole fleets under random joins, deaths, partitions, publishes, failures, commands and restarts of the daemon."""

import os
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from resharder.v1 import resources_pb2, server_pb2

from tests.support.simulated_fleet import AheadSimulation, FleetSimulation

SETTINGS = settings(
    max_examples=10,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize="RESHARDER_SEARCH" not in os.environ,  # set it, and --hypothesis-seed, to look where nobody has looked yet
)


def in_full(test: Any) -> Any:
    """Return the same test of four times as many fleets, which `make test-all` runs."""
    found = type(test.__name__, (test,), {"settings": settings(SETTINGS, max_examples=40)})
    return pytest.mark.full(pytest.mark.timeout(1200)(found))


FleetSimulation.TestCase.settings = AheadSimulation.TestCase.settings = SETTINGS
test_fleets_under_everything = FleetSimulation.TestCase
test_fleets_that_serve_ahead_under_everything = AheadSimulation.TestCase
test_many_fleets_under_everything = in_full(FleetSimulation.TestCase)
test_many_fleets_that_serve_ahead_under_everything = in_full(AheadSimulation.TestCase)


def test_a_server_of_a_rolling_fleet_that_returns_with_a_retired_version_gets_the_newest() -> None:
    """Found by simulation: it counted as out of service for its own turn. It was lost while it staged."""
    fleets = FleetSimulation()
    fleets.set_up(resources_pb2.UpdateStrategy.ROLLING, 0, 1, approval=False, ahead=False)
    for name in ("b", "c"):
        fleets.kill_server(name)
    for _ in range(10):
        fleets.settle()
    fleets.publish()
    plant = fleets.plants["a"]
    assert plant.attachment is not None
    stage = next(order for order in iter(plant.attachment.orders.get, None) if order.kind == server_pb2.Order.STAGE)
    fleets.cut_off("a")
    for _ in range(4):
        fleets.pass_time(30)
        fleets.publish()
    assert 1 not in fleets.versions.ready
    plant.install, plant.staged, plant.state = stage.install, stage.version, resources_pb2.Worker.STAGED
    fleets.connect("a")
    for _ in range(10):
        fleets.settle()
    assert plant.shows(fleets.now) == 6, fleets.reasons()
