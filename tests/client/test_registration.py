"""Ranks whose registration is interrupted by a restart of the daemon."""

from collections.abc import Iterator

import pytest
from resharder.client.trainer import registration
from resharder.client.trainer.publisher import Publisher

from tests.client.models import CONFIG, connect, declared, parts, spread, together, weights
from tests.support.daemon import Daemon

WAIT = 45.0


def publishers(daemon: Daemon) -> list[Publisher]:
    return [
        connect(daemon.endpoint, model="policy", job="j", rank=rank, world_size=2, config=CONFIG, register_timeout=WAIT)
        for rank in range(2)
    ]


def attach(publisher: Publisher) -> None:
    publisher.attach_tensors(declared(spread(2)[publisher.identity.rank]), wait=False)


def publish(ranks: list[Publisher]) -> None:
    held = spread(2)
    handles = together(lambda rank: ranks[rank].publish_tensors(1, lambda: parts(weights(1), held[rank])), 2)
    handles[0].wait_ready(WAIT)
    for rank in ranks:
        rank.close()


def test_a_rank_registers_again_with_a_daemon_that_knows_its_publisher_from_another_rank_only(daemon: Daemon) -> None:
    first, second = publishers(daemon)
    attach(second)
    daemon.kill()
    daemon.start()
    attach(first)
    publish([first, second])


def test_the_models_files_are_sent_again_if_the_daemon_restarts_between_the_calls_of_a_registration(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = publishers(daemon)
    restarts = []

    def restart_once(point: str) -> None:
        if point == "register.slot" and not restarts:
            restarts.append(point)
            daemon.kill()
            daemon.start()
            attach(second)

    monkeypatch.setattr(registration, "failpoint", restart_once)
    attach(first)
    assert restarts
    publish([first, second])


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon() as running:
        yield running
