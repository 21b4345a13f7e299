"""Nodes on emulated hosts: network namespaces with links of limited rates, real processes, and the death of each."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from resharder.converters.geometry.layout import TensorSpec

from tests.support.daemon import Daemon
from tests.support.namespaces import unavailable
from tests.support.node import nodes, stored_files, wait_live
from tests.support.node_hosts import ARRIVED, NodeHosts, Site
from tests.support.observing import wait_until
from tests.support.publishing import Job, random_weights, whole

SPECS = [TensorSpec("big", "BF16", (80 << 10, 1024))]  # 160 MiB in 11 pieces
REASON = unavailable()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)


@pytest.fixture(scope="module")
def hosts() -> Iterator[NodeHosts]:
    with NodeHosts(3, rate="1gbit") as made:
        yield made


@pytest.fixture(scope="module")
def daemon(hosts: NodeHosts) -> Daemon:
    return hosts.daemon


@pytest.fixture(scope="module")
def sites(hosts: NodeHosts) -> list[Site]:
    return hosts.sites


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
