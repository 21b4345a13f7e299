"""The nodes of a run: `node` holds versions for the server `right`, the trainer writes on `far` in some of its lives, and `third`
holds replicas alone.
"""

import re
import signal
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from resharder.client.operator import answers

from tests.support.node import Node
from tests.support.ports import free_port

MODEL = "policy"
CAPACITY = {"node": 10 << 20, "far": 17 << 20}
"""Bytes of versions that each may hold: three versions, fewer than the daemon retains, so that older ones are dropped.

On `far`, two more, for the files that ranks write next.
"""
REPLICATED = {"node": 10 << 20, "far": 32 << 20, "third": 25 << 20}
"""The same with several replicas: all but `node` have memory for every version that the daemon retains, and two further
ones, so that older replicas move to `third`, and none is missing in peace.
"""
SETS = 2
"""Sets of files for which a node keeps memory free while ranks on its host are registered."""
_SMALL = 4096  # bytes: no version fits


class KeptNode:
    """`resharder-node`. `small` (memory for no version) and `failpoint` hold for its next process only.

    `options` are those of the node, without their prefix.
    """

    def __init__(self, name: str, endpoint: str, folder: Path, **options: object) -> None:
        self.name = name
        self.node = Node(endpoint, name, **options)
        self.node.log = folder / f"{name}.log"
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

    @property
    def impaired(self) -> bool:
        """Whether its process, or the next one, has a failpoint or memory for no version."""
        return bool(self.limited or self.small or self.armed or self.failpoint)

    def processes(self) -> list[psutil.Process]:
        """Return its process, if it runs."""
        process = self.node.process
        return [psutil.Process(process.pid)] if process is not None and process.poll() is None else []

    def memory(self) -> "NodeMemory":
        """Return what is in its folder, of the model; versions of an adapter are not in homes."""
        found = self.node.folder.glob(f"versions/{MODEL}/*")
        numbers = {int(path.name.partition("-")[0]) for path in found if re.match(r"[0-9]+-", path.name)}
        return NodeMemory(numbers, len(list(self.node.folder.glob("sets/*"))))

    def finish(self) -> list[str]:
        """End the process by SIGTERM, once no server and no trainer runs, and return what it leaves behind."""
        if self.node.process is None:
            return []
        self.node.process.send_signal(signal.SIGTERM)
        status = self.node.wait()
        folder = self.node.folder
        left = [f"{self.name} leaves {path}" for path in (*folder.glob("versions/*/*"), *folder.glob("sets/*"))]
        return left if status == 0 else [*left, f"{self.name} ended with {status} on SIGTERM"]


@dataclass(frozen=True)
class NodeMemory:
    """Numbers of the versions in a node's folder, and the number of its sets of files that ranks may write."""

    versions: Collection[int]
    sets: int


@dataclass(frozen=True)
class NodeUse:
    """Versions and files that processes on the host of a node use there.

    Attributes:
        version: Version that its workers map, or that its ranks have written; 0 for none.
        writes: Whether ranks on its host are registered.
        servers: Servers that read through it.
    """

    version: int = 0
    writes: bool = False
    servers: tuple[answers.Server, ...] = ()


def node_problems(
    name: str, nodes: Iterable[answers.Node], use: NodeUse, memory: NodeMemory, ready: Collection[int]
) -> list[str]:
    """Return why a node does not have what its host needs, or has more; empty if it does.

    Args:
        name: Id of the node.
        nodes: All nodes.
        use: What its host needs.
        memory: What is in its folder.
        ready: Numbers of the READY versions.
    """
    found = [node for node in nodes if node.name == f"nodes/{name}"]
    if [node.state for node in found] != [answers.Node.State.LIVE]:
        return [f"expected {name} to be live, got {[(node.name, node.state.value) for node in found]}"]
    (node,), problems = found, []
    of_model = [copy for copy in node.copies if copy.version.startswith(f"models/{MODEL}/")]
    copies = {int(copy.version.rpartition("/")[2]): copy for copy in of_model}
    copy = copies.get(use.version)
    if use.version and (copy is None or not 0 < copy.wanted_pieces <= copy.held_pieces):
        problems.append(f"{name} does not hold version {use.version}: {copy}")
    problems += [f"{name} has a problem with {copy.version}: {copy.problem}" for copy in node.copies if copy.problem]
    problems += [f"ranks still write {copy.version} on {name}" for copy in node.copies if copy.uploading]
    if dead := set(memory.versions) - set(ready):
        problems.append(f"{name} keeps versions {sorted(dead)}, READY are {sorted(ready)}")
    least, most = (1, SETS) if use.writes else (0, 0)
    if not least <= memory.sets <= most:
        problems.append(f"expected {least} to {most} sets of files on {name}, got {memory.sets}")
    if node.used_bytes > node.capacity_bytes:
        problems.append(f"{name} uses {node.used_bytes} of {node.capacity_bytes} bytes")
    for server in use.servers:
        for worker in server.workers:
            if worker.transport != "node":
                problems.append(f"{server.name} worker {worker.rank} read {worker.transport}: {worker.transport_reason}")
    return problems


def memory_of(name: str, replicas: int) -> int:
    """Return the bytes of versions that a node may hold."""
    return (CAPACITY if replicas == 1 else REPLICATED)[name]


def port() -> str:
    """Return a free address for a port."""
    return f"127.0.0.1:{free_port()}"
