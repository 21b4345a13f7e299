"""A sample of the matrix: some faults, another choice for each seed (RESHARDER_FAILPOINT_SEED, by default 1)."""

import os
import subprocess
import sys
from pathlib import Path

from resharder.converters.failpoints import FILE_POINTS, POINTS

SAMPLE, JOBS = 14, 2


def test_every_declared_failpoint_has_cases_of_every_kind() -> None:
    from tests.failpoints.cases import PASSES, REMOTE, RESTARTED, all_cases

    cases = all_cases()
    assert {case.point for case in cases} == set(POINTS)
    assert len(cases) == 3 * len(POINTS) + 2 * len(FILE_POINTS)
    assert {*PASSES, *REMOTE, *RESTARTED} <= set(POINTS)


def test_a_sample_of_the_faults_comes_to_peace() -> None:
    seed = os.environ.get("RESHARDER_FAILPOINT_SEED", "1")
    command = [sys.executable, "-m", "tests.failpoints", "--sample", str(SAMPLE), "--seed", seed, "--jobs", str(JOBS)]
    run = subprocess.run(
        command,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=900,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, f"seed {seed}:\n{run.stdout}\n{run.stderr[-3000:]}"
