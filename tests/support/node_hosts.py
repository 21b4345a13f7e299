"""Emulated hosts (`namespaces`), each with a node and a worker, and a daemon on this one's.

with NodeHosts(3, rate="1gbit") as hosts:
    hosts.daemon, hosts.sites[0].node, hosts.sites[0].stage(version)
"""

from contextlib import ExitStack
from types import TracebackType
from typing import Any

from tests.support.daemon import Daemon
from tests.support.home_rank import Ranks
from tests.support.namespaces import Hosts
from tests.support.node import Node, wait_live
from tests.support.ports import free_port
from tests.support.remote import Remote

ARRIVED = {"verified": True, "transport": "node", "reason": ""}
"""A worker's report of a version that it has mapped from its host's node."""


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


class NodeHosts:
    """`count` hosts, whose links have a rate as `tc` writes it."""

    def __init__(self, count: int, rate: str) -> None:
        self._count, self._rate, self._stack = count, rate, ExitStack()

    def __enter__(self) -> "NodeHosts":
        with ExitStack() as stack:
            self.network = stack.enter_context(Hosts(self._count, self._rate))
            data = f"{self.network.second_address}:{free_port()}"
            self.daemon = Daemon(insecure=True, shared_memory=False, data_listen=data, keep_count=2, lease_seconds=10)
            self.daemon.endpoint = f"{self.network.address}:{self.daemon.port}"
            stack.enter_context(self.daemon)
            self.sites = [Site(self.network, number, self.daemon) for number in range(self._count)]
            for site in self.sites:
                stack.enter_context(site.node)
                site.begin([other for other in self.sites if other is not site])
                stack.callback(site.close)
            wait_live(self.daemon, *(site.node.name for site in self.sites))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()
