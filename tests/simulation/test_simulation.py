"""Seeds that once failed, and half a minute of each simulation from the first seed on; `make simulate` runs more of them."""

import re
import subprocess
import sys

import pytest

from tests.simulation import SIMULATIONS

SECONDS = 30  # of a processor
ONCE_FAILED = {
    "control": (4215, 10000219, 20007339, 21003970, 22000137, 30064821, 38016490),
    "store": (4473, 10000093, 30017572, 30023615, 30032322, 30048568, 300035299),
}
FEWEST = 200  # schedules in that time, of some 2,000 on an idle processor


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", sorted(SIMULATIONS))
def test_no_schedule_violates_an_invariant(name: str) -> None:
    first = ["--first", *map(str, ONCE_FAILED[name])] if name in ONCE_FAILED else []
    command = [sys.executable, "-m", "tests.simulation", "--only", name, "--seconds", str(SECONDS), *first]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1100)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-4_000:]
    count = re.findall(rf"^{name}: ([\d,]+) schedules", done.stdout, re.MULTILINE)
    assert int(count[-1].replace(",", "")) >= FEWEST, f"too few schedules in {SECONDS} s"
