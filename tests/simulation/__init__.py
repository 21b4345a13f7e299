"""Deterministic simulations: one seed is one schedule of calls, faults and stops, without processes, sockets or waiting.

`python -m tests.simulation --help` runs them. A new simulation is a function of the type `Simulation`, registered here.
"""

from collections import Counter
from collections.abc import Callable
from importlib import import_module
from random import Random

from tests.simulation.driver import Simulation


def _control(random: Random, trace: Callable[[str], None]) -> Counter[str]:
    from tests.simulation.control.control_side import simulate_control_side  # imports vLLM, which takes seconds

    return simulate_control_side(random, trace)


def _store(random: Random, trace: Callable[[str], None]) -> Counter[str]:
    from tests.simulation.store import simulate

    return simulate(random, trace)


def _pieces(random: Random, trace: Callable[[str], None]) -> Counter[str]:
    from tests.simulation.store import simulate

    return simulate(random, trace, partial=True)


def prepare(name: str) -> None:
    """Import what a simulation runs."""
    import_module("tests.simulation.control.control_side" if name == "control" else "tests.simulation.store")


SIMULATIONS: dict[str, Simulation] = {"control": _control, "pieces": _pieces, "store": _store}
"""Every simulation by its name."""
