"""Ranks whose registration is interrupted by a restart of the daemon."""

import threading
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from resharder.client.errors import WaitTimeout
from resharder.client.trainer import registration
from resharder.client.trainer.identity import RankIdentity
from resharder.client.trainer.publisher import Publisher
from resharder.client.trainer.rank_layout import RankLayout
from resharder.client.trainer.session import PublisherLease
from resharder.v1 import publisher_pb2, resources_pb2

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


class AnsweringChannel:
    """Channel to a daemon that answers each claim with the next publisher."""

    grpc = grpc.insecure_channel("localhost:1")

    def __init__(self, *answers: resources_pb2.Publisher) -> None:
        self._answers, self.claims = answers, 0

    def call(self, method: object, request: object) -> resources_pb2.Publisher:
        self.claims += 1
        return self._answers[min(self.claims, len(self._answers)) - 1]


def test_a_rank_waits_for_the_node_of_its_host_after_a_restart_of_the_daemon_until_it_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registration, "_NODE_POLL_SECONDS", 0.01)
    nonce = tmp_path / "nonce"
    nonce.write_bytes(b"n")
    state = resources_pb2.Publisher.REGISTERING
    other = resources_pb2.Publisher(state=state, nonce_files=[str(nonce)], settled_nonces=[sha256(b"m").hexdigest()])
    known = resources_pb2.Publisher(state=state, settled_nonces=[sha256(b"n").hexdigest()])
    channel = AnsweringChannel(resources_pb2.Publisher(state=state), other, known)
    claim = publisher_pb2.CreatePublisherRequest()
    assert registration._claimed(channel, claim, [str(nonce)]) == known  # type: ignore[arg-type]
    assert channel.claims == 3, "the path is that of another host's node first"


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon() as running:
        yield running


class Waiting:
    """A channel whose daemon still waits, and says for what."""

    def __init__(self, message: str) -> None:
        self.grpc, self.message = grpc.insecure_channel("127.0.0.1:1"), message

    def call(self, *_: object, **__: object) -> None:
        raise WaitTimeout(self.message)


def test_a_rank_that_waits_in_vain_reads_what_the_daemon_waits_for_and_nothing_else() -> None:
    message = "all ranks have registered; the daemon still checks their tensors and reserves room: wait for it"
    publisher = resources_pb2.Publisher(name="models/m/publishers/1")
    identity, layout = RankIdentity("job", 0, 2), RankLayout({}, ())
    registered = registration.Registration(Waiting(message), publisher, identity, layout)  # type: ignore[arg-type]
    with pytest.raises(WaitTimeout) as caught:
        registered.assignment(0.0)
    assert str(caught.value).startswith(f"models/m/publishers/1 is not ready to publish after 0 s: {message}")


def test_an_error_of_any_kind_costs_one_renewal_and_not_the_lease() -> None:
    renewed, failures = threading.Event(), [KeyError("first")]

    def after() -> None:
        if failures:
            raise failures.pop()
        renewed.set()

    with grpc.insecure_channel("127.0.0.1:1") as unused:
        answer = resources_pb2.Publisher(state=resources_pb2.Publisher.ACTIVE)
        channel: Any = SimpleNamespace(grpc=unused, call=lambda *arguments, **options: answer)
        held: Any = SimpleNamespace(name="p", lease_seconds=0.15, nonce_files=(), complete=True)
        lease = PublisherLease(channel, held, 0, lambda: None, after)
        assert renewed.wait(60)
        assert lease.lost is None
        lease.stop()
