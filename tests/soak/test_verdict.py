"""The verdict of a soak: leaking series exceed their bound, flat and noisy ones do not."""

import random

import pytest

from tests.soak.report import table, verdict
from tests.soak.verdict import BOUNDS, FEWEST, MIB, Sample, judge, theil_sen

SAMPLES, STEP = 240, 3
"""Samples of a run, and versions from one to the next."""


def series(measure: str, values: list[float], process: str = "daemon") -> list[Sample]:
    return [Sample(process, STEP * i, {measure: value}) for i, value in enumerate(values)]


def exceeded(samples: list[Sample]) -> list[tuple[str, str]]:
    return [(growth.process, growth.measure) for growth in judge(samples) if growth.exceeded]


def test_a_leaked_descriptor_in_each_tenth_version_exceeds_the_bound() -> None:
    leaking = [40.0 + STEP * i // 10 for i in range(SAMPLES)]
    (growth,) = judge(series("descriptors", leaking))
    assert growth.slope == pytest.approx(100, rel=0.05)
    assert growth.exceeded
    assert verdict([growth]) == ["daemon: descriptors grows by 100 in 1,000 versions, the bound is 8"]


def test_leaked_memory_is_seen_below_noise_that_is_greater_than_the_leak() -> None:
    chance = random.Random(1)
    noisy = [100 * MIB + chance.uniform(0, 30 * MIB) + STEP * i * 40 * 1024 for i in range(SAMPLES)]
    assert exceeded(series("uss", noisy)) == [("daemon", "uss")]


def test_a_flat_series_with_noise_and_outliers_stays_below_the_bound() -> None:
    chance = random.Random(2)
    flat = [100 * MIB + chance.uniform(0, 2 * MIB) + (400 * MIB if chance.random() < 0.05 else 0) for _ in range(SAMPLES)]
    assert exceeded(series("uss", flat)) == []
    assert exceeded(series("threads", [float(chance.choice((60, 60, 61, 64))) for _ in range(SAMPLES)])) == []


def test_growth_of_the_warm_up_does_not_count() -> None:
    warming = [min(i, SAMPLES / 3) * MIB for i in range(SAMPLES)]
    assert exceeded(series("uss", warming)) == []


def test_growth_that_begins_after_the_warm_up_counts() -> None:
    late = [max(0.0, i - SAMPLES / 2) for i in range(SAMPLES)]
    assert exceeded(series("mappings", late)) == [("daemon", "mappings")]


def test_a_shrinking_measure_does_not_exceed_its_bound() -> None:
    assert exceeded(series("rss", [(1000 - i) * MIB for i in range(SAMPLES)])) == []


def test_only_the_process_that_leaks_is_named() -> None:
    samples = [*series("sockets", [9.0] * SAMPLES), *series("sockets", [float(i) for i in range(SAMPLES)], "rank 0")]
    assert exceeded(samples) == [("rank 0", "sockets")]


def test_a_journal_that_is_not_rotated_exceeds_its_limit() -> None:
    rotated = [(1 + i % 40 / 40) * MIB for i in range(SAMPLES)]
    assert exceeded(series("history bytes", rotated)) == []
    stuck = judge(series("history bytes", [6 * MIB] * SAMPLES))
    assert verdict(stuck) == ["daemon: history bytes reached 6.00 MiB, the limit is 4.20 MiB"]


def test_a_run_that_is_too_short_has_no_verdict() -> None:
    for samples in ([], series("rss", [1.0] * 10), [Sample("daemon", 0, {"rss": 1.0})] * SAMPLES):
        with pytest.raises(ValueError, match=f"expected at least {FEWEST} samples of a process after the warm-up, got [06]"):
            judge(samples)


def test_a_process_that_begins_or_ends_during_the_run_is_left_out() -> None:
    short = [Sample("helper", 600 + i, {"rss": 1e9 * i}) for i in range(FEWEST - 1)]
    assert exceeded([*series("rss", [1.0] * SAMPLES), *short]) == []


def test_a_measure_without_a_bound_is_an_error() -> None:
    with pytest.raises(KeyError, match="colour"):
        judge(series("colour", [1.0] * SAMPLES))


def test_theil_sen_is_the_median_slope_of_all_pairs() -> None:
    assert theil_sen([0, 1, 2, 3, 4], [0, 2, 4, 100, 8]) == 2.0
    assert theil_sen([0, 0, 1], [5, 7, 9]) == 3.0


def test_the_table_has_every_measure_and_marks_the_ones_that_leak() -> None:
    shown = table(judge(series("descriptors", [float(i) for i in range(SAMPLES)])))
    assert "| daemon | descriptors | " in shown
    assert "| **333.3** | 8 |" in shown
    assert all(bound > 0 for bound in BOUNDS.values())
