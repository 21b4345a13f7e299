"""A sample of the matrix: some faults, another choice for each seed (RESHARDER_FAILPOINT_SEED, by default 1)."""

import os
import subprocess
import sys
from pathlib import Path

from resharder.converters.failpoints import FILE_POINTS, POINTS

SAMPLE, JOBS = 18, 2


def test_every_declared_failpoint_has_cases_of_every_kind() -> None:
    from tests.failpoints.cases import DECIDED, DECISION, PASSES, REMOTE, RESTARTED, TOGETHER, all_cases

    cases = all_cases()
    assert {case.point for case in cases} == set(POINTS)
    alone = [case for case in cases if not case.together]
    assert len(alone) == 3 * len(set(POINTS) - DECISION) + 2 * len(FILE_POINTS - DECISION)
    assert {*PASSES, *REMOTE, *RESTARTED, *TOGETHER} <= set(POINTS)
    assert set(TOGETHER) >= DECISION | DECIDED


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
