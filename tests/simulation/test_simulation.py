"""Some hundreds of schedules of every simulation; `make simulate` runs more of them."""

import os
import subprocess
import sys

import pytest

from tests.simulation import SIMULATIONS

SCHEDULES = {"control": 500, "store": 600}


@pytest.mark.parametrize("name", sorted(SIMULATIONS))
def test_no_schedule_violates_an_invariant(name: str) -> None:
    command = [sys.executable, "-m", "tests.simulation", "--only", name, "--schedules", str(SCHEDULES[name])]
    done = subprocess.run(command, env=os.environ | {"PYTHONHASHSEED": "0"}, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-4_000:]
    print(done.stdout)
