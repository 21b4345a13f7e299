"""The direct path between hosts, over gloo: a rank, a server and the daemon each in a network namespace of its own."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from resharder.v1 import resources_pb2

from tests.support.daemon import Daemon
from tests.support.direct_hosts import HostServer, HostTrainer
from tests.support.namespaces import Hosts, unavailable
from tests.support.observing import wait_serving, wait_until
from tests.support.remote import Remote

REASON = unavailable()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)
SECONDS = 6.0  # the daemon's bound on a transfer
TRAINER, SERVER = 0, 1  # hosts
STORAGE = "10.255.0.1"  # address of the trainer's host that leads nowhere


@dataclass
class Site:
    hosts: Hosts
    daemon: Daemon
    trainer: Remote
    served: Path

    def publish(self, step: int) -> resources_pb2.Server:
        """Publish, and return the server once it serves the version."""
        return wait_serving(self.daemon, int(self.trainer.call("publish", step)))

    def path(self, step: int) -> str:
        """Publish, and return the kind of link over which the version came; empty for the staged path."""
        (worker,) = self.publish(step).workers
        return worker.path

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.daemon.log.read_text().splitlines() if line.startswith("{")]
        return [line for line in lines if line["event"] == name]

    def wrong(self) -> list[str]:
        """Return the lines of the server whose weights are not those of their version's step."""
        expected = {str(step): self.trainer.call("fingerprint", step) for step in range(1, 9)}  # steps and versions go together
        return [line for line in self.served.read_text().splitlines() if expected[line.split()[0]] != line.split()[1]]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    served = tmp_path_factory.mktemp("site") / "served"
    with ExitStack() as stack:
        hosts = stack.enter_context(Hosts(2, rate="50mbit"))
        hosts.add_interface(TRAINER, "storage0", STORAGE)
        made = Daemon(
            host=hosts.address, insecure=True, shared_memory=False, direct_seconds=SECONDS, log_format="json", lease_seconds=10
        )
        daemon = stack.enter_context(made)
        trainer = Remote(HostTrainer, daemon.endpoint, namespace=hosts.namespace(TRAINER))
        stack.callback(trainer.close)
        trainer.call("register", "job", "auto", True)
        trainer.call("publish", 1)
        environment = {
            "RESHARDER_ENDPOINT": daemon.endpoint,
            "RESHARDER_SERVER_ID": "one",
            "RESHARDER_PAGE": str(served.parent / "page"),
        }
        server = Remote(HostServer, str(served), environment=environment, namespace=hosts.namespace(SERVER))
        stack.callback(server.close)
        assert server.call("boot") == 1
        yield Site(hosts, daemon, trainer, served)


@pytest.mark.full
def test_a_version_goes_from_a_ranks_host_to_a_servers_host(site: Site) -> None:
    assert site.path(2) == "gloo", site.events("direct_failed")
    assert site.path(3) == "gloo"
    assert site.wrong() == []


@pytest.mark.full
def test_a_link_that_is_cut_midway_costs_the_bound_and_no_torn_weights(site: Site) -> None:
    begun, failed = len(site.events("direct_turn")), len(site.events("direct_failed"))
    with ThreadPoolExecutor(1) as pool:
        publishing = pool.submit(site.trainer.call, "publish", 4)
        wait_until(lambda: len(site.events("direct_turn")) > begun, "the transfer has its turn")
        site.hosts.cut(TRAINER, SERVER)
        server = wait_serving(site.daemon, 4)
        assert publishing.result() == 4
    site.hosts.mend(TRAINER, SERVER)
    assert not server.workers[0].path
    assert len(site.events("direct_failed")) > failed
    assert site.wrong() == []


@pytest.mark.full
def test_a_rank_at_an_interface_that_no_server_reaches_takes_the_staged_path_and_says_why(site: Site) -> None:
    site.trainer.call("use_interface", "storage0")
    assert site.path(5) == ""
    reason = site.events("direct_failed")[-1]["reason"]
    assert "each has to reach the others, at any port" in reason
    assert site.wrong() == []
