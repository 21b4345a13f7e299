"""Nodes on emulated hosts: network namespaces with links of limited rates, real processes, and the death of each."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
from resharder.converters.geometry.layout import TensorSpec

from tests.support.daemon import Daemon
from tests.support.home_rank import Ranks
from tests.support.namespaces import Hosts, unavailable
from tests.support.node import Node, nodes, stored_files, wait_live
from tests.support.observing import wait_until
from tests.support.ports import free_port
from tests.support.publishing import Job, random_weights, whole
from tests.support.remote import Remote

SPECS = [TensorSpec("big", "BF16", (80 << 10, 1024))]  # 160 MiB in 11 pieces
ARRIVED = {"verified": True, "transport": "node", "reason": ""}
REASON = unavailable()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)


class Site:
    """A host with a node and a worker, which cannot read the folders of the other hosts."""

    def __init__(self, hosts: Hosts, number: int, daemon: Daemon) -> None:
        self.hosts, self.number, self.endpoint = hosts, number, daemon.endpoint
        here = tuple(hosts.command(number))
        self.node = Node(daemon.endpoint, f"host-{number}", command=here, listen="0.0.0.0:7679", insecure=True)

    def begin(self, others: list["Site"]) -> None:
        """Start the worker in a mount namespace in which the other nodes' folders are empty."""
        hidden = [site.node.root for site in others]
        self._worker = Remote(Ranks, hidden=hidden, namespace=self.hosts.namespace(self.number))

    def stage(self, version: str) -> dict[str, Any]:
        """Stage a version on this host."""
        found: dict[str, Any] = self._worker.call("stage", self.endpoint, version)
        return found

    def close(self) -> None:
        self._worker.close()


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Hosts(3, rate="1gbit") as hosts:
        data = f"{hosts.second_address}:{free_port()}"
        made = Daemon(insecure=True, shared_memory=False, data_listen=data, keep_count=2, lease_seconds=10)
        made.endpoint = f"{hosts.address}:{made.port}"
        with made as running:
            running.hosts = hosts  # type: ignore[attr-defined]
            yield running


@pytest.fixture(scope="module")
def sites(daemon: Daemon) -> Iterator[list[Site]]:
    made = [Site(daemon.hosts, number, daemon) for number in range(3)]  # type: ignore[attr-defined]
    with ExitStack() as stack:
        for site in made:
            stack.enter_context(site.node)
            site.begin([other for other in made if other is not site])
            stack.callback(site.close)
        wait_live(daemon, *(site.node.name for site in made))
        yield made


def publish(daemon: Daemon, step: int) -> str:
    return Job(daemon.channel, SPECS, [whole(SPECS)]).connect().publish(step, random_weights(SPECS, step)).name


def test_three_hosts_take_a_version_from_each_other(daemon: Daemon, sites: list[Site]) -> None:
    version = publish(daemon, 1)
    with ThreadPoolExecutor() as pool:
        assert list(pool.map(lambda site: site.stage(version), sites)) == [ARRIVED] * 3
    for site in sites:
        assert site.node.files(version) == stored_files(daemon, version)

    def received() -> tuple[float, float]:
        found = nodes(daemon).values()
        sizes = [sum(node.received_daemon_bytes for node in found), sum(node.received_peer_bytes for node in found)]
        return sizes[0] / SPECS[0].size, sizes[1] / SPECS[0].size

    wait_until(lambda: sum(received()) > 2.99)
    assert received()[0] < 2, f"of 3 copies, from the daemon and from nodes: {received()}"


@pytest.mark.full
def test_the_death_of_a_node_leaves_no_host_without_the_version(daemon: Daemon, sites: list[Site]) -> None:
    sites[0].node.kill()
    sites[0].node.start(failpoint="node.held@3=kill")
    version = publish(daemon, 2)
    wait_live(daemon, "host-0")
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda site: site.stage(version), sites))
    assert [one["verified"] for one in found] == [True] * 3
    assert found[1:] == [ARRIVED] * 2
    sites[0].node.wait()
    sites[0].node.start()
    wait_until(lambda: sites[0].stage(version) == ARRIVED)


@pytest.mark.full
def test_the_death_of_the_daemon_interrupts_no_host_for_good(daemon: Daemon, sites: list[Site]) -> None:
    version = publish(daemon, 3)
    with ThreadPoolExecutor() as pool:
        staged = [pool.submit(site.stage, version) for site in sites]
        wait_until(lambda: any(copy.held_pieces for n in nodes(daemon).values() for copy in n.copies if copy.version == version))
        daemon.kill()
        daemon.start()
        found = [one.result() for one in staged]
    assert [one["verified"] for one in found] == [True] * 3
    for site in sites:
        wait_until(lambda site=site: site.stage(version) == ARRIVED)
        assert site.node.files(version) == stored_files(daemon, version)
