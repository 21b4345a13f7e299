"""A daemon, and two hosts with a node and two ranks each, which read no other host's folder."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from resharder.converters.storage.files import read_layout
from resharder.v1 import operator_pb2, operator_pb2_grpc, resources_pb2

from tests.support.daemon import Daemon
from tests.support.home_rank import Ranks, Rows, weights
from tests.support.node import Node, patient, wait_live
from tests.support.observing import wait_until
from tests.support.publishing import read_folder
from tests.support.remote import Remote

A, B, SPLIT = [6000, 1024], [4000, 1024], [1000, 512]  # of hosts a and b, and of both
HOLDINGS: list[Rows] = [
    [("a.up", A, 0, 3000), ("a.down", B, 0, 4000)],
    [("a.up", A, 3000, 3000), ("split", SPLIT, 0, 500)],
    [("b.up", A, 0, 6000), ("split", SPLIT, 500, 500)],
    [("b.down", B, 0, 4000)],
]
HOSTS = "aabb"


class Site:
    """A daemon that no rank shares memory with, and two hosts with a node and two ranks each, in one process."""

    holdings, hosts = HOLDINGS, HOSTS

    def __init__(self, stack: ExitStack, **options: object) -> None:
        """Start all processes. `options`: further ones of the daemon."""
        own = {"data_listen": "127.0.0.1:0", "keep_count": 2, "lease_seconds": 10, "shared_memory": False} | options
        self.daemon = stack.enter_context(patient(Daemon(**own)))
        self.nodes = {name: stack.enter_context(Node(self.daemon.endpoint, name)) for name in "ab"}
        wait_live(self.daemon, *self.nodes)
        hidden = {name: [node.root for other, node in self.nodes.items() if other != name] for name in "ab"}
        self.ranks = {name: stack.enter_context(Remote(Ranks, hidden=hidden[name])) for name in "ab"}

    def attach(self, job: str, **options: object) -> None:
        for host, process in self.ranks.items():
            holdings = {str(rank): rows for rank, rows in enumerate(self.holdings) if self.hosts[rank] == host}
            process.call("attach", self.daemon.endpoint, job, holdings, len(self.holdings), **options)

    def publish(self, step: int, **options: object) -> tuple[resources_pb2.Version, list[list[str]]]:
        """The version once it is settled, and what each rank returned."""
        found = [each for process in self.ranks.values() for each in process.call("publish", step, **options)]
        return self.settled(found[0][0]), found

    @contextmanager
    def waiting_for_nodes(self, seconds: float) -> Iterator[None]:
        """Let ranks wait for so long for nodes to report to a daemon that has restarted, where they wait for any."""
        before = {process: process.call("wait_for_nodes", seconds) for process in self.ranks.values()}
        yield
        for process, seconds in before.items():
            process.call("wait_for_nodes", seconds)

    def publish_wrongly(self, step: int) -> resources_pb2.Version:
        """The version after a byte that no rank has written, in a tensor of rank 2, before rank 3 writes into the same file."""
        name = self.ranks["a"].call("publish", step)[0][0]
        folder = Path(next(home.folder for home in self.version(name).homes if home.node == "nodes/b"))
        file = next(file for file in read_layout(folder) if "b.up" in file.by_name)
        self.ranks["b"].call("publish", step, spoil=[str(folder / file.path), file.by_name["b.up"].offset + 4096])
        return self.settled(name)

    def begin_and_kill(self, step: int) -> resources_pb2.Version:
        """The version whose home on host b is killed once three of four ranks have written theirs."""
        name = self.ranks["a"].call("publish", step)[0][0]
        self.ranks["b"].call("publish", step, only=["2"])
        self.nodes["b"].kill()
        return self.settled(name)

    def settled(self, name: str) -> resources_pb2.Version:
        wait_until(lambda: self.version(name).state != resources_pb2.Version.UPLOADING)
        return self.version(name)

    def version(self, name: str) -> resources_pb2.Version:
        stub = operator_pb2_grpc.OperatorServiceStub(self.daemon.channel)
        return stub.GetVersion(operator_pb2.GetVersionRequest(version=name))

    def check(self, version: resources_pb2.Version) -> None:
        """The store has exactly what the ranks have published."""
        assert version.state == resources_pb2.Version.READY, version.reason
        folder = self.daemon.store / f"models/policy/versions/{version.number:08}"
        shapes = {name: shape for rows in self.holdings for name, shape, *_ in rows}
        found_tensors = read_folder(str(folder))
        assert found_tensors.keys() == shapes.keys()
        for name, found in found_tensors.items():
            expected = weights(name, shapes[name], version.step)
            assert found.tobytes() == expected.view(torch.uint8).numpy().tobytes(), name
