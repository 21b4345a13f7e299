"""A region: a daemon that sees only home's bucket, with servers of its own, moves them as home does."""

from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import grpc
import pytest
from resharder.client.errors import Refused
from resharder.client.operator import Operator
from resharder.client.operator.answers import UpdateStrategy
from resharder.converters.geometry.layout import TensorSpec

from tests.support.daemon import Daemon
from tests.support.observing import wait_until
from tests.support.populated_daemon import serves
from tests.support.ports import free_port
from tests.support.publishing import Job, random_weights, read_folder, whole
from tests.support.simulated_server import SimulatedServer

SPECS = [TensorSpec("w", "BF16", (640, 100)), TensorSpec("s", "F32", (33,))]


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(archive_url=tmp_path, archive_every=1, archive_full_every=3) as daemon:
        yield daemon


@pytest.fixture
def region(home: Daemon, tmp_path: Path) -> Iterator[Daemon]:
    daemon = Daemon(follow=tmp_path, web_listen=f"127.0.0.1:{free_port()}")
    yield daemon
    daemon.close()


def test_a_region_has_homes_versions_moves_its_fleets_by_canary_and_rolls_them_back(home: Daemon, region: Daemon) -> None:
    job = Job(home.channel, SPECS, [whole(SPECS)]).connect()
    weights = {step: random_weights(SPECS, step) for step in range(3)}
    job.publish(0, weights[0])
    region.start()
    with SimulatedServer(region, "one") as one, SimulatedServer(region, "two"), Operator(region.endpoint) as operator:
        wait_until(lambda: serves(operator, ("one", "two"), 1))
        operator.set_fleet("policy", strategy=UpdateStrategy(UpdateStrategy.Kind.CANARY, canaries=1))
        job.publish(1, weights[1])
        wait_until(lambda: serves(operator, ("one", "two"), 2))
        one.broken = {3}
        job.publish(2, weights[2])
        wait_until(
            lambda: operator.fleet("policy").move is not None and [r.version for r in operator.fleet("policy").refused] == [3]
        )
        assert serves(operator, ("one", "two"), 2), "the canary could not install it"
        operator.rollback("policy")
        wait_until(lambda: serves(operator, ("one", "two"), 1))
        with Operator(home.endpoint) as at_home:
            known = {version.number: version for version in at_home.versions("policy")}
        for version in operator.versions("policy"):
            there = known[version.number]
            assert (version.step, version.job, version.epoch, version.fingerprint) == (
                there.step,
                there.job,
                there.epoch,
                there.fingerprint,
            )
            found = read_folder(version.folder)
            assert {name: array.tobytes() for name, array in found.items()} == {
                name: array.tobytes() for name, array in weights[version.step].items()
            }


def test_a_region_refuses_publishers_and_archives_by_name(home: Daemon, region: Daemon) -> None:
    job = Job(home.channel, SPECS, [whole(SPECS)]).connect()
    job.publish(0, random_weights(SPECS, 0))
    region.start()
    with pytest.raises(grpc.RpcError, match="this daemon follows an archive, and takes no versions: publish 'policy' to"):
        Job(region.channel, SPECS, [whole(SPECS)]).connect()
    with Operator(region.endpoint) as operator:
        wait_until(lambda: [version.number for version in operator.versions("policy")] == [1])
        with pytest.raises(Refused, match=r"this daemon follows file://") as refused:
            operator.archive(1, model="policy")
        assert refused.value.reason == "READ_ONLY"


def test_what_a_region_cannot_follow_is_an_event_a_metric_and_a_problem_on_its_page(
    home: Daemon, region: Daemon, tmp_path: Path
) -> None:
    job = Job(home.channel, SPECS, [whole(SPECS)]).connect()
    job.publish(0, random_weights(SPECS, 0))
    region.start()
    page = f"http://{region.options['web_listen']}"
    metric = 'resharder_follow_failing{model="policy"}'
    with Operator(region.endpoint) as operator:
        wait_until(lambda: [version.number for version in operator.versions("policy")] == [1])
        wait_until(lambda: f"{metric} 0.0" in urlopen(f"{page}/metrics").read().decode())
        (tmp_path / "policy" / "latest.json").unlink()
        wait_until(lambda: f"{metric} 1.0" in urlopen(f"{page}/metrics").read().decode())
        assert "latest.json is missing" in urlopen(f"{page}/api/status").read().decode()
        events = [event for event in operator.events() if event.kind == "archive" and event.what == "failed"]
        assert ["latest.json is missing" in event.reason for event in events] == [True]
        job.publish(1, random_weights(SPECS, 1))
        wait_until(lambda: 2 in [version.number for version in operator.versions("policy")])
        wait_until(lambda: f"{metric} 0.0" in urlopen(f"{page}/metrics").read().decode())


@pytest.mark.parametrize(
    ("option", "why"),
    [({"archive_url": "/other"}, "a daemon that follows an archive writes none"), ({"hold": "none"}, "it restores")],
)
def test_a_daemon_that_could_not_follow_does_not_start(tmp_path: Path, option: dict[str, str], why: str) -> None:
    daemon = Daemon(follow=tmp_path / "one", **option)
    try:
        assert daemon.launch().wait(60) == 2
        assert daemon.log.read_text().splitlines()[-1].startswith(f"resharderd: --follow: {why}")
    finally:
        daemon.close()


def test_a_region_follows_a_container_of_azure(azure: str) -> None:
    with Daemon(archive_url=azure, archive_every=1, archive_full_every=3) as home:
        job = Job(home.channel, SPECS, [whole(SPECS)]).connect()
        weights = {step: random_weights(SPECS, step) for step in range(3)}
        job.publish(0, weights[0])
        with Daemon(follow=azure) as region, Operator(region.endpoint) as operator:
            for step in (1, 2):
                job.publish(step, weights[step])
                wait_until(lambda wanted=step + 1: wanted in [version.number for version in operator.versions("policy")])
            found = read_folder(operator.version(3, model="policy").folder)
            assert {name: array.tobytes() for name, array in found.items()} == {
                name: array.tobytes() for name, array in weights[2].items()
            }
