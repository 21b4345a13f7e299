"""Counts of schedules and failures over many seeds."""

from collections import Counter
from collections.abc import Callable
from math import inf
from random import Random

import pytest

from tests.simulation import driver
from tests.simulation.driver import MESSAGES, run_many

FIRST = 1002


def every_seventh_fails(random: Random, trace: Callable[[str], None]) -> Counter[str]:
    number = next(seed for seed in range(FIRST, FIRST + 1000) if Random(f"s/{seed}").getstate() == random.getstate())
    assert number % 7, "a seventh one"
    return Counter({str(number): 1})


@pytest.mark.parametrize("jobs", [1, 2])
def test_every_schedule_after_one_that_fails_runs_once_and_each_failure_is_counted(jobs: int) -> None:
    totals = run_many("s", {"s": every_seventh_fails}, range(FIRST, FIRST + 210), jobs, failures=inf)
    fail = {seed for seed in range(FIRST, FIRST + 210) if not seed % 7}
    assert (totals.schedules, totals.failures, len(totals.failed)) == (210, 30, MESSAGES)
    assert totals.failed.keys() < fail
    assert totals.counts == Counter({str(seed): 1 for seed in range(FIRST, FIRST + 210) if seed not in fail})


def test_without_that_the_first_failure_ends_a_run() -> None:
    totals = run_many("s", {"s": every_seventh_fails}, range(FIRST, FIRST + 210))
    assert (totals.schedules, totals.failures, list(totals.failed)) == (7, 1, [FIRST + 6])


def test_a_run_ends_after_its_time_with_the_counts_of_all_that_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_BATCH", 5)
    totals = run_many("s", {"s": every_seventh_fails}, range(FIRST, FIRST + 1000), 2, failures=inf, elapsed=0.0)
    assert totals.schedules in (1, 6, 11)


def test_given_seeds_run_before_the_others() -> None:
    totals = run_many("s", {"s": every_seventh_fails}, [FIRST + 6, *range(FIRST, FIRST + 6)], failures=inf)
    assert (totals.schedules, list(totals.failed)) == (7, [FIRST + 6])
