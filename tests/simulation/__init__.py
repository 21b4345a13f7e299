"""Deterministic simulations: one seed is one schedule of calls, faults and stops, without processes, sockets or waiting.

`python -m tests.simulation --help` runs them. A new simulation is a function of the type `Simulation`, registered here.
"""

from tests.simulation import store
from tests.simulation.control.control_side import simulate_control_side
from tests.simulation.driver import Simulation

SIMULATIONS: dict[str, Simulation] = {"control": simulate_control_side, "store": store.simulate}
"""Every simulation by its name."""
