"""The direct path of a trainer that says nothing of it, to another host: rank, server and daemon are each in a network namespace.

All have one shared memory, so that the server maps the daemon's store, as it maps that of a node of its host.
"""

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from resharder.client.direct import nixl_agent
from resharder.client.trainer.delivery import DEFAULT_WAIT

from tests.support.daemon import Daemon
from tests.support.direct_hosts import HostJob, HostServer
from tests.support.namespaces import Hosts, unavailable
from tests.support.node import Node, wait_live
from tests.support.observing import servers, wait_serving, wait_until
from tests.support.remote import Remote
from tests.support.secure import Authority, SecureDaemon

REASON = unavailable()
pytestmark = [pytest.mark.full, pytest.mark.skipif(bool(REASON), reason=REASON)]
SECONDS = 5.0  # the daemon's bound on a transfer
TRAINER, SERVER = 0, 1  # hosts
FAST, MIDDLING, SLOW = "1gbit", "80mbit", "20mbit"  # 4 MB take 34 ms, 0.4 s and 1.7 s
OVER = {
    "gloo": {"RESHARDER_NIXL": "off"},
    "nixl": {"UCX_TLS": "tcp", "RESHARDER_NIXL": "on"},  # UCX would find out that the hosts are one
}
"""Environment of ranks and servers, by the links that they use."""
ROLES = {"dns:trainer.test": ["publisher:policy"], "dns:server.test": ["server:policy"], "dns:probe.test": ["viewer"]}


@dataclass
class Site:
    hosts: Hosts
    daemon: Daemon
    folder: Path
    stack: ExitStack
    authority: Authority | None
    way: str = "gloo"
    step: int = 0
    started: int = 0
    trainer: Remote = field(init=False)
    server: Remote = field(init=False)

    def start_trainer(self, **options: Any) -> None:
        self.started += 1
        environment = OVER[self.way] | self.tls("trainer.test")
        where = self.hosts.namespace(TRAINER)
        arguments = (self.daemon.endpoint, f"job-{self.started}")
        self.trainer = Remote(HostJob, *arguments, environment=environment, namespace=where, **options)
        self.stack.callback(self.trainer.close)

    def start_server(self) -> None:
        self.started += 1
        environment = {
            "RESHARDER_ENDPOINT": self.daemon.endpoint, "RESHARDER_SERVER_ID": f"server-{self.started}",
            "RESHARDER_PAGE": str(self.folder / f"page-{self.started}"), **OVER[self.way], **self.tls("server.test"),
        }  # fmt: skip
        served, where = str(self.folder / "served"), self.hosts.namespace(SERVER)
        self.server = Remote(HostServer, served, environment=environment, namespace=where)
        self.stack.callback(self.server.close)
        assert self.server.call("boot") == self.step

    def tls(self, name: str) -> dict[str, str]:
        return self.authority.environment(name) if self.authority is not None else {}

    def publish(self) -> tuple[str, float]:
        """Publish, and return the way of the version to the server, and the seconds for which the trainer was held."""
        self.step += 1
        with ThreadPoolExecutor(1) as pool:
            number, held = pool.submit(self.trainer.call, "timed", self.step, timeout=120).result()
        assert number == self.step
        (worker,) = wait_serving(self.daemon, number).workers
        assert self.server.call("memory") == self.trainer.call("fingerprint", self.step)
        return worker.path, held

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.daemon.log.read_text().splitlines() if line.startswith("{")]
        return [line for line in lines if line["event"] == name]

    def wait_tried(self, event: str = "direct_linked") -> dict[str, Any]:
        """Publish until a link was tried with this result. Trainers are held for none of it."""
        before = len(self.events(event))
        for _ in range(10):
            path, held = self.publish()
            assert (path, held < DEFAULT_WAIT) == ("", True)
            try:
                wait_until(lambda: len(self.events(event)) > before, event, 3)
                return self.events(event)[-1]
            except TimeoutError:
                pass
        raise AssertionError(self.daemon.log.read_text()[-3000:])


@contextmanager
def made(
    folder: Path, rate: str, authority: Authority | None = None, way: str = "gloo", *, node: bool = False, **options: object
) -> Iterator[Site]:
    """A site whose server has booted version 1. With a `node` on its host, from which it maps versions instead."""
    with ExitStack() as stack:
        hosts = stack.enter_context(Hosts(2, rate=rate))
        options = {"direct_seconds": SECONDS, "log_format": "json", "lease_seconds": 10} | options
        if authority is None:
            daemon = Daemon(host=hosts.address, insecure=True, **options)
        else:
            authority.issue("daemon", hosts.address)
            daemon = SecureDaemon(authority, ROLES, host=hosts.address, **options)
        if node:
            daemon.options["shared_memory"] = False
        site = Site(hosts, stack.enter_context(daemon), folder, stack, authority, way)
        site.start_trainer()
        site.step = 1
        assert site.trainer.call("timed", 1, timeout=120)[0] == 1
        if node:
            there = tuple(hosts.command(SERVER))
            stack.enter_context(Node(daemon.endpoint, "there", command=there, listen="0.0.0.0:7679", insecure=True))
            wait_live(daemon, "there")
        site.start_server()
        yield site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with made(tmp_path_factory.mktemp("site"), FAST) as found:
        yield found


def test_a_server_takes_versions_ahead_once_its_link_is_proven(site: Site) -> None:
    assert site.wait_tried()["seconds"] < 1
    for _ in range(3):
        path, held = site.publish()
        assert (path, held < DEFAULT_WAIT) == ("gloo", True)
    assert len(site.events("direct_group")) == 1


def test_a_server_that_hangs_holds_the_trainer_briefly_and_once(site: Site) -> None:
    site.server.send_signal(signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(1) as pool:
            held = [pool.submit(site.trainer.call, "timed", site.step + i, timeout=120).result()[1] for i in (1, 2, 3)]
    finally:
        site.server.send_signal(signal.SIGCONT)
    site.step += 3
    assert max(held) < DEFAULT_WAIT + 1, held
    assert sum(seconds > DEFAULT_WAIT / 2 for seconds in held) <= 1, held
    wait_serving(site.daemon, site.step)


def test_a_rank_that_dies_leaves_the_server_as_it_is_and_the_next_job_is_tried_anew(site: Site) -> None:
    site.trainer.send_signal(signal.SIGKILL)
    site.start_trainer()
    path, held = site.publish()
    assert (path, held < DEFAULT_WAIT) == ("", True)


def test_a_link_that_stalls_half_way_costs_the_bound_and_no_torn_weights(tmp_path: Path) -> None:
    with made(tmp_path, MIDDLING) as site:
        assert site.wait_tried()["seconds"] < 1
        turns = len(site.events("direct_turn"))
        with ThreadPoolExecutor(1) as pool:
            publishing = pool.submit(site.publish)
            wait_until(lambda: len(site.events("direct_turn")) > turns, "the transfer has its turn")
            site.hosts.cut(TRAINER, SERVER)
            path, held = publishing.result()
        assert (path, held < DEFAULT_WAIT + SECONDS + 6) == ("", True)
        path, held = site.publish()
        assert (path, held < DEFAULT_WAIT / 2) == ("", True)  # not tried again at once


def test_over_a_slow_link_versions_take_the_staged_path_and_operators_read_why(tmp_path: Path) -> None:
    with made(tmp_path, SLOW) as site:
        assert "longer than 1 s" in site.wait_tried("direct_failed")["reason"]
        path, held = site.publish()
        assert (path, held < DEFAULT_WAIT) == ("", True)
        assert not site.events("direct_turn")


def test_a_worker_that_ranks_do_not_reach_takes_the_staged_path_and_nobody_waits_for_it(tmp_path: Path) -> None:
    with made(tmp_path, FAST) as site:
        site.hosts.cut(TRAINER, SERVER)
        reason = site.wait_tried("direct_failed")["reason"]
        assert "each has to reach the others, at any port" in reason
        for _ in range(2):
            path, held = site.publish()
            assert (path, held < DEFAULT_WAIT / 2) == ("", True)


def test_over_nixl_a_link_is_proven_and_used_for_all_versions_and_a_rank_that_died_is_tried_anew(tmp_path: Path) -> None:
    if why := nixl_agent.unavailable():
        pytest.skip(why)
    with made(tmp_path, FAST, way="nixl") as site:
        for _ in range(2):
            assert site.wait_tried()["seconds"] < 1
            assert [site.publish()[0] for _ in range(3)] == ["nixl"] * 3
            site.trainer.send_signal(signal.SIGKILL)
            site.start_trainer()


def test_a_server_that_maps_the_files_of_a_node_on_its_host_takes_versions_ahead_over_its_link(tmp_path: Path) -> None:
    with made(tmp_path, FAST, node=True) as site:
        assert site.wait_tried()["seconds"] < 1
        assert [site.publish()[0] for _ in range(2)] == ["gloo"] * 2
        (server,) = servers(site.daemon)
        assert server.workers[0].transport == "node"


def test_a_server_that_fetches_every_version_takes_the_staged_path_and_says_so(tmp_path: Path) -> None:
    with made(tmp_path, FAST, shared_memory=False) as site:
        for _ in range(3):
            path, held = site.publish()
            assert (path, held < DEFAULT_WAIT / 2) == ("", True)
        assert not site.events("direct_group")


def test_with_a_wait_of_0_no_link_is_tried(tmp_path: Path) -> None:
    with made(tmp_path, FAST) as site:
        site.start_trainer(direct_wait=0)
        for _ in range(3):
            path, held = site.publish()
            assert (path, held < DEFAULT_WAIT / 2) == ("", True)
        assert not site.events("direct_group")


@pytest.mark.parametrize("trusted", [False, True])
def test_with_security_a_link_is_tried_only_if_the_operator_trusts_the_network(tmp_path: Path, trusted: bool) -> None:
    with made(tmp_path, FAST, Authority(tmp_path / "authority"), direct_trusted_fabric=trusted) as site:
        if trusted:
            site.wait_tried()
            assert site.publish()[0] == "gloo"
        else:
            for _ in range(3):
                assert site.publish()[0] == ""
            assert not site.events("direct_group")
