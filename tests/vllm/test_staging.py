"""The READY version that a worker keeps for an install ahead of READY: staged beforehand, and used for nothing else."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from resharder.client.direct.base import DirectFailed
from resharder.client.errors import DaemonUnreachable, NotFound
from resharder.client.inference.engine import InstallError
from resharder.client.inference.worker import staging as module
from resharder.client.inference.worker.staging import StagedInstall, Staging

from tests.support.observing import wait_until

NEEDS: dict[str, Any] = {"w": ()}


class Source:
    """A staged version."""

    def __init__(self, number: int) -> None:
        self.manifest = manifest(number)
        self.expected: dict[Any, int] = {("w", ()): number}
        self.closed = self.registered = False

    def populate(self, needs: Any) -> None: ...

    def unregister(self) -> None:
        self.registered = False

    def close(self) -> None:
        assert not self.closed
        self.closed = True


class Sources:
    """Opens versions at once, and counts."""

    def __init__(self, shared: bool) -> None:
        self.shared, self.staged, self.gone = shared, list[Source](), set[int]()
        self.unreachable = False
        self.opening, self.go = threading.Event(), threading.Event()
        self.go.set()

    def open(self, manifest: Any, needs: Any, without: frozenset[str] = frozenset()) -> Source:
        if threading.current_thread() is not threading.main_thread():
            self.opening.set()
            assert self.go.wait(60)
        if self.unreachable:
            raise DaemonUnreachable("it is away")
        if manifest.number in self.gone:
            raise FileNotFoundError(manifest.name)
        self.staged.append(Source(manifest.number))
        return self.staged[-1]

    def expected(self, manifest: Any, needs: Any) -> dict[Any, int]:
        return {("w", ()): manifest.number}

    @property
    def held(self) -> list[int]:
        return [source.manifest.number for source in self.staged if not source.closed]


class Receiver:
    """A link to the ranks, which offer everything."""

    offered = answers = True
    problem = "they are gone"

    def __init__(self) -> None:
        self.joined: Callable[[], None] = lambda: None

    def join(self, memory: Any, models: Any, version: str, install: str) -> bool:
        self.joined()
        return self.offered

    def expect_early(self, memory: Any, version: str) -> Any:
        if not self.answers:
            raise DirectFailed(self.problem)
        return SimpleNamespace(version=version, config=b"{}", tensors="")


def manifest(number: int) -> Any:
    return SimpleNamespace(name=f"v/{number}", number=number)


class Asked(list[str]):
    """The manifests that were fetched; those of `uploading` versions cannot be."""

    uploading: set[str]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    names = Asked()
    names.uploading = set()
    monkeypatch.setattr(module, "_let_go", lambda work: work())

    def get(channel: Any, version: str) -> Any:
        if version in names.uploading:
            raise NotFound(f"{version} is not READY")
        names.append(version)
        return manifest(int(version.rpartition("/")[2]))

    monkeypatch.setattr(module, "get_manifest", get)
    return names


class Worker:
    """A worker's staging, and what it applies."""

    def __init__(self, *, shared: bool = True) -> None:
        self.sources, self.receiver = Sources(shared), Receiver()
        host: Any = SimpleNamespace(device=SimpleNamespace(type="cpu"))
        parts: Any = SimpleNamespace(
            by_name={}, needs=lambda: NEEDS, loaded=frozenset(), check=lambda manifest: None, check_early=self.check_early
        )
        unused: Any = None
        receiver: Any = self.receiver
        self.staging = Staging(host, unused, unused, parts, receiver, lambda: True)
        self.staging.sources = self.sources  # type: ignore[assignment]
        self._installs = 0
        self.other_config = False

    def check_early(self, version: str, config: bytes, tensors: str) -> None:
        if self.other_config:
            raise InstallError(f"{version}: rope_theta is 1 here, 2 in the version")

    def stage(self, version: int, fallback: int = 0) -> StagedInstall:
        self._installs += 1
        staged = self.staging.begin(f"i-{self._installs}", f"v/{version}", f"v/{fallback}" if fallback else "")
        assert staged is not None
        memory: Any = SimpleNamespace()
        staged.source = self.staging.stage({}, staged, memory if fallback else None, None)
        return staged

    def install(self, version: int, fallback: int = 0, *, keep: bool = False) -> None:
        self.staging.finish(self.stage(version, fallback), keep)


def test_each_version_served_ahead_is_the_fallback_of_the_next_without_being_staged_again(asked: list[str]) -> None:
    worker = Worker()
    worker.install(2, fallback=1)
    assert asked == ["v/1"], "the first fallback is staged when it is needed"
    assert worker.staging.prepare_fallback(manifest(2)) == {("w", ()): 2}
    assert worker.sources.held == [2]
    for version in (3, 4):
        staged = worker.stage(version, fallback=version - 1)
        assert staged.early is not None
        assert staged.early.version == f"v/{version}"
        assert staged.source is worker.sources.staged[-1]
        worker.staging.finish(staged)
        worker.staging.prepare_fallback(manifest(version))
        assert worker.sources.held == [version]
    assert asked == ["v/1"]


def test_a_version_that_was_served_ahead_and_differs_comes_from_the_fallback(asked: list[str]) -> None:
    worker = Worker()
    worker.install(2, fallback=1)
    worker.staging.prepare_fallback(manifest(2))
    assert worker.stage(2).source is worker.sources.staged[-1]
    assert asked == ["v/1"]


def test_a_prepared_version_is_closed_when_another_is_installed(asked: list[str]) -> None:
    worker = Worker()
    worker.install(2, fallback=1)
    worker.staging.prepare_fallback(manifest(2))
    worker.stage(7)
    assert worker.sources.held == [7]
    assert asked == ["v/1", "v/7"]


def test_a_version_from_the_store_is_the_fallback_of_the_next_one_ahead_without_being_staged_again(asked: list[str]) -> None:
    worker = Worker()
    worker.install(1, keep=True)
    assert worker.sources.held == [1]
    staged = worker.stage(2, fallback=1)
    assert staged.source is worker.sources.staged[0]
    assert asked == ["v/1"]


def test_a_version_from_the_store_is_closed_after_a_failed_install(asked: list[str]) -> None:
    worker = Worker()
    worker.install(1)
    assert worker.sources.held == []


@pytest.mark.parametrize("same", [False, True])
def test_an_install_waits_for_the_version_that_it_falls_back_on_and_for_no_other(asked: list[str], same: bool) -> None:
    worker = Worker()
    worker.install(2, fallback=1)
    worker.sources.go.clear()
    preparing = threading.Thread(target=worker.staging.prepare_fallback, args=[manifest(2)])
    preparing.start()
    assert worker.sources.opening.wait(60)
    if same:
        with ThreadPoolExecutor() as pool:
            staged = pool.submit(worker.stage, 3, 2)
            wait_until(lambda: worker.staging._opening is None)  # the install has found it
            worker.sources.go.set()
            assert staged.result(60).source is worker.sources.staged[-1]
    else:
        worker.stage(4, fallback=3)  # while version 2 is being opened
        assert not worker.sources.go.is_set()
        worker.sources.go.set()
    preparing.join()
    assert worker.sources.held == ([2] if same else [3])
    assert asked == (["v/1"] if same else ["v/1", "v/3"])


def test_a_fallback_whose_digests_cannot_be_fetched_leaves_the_former_one(asked: Asked) -> None:
    worker = Worker()
    worker.install(2, fallback=1)
    worker.sources.unreachable = True
    with pytest.raises(DaemonUnreachable):
        worker.staging.prepare_fallback(manifest(2))
    worker.sources.unreachable = False
    assert worker.sources.held == [1]
    worker.install(3, fallback=1)
    assert asked == ["v/1"]


def test_a_version_whose_ranks_cannot_be_reached_leaves_the_fallback(asked: Asked) -> None:
    worker = Worker()
    asked.uploading.add("v/3")
    worker.install(2, fallback=1)
    worker.staging.prepare_fallback(manifest(2))
    worker.receiver.offered = False
    with pytest.raises(InstallError, match="no link to its ranks: they are gone"):
        worker.stage(3, fallback=2)
    worker.receiver.offered = True
    assert worker.stage(3, fallback=2).source is worker.sources.staged[-1]
    assert asked == ["v/1"]


def test_a_version_of_another_config_is_refused_ahead_of_ready_and_leaves_the_fallback(asked: Asked) -> None:
    worker = Worker()
    asked.uploading.add("v/3")
    worker.install(2, fallback=1)
    worker.staging.prepare_fallback(manifest(2))
    worker.other_config = True
    with pytest.raises(InstallError, match="rope_theta is 1 here, 2 in the version"):
        worker.stage(3, fallback=2)
    worker.other_config = False
    assert worker.stage(3, fallback=2).source is worker.sources.staged[-1]


@pytest.mark.parametrize("at", ["join", "digests"])
def test_a_version_that_is_ready_once_its_ranks_are_gone_comes_from_the_store_at_once(asked: Asked, at: str) -> None:
    worker = Worker()
    worker.install(2, fallback=1)
    worker.receiver.offered, worker.receiver.answers = at != "join", at != "digests"
    staged = worker.stage(3, fallback=2)
    assert (staged.early, staged.direct, staged.fallback) == (None, None, "")
    assert worker.sources.held == [3]
    assert asked == ["v/1", "v/2", "v/3"]


def test_ranks_are_joined_once_the_fallback_is_there_because_they_do_not_wait_for_it(asked: Asked) -> None:
    worker = Worker()
    there: list[list[int]] = []
    worker.receiver.joined = lambda: there.append(worker.sources.held)
    worker.stage(2, fallback=1)
    assert there == [[1]]


def test_a_mirror_prepares_no_fallback_because_it_has_one_version_at_a_time(asked: list[str]) -> None:
    worker = Worker(shared=False)
    worker.install(2, fallback=1)
    assert worker.sources.held == [1]
    assert worker.staging.prepare_fallback(manifest(2)) == {("w", ()): 2}
    assert worker.sources.held == []
    worker.install(3, fallback=2)
    assert asked == ["v/1", "v/2"]


def test_a_version_that_is_retired_meanwhile_is_compared_all_the_same(asked: list[str]) -> None:
    worker = Worker()
    worker.install(2, fallback=1)
    worker.sources.gone = {2}
    assert worker.staging.prepare_fallback(manifest(2)) == {("w", ()): 2}
    assert worker.sources.held == []
