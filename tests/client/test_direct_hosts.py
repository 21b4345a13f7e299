"""The direct path between hosts, over gloo and NIXL: a rank, a server and the daemon each in a network namespace of its own."""

import json
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from resharder.client.direct import nixl_agent
from resharder.v1 import resources_pb2

from tests.support.daemon import Daemon
from tests.support.direct_hosts import HostServer, HostTrainer
from tests.support.namespaces import Hosts, unavailable
from tests.support.observing import wait_serving, wait_until
from tests.support.remote import Remote
from tests.support.secure import Authority, SecureDaemon

REASON = unavailable()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)
SECONDS = 10.0  # the daemon's bound on a transfer
TRAINER, SERVER = 0, 1  # hosts
STORAGE = "10.255.0.1"  # address of the trainer's host that leads nowhere


ROLES = {"dns:trainer.test": ["publisher:policy"], "dns:server.test": ["server:policy"], "dns:probe.test": ["viewer"]}
OVER = {
    "gloo": {"RESHARDER_NIXL": "off"},
    "nixl": {"UCX_TLS": "tcp", "RESHARDER_NIXL": "on"},  # UCX would find out that the hosts are one
}
"""Environment of ranks and servers, by the links that they use."""


@dataclass
class Site:
    way: str
    hosts: Hosts
    daemon: Daemon
    folder: Path
    trainer: Remote = field(init=False)
    server: Remote = field(init=False)
    stack: ExitStack = field(default_factory=ExitStack)
    authority: Authority | None = None

    @property
    def served(self) -> Path:
        return self.folder / "served"

    def start_trainer(self, job: str) -> None:
        environment = OVER[self.way] | self.tls("trainer.test")
        self.trainer = Remote(HostTrainer, self.daemon.endpoint, environment=environment, namespace=self.hosts.namespace(TRAINER))
        self.stack.callback(self.trainer.close)
        self.trainer.call("register", job, "auto", True)

    def start_server(self, name: str) -> int:
        """Return the version that it has booted."""
        environment = {
            "RESHARDER_ENDPOINT": self.daemon.endpoint,
            "RESHARDER_SERVER_ID": name,
            "RESHARDER_PAGE": str(self.folder / f"page-{name}"),
            **OVER[self.way],
            **self.tls("server.test"),
        }
        self.server = Remote(HostServer, str(self.served), environment=environment, namespace=self.hosts.namespace(SERVER))
        self.stack.callback(self.server.close)
        return int(self.server.call("boot"))

    def tls(self, name: str) -> dict[str, str]:
        return self.authority.environment(name) if self.authority is not None else {}

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


@contextmanager
def site_over(way: str, folder: Path, authority: Authority | None = None, **options: object) -> Iterator[Site]:
    """A site whose server has booted version 1, of step 1. With an `authority`, the daemon has security."""
    if way == "nixl" and (why := nixl_agent.unavailable()):
        pytest.skip(why)
    with ExitStack() as stack:
        hosts = stack.enter_context(Hosts(2, rate="50mbit"))
        hosts.add_interface(TRAINER, "storage0", STORAGE)
        options |= {"shared_memory": False, "direct_seconds": SECONDS, "log_format": "json", "lease_seconds": 10}
        if authority is None:
            made = Daemon(host=hosts.address, insecure=True, **options)
        else:
            authority.issue("daemon", hosts.address)
            made = SecureDaemon(authority, ROLES, host=hosts.address, **options)
        site = Site(way, hosts, stack.enter_context(made), folder, stack=stack, authority=authority)
        site.start_trainer("job")
        site.trainer.call("publish", 1)
        assert site.start_server("one") == 1
        yield site


@pytest.fixture(scope="module", params=["gloo", "nixl"])
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site_over(request.param, tmp_path_factory.mktemp("site")) as made:
        yield made


@pytest.mark.full
def test_a_version_goes_from_a_ranks_host_to_a_servers_host(site: Site) -> None:
    assert site.path(2) == site.way, site.events("direct_failed")
    assert site.path(3) == site.way
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
def test_over_nixl_a_killed_rank_costs_the_bound_and_the_next_one_is_read_again(tmp_path: Path) -> None:
    with site_over("nixl", tmp_path) as site:
        assert site.path(2) == "nixl", site.events("direct_failed")
        begun = len(site.events("direct_turn"))
        with ThreadPoolExecutor(1) as pool:
            pool.submit(site.trainer.call, "publish", 3)
            wait_until(lambda: len(site.events("direct_turn")) > begun, "the transfer has its turn")
            site.trainer.send_signal(signal.SIGKILL)
            server = wait_serving(site.daemon, 3, SECONDS + 60)
        assert not server.workers[0].path
        site.start_trainer("another")
        assert site.path(4) == "nixl", site.events("direct_failed")
        assert site.wrong() == []


@pytest.mark.full
def test_over_nixl_a_killed_worker_holds_the_rank_no_longer_than_the_bound(tmp_path: Path) -> None:
    with site_over("nixl", tmp_path) as site:
        assert site.path(2) == "nixl", site.events("direct_failed")
        begun, failed = (len(site.events(name)) for name in ("direct_turn", "direct_failed"))
        with ThreadPoolExecutor(1) as pool:
            publishing = pool.submit(site.trainer.call, "publish", 3)
            wait_until(lambda: len(site.events("direct_turn")) > begun, "the transfer has its turn")
            killed = time.monotonic()
            site.server.send_signal(signal.SIGKILL)
            wait_until(lambda: len(site.events("direct_failed")) > failed, "all hear of it")
            assert time.monotonic() - killed < SECONDS
            assert publishing.result() == 3
        assert site.start_server("two") == 3
        assert site.path(4) == "nixl", site.events("direct_failed")
        assert site.wrong() == []


@pytest.mark.full
@pytest.mark.parametrize(("trusted", "path"), [(False, "gloo"), (True, "nixl")])
def test_with_security_nixl_is_used_only_if_the_operator_trusts_the_network(tmp_path: Path, trusted: bool, path: str) -> None:
    authority = Authority(tmp_path / "authority")
    with site_over("nixl", tmp_path, authority, direct_trusted_fabric=trusted) as site:
        assert site.path(2) == path, site.events("direct_failed")
        assert site.wrong() == []


@pytest.mark.full
def test_a_rank_at_an_interface_that_no_server_reaches_takes_the_staged_path_and_says_why(site: Site) -> None:
    if site.way == "nixl":
        pytest.skip("UCX tells all addresses of a host")
    site.trainer.call("use_interface", "storage0")
    assert site.path(5) == ""
    reason = site.events("direct_failed")[-1]["reason"]
    assert "each has to reach the others, at any port" in reason
    assert site.wrong() == []
