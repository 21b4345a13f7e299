"""The daemon's host is gone, with a node on it: another daemon goes on elsewhere with what nodes return. Emulated hosts."""

import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import torch
from resharder.client.operator import Operator
from resharder.v1 import resources_pb2

from tests.support.daemon import Daemon
from tests.support.home_rank import Ranks, weights
from tests.support.home_site import Site
from tests.support.namespaces import Hosts, unavailable
from tests.support.node import Node, nodes, patient, wait_live
from tests.support.observing import wait_until
from tests.support.publishing import read_folder
from tests.support.remote import Remote

REASON = unavailable()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)
READY = resources_pb2.Version.READY
SHAPE = [6_000, 1024]


class Hosted(Site):
    """Hosts a, with the daemon and a node, b and c, with a rank and a node each, and d, where another daemon may start."""

    holdings, hosts = [[(f"{name}.up", SHAPE, 0, SHAPE[0])] for name in "bc"], "bc"

    def __init__(self, stack: ExitStack) -> None:
        self.network = hosts = stack.enter_context(Hosts(4, rate="1gbit"))
        options = {"hold": "none", "shared_memory": False, "keep_count": 3, "lease_seconds": 10, "replicas": 2, "insecure": True}
        made = [
            Daemon(host=hosts.address_of(at), command=tuple(hosts.command(at)), **options, **further)
            for at, further in ((0, {}), (3, {"from_nodes": True}))
        ]
        self.daemon, self.second = (patient(stack.enter_context(closing(each))) for each in made)
        self.endpoint = f"{self.second.endpoint},{self.daemon.endpoint}"
        self.daemon.start()
        given = {"listen": "0.0.0.0:7679", "insecure": True}
        started = (Node(self.endpoint, name, command=tuple(hosts.command(at)), **given) for at, name in enumerate("abc"))
        self.nodes = {node.name: stack.enter_context(node) for node in started}
        hidden = {name: [node.root for other, node in self.nodes.items() if other != name] for name in "bc"}
        self.ranks = {
            name: stack.enter_context(Remote(Ranks, hidden=hidden[name], namespace=hosts.namespace(at)))
            for at, name in ((1, "b"), (2, "c"))
        }
        wait_live(self.daemon, *self.nodes)

    def attach(self, job: str, **options: object) -> None:
        for host, process in self.ranks.items():
            holdings = {str(rank): rows for rank, rows in enumerate(self.holdings) if self.hosts[rank] == host}
            process.call("attach", self.endpoint, job, holdings, len(self.holdings), **options)

    def lose_host(self) -> None:
        """End all that is on host a, for good, without a word to the others."""
        self.network.lose(0)
        self.daemon.kill()
        self.nodes["a"].kill()
        shutil.rmtree(self.daemon.store)
        shutil.rmtree(self.nodes.pop("a").folder)

    def is_published(self, folder: Path, step: int) -> bool:
        """Whether a checkpoint folder has exactly what the ranks have published."""
        wanted = {name: weights(name, shape, step) for rows in self.holdings for name, shape, *_ in rows}
        found = read_folder(str(folder))
        return {name: each.tobytes() for name, each in found.items()} == {
            name: each.view(torch.uint8).numpy().tobytes() for name, each in wanted.items()
        }


@pytest.fixture
def site() -> Iterator[Hosted]:
    with ExitStack() as stack:
        yield Hosted(stack)


@pytest.mark.full
def test_no_ready_version_is_lost_with_the_host_of_the_daemon(site: Hosted, tmp_path: Path) -> None:
    site.attach("job")
    before = [site.publish(step)[0] for step in (1, 2, 3)]
    assert [version.state for version in before] == [READY] * 3, before
    lost = time.monotonic()
    site.lose_host()
    site.daemon = site.second
    site.daemon.start()
    print(f"from the loss of the host until the other daemon serves: {time.monotonic() - lost:.2f} s")
    wait_live(site.daemon, *site.nodes)
    found = [site.version(version.name) for version in before]
    assert [(version.state, version.fingerprint) for version in found] == [(READY, each.fingerprint) for each in before]
    with Operator(site.daemon.endpoint) as operator:
        for step, version in enumerate(before, 1):
            operator.export(version.number, tmp_path / f"{step}")
            assert site.is_published(tmp_path / f"{step}", step)
    wait_until(lambda: sorted(nodes(site.daemon)) == ["nodes/b", "nodes/c"])
    after, transports = site.publish(4)
    assert (after.state, after.number > before[-1].number) == (READY, True), after.reason
    print(f"from the loss of the host until the next step is READY: {time.monotonic() - lost:.2f} s; {transports}")
    with Operator(site.daemon.endpoint) as operator:
        operator.export(after.number, tmp_path / "4")
    assert site.is_published(tmp_path / "4", 4)
