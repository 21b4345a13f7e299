"""Exponential backoff: doubling, its bound, and large numbers of failures."""

from resharder.server.infra.backoff import backoff


def test_backoff_doubles_up_to_its_bound() -> None:
    assert [backoff(failures, 2.0, 60.0) for failures in range(8)] == [0.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]


def test_backoff_stays_at_its_bound_after_any_number_of_failures() -> None:
    assert backoff(100_000, 2.0, 60.0) == 60.0
