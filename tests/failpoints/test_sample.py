"""A sample of the matrix: some faults, another choice for each seed (RESHARDER_FAILPOINT_SEED, by default 1)."""

import os

import pytest
from resharder.converters.failpoints import FILE_POINTS, POINTS

from tests.support.whole_system import Run


def test_every_declared_failpoint_has_cases_of_every_kind() -> None:
    from tests.failpoints.cases import DECIDED, DECISION, PASSES, REMOTE, RESTARTED, TOGETHER, all_cases

    cases = all_cases()
    assert {case.point for case in cases} == set(POINTS)
    alone = [case for case in cases if not case.together]
    assert len(alone) == 3 * len(set(POINTS) - DECISION) + 2 * len(FILE_POINTS - DECISION)
    assert {*PASSES, *REMOTE, *RESTARTED, *TOGETHER} <= set(POINTS)
    assert set(TOGETHER) >= DECISION | DECIDED


@pytest.mark.full
def test_a_sample_of_the_faults_comes_to_peace() -> None:
    seed = os.environ.get("RESHARDER_FAILPOINT_SEED", "1")
    Run("failpoints", "--sample", 18, "--seed", seed, "--jobs", 2, timeout=900)
