"""Whole fleets under random joins, deaths, partitions, publishes, failures, commands and restarts of the daemon."""

import os

import pytest
from hypothesis import HealthCheck, settings

from tests.support.simulated_fleet import AheadSimulation, FleetSimulation

FleetSimulation.TestCase.settings = AheadSimulation.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize="RESHARDER_SEARCH" not in os.environ,  # set it, and --hypothesis-seed, to look where nobody has looked yet
)
test_fleets_under_everything = pytest.mark.timeout(1200)(FleetSimulation.TestCase)
test_fleets_that_serve_ahead_under_everything = pytest.mark.timeout(1200)(AheadSimulation.TestCase)
