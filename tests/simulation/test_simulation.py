"""Some schedules of each simulation, from the first seed on, and seeds that once failed; `make simulate` runs more of them."""

import os
import re
import subprocess
import sys

import pytest

from tests.simulation import SIMULATIONS

SCHEDULES = {"control": 400, "pieces": 700, "store": 1000}  # half a minute of a processor each
ONCE_FAILED = {
    "control": (4215, 10000219, 20007339, 21003970, 22000137, 30064821, 38016490),
    "store": (4473, 10000093, 30017572, 30023615, 30032322, 30048568, 300035299),
}


def simulate(name: str, *options: str) -> str:
    command = [sys.executable, "-m", "tests.simulation", "--only", name, *options]
    done = subprocess.run(command, env=os.environ | {"PYTHONHASHSEED": "0"}, capture_output=True, text=True, timeout=1100)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-4_000:]
    return done.stdout


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", sorted(SIMULATIONS))
def test_no_schedule_violates_an_invariant(name: str) -> None:
    output = simulate(name, "--schedules", str(SCHEDULES[name]))
    print(output)
    assert re.findall(rf"^{name}: ([\d,]+) schedules", output, re.MULTILINE)[-1] == f"{SCHEDULES[name]:,}"


@pytest.mark.parametrize("name", sorted(ONCE_FAILED))
def test_schedules_that_found_a_fault_once_pass(name: str) -> None:
    simulate(name, "--replay", *map(str, ONCE_FAILED[name]))
