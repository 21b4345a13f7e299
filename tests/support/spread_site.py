"""Four emulated hosts: ranks and nodes with little memory on three, a worker and a node that holds nothing on the fourth."""

from contextlib import ExitStack
from pathlib import Path
from typing import ClassVar

import torch

from tests.support.daemon import Daemon
from tests.support.home_rank import Ranks, Rows
from tests.support.home_site import Site
from tests.support.namespaces import Hosts
from tests.support.node import Node, patient, wait_live
from tests.support.ports import free_port
from tests.support.publishing import read_folder
from tests.support.remote import Remote

SHAPE = [12_000, 1024]
SIZE = 3 * SHAPE[0] * SHAPE[1] * 2
LIMIT = SIZE * 8 // 10


class Spread(Site):
    """The daemon, which holds no version; hosts a, b and c with a rank and a node each; host d, whose node holds nothing."""

    holdings: ClassVar[list[Rows]] = [[(f"{name}.up", SHAPE, 0, SHAPE[0])] for name in "abc"]
    hosts, role = "abc", Ranks

    def __init__(self, stack: ExitStack, archive: Path, limit: int = LIMIT, replicas: int = 1) -> None:
        hosts = self.network = stack.enter_context(Hosts(4, rate="1gbit"))
        options = {"hold": "none", "shared_memory": False, "keep_count": 1, "lease_seconds": 10, "archive_url": archive}
        options["replicas"] = replicas
        self.daemon = patient(Daemon(insecure=True, data_listen=f"{hosts.second_address}:{free_port()}", **options))
        self.daemon.endpoint = f"{hosts.address}:{self.daemon.port}"
        stack.enter_context(self.daemon)
        self.nodes, self.ranks = {}, {}
        for number, name in enumerate("abcd"):
            given = {"listen": "0.0.0.0:7679", "insecure": True, "limit_bytes": limit if name != "d" else 0}
            node = Node(self.daemon.endpoint, name, command=tuple(hosts.command(number)), **given)
            self.nodes[name] = stack.enter_context(node)
        for number, name in enumerate("abcd"):
            process = stack.enter_context(Remote(self.role, hidden=self.hidden(name), namespace=hosts.namespace(number)))
            if name == "d":
                self.worker = process
            else:
                self.ranks[name] = process
        wait_live(self.daemon, *self.nodes)

    def hidden(self, host: str) -> list[Path]:
        """Folders of the other hosts' nodes."""
        return [node.root for other, node in self.nodes.items() if other != host]

    def held_bytes(self) -> int:
        """Memory of the files of versions on the daemon's host."""
        return sum(file.stat().st_blocks * 512 for file in self.daemon.store.glob("models/*/*/*/*.safetensors"))

    def is_published(self, folder: Path, step: int) -> bool:
        """Whether a checkpoint folder has exactly what the ranks have published."""
        return {name: found.tobytes() for name, found in read_folder(str(folder)).items()} == {
            name: self.role.weights(name, shape, step).contiguous().view(torch.uint8).numpy().tobytes()
            for rows in self.holdings
            for name, shape, *_ in rows
        }
