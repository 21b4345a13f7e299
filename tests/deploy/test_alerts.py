"""Alerts that a real Prometheus fires on a real daemon. How long each waits before is in `rules_test.yaml`."""

from collections.abc import Iterator

import pytest
from resharder.client.operator import Operator
from resharder.client.operator.answers import Move, UpdateStrategy, VersionTarget

from tests.support.daemon import Daemon
from tests.support.metrics import read
from tests.support.observing import wait_until
from tests.support.populated_daemon import job, publish, serves
from tests.support.ports import free_port
from tests.support.prometheus import Prometheus
from tests.support.publishing import Job, random_weights
from tests.support.simulated_server import Order, SimulatedServer

VERSION = 4 * 4096 * 64 * 4  # bytes of a version of `job`


def started(**options: object) -> Daemon:
    return Daemon(web_listen=f"127.0.0.1:{free_port()}", **options)


@pytest.fixture(scope="module")
def roomy() -> Iterator[Daemon]:
    with started() as running:
        yield running


@pytest.fixture(scope="module")
def tight() -> Iterator[Daemon]:
    """A daemon whose store has room for three versions of `job`, and no more."""
    with started(keep_count=2, store_limit_bytes=3 * VERSION + VERSION // 2) as running:
        yield running


@pytest.fixture(scope="module")
def replicated() -> Iterator[Daemon]:
    """A daemon whose versions wait for two nodes, of which there are none."""
    with started(replicas=3, replica_seconds=600) as running:
        yield running


@pytest.fixture(scope="module")
def prometheus(
    roomy: Daemon, tight: Daemon, replicated: Daemon, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    folder = tmp_path_factory.mktemp("prometheus")
    with Prometheus(folder, [roomy, tight, replicated], {"ResharderFleetLags": ("> 900", "> 1")}) as running:
        yield running


def fires(prometheus: Prometheus, alert: str, fleet: str = "") -> None:
    wait_until(lambda: (alert, fleet) in prometheus.firing(), f"{alert} fires")


def quiet(prometheus: Prometheus, alert: str, fleet: str = "") -> None:
    wait_until(lambda: (alert, fleet) not in prometheus.firing(), f"{alert} does not fire")


def test_a_lost_server(prometheus: Prometheus, roomy: Daemon) -> None:
    writer = job(roomy, "lost")
    publish(writer, 1)
    with SimulatedServer(roomy, "lost-a", fleet="lost", model="lost") as server, Operator(roomy.endpoint) as operator:
        wait_until(lambda: serves(operator, ["lost-a"], 1), "it serves")
        assert ("ResharderServersLost", "lost") not in prometheus.firing()
        server.dies_at = {Order.STAGE}
        publish(writer, 2)
        fires(prometheus, "ResharderServersLost", "lost")
        fires(prometheus, "ResharderNothingServes", "lost")


def test_a_stopped_move_and_not_that_its_fleet_is_behind(prometheus: Prometheus, roomy: Daemon) -> None:
    writer = job(roomy, "stopped")
    publish(writer, 1)
    with SimulatedServer(roomy, "stopped-a", fleet="stopped", model="stopped") as server, Operator(roomy.endpoint) as operator:
        operator.set_fleet("stopped", strategy=UpdateStrategy(UpdateStrategy.Kind.ROLLING, at_a_time=1, max_failures=1))
        wait_until(lambda: serves(operator, ["stopped-a"], 1), "it serves")
        server.broken = {2}
        publish(writer, 2)
        fires(prometheus, "ResharderMoveStopped", "stopped")
        move = operator.fleet("stopped").move
        assert move is not None
        assert move.state == Move.State.STOPPED
        quiet(prometheus, "ResharderFleetLags", "stopped")
        server.broken = set()
        operator.approve("stopped")
        quiet(prometheus, "ResharderMoveStopped", "stopped")


def test_a_fleet_that_is_behind(prometheus: Prometheus, roomy: Daemon) -> None:
    writer = job(roomy, "behind")
    publish(writer, 1)
    with SimulatedServer(roomy, "behind-a", fleet="behind", model="behind") as server, Operator(roomy.endpoint) as operator:
        wait_until(lambda: serves(operator, ["behind-a"], 1), "it serves")
        server.broken = {2}
        publish(writer, 2)
        fires(prometheus, "ResharderFleetLags", "behind")
        publish(writer, 3)
        quiet(prometheus, "ResharderFleetLags", "behind")


def test_a_store_without_room_for_a_further_version_and_not_one_that_is_as_full_as_it_is_meant_to_be(
    prometheus: Prometheus, tight: Daemon
) -> None:
    writer = job(tight, "policy")
    publish(writer, 1)
    with SimulatedServer(tight, "pinned", fleet="policy", model="policy"), Operator(tight.endpoint) as operator:
        wait_until(lambda: serves(operator, ["pinned"], 1), "it serves")
        operator.set_fleet("policy", target=VersionTarget(VersionTarget.Kind.NUMBER, version=1))
        publish(writer, 2)
        size = operator.version(2, model="policy").size_bytes
        wait_until(lambda: read(tight)("store_used_bytes") == 3 * size, "the files of the reserve are laid out")
        assert read(tight)("available_bytes", model="policy") == operator.daemon().store_limit_bytes - 2 * size
        assert ("ResharderStoreNearlyFull", "") not in prometheus.firing()
        publish(writer, 3)
        fires(prometheus, "ResharderStoreNearlyFull")
        operator.set_fleet("policy", target=VersionTarget(VersionTarget.Kind.LATEST))
        quiet(prometheus, "ResharderStoreNearlyFull")


def test_missing_replicas(prometheus: Prometheus, replicated: Daemon) -> None:
    assert ("ResharderReplicasMissing", "") not in prometheus.firing()
    sealed(job(replicated, "policy"), 1)
    fires(prometheus, "ResharderReplicasMissing")


def sealed(writer: Job, step: int) -> None:
    """A version that is whole, and not READY."""
    weights = random_weights(writer.specs, step)
    version = writer.begin(step)
    writer.upload(version.number, 0, weights)
    writer.seal(version.name, 0, weights)
