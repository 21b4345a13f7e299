"""The node of a run: it holds versions for the server `right`, which is as on a host of its own."""

import re
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
from resharder.client.operator.answers import ServerStatus
from resharder.client.operator.nodes import NodeLife, NodeStatus

from tests.support.node import Node

NODE = "node"
CAPACITY = 10 << 20
"""Bytes of versions that it may hold: three versions, fewer than the daemon retains, so that older ones are dropped."""
_SMALL = 4096  # bytes: no version fits


class KeptNode:
    """`resharder-node`. `small` (memory for no version) and `failpoint` hold for its next process only."""

    name = NODE

    def __init__(self, endpoint: str, folder: Path) -> None:
        self.node = Node(endpoint, NODE, limit_bytes=CAPACITY)
        self.node.log = folder / "node.log"
        self.small, self.failpoint = False, ""
        self.limited, self.armed = False, ""  # of the process that runs

    def start(self) -> dict[str, Any]:
        self.limited, self.small = self.small, False
        self.armed, self.failpoint = self.failpoint, ""
        limit = {"RESHARDER_NODE_LIMIT_BYTES": str(_SMALL)} if self.limited else {}
        self.node.start(failpoint=self.armed, environment=limit)
        return {"failpoint": self.armed, "small": self.limited}

    def ended(self) -> int | None:
        return -1 if self.node.process is None else self.node.process.poll()

    def end(self) -> None:
        if self.node.process is not None:
            self.node.kill()

    def processes(self) -> list[psutil.Process]:
        """Return its process, if it runs."""
        process = self.node.process
        return [psutil.Process(process.pid)] if process is not None and process.poll() is None else []

    def versions(self) -> dict[int, Path]:
        """Return the folders of versions in its memory, by number."""
        found = self.node.folder.glob("versions/*/*")
        return {int(path.name.partition("-")[0]): path for path in found if re.match(r"[0-9]+-", path.name)}

    def finish(self) -> list[str]:
        """End the process by SIGTERM, once no server runs, and return what it leaves behind."""
        if self.node.process is None:
            return []
        self.node.process.send_signal(signal.SIGTERM)
        status = self.node.wait()
        left = [f"the node leaves {path}" for path in self.node.folder.glob("versions/*/*")]
        return left if status == 0 else [*left, f"the node ended with {status} on SIGTERM"]


def node_problems(
    nodes: Iterable[NodeStatus], servers: Iterable[ServerStatus], stored: Iterable[int], ready: Iterable[int], newest: int
) -> list[str]:
    """Return why a node does not have what its workers need, or has more; empty if it does.

    Args:
        nodes: All nodes.
        servers: Servers that read through the node.
        stored: Numbers of the versions in its memory.
        ready: Numbers of the READY versions.
        newest: Version that the servers serve, published over the store; 0: no server reads through the node.
    """
    found = [node for node in nodes if node.name == f"nodes/{NODE}"]
    if [node.state for node in found] != [NodeLife.LIVE]:
        return [f"expected a live node, got {[(node.name, node.state.value) for node in found]}"]
    (node,), problems = found, []
    copies = {int(copy.version.rpartition("/")[2]): copy for copy in node.copies}
    copy = copies.get(newest)
    if newest and (copy is None or not 0 < copy.wanted_pieces <= copy.held_pieces):
        problems.append(f"the node does not hold version {newest}: {copy}")
    problems += [f"the node has a problem with {copy.version}: {copy.problem}" for copy in node.copies if copy.problem]
    if dead := set(stored) - set(ready):
        problems.append(f"the node keeps versions {sorted(dead)}, READY are {sorted(ready)}")
    if node.used_bytes > node.capacity_bytes:
        problems.append(f"the node uses {node.used_bytes} of {node.capacity_bytes} bytes")
    for server in servers:
        for worker in server.workers:
            if worker.transport != "node":
                problems.append(f"{server.name} worker {worker.rank} read {worker.transport}: {worker.transport_reason}")
    return problems
