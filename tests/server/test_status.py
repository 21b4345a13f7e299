"""The status page's badge of the store."""

from dataclasses import replace

from resharder.server.web.status import status

from tests.support.page_scenes import SIZE, fleet, plain, server


def test_a_store_at_its_limit_is_as_it_should_be_while_files_are_laid_out_for_the_next_version() -> None:
    now = plain(1e9, [server("a", 4)], fleet("policy", 4), store_used=8 * SIZE, available={"policy": SIZE})
    shown = status(now, ())
    assert (shown["store"]["badge"], shown["problems"]) == (None, [])


def test_a_store_without_room_for_the_next_version_of_a_trainer_is_almost_full() -> None:
    now = plain(1e9, [server("a", 4)], fleet("policy", 4), store_used=6 * SIZE, available={"policy": SIZE - 1})
    shown = status(now, ())
    assert shown["store"]["badge"] == {"text": "ALMOST FULL", "severity": "warn"}
    assert shown["problems"] == [], "it passes by itself while servers leave an old version; the alert waits ten minutes"


def test_a_model_that_no_trainer_publishes_needs_no_room() -> None:
    now = plain(1e9, [server("a", 4)], fleet("policy", 4), available={"policy": 0})
    assert status(replace(now, publishers=[(now.publishers[0][0], 0)]), ())["store"]["badge"] is None
