"""Rank processes that are stopped for longer than their lease, or replaced: the versions concerned are lost, and nothing else."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from resharder.client.errors import ResharderError
from resharder.client.trainer.connect import connect

from tests.client.models import CONFIG, declared, equal, exported, parts, spread, weights
from tests.support.daemon import Daemon
from tests.support.observing import versions, wait_until
from tests.support.remote import Remote


class Rank:
    """A trainer rank in a process of its own."""

    def __init__(self, endpoint: str, rank: int, transport: str) -> None:
        options: dict[str, Any] = {"config": CONFIG, "transport": transport, "staging_timeout": 60.0}
        self.held = spread(2)[rank]
        self.publisher = connect(endpoint, model="policy", job="stalls", rank=rank, world_size=2, **options)
        self.publisher.attach_tensors(declared(self.held))

    def publish(self, step: int) -> str:
        """The version's number, or the name of the error."""
        try:
            return str(self.publisher.publish_tensors(step, parts(weights(step), self.held)).version)
        except ResharderError as error:
            return type(error).__name__

    def ready(self) -> None:
        """Return once the rank is attached."""


@contextmanager
def ranks(daemon: Daemon, transport: str) -> Iterator[list[Remote]]:
    with Remote(Rank, daemon.endpoint, 0, transport) as first, Remote(Rank, daemon.endpoint, 1, transport) as second:
        for rank in (first, second):
            rank.call("ready")
        yield [first, second]


@pytest.mark.full
@pytest.mark.parametrize("transport", ["shared-memory", "grpc"])
def test_a_rank_that_is_stopped_twice_costs_two_versions_and_nothing_else(transport: str, tmp_path: Path) -> None:
    with Daemon(lease_seconds=8) as daemon, ranks(daemon, transport) as (first, second):
        for step in (1, 2):
            second.send_signal(signal.SIGSTOP)
            number = int(first.call("publish", step))
            wait_until(lambda number=number: versions(daemon)[number] == "ABORTED", "the lease ends")  # type: ignore[misc]
            second.send_signal(signal.SIGCONT)
            assert second.call("publish", step) == "VersionAborted"
            assert "UPLOADING" not in versions(daemon).values()
        for step in (3, 4):
            publish_both(daemon, first, second, step)
        assert sorted(versions(daemon).values()) == ["ABORTED", "ABORTED", "READY", "READY"]
        assert equal(exported(daemon.endpoint, "latest", tmp_path / "out"), weights(4))


@pytest.mark.full
def test_a_job_that_restarts_at_an_earlier_step_has_the_places_of_its_former_processes() -> None:
    with Daemon() as daemon:
        with ranks(daemon, "auto") as (first, second):
            left = [int(first.call("publish", step)) for step in (7, 8)]
        with ranks(daemon, "auto") as (first, second):
            for step in (5, 6, 7, 8):
                publish_both(daemon, first, second, step)
        assert [versions(daemon)[number] for number in left] == ["ABORTED"] * 2


def publish_both(daemon: Daemon, first: Remote, second: Remote, step: int) -> None:
    number, other = (rank.call("publish", step) for rank in (first, second))
    assert number == other
    wait_until(lambda: versions(daemon)[int(number)] == "READY", f"step {step}")
