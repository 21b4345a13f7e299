"""Seeds that once failed, and some schedules of each simulation from the first seed on; `make simulate` runs more of them."""

import re
import subprocess
import sys

import pytest

from tests.simulation import SIMULATIONS

SCHEDULES = {"control": 400, "pieces": 700, "store": 1000}  # half a minute of a processor each
FEW = {"control": 200, "pieces": 100, "store": 100}  # enough for each fault of `make sabotage`
ONCE_FAILED = {
    "control": (4215, 10000219, 20007339, 21003970, 22000137, 30064821, 38016490),
    "store": (4473, 10000093, 30017572, 30023615, 30032322, 30048568, 300035299),
}


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("counts", [pytest.param(FEW, id="few"), pytest.param(SCHEDULES, id="all", marks=pytest.mark.full)])
@pytest.mark.parametrize("name", sorted(SIMULATIONS))
def test_no_schedule_violates_an_invariant(name: str, counts: dict[str, int]) -> None:
    once, schedules = ONCE_FAILED.get(name, ()), counts[name]
    command = [sys.executable, "-m", "tests.simulation", "--only", name, "--schedules", str(schedules)]
    command += ["--first", *map(str, once)] if once else []
    done = subprocess.run(command, capture_output=True, text=True, timeout=1100)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-4_000:]
    count = re.findall(rf"^{name}: ([\d,]+) schedules", done.stdout, re.MULTILINE)
    assert int(count[-1].replace(",", "")) == schedules + len(once)
