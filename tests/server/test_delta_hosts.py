"""Nodes on emulated hosts with slow links: the next version comes as deltas, bit for bit, also where memory has been damaged."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from resharder.converters.geometry.layout import TensorSpec
from resharder.converters.wire.ranges import PIECE_BYTES
from resharder.v1 import resources_pb2

from tests.support.namespaces import unavailable
from tests.support.node import nodes, stored_files
from tests.support.node_hosts import ARRIVED, NodeHosts
from tests.support.observing import wait_until
from tests.support.publishing import Job, random_weights, whole

SPECS = [TensorSpec("big", "BF16", (48 << 10, 1024))]  # 96 MiB in 7 pieces
REASON = unavailable()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)


@pytest.fixture
def hosts() -> Iterator[NodeHosts]:
    with NodeHosts(2, rate="200mbit") as made:
        yield made


def publish(hosts: NodeHosts, step: int) -> tuple[str, float]:
    """Publish a step that changes one number in a thousand, let all hosts have it, and compare the files.

    Returns the version, and the bytes that the hosts have received, in versions.
    """
    weights = random_weights(SPECS, 0)
    flat = weights["big"].reshape(-1)
    for each in range(step):
        flat[np.random.default_rng(each).integers(0, len(flat), len(flat) // 1000)] ^= 1
    before = received(hosts)
    version = Job(hosts.daemon.channel, SPECS, [whole(SPECS)]).connect().publish(step, weights).name
    with ThreadPoolExecutor() as pool:
        assert list(pool.map(lambda site: site.stage(version), hosts.sites)) == [ARRIVED] * len(hosts.sites)
    for site in hosts.sites:
        assert site.node.files(version) == stored_files(hosts.daemon, version)
    return version, (received(hosts) - before) / SPECS[0].size


def received(hosts: NodeHosts) -> int:
    return sum(hosts.network.received_bytes(site.number) for site in hosts.sites)


def deltas(hosts: NodeHosts, name: str) -> resources_pb2.NodeLink:
    """Sum of the deltas that a node has reported."""
    links = nodes(hosts.daemon)[f"nodes/{name}"].links
    counts = {key: sum(getattr(link, key) for link in links) for key in ("delta_bytes", "delta_part_bytes", "delta_failures")}
    return resources_pb2.NodeLink(**counts, delta_problem=next((link.delta_problem for link in links if link.delta_failures), ""))


def test_hosts_that_hold_a_version_take_the_next_one_as_deltas_over_a_slow_link(hosts: NodeHosts) -> None:
    _, first = publish(hosts, 0)
    assert first > 2
    _, second = publish(hosts, 1)
    version, third = publish(hosts, 2)
    print(f"{first:.2f} versions received by two hosts, then {second:.2f} and {third:.2f}")
    assert max(second, third) < first / 3
    names = [site.node.name for site in hosts.sites]
    wait_until(lambda: all(deltas(hosts, name).delta_part_bytes for name in names), timeout=30)
    for name in names:
        found = deltas(hosts, name)
        assert found.delta_bytes < found.delta_part_bytes / 20
        assert found.delta_failures == 0
    damaged = hosts.sites[1].node
    with (damaged.copy_of(version) / "model.safetensors").open("r+b") as file:
        for at in range(5, SPECS[0].size, PIECE_BYTES):
            file.seek(at)
            file.write(bytes(8))
    version, _ = publish(hosts, 3)
    wait_until(lambda: deltas(hosts, damaged.name).delta_failures > 0, timeout=30)
    assert f"{version}, model.safetensors, bytes" in deltas(hosts, damaged.name).delta_problem
    assert "delta_refused" in damaged.log.read_text()
