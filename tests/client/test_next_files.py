"""Files of the next version, prepared before it exists, with a real daemon. CUDA's registration is a stand-in that counts."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from resharder.client.inference.worker.source import NextFiles, SourceFiles
from resharder.client.rpc.channel import Channel
from resharder.client.versions.manifest import VersionManifest, get_manifest
from resharder.converters.geometry.layout import Box, TensorSpec, full_box
from resharder.converters.storage.digest import Array

from tests.support.daemon import Daemon
from tests.support.observing import wait_until
from tests.support.publishing import Job, Weights, random_weights, whole

SPECS = [TensorSpec("weight", "BF16", (64, 32)), TensorSpec("scale", "F32", ())]
BOXES: list[tuple[str, Box]] = [(spec.name, full_box(spec.shape)) for spec in SPECS]
CPU = torch.device("cpu")


class Pages:
    """Registers arrays as `pinned_pages.register`, and counts what is registered."""

    def __init__(self) -> None:
        self.calls = self.held = 0

    def __call__(self, arrays: Sequence[Array], device: torch.device, busy: Callable[[], bool]) -> "Pages":
        self.calls, self.held = self.calls + 1, self.held + 1
        return self

    def close(self) -> None:
        self.held -= 1


class Trainer:
    """Publishes, with the daemon's answers."""

    def __init__(self, daemon: Daemon) -> None:
        self.job = Job(daemon.channel, SPECS, [whole(SPECS)]).connect()
        self.step = 0

    def publish(self) -> tuple[str, Weights]:
        self.step += 1
        weights = random_weights(SPECS, self.step)
        return self.job.publish(self.step, weights).name, weights


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon(keep_count=2) as running:
        yield running


@pytest.fixture(scope="module")
def trainer(daemon: Daemon) -> Trainer:
    return Trainer(daemon)


@pytest.fixture
def channel(daemon: Daemon) -> Iterator[Channel]:
    with Channel(daemon.endpoint) as opened:
        yield opened


@pytest.fixture
def pages() -> Pages:
    return Pages()


@pytest.fixture
def following(channel: Channel, pages: Pages) -> Iterator[NextFiles]:
    made: NextFiles = NextFiles(channel, lambda: False, pages, ask_seconds=0.02, check_seconds=0.02)  # type: ignore[arg-type]
    yield made
    made.close()


def take(following: NextFiles, manifest: VersionManifest) -> SourceFiles:
    return following.take(Path(manifest.folder), manifest.files)


def test_a_version_in_prepared_files_has_nothing_left_to_register(
    trainer: Trainer, channel: Channel, following: NextFiles, pages: Pages
) -> None:
    manifest = get_manifest(channel, trainer.publish()[0])
    for count in range(1, 6):  # more than the store has sets of files, so that recycled ones are among them
        following.prepare(manifest, BOXES, CPU)
        wait_until(lambda count=count: pages.calls == count)
        name, weights = trainer.publish()
        manifest = get_manifest(channel, name)
        files = take(following, manifest)
        assert files.register(BOXES, CPU, lambda: False, pages)  # type: ignore[arg-type]
        assert (pages.calls, pages.held) == (count, 1)
        for spec in SPECS:
            assert files.arrays[spec.name].tobytes() == weights[spec.name].tobytes()
        files.close()
        assert pages.held == 0


def test_other_boxes_than_those_prepared_are_registered_anew(
    trainer: Trainer, channel: Channel, following: NextFiles, pages: Pages
) -> None:
    following.prepare(get_manifest(channel, trainer.publish()[0]), BOXES[:1], CPU)
    wait_until(lambda: pages.calls == 1)
    files = take(following, get_manifest(channel, trainer.publish()[0]))
    assert files.register(BOXES, CPU, lambda: False, pages)  # type: ignore[arg-type]
    assert (pages.calls, pages.held) == (2, 1)
    files.close()


def test_a_version_in_other_files_is_mapped_itself_and_the_prepared_ones_are_let_go(
    trainer: Trainer, channel: Channel, following: NextFiles, pages: Pages
) -> None:
    name, weights = trainer.publish()
    manifest = get_manifest(channel, name)
    following.prepare(manifest, BOXES, CPU)
    wait_until(lambda: pages.held == 1)
    files = take(following, manifest)  # as when a fleet returns to a version
    assert pages.held == 0
    assert files.arrays["weight"].tobytes() == weights["weight"].tobytes()
    files.close()


def test_prepared_files_that_the_daemon_removes_are_let_go(
    daemon: Daemon, trainer: Trainer, channel: Channel, following: NextFiles, pages: Pages
) -> None:
    following.prepare(get_manifest(channel, trainer.publish()[0]), BOXES, CPU)
    wait_until(lambda: pages.held == 1)
    Job(daemon.channel, SPECS, [whole(SPECS)], job="successor").connect()  # whose epoch has files of its own
    wait_until(lambda: pages.held == 0)
