"""Files of the next version, prepared before it exists, with a real daemon. CUDA's registration is a stand-in that counts."""

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from resharder.client.gpu.pinned_pages import Stop
from resharder.client.inference.worker.source import NextFiles, SourceFiles
from resharder.client.rpc.channel import Channel
from resharder.client.runtime.driver_lock import DRIVER_LOCK
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
    """Registers arrays as `pinned_pages.register`, one array a step, and counts what is registered.

    A step with a number in `slow` waits for `go`.
    """

    def __init__(self, slow: int = 0) -> None:
        self.calls = self.held = self.steps = 0
        self._slow, self.stands, self.go = slow, threading.Event(), threading.Event()

    def __call__(self, arrays: Sequence[Array], device: torch.device, busy: Callable[[], bool], stop: Stop) -> "Registered":
        self.calls, self.held = self.calls + 1, self.held + 1
        made = Registered(self, len(arrays))
        made.go_on(stop)
        return made

    def step(self) -> None:
        self.steps += 1
        if self.steps == self._slow:
            self.stands.set()
            assert self.go.wait(60)


class Registered:
    def __init__(self, pages: Pages, left: int) -> None:
        self._pages, self._left = pages, left

    def go_on(self, stop: Stop) -> bool:
        while self._left and not stop():
            self._pages.step()
            self._left -= 1
        return True

    @property
    def whole(self) -> bool:
        return not self._left

    def close(self) -> None:
        self._pages.held -= 1


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
        following.prepare(manifest, lambda: BOXES, CPU)
        wait_until(lambda count=count: pages.steps == count * len(BOXES))
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
    following.prepare(get_manifest(channel, trainer.publish()[0]), lambda: BOXES[:1], CPU)
    wait_until(lambda: pages.steps == 1)
    files = take(following, get_manifest(channel, trainer.publish()[0]))
    assert files.register(BOXES, CPU, lambda: False, pages)  # type: ignore[arg-type]
    assert (pages.calls, pages.held) == (2, 1)
    files.close()


def test_a_version_in_other_files_is_mapped_itself_and_the_prepared_ones_stay_for_the_next(
    trainer: Trainer, channel: Channel, following: NextFiles, pages: Pages
) -> None:
    name, weights = trainer.publish()
    manifest = get_manifest(channel, name)
    following.prepare(manifest, lambda: BOXES, CPU)
    wait_until(lambda: pages.steps == len(BOXES))
    files = take(following, manifest)  # as when a fleet returns to a version
    assert files.arrays["weight"].tobytes() == weights["weight"].tobytes()
    files.close()
    assert pages.held == 1
    files = take(following, get_manifest(channel, trainer.publish()[0]))
    assert files.register(BOXES, CPU, lambda: False, pages)  # type: ignore[arg-type]
    assert pages.calls == 1
    files.close()


@pytest.mark.parametrize("same", [True, False])
def test_no_version_waits_for_a_registration_in_progress_and_its_own_goes_on_with_it(
    trainer: Trainer, channel: Channel, same: bool
) -> None:
    pages = Pages(slow=1)
    following: NextFiles = NextFiles(channel, lambda: False, pages, ask_seconds=0.02, check_seconds=0.02)  # type: ignore[arg-type]
    manifest = get_manifest(channel, trainer.publish()[0])
    following.prepare(manifest, lambda: BOXES, CPU)
    assert pages.stands.wait(60)
    if same:
        manifest = get_manifest(channel, trainer.publish()[0])
    files = take(following, manifest)
    assert not pages.go.is_set(), "the registration stands still, and the version is open"
    pages.go.set()
    if same:
        assert files.register(BOXES, CPU, lambda: False, pages)  # type: ignore[arg-type]
        assert (pages.calls, pages.steps) == (1, len(BOXES)), "each step once, by whichever thread"
    files.close()
    following.close()
    assert pages.held == 0


def test_an_apply_copies_from_files_whose_registration_stands_still_because_of_it(trainer: Trainer, channel: Channel) -> None:
    """A call into the driver waits for the end of the apply, which therefore must not wait for the call."""
    pages = Pages(slow=2)
    following: NextFiles = NextFiles(channel, lambda: False, pages, ask_seconds=0.02, check_seconds=0.02)  # type: ignore[arg-type]
    following.prepare(get_manifest(channel, trainer.publish()[0]), lambda: BOXES, CPU)
    assert pages.stands.wait(60)
    name, weights = trainer.publish()
    files = take(following, get_manifest(channel, name))
    with DRIVER_LOCK.priority():
        array = files.arrays["weight"]
        copy = files.copyable(array)
        assert not np.shares_memory(copy, array), "CUDA refuses an array of which only a part is registered"
        assert copy.tobytes() == weights["weight"].tobytes()
    del array
    pages.go.set()
    files.close()
    following.close()
    assert pages.held == 0


def test_pages_that_are_being_released_are_registered_anew_afterwards(trainer: Trainer, channel: Channel, pages: Pages) -> None:
    manifest = get_manifest(channel, trainer.publish()[0])
    files = SourceFiles(Path(manifest.folder), manifest.files)
    for count in (1, 2, 3):
        assert files.register(BOXES, CPU, lambda: False, pages)  # type: ignore[arg-type]
        assert (pages.calls, pages.held) == (count, 1)
        files.unregister()
    files.close()
    assert pages.held == 0


def test_a_preparation_that_is_no_longer_wanted_stops_at_its_next_step(trainer: Trainer, channel: Channel) -> None:
    pages = Pages(slow=1)
    following: NextFiles = NextFiles(channel, lambda: False, pages, ask_seconds=0.02, check_seconds=0.02)  # type: ignore[arg-type]
    manifest = get_manifest(channel, trainer.publish()[0])
    following.prepare(manifest, lambda: BOXES, CPU)
    assert pages.stands.wait(60)
    following.prepare(manifest, lambda: BOXES[:1], CPU)  # returns while the former one stands still
    pages.go.set()
    wait_until(lambda: pages.calls == 2)
    wait_until(lambda: pages.steps == 2)
    following.close()
    assert pages.held == 0


def test_prepared_files_that_the_daemon_removes_are_let_go(
    daemon: Daemon, trainer: Trainer, channel: Channel, following: NextFiles, pages: Pages
) -> None:
    following.prepare(get_manifest(channel, trainer.publish()[0]), lambda: BOXES, CPU)
    wait_until(lambda: pages.held == 1)
    Job(daemon.channel, SPECS, [whole(SPECS)], job="successor").connect()  # whose epoch has files of its own
    wait_until(lambda: pages.held == 0)
