"""Half a minute of each simulation, from the first seed on; `make simulate` runs more of them."""

import os
import re
import subprocess
import sys

import pytest

from tests.simulation import SIMULATIONS

SECONDS = 30  # of a processor
FEWEST = 200  # schedules in that time, of some 2,000 on an idle processor


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", sorted(SIMULATIONS))
def test_no_schedule_violates_an_invariant(name: str) -> None:
    command = [sys.executable, "-m", "tests.simulation", "--only", name, "--seconds", str(SECONDS)]
    done = subprocess.run(command, env=os.environ | {"PYTHONHASHSEED": "0"}, capture_output=True, text=True, timeout=1100)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-4_000:]
    print(done.stdout)
    count = re.findall(rf"^{name}: ([\d,]+) schedules", done.stdout, re.MULTILINE)
    assert int(count[-1].replace(",", "")) >= FEWEST, f"too few schedules in {SECONDS} s: {done.stdout}"
