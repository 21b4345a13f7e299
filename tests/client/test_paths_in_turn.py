"""Versions over each path right after each other path, while a registration of the next version's files stands still.

A worker's staging, with a real daemon and its store. CUDA's registration and the ranks are stand-ins.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from resharder.client.gpu.pinned_pages import Stop
from resharder.client.inference.settings import PluginSettings
from resharder.client.inference.worker.source import NextFiles, Sources, VersionSource
from resharder.client.inference.worker.staging import Staging
from resharder.client.rpc.channel import Channel
from resharder.client.versions.manifest import get_manifest
from resharder.converters.geometry.layout import TensorSpec, full_box
from resharder.converters.storage.digest import Array
from resharder.v1 import resources_pb2

from tests.support.daemon import Daemon
from tests.support.publishing import Job, random_weights, whole

SPECS = [TensorSpec("weight", "BF16", (64, 32)), TensorSpec("scale", "F32", ())]
NEEDS = {spec.name: (full_box(spec.shape),) for spec in SPECS}
CPU = torch.device("cpu")
STAGED, DIRECT, AHEAD = "staged", "direct", "ahead"
# Each path after each, itself included.
TURNS = (STAGED, STAGED, DIRECT, DIRECT, AHEAD, AHEAD, DIRECT, STAGED, AHEAD, STAGED)


class Registration:
    """Registers nothing, and stands still until it is let go."""

    whole = True

    def __init__(self) -> None:
        self.stands, self.go = threading.Event(), threading.Event()

    def __call__(self, arrays: Sequence[Array], device: torch.device, busy: Callable[[], bool], stop: Stop) -> "Registration":
        stands, go = self.stands, self.go
        stands.set()
        assert go.wait(60)
        return self

    def next(self) -> Callable[[], None]:
        """Return what lets those go that stand now; later ones stand until the next call."""
        go, self.stands, self.go = self.go, threading.Event(), threading.Event()
        return go.set

    def close(self) -> None: ...


class Receiver:
    """A link to ranks that offer everything."""

    problem = ""

    def join(self, memory: Any, models: Any, version: str, install: str) -> bool:
        return True

    def expect(self, memory: Any, expected: Any) -> None: ...

    def expect_early(self, memory: Any, version: str) -> Any:
        return SimpleNamespace(version=version, config=b"", tensors="")


class Worker(Staging):
    """A worker whose versions from the store are registered, as on a GPU."""

    def __init__(self, daemon: Daemon, channel: Channel, registration: Registration) -> None:
        host: Any = SimpleNamespace(device=CPU)
        parts: Any = SimpleNamespace(
            by_name={}, needs=lambda: NEEDS, loaded=frozenset(), check=lambda manifest: None, check_early=lambda *args: None
        )
        receiver: Any = Receiver()
        settings = PluginSettings(daemon.endpoint, "s", "policy")
        super().__init__(host, channel, settings, parts, receiver, lambda: True)
        self.sources = Sources(channel, resources_pb2.StoreAccess(), settings)
        self.sources.shared = True
        self.sources._next = NextFiles(channel, lambda: True, registration, ask_seconds=0.01)  # type: ignore[arg-type]

    def _register(self, models: Any, staged: Any, source: VersionSource) -> None:
        source.registered = staged.direct is None

    def _boxed(self) -> Any:
        return [(name, box) for name, boxes in NEEDS.items() for box in boxes]

    def install(self, version: str, path: str, fallback: str = "") -> VersionSource:
        staged = self.begin(version, version, fallback)
        assert staged is not None
        memory: Any = SimpleNamespace(layout=SimpleNamespace(tensors={}))
        source = staged.source = self.stage({}, staged, None if path == STAGED else memory, None)
        self.finish(staged, keep=True)
        return source


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon(keep_count=2) as running:
        yield running


def test_no_install_waits_for_a_preparation_whatever_the_paths_of_versions_after_one_another(daemon: Daemon) -> None:
    assert len(set(pairwise(TURNS))) == 9
    job = Job(daemon.channel, SPECS, [whole(SPECS)]).connect()
    registration, beside = Registration(), list[str]()

    def publish(step: int) -> str:
        return job.publish(step, random_weights(SPECS, step)).name

    with Channel(daemon.endpoint) as channel:
        worker = Worker(daemon, channel, registration)
        served, before = publish(1), STAGED
        worker.install(served, STAGED)
        for step, path in enumerate(TURNS, 2):
            if before == STAGED:
                assert registration.stands.wait(60)
                beside.append(path)
            let_go = registration.next()
            if path == AHEAD:
                version = f"{served.rpartition('/')[0]}/{int(served.rpartition('/')[2]) + 1}"
                assert worker.install(version, AHEAD, served).manifest.name == served
                assert publish(step) == version
                worker.prepare_fallback(get_manifest(channel, version))
            else:
                version = publish(step)
                assert worker.install(version, path).manifest.name == version
            let_go()
            served, before = version, path
        registration.next()()
        assert set(beside) == {STAGED, DIRECT, AHEAD}, "each path ran beside a registration that stood still"
        worker.sources.close()
