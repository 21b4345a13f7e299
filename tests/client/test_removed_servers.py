"""Lost servers are forgotten by command, and fleets without servers are deleted."""

from collections.abc import Iterator

import pytest
from resharder.client.errors import NotFound, Refused
from resharder.client.operator import Operator
from resharder.client.operator.answers import Server, VersionTarget

from tests.client.models import connected, publish_all, weights
from tests.support.command import resharder
from tests.support.daemon import Daemon
from tests.support.observing import wait_serving, wait_until
from tests.support.simulated_server import SimulatedServer


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon(lease_seconds=6) as running:
        publishers = connected(running.endpoint, 1, "removed")
        publish_all(publishers, 1, weights(1))[0].wait_ready(60)
        publishers[0].close()
        yield running


@pytest.fixture
def operator(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[Operator]:
    monkeypatch.setenv("RESHARDER_ENDPOINT", daemon.endpoint)
    with Operator() as operator:
        yield operator


def test_a_lost_server_is_forgotten_and_its_fleet_deleted(daemon: Daemon, operator: Operator) -> None:
    assert resharder("fleet", "set", "apart", "--model", "policy", "--want", 1).code == 0
    with SimulatedServer(daemon, "one", fleet="apart"):
        wait_serving(daemon, 1)
        with pytest.raises(Refused, match="server one is not LOST"):
            operator.forget("one")
        with pytest.raises(Refused, match="fleet apart still has servers one"):
            operator.delete_fleet("apart")
    wait_until(lambda: operator.server("one").state == Server.State.LOST, "its lease ends")
    assert resharder("forget", "one").out == "one: forgotten\n"
    assert operator.servers("apart") == []
    assert resharder("fleet", "delete", "apart").out == "apart: deleted\n"
    assert "apart" not in [fleet.name for fleet in operator.fleets()]
    assert resharder("forget", "one").code == 4
    with pytest.raises(NotFound, match="has no settings to delete"):
        operator.delete_fleet("apart")
    assert {event.what for event in operator.events() if event.kind == "operator"} >= {"forget", "delete"}


def test_a_default_fleet_that_is_deleted_has_default_settings_also_after_a_restart(daemon: Daemon, operator: Operator) -> None:
    assert resharder("pin", 1, "--fleet", "policy").code == 0
    assert operator.fleet("policy").target.kind == VersionTarget.Kind.NUMBER
    operator.delete_fleet("policy")
    assert operator.fleet("policy").target.kind == VersionTarget.Kind.LATEST
    daemon.kill()
    daemon.start()
    with Operator(connect_timeout=30) as again:
        assert again.fleet("policy").target.kind == VersionTarget.Kind.LATEST


@pytest.mark.full
def test_a_forgotten_server_that_returns_is_registered_again(daemon: Daemon, operator: Operator) -> None:
    with SimulatedServer(daemon, "two"):
        wait_serving(daemon, 1)
    wait_until(lambda: operator.server("two").state == Server.State.LOST, "its lease ends")
    operator.forget("two")
    with SimulatedServer(daemon, "two"):
        wait_serving(daemon, 1)


@pytest.mark.full
def test_versions_counts_the_servers_on_exactly_each_version(daemon: Daemon, operator: Operator) -> None:
    publishers = connected(daemon.endpoint, 1, "second")
    wait_until(lambda: {server.state for server in operator.servers()} <= {Server.State.LOST}, "no other server is left")
    with SimulatedServer(daemon, "three"):
        wait_until(lambda: operator.server("three").version == 1, "it serves")
        publish_all(publishers, 2, weights(2))[0].wait_ready(60)
        wait_until(lambda: operator.server("three").version == 2, "it follows")
        rows = [line.split() for line in resharder("versions").out.splitlines()[1:]]
        assert [(row[1], row[-1]) for row in rows] == [("2", "1/1"), ("1", "0/1")]
    publishers[0].close()
