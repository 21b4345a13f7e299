"""Resharder, as its documentation starts it: no option of `connect`, of the daemon, or of the server's plugin is set.
The store is in huge pages, as it asks for, where this process may mount them. `resharder-staged` has `connect(direct_wait=0)`:
versions go through the daemon's store.

A daemon's settings may be given in its environment (`RESHARDERD_KEEP_COUNT=1` where the store has no room for three versions).
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import torch

from benchmarks.stores import fast_store
from benchmarks.systems.base import Points, Sender, Setup, Site, System, missing
from benchmarks.weights import values
from tests.support.daemon import Daemon
from tests.support.observing import servers, wait_serving, wait_until

PATIENCE = 90.0  # seconds
LOGGED = {  # points of a version in the daemon's log
    "transferred": r"^direct_transfer None {} ",
    "verified": r"^server_serving .* serving version {}\b",
    "ready": r"^version_ready .*/versions/{} ",
}


class OurSite(Site):
    def __init__(self, daemon: Daemon) -> None:
        super().__init__(["--load-format", "resharder"], {"RESHARDER_ENDPOINT": daemon.endpoint}, ("resharder",))
        self._daemon = daemon

    def settle(self, version: int) -> tuple[Points, str]:
        wait_serving(self._daemon, version, PATIENCE)
        wait_until(lambda: not any(server.ahead for server in servers(self._daemon)), "it is the store's", PATIENCE)
        wait_until(lambda: self._points(version).keys() >= {"verified", "ready"}, "the daemon's log says so", 20)
        (server,) = servers(self._daemon)
        return self._points(version), server.workers[0].path or "store"

    def _points(self, version: int) -> Points:
        """Return the points in the log; of one that happened twice, the first."""
        found: Points = {}
        for line in self._daemon.log.read_text().splitlines():
            if line.startswith("{"):
                entry = json.loads(line)
                said = f"{entry['event']} {entry.get('subject')} {entry.get('version')} {entry.get('reason')}"
                for point, pattern in LOGGED.items():
                    if re.search(pattern.format(version), said):
                        found.setdefault(point, datetime.fromisoformat(entry["timestamp"]).timestamp())
        return found


class Megatron(Sender):
    """One Megatron rank."""

    def __init__(self, setup: Setup, options: dict[str, Any]) -> None:
        if setup.device.type == "cpu":
            from tests.support import megatron_shim  # noqa: F401
        import torch.distributed as dist
        from resharder.converters.models.megatron.build import build_chunks
        from resharder.converters.models.megatron.layout import local_layout

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self._setup, self._options, self._handle = setup, options, None
        self.chunks = build_chunks(setup.config, **{setup.kind: 1}, dtype=torch.bfloat16, device=setup.device.type)
        self._layout, self._tensors = local_layout(self.chunks, setup.config)

    @torch.no_grad()
    def fill(self, seed: int) -> None:
        from resharder.converters.models.tensor_io import view_of

        for piece in self._layout.pieces:
            there = view_of(self._tensors[piece.local], piece.view(piece.box))
            there.copy_(values(piece.tensor, piece.box, self._layout.tensors[piece.tensor].shape, seed, self._setup.device))

    def open(self, server: str) -> None:
        from resharder.client import connect

        self._publisher = connect(model="policy", **self._options)
        self._publisher.attach(self.chunks, self._setup.config, tokenizer=self._setup.own)
        self.publish(0)
        self.settle()

    def publish(self, step: int) -> int:
        self._handle = self._publisher.publish(step)
        return self._handle.version

    def settle(self) -> Points:
        assert self._handle is not None
        self._handle.wait_ready(PATIENCE)
        return {}


class Resharder(System):
    boots_from_trainer = True

    def __init__(self, name: str = "resharder", **options: Any) -> None:
        self.name, self._options = name, options

    def unavailable(self, setup: Setup) -> str:
        module = missing("megatron")
        return f"{module} is not installed" if module else ""

    @contextmanager
    def site(self, setup: Setup) -> Iterator[Site]:
        with fast_store() as (folder, _), Daemon(lease_seconds=None, log_format="json", store=folder / "store") as daemon:
            yield OurSite(daemon)

    def sender(self, setup: Setup) -> Sender:
        return Megatron(setup, self._options)
