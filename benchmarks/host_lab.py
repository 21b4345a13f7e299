"""A version to many hosts, with limited links: `python -m benchmarks.host_lab [--hosts 8] [--rate 500mbit] [--megabytes 1200]`.

Emulated hosts (tests/support/namespaces.py): a real daemon on one, a real node on each of the others, all links limited both
ways. Three runs: one host alone, all hosts, and all hosts of which one is killed when it has half of the version. Each run ends
when the last living node holds every piece; then every file is compared with the store's. Needs root, iproute2, and memory for
the version on all hosts and twice more. Without, it says so and ends.
"""

import argparse
import filecmp
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from resharder.client import connect
from resharder.client.trainer.connect import DeclaredTensor
from resharder.v1 import node_pb2, node_pb2_grpc, operator_pb2, operator_pb2_grpc, resources_pb2

from tests.support.daemon import Daemon
from tests.support.namespaces import Hosts, unavailable
from tests.support.node import Node

VERSION = "models/policy/versions/1"
CONFIG = {"model_type": "none", "architectures": ["None"]}
TENSOR_BYTES = 48 << 20
PORT = 7679


@dataclass(frozen=True)
class LabRun:
    """Seconds until each living host held the version; bytes of the version; bytes that the daemon's host sent."""

    seconds: list[float]
    size: int
    sent: int
    received_origin: int
    same: bool

    def line(self, name: str, alone: float) -> str:
        last, first = max(self.seconds), min(self.seconds)
        return (
            f"| {name} | {last:.1f} | {first:.1f} | {last / alone:.2f} | {self.sent / self.size:.2f} | "
            f"{self.received_origin / self.size:.2f} | {'yes' if self.same else 'NO'} |"
        )


def publish(daemon: Daemon, megabytes: int) -> int:
    """Publish a version of about so many megabytes from the daemon's host, and return its bytes."""
    count = -(-megabytes * 10**6 // TENSOR_BYTES)
    names, shape = [f"t{i}" for i in range(count)], (TENSOR_BYTES // 2048, 1024)
    with connect(daemon.endpoint, model="policy", job="j", rank=0, world_size=1, config=CONFIG) as publisher:
        publisher.attach_tensors([DeclaredTensor(name, torch.bfloat16, shape) for name in names])
        values = torch.randint(-(1 << 15), 1 << 15, shape, dtype=torch.int16).view(torch.bfloat16)
        publisher.publish_tensors(1, [(name, values) for name in names]).wait_ready(600)
    return sum(path.stat().st_size for path in stored(daemon))


def stored(daemon: Daemon) -> list[Path]:
    """Return the safetensors files of the version in the daemon's store."""
    return sorted((daemon.store / "models" / "policy" / "versions" / "00000001").glob("*.safetensors"))


def held(daemon: Daemon) -> dict[str, resources_pb2.Node]:
    """Return the nodes by their ids."""
    listed = operator_pb2_grpc.OperatorServiceStub(daemon.channel).ListNodes(operator_pb2.ListNodesRequest())
    return {node.name.removeprefix("nodes/"): node for node in listed.nodes}


def share(node: resources_pb2.Node) -> float:
    """Return the share of the version that a node holds."""
    return max((copy.held_pieces / copy.pieces for copy in node.copies if copy.pieces), default=0.0)


def request(daemon: Daemon, node: Node) -> None:
    """Ask for the version on a node's host, as a worker there does."""
    path = node.folder / "nonce"
    readable = [resources_pb2.StoreAccess(nonce_file=str(path), nonce=path.read_bytes())]
    stub = node_pb2_grpc.NodeServiceStub(daemon.channel)
    stub.GetHostVersion(node_pb2.GetHostVersionRequest(version=VERSION, server=f"servers/{node.name}", readable=readable))


@contextmanager
def emulated(count: int, rate: str) -> Iterator[tuple[Hosts, Daemon, list[Node]]]:
    """Yield hosts, the daemon on the first, and a node on each of the others, once all nodes have joined."""
    with ExitStack() as ended:
        hosts = ended.enter_context(Hosts(count + 1, rate))
        address = hosts.address_of(0)
        options = {"data_listen": f"{address}:{PORT}", "insecure": True, "keep_count": 1, "lease_seconds": 10}
        daemon = ended.enter_context(Daemon(host=address, command=tuple(hosts.command(0)), **options))
        nodes = []
        for host in range(1, count + 1):
            listen = {"listen": f"{hosts.address_of(host)}:{PORT}", "insecure": True}
            node = Node(daemon.endpoint, f"host{host}", command=tuple(hosts.command(host)), **listen)
            nodes.append(ended.enter_context(node))
        while len(held(daemon)) < count:
            time.sleep(0.2)
        yield hosts, daemon, nodes


def measure(count: int, rate: str, megabytes: int, *, kill: bool = False, limit: float = 600) -> LabRun:
    """Bring a version to `count` hosts; with `kill`, the first of them is killed once it has half of it."""
    with emulated(count, rate) as (hosts, daemon, nodes):
        size = publish(daemon, megabytes)
        before, began = hosts.sent_bytes(0), time.perf_counter()
        for node in nodes:
            request(daemon, node)
        living, done = {node.name: node for node in nodes}, dict[str, float]()
        received = 0
        while set(done) != set(living):
            found, elapsed = held(daemon), time.perf_counter() - began
            if elapsed > limit:
                logs = "\n".join(node.log.read_text()[-2000:] for node in nodes)
                raise TimeoutError(f"not complete after {limit:.0f} s: {[(n, share(found[n])) for n in living]}\n{logs}")
            received = max(received, sum(found[name].received_daemon_bytes for name in living))
            for name in living:
                if name not in done and share(found[name]) == 1.0:
                    done[name] = elapsed
            if kill and share(found[nodes[0].name]) >= 0.5:
                nodes[0].kill()
                del living[nodes[0].name]
                kill = False
            time.sleep(0.1)
        sent = hosts.sent_bytes(0) - before
        same = all(
            filecmp.cmp(file, node.copy_of("models/policy/versions/1") / file.name, shallow=False)
            for node in living.values()
            for file in stored(daemon)
        )
        return LabRun(sorted(done.values()), size, sent, received, same)


def missing(hosts: int, megabytes: int) -> str:
    """Return why the lab cannot run here; empty if it can."""
    needed, free = (hosts + 2) * megabytes * 10**6, psutil.virtual_memory().available
    if needed > free:
        return f"expected {needed / 1e9:.1f} GB of memory, found {free / 1e9:.1f}"
    return unavailable()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--rate", default="500mbit", help="of each link, as tc writes it")
    parser.add_argument("--megabytes", type=int, default=1200)
    arguments = parser.parse_args()
    if reason := missing(arguments.hosts, arguments.megabytes):
        print(f"skipped: {reason}")
        return
    hosts, work = arguments.hosts, (arguments.rate, arguments.megabytes)
    alone = measure(1, *work)
    print("| run | last host, s | first | last / one host alone | daemon's host sent | of it pieces | same bytes |")
    print("|---|---|---|---|---|---|---|")
    print(alone.line("one host alone", max(alone.seconds)), flush=True)
    print(measure(hosts, *work).line(f"{hosts} hosts", max(alone.seconds)), flush=True)
    print(measure(hosts, *work, kill=True).line(f"{hosts} hosts, one killed midway", max(alone.seconds)), flush=True)


if __name__ == "__main__":
    main()
