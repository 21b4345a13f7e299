"""A daemon and workers on other hosts: network namespaces with limited links."""

from collections.abc import Iterator
from typing import Any

import pytest
from resharder.converters.geometry.layout import TensorSpec

from tests.support.daemon import Daemon
from tests.support.namespaces import Hosts, unavailable
from tests.support.ports import free_port
from tests.support.publishing import Job, random_weights, whole
from tests.support.reading import Reader
from tests.support.remote import Refusal, Remote

SPECS = [TensorSpec("a", "BF16", (4 << 10, 1024))]
RATE = 100e6  # bits a second
REASON = unavailable()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts(2, rate=f"{RATE:.0f}bit") as made:
        yield made


@pytest.fixture(scope="module")
def daemon(hosts: Hosts) -> Iterator[Daemon]:
    """A daemon whose data port is on a card of its own."""
    made = Daemon(insecure=True, shared_memory=False, data_listen=f"{hosts.second_address}:{free_port()}")
    made.endpoint = f"{hosts.address}:{made.port}"
    with made as running:
        Job(running.channel, SPECS, [whole(SPECS)]).connect().publish(1, random_weights(SPECS, 1))
        yield running


def read(hosts: Hosts, host: int, daemon: Daemon) -> dict[str, Any]:
    with Remote(Reader, daemon.endpoint, namespace=hosts.namespace(host)) as reader:
        found: dict[str, Any] = reader.call("read", "models/policy/versions/1")
    return found


def test_a_worker_on_another_host_reads_over_its_link_by_http(hosts: Hosts, daemon: Daemon) -> None:
    found = read(hosts, 0, daemon)
    assert found["verified"]
    assert found["seconds"] > 0.8 * 8 * sum(spec.size for spec in SPECS) / RATE


@pytest.mark.full
def test_a_worker_that_cannot_reach_the_data_port_says_which_port_to_open(hosts: Hosts, daemon: Daemon) -> None:
    hosts.block(1, hosts.second_address)
    with pytest.raises(Refusal, match=rf"cannot reach the daemon's data port at {hosts.second_address}:(\d+): .*; open port \1"):
        read(hosts, 1, daemon)
