"""Control sides under random schedules. A failing seed is printed with its trace, and replays with RESHARDER_SEED."""

import gc
import logging
import os
from collections import Counter
from collections.abc import Iterator
from random import Random

import pytest
import structlog

from tests.simulation.control.control_side import simulate_control_side

SCHEDULES = 100
FIRST = int(os.environ.get("RESHARDER_SEED", "0"))


@pytest.fixture(autouse=True)
def _light() -> Iterator[None]:
    """Suppress the logs of the code under simulation, and collections of what was imported."""
    gc.collect()
    gc.freeze()
    before = structlog.get_config()["wrapper_class"]
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    logging.disable(logging.CRITICAL)
    yield
    gc.unfreeze()
    logging.disable(logging.NOTSET)
    structlog.configure(wrapper_class=before)


def run(seed: int) -> tuple[Counter[str], list[str]]:
    """Run one schedule and return its counts and its trace."""
    lines: list[str] = []
    try:
        return simulate_control_side(Random(seed), lines.append), lines
    except AssertionError as error:
        print("\n".join(lines))
        raise AssertionError(f"seed {seed}: {error}") from error


@pytest.mark.timeout(600)
def test_control_sides_keep_their_promises_under_random_schedules() -> None:
    counts = Counter[str]()
    for seed in range(FIRST, FIRST + (SCHEDULES if "RESHARDER_SEED" not in os.environ else 1)):
        counts += run(seed)[0]
    print(dict(counts))
    if "RESHARDER_SEED" not in os.environ:
        assert counts["answered"] > counts["requests"] / 2, "most requests are answered"
        assert counts["installs"] > 3 * SCHEDULES, "schedules reach installs"


@pytest.mark.parametrize("seed", range(5))
def test_a_seed_determines_the_schedule(seed: int) -> None:
    (first, trace), (second, again) = run(seed), run(seed)
    assert trace == again
    assert first == second
