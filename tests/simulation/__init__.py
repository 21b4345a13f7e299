"""Deterministic simulations: real code under random schedules that one seed determines."""

from collections import Counter
from collections.abc import Callable
from random import Random

from tests.simulation.control_side import simulate_control_side

Simulation = Callable[[Random, Callable[[str], None]], Counter[str]]
"""Run one schedule and return counts of what happened in it. Raises AssertionError if an invariant is violated."""

SIMULATIONS: dict[str, Simulation] = {"control_side": simulate_control_side}
