"""Ranks of two emulated hosts publish, a worker on a third installs, and each host is killed once. Needs root and iproute2."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from resharder.v1 import resources_pb2

from tests.support.daemon import Daemon
from tests.support.home_rank import Ranks
from tests.support.home_site import Site
from tests.support.namespaces import Hosts, unavailable
from tests.support.node import Node, nodes, patient, stored_files, wait_live
from tests.support.observing import wait_until
from tests.support.ports import free_port
from tests.support.remote import Remote

ARRIVED = {"verified": True, "transport": "node", "reason": ""}
REASON = unavailable()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)


class LinkedSite(Site):
    """The daemon, hosts a and b with ranks, and host c with a worker: network namespaces with links of 1 Gb/s."""

    def __init__(self, stack: ExitStack) -> None:
        hosts = stack.enter_context(Hosts(3, rate="1gbit"))
        self.daemon = patient(
            Daemon(
                insecure=True,
                shared_memory=False,
                replicas=2,
                keep_count=2,
                lease_seconds=10,
                data_listen=f"{hosts.second_address}:{free_port()}",
            )
        )
        self.daemon.endpoint = f"{hosts.address}:{self.daemon.port}"
        stack.enter_context(self.daemon)
        self.nodes, self.ranks = {}, {}
        for number, name in enumerate("abc"):
            command = tuple(hosts.command(number))
            node = Node(self.daemon.endpoint, name, command=command, listen="0.0.0.0:7679", insecure=True)
            self.nodes[name] = stack.enter_context(node)
        for number, name in enumerate("abc"):
            hidden = [node.root for other, node in self.nodes.items() if other != name]
            ranks = stack.enter_context(Remote(Ranks, hidden=hidden, namespace=hosts.namespace(number)))
            if name == "c":
                self.worker = ranks
            else:
                self.ranks[name] = ranks
        wait_live(self.daemon, *self.nodes)

    def install(self, version: resources_pb2.Version) -> object:
        """Stage a version on host c, as its worker does."""
        return self.worker.call("stage", self.daemon.endpoint, version.name)

    def restart(self, name: str, failpoint: str = "") -> None:
        """Start a node that has ended, and wait until it is live."""
        self.nodes[name].start(failpoint=failpoint)
        wait_live(self.daemon, name)


@pytest.fixture(scope="module")
def site() -> Iterator[LinkedSite]:
    with ExitStack() as stack:
        yield LinkedSite(stack)


def transports(found: list[list[str]]) -> list[str]:
    return [transport for _, transport, _ in found]


def test_what_two_hosts_publish_is_installed_on_a_third(site: LinkedSite) -> None:
    site.attach("first")
    version, found = site.publish(1)
    assert transports(found) == ["node"] * 4, found
    site.check(version)
    assert site.install(version) == ARRIVED
    assert site.nodes["c"].files(version.name) == stored_files(site.daemon, version.name)


def test_the_third_host_installs_after_the_death_of_one_that_has_published(site: LinkedSite) -> None:
    site.attach("second")
    version, _ = site.publish(1)
    site.check(version)
    site.nodes["a"].kill()
    assert site.install(version) == ARRIVED
    assert site.nodes["c"].files(version.name) == stored_files(site.daemon, version.name)
    site.restart("a")


@pytest.mark.full
def test_a_host_that_dies_while_its_ranks_publish_costs_that_version_alone(site: LinkedSite) -> None:
    site.attach("third")
    before, _ = site.publish(1)
    aborted = site.begin_and_kill(2)
    assert aborted.state == resources_pb2.Version.ABORTED
    assert "nodes/b, into whose files ranks wrote, " in aborted.reason
    assert site.install(before) == ARRIVED
    wait_until(lambda: nodes(site.daemon)["nodes/b"].state == resources_pb2.Node.LOST)
    version, found = site.publish(3)
    assert transports(found) == ["node", "node", "http", "http"]
    site.check(version)
    assert site.install(version) == ARRIVED
    site.restart("b")


@pytest.mark.full
def test_a_worker_installs_although_its_own_node_dies_meanwhile(site: LinkedSite) -> None:
    site.nodes["c"].stop()
    site.restart("c", failpoint="node.held@1=kill")
    site.attach("fourth")
    version, _ = site.publish(1)
    arrived = site.install(version)
    assert isinstance(arrived, dict)
    assert arrived["verified"]
    assert arrived["transport"] == "http"
    assert arrived["reason"]
    site.nodes["c"].wait()
    site.restart("c")
    wait_until(lambda: site.install(version) == ARRIVED)


@pytest.mark.full
def test_a_killed_daemon_serves_the_version_again_after_its_restart(site: LinkedSite) -> None:
    site.attach("fifth")
    version, _ = site.publish(1)
    site.daemon.kill()
    site.daemon.start()
    wait_live(site.daemon, *site.nodes)
    assert site.install(version) == ARRIVED
    site.check(site.version(version.name))
