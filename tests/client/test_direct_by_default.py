"""The direct path of a trainer that says nothing of it, with real parts but vLLM's engine; over gloo.

Servers of its host take versions before READY, and a `publish` that no server can take returns as one with `direct_wait=0` does.
"""

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from resharder.client.operator import Operator
from resharder.client.operator.answers import ServeAhead, UpdateStrategy
from resharder.client.trainer.delivery import DEFAULT_WAIT
from resharder.v1 import resources_pb2

from tests.failpoints.adapter_cycle import ADAPTER, AdapterServer, adapter_weights
from tests.failpoints.light_server import fingerprint
from tests.failpoints.roles import Trainer
from tests.support.daemon import Daemon
from tests.support.direct_jobs import AdapterJob, ConfiguredServer, Job
from tests.support.observing import servers, wait_serving, wait_until
from tests.support.remote import Remote
from tests.support.tiny_hf import tiny_config

CONFIG = tiny_config("llama") | {"architectures": ["TeleChat3ForCausalLM"]}  # vLLM's, without a table here
ENVIRONMENT = {"RESHARDER_PEER_MEMORY": "off"}
AT_ONCE = DEFAULT_WAIT / 2  # seconds; a `publish` of this small model that waits for nobody takes a few milliseconds


@dataclass
class Site:
    daemon: Daemon
    folder: Path
    stack: ExitStack
    names: list[str] = field(default_factory=list)
    steps: int = 0

    def server(self) -> Remote:
        """Start a server, which boots from the newest version."""
        self.names.append(f"server-{len(self.names)}")
        folder = self.folder / self.names[-1]
        folder.mkdir()
        environment = {
            **ENVIRONMENT, "RESHARDER_ENDPOINT": self.daemon.endpoint, "RESHARDER_SERVER_ID": self.names[-1],
            "RESHARDER_PAGE": str(folder / "page"),
        }  # fmt: skip
        server = Remote(ConfiguredServer, str(folder / "served"), CONFIG, environment=environment)
        self.stack.callback(server.close)
        return server

    def job(self, name: str = "job", **options: Any) -> Remote:
        job = Remote(Job, self.daemon.endpoint, name, CONFIG, environment=ENVIRONMENT, **{"direct_wait": None, **options})
        self.stack.callback(job.close)
        return job

    def publish(self, job: Remote) -> tuple[int, float]:
        """Return the number of a version, and the seconds for which the trainer was held."""
        self.steps += 1
        with ThreadPoolExecutor(1) as pool:
            number, seconds = pool.submit(job.call, "timed", self.steps, timeout=600).result()
        return int(number), float(seconds)

    def worker(self, version: int) -> resources_pb2.Worker:
        (worker,) = wait_serving(self.daemon, version).workers
        return worker

    def transfers(self) -> int:
        return sum('"direct_transfer"' in line for line in self.daemon.log.read_text().splitlines())


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with Daemon(log_format="json", direct_seconds=20) as daemon, ExitStack() as stack:
        yield Site(daemon, tmp_path_factory.mktemp("site"), stack)


@pytest.fixture(scope="module")
def booted(site: Site) -> tuple[Remote, Remote]:
    """A job that turns the direct path off, and a server that has booted from its version."""
    job = site.job("off", direct_wait=0)
    site.publish(job)
    server = site.server()
    assert server.call("boot", timeout=600) == 1
    wait_serving(site.daemon, 1)
    return job, server


@pytest.fixture(scope="module")
def served(site: Site, booted: tuple[Remote, Remote]) -> tuple[Remote, Remote]:
    """A later job, and the server, which has taken a version from its memory."""
    job = site.job()
    warm(site, job)
    return job, booted[1]


def warm(site: Site, job: Remote) -> None:
    """Have the server take a version from the job's memory; the first link may take longer than a trainer waits."""
    for _ in range(4):
        version = site.publish(job)[0]
        if site.worker(version).path == "gloo":
            return
    raise AssertionError(site.daemon.log.read_text()[-3000:])


@pytest.fixture
def fleet(site: Site, served: tuple[Remote, Remote]) -> Iterator[Operator]:
    """The operator of the fleet, which has its defaults again after the test."""
    with Operator(site.daemon.endpoint) as operator:
        yield operator
        all_at_once = UpdateStrategy(UpdateStrategy.Kind.ALL_AT_ONCE)
        operator.set_fleet("policy", strategy=all_at_once, max_skew=0, serve_ahead=ServeAhead.AUTO)
        operator.update("policy")
    warm(site, served[0])


def test_with_a_wait_of_0_servers_use_the_store(site: Site, booted: tuple[Remote, Remote]) -> None:
    version, held = site.publish(booted[0])
    assert site.worker(version).path == ""
    assert (site.transfers(), held < AT_ONCE) == (0, True)


def test_a_trainer_is_not_held_without_a_fleet(site: Site, booted: tuple[Remote, Remote]) -> None:
    job = Remote(Job, site.daemon.endpoint, "alone", CONFIG, environment=ENVIRONMENT, direct_wait=None, model="another")
    with job:
        assert job.call("timed", 1, timeout=600)[1] < AT_ONCE


def test_servers_of_its_host_take_versions_from_its_memory_ahead_of_ready(site: Site, served: tuple[Remote, Remote]) -> None:
    job, server = served
    version, held = site.publish(job)
    assert site.worker(version).path == "gloo"
    assert server.call("memory") == job.call("fingerprint", site.steps)
    assert held < DEFAULT_WAIT + 1


@pytest.mark.parametrize("level", [1, 2])
def test_a_trainer_is_not_held_for_servers_that_sleep(site: Site, served: tuple[Remote, Remote], level: int) -> None:
    job, _ = served
    with Operator(site.daemon.endpoint) as operator:
        operator.sleep("policy", level=level)
        asleep = resources_pb2.ASLEEP_1 if level == 1 else resources_pb2.ASLEEP_2
        wait_until(lambda: servers(site.daemon)[0].power == asleep, "it sleeps", 60)
        assert site.publish(job)[1] < AT_ONCE
        version, held = site.publish(job)
        assert held < AT_ONCE
        operator.wake("policy")
        wait_serving(site.daemon, version)


FLEETS: dict[str, dict[str, Any]] = {
    "canary": {"strategy": UpdateStrategy(UpdateStrategy.Kind.CANARY)},
    "rolling": {"strategy": UpdateStrategy(UpdateStrategy.Kind.ROLLING)},
    "atomic": {"strategy": UpdateStrategy(UpdateStrategy.Kind.ATOMIC)},
    "skew": {"max_skew": 1},
    "ready only": {"serve_ahead": False},
}


@pytest.mark.parametrize("kind", FLEETS)
def test_a_trainer_is_not_held_for_a_fleet_that_takes_ready_versions_alone(
    site: Site, served: tuple[Remote, Remote], fleet: Operator, kind: str
) -> None:
    job, _ = served
    fleet.set_fleet("policy", **FLEETS[kind])
    transfers = site.transfers()
    version, held = site.publish(job)
    assert held < AT_ONCE
    assert site.worker(version).path == ""
    assert site.transfers() == transfers


def test_a_trainer_is_not_held_for_a_fleet_that_stays_where_it_is(
    site: Site, served: tuple[Remote, Remote], fleet: Operator
) -> None:
    job, _ = served
    fleet.pin("policy")
    assert site.publish(job)[1] < AT_ONCE


def test_a_trainer_is_held_briefly_and_once_for_a_server_that_hangs(site: Site, served: tuple[Remote, Remote]) -> None:
    job, server = served
    server.send_signal(signal.SIGSTOP)
    try:
        times = [site.publish(job)[1] for _ in range(4)]
    finally:
        server.send_signal(signal.SIGCONT)
    assert max(times) < DEFAULT_WAIT + 1, times
    assert sum(held > AT_ONCE for held in times) <= 1, times
    version, _ = site.publish(job)
    wait_serving(site.daemon, version)
    assert server.call("memory") == job.call("fingerprint", site.steps)


def test_a_trainer_is_not_held_for_a_server_that_was_killed(site: Site, served: tuple[Remote, Remote]) -> None:
    job, server = served
    server.send_signal(signal.SIGKILL)
    wait_until(lambda: not server.alive, "it is gone", 60)
    assert site.publish(job)[1] < AT_ONCE


@pytest.mark.parametrize("wait", [None, 0], ids=["default", "off"])
def test_a_trainer_of_an_adapter_is_not_held_and_its_servers_have_what_it_published(tmp_path: Path, wait: float | None) -> None:
    with Daemon() as daemon, ExitStack() as stack:
        base = stack.enter_context(Remote(Trainer, daemon.endpoint))
        base.call("register", "base", "auto", False)
        base.call("publish", 1)
        environment = {
            "RESHARDER_ENDPOINT": daemon.endpoint, "RESHARDER_SERVER_ID": "s", "RESHARDER_PAGE": str(tmp_path / "page"),
            "RESHARDER_ADAPTERS": ADAPTER,
        }  # fmt: skip
        server = stack.enter_context(Remote(AdapterServer, str(tmp_path / "served"), environment=environment))
        assert server.call("boot", timeout=600) == 1
        job = stack.enter_context(Remote(AdapterJob, daemon.endpoint, direct_wait=wait))
        for step in (1, 2, 3):
            number, held = job.call("timed", step, timeout=600)
            assert held < AT_ONCE
            wait_until(lambda number=number: server.call("version") == number, f"version {number} is served", 120)  # type: ignore[misc]
            assert server.call("memory") == fingerprint(adapter_weights(step).items())
