"""The store on a simulated medium: single faults that simulations have found, each with its mend."""

import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from resharder.converters.geometry.layout import TensorSpec
from resharder.converters.storage.files import MappedFiles, lay_out
from resharder.server.state.errors import DaemonError
from resharder.server.state.version import READY, VersionRecord
from resharder.server.store import manifest
from resharder.server.store.epochs import NewEpoch
from resharder.server.store.store import Store

from tests.simulation.daemon import STORE
from tests.simulation.driver import ignore
from tests.simulation.filesystem import Change, SimulatedFiles
from tests.simulation.medium import Crash, Medium
from tests.simulation.schedule import Process, Schedule
from tests.simulation.seams import Log, installed

pytestmark = pytest.mark.slow

LAYOUTS = lay_out([TensorSpec("a", "F32", (16,))])
SMALL = {"config.json": b"{}", "tokenizer.json": b"[]"}
LATER = {name: content + b" " for name, content in SMALL.items()}


class Refusals:
    """Failures of operations of a kind whose path has an ending: (kind, ending, how often)."""

    number = errno.EIO

    def __init__(self, *due: tuple[str, str, int]) -> None:
        self._due = list(due)

    def strikes(self, kind: str, path: str, count: int) -> bool:
        """Return whether the operation fails."""
        for place, (other, ending, times) in enumerate(self._due):
            if kind == other and path.endswith(ending) and times:
                self._due[place] = other, ending, times - 1
                return True
        return False


class Host:
    """A store on a medium that is cut from power or fails at command."""

    def __init__(self) -> None:
        self.schedule = Schedule(Random(1), ignore, 0.0)
        self.files = SimulatedFiles(Random(1), 1 << 30)
        self.medium = Medium(self.files, self.schedule, None)
        self.log = Log(self.schedule)
        self.process, self.lives = Process("daemon 0"), 0
        self.files.mkdir(STORE)
        self.files.fsync(self.files.root)
        self.store: Store

    def act(self, function: Callable[[], Any]) -> Any:
        """Run a function in the daemon's process, and all work that follows from it; raise its error."""
        task = self.schedule.start("act", self.process, function)
        while self.schedule.tasks and not self.process.dead:
            self.schedule.step()
        if self.process.dead:
            self.schedule.kill(self.process)
        self.schedule.unexpected.clear()
        if isinstance(task.error, DaemonError):
            raise task.error
        return task.result

    def start(self, crash: Crash | None = None) -> Store:
        """Start a daemon's store."""
        self.lives += 1
        self.process = Process(f"daemon {self.lives}")
        self.medium.begin(self.process, crash)
        self.store = self.act(lambda: Store(Path(STORE), limit_bytes=1 << 20, keep_count=1, clock=self.schedule.wall_clock))
        return self.store

    def restart(self, *, power: bool, kept: float = 0.0) -> Store:
        """End the daemon, or the power of its host, and start the next one. `kept`: share of unsynced writes that are left."""
        self.process.dead = True
        self.schedule.kill(self.process)
        self.files.end_process(self.process.name)
        if power:
            self.files.cut_power(kept)
        return self.start()

    def claim(self, job: str) -> int:
        """Claim the model for a job and reserve capacity."""
        epoch: int = self.act(lambda: self.store.epochs.begin("policy", job, 1)).epoch
        self.act(lambda: self.store.epochs.reserve(NewEpoch("policy", epoch, LAYOUTS, SMALL)))
        return epoch

    def begin(self, epoch: int, step: int) -> VersionRecord:
        """Begin a version whose bytes are all of value `step`."""
        record: VersionRecord = self.act(lambda: self.store.lifecycle.begin("policy", epoch, step, "job"))

        def fill() -> None:
            with MappedFiles(self.store.folder.path(record), LAYOUTS, writable=True) as files:
                files.arrays["a"][...] = step

        self.act(fill)
        return record

    def publish(self, epoch: int, step: int) -> VersionRecord:
        """Publish a version whose bytes are all of value `step`."""
        record = self.begin(epoch, step)
        done: VersionRecord = self.act(lambda: self.store.lifecycle.commit(record, {"a": 0}, ()))
        return done

    def ready(self) -> dict[int, int]:
        """Return the value of each READY version, which must be the same in all elements."""
        model, found = self.store.catalogue.model("policy"), {}
        for record in model.of(READY):
            content = manifest.read(Path(self.store.folder.path(record)))
            with MappedFiles(self.store.folder.path(record), content.files) as files:
                values = np.unique(files.arrays["a"]).tolist()
            assert values == [record.step], f"version {record.number} of step {record.step} has {values}"
            found[record.number] = record.step
        return found


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host()
    with installed(made.medium, lambda: made.process, made.log, 1 << 20):
        yield made
        made.schedule.close()


def test_the_first_version_of_a_model_survives_a_power_cut(host: Host) -> None:
    host.start()
    host.publish(host.claim("job"), 1)
    host.restart(power=True)
    assert host.ready() == {1: 1}
    assert host.store.catalogue.newest_number("policy") == 1


def test_a_version_that_a_killed_daemon_had_not_synced_is_durable_once_it_is_ready_again(host: Host) -> None:
    host.start()
    epoch = host.claim("job")
    host.publish(epoch, 1)
    record = host.begin(epoch, 2)
    host.medium.crash = Crash(0, False, "sync folder", "/versions")
    host.act(lambda: host.store.lifecycle.commit(record, {"a": 0}, ()))
    host.restart(power=False)
    assert host.ready() == {1: 1, 2: 2}
    host.restart(power=True)
    assert host.ready() == {1: 1, 2: 2}


@pytest.mark.parametrize("kept", [0.0, 0.5])
def test_a_retired_version_that_a_power_cut_brings_back_is_whole(host: Host, kept: float) -> None:
    host.start()
    epoch = host.claim("job")
    for step in range(1, 4):
        host.publish(epoch, step)
    for step in (4, 5):  # one of them in the files of version 2
        host.begin(epoch, step)
    for _, inode in host.files.walk():
        if not inode.is_folder:
            host.files.fsync(inode)  # the kernel may write data at any time
    host.restart(power=True, kept=kept)
    assert 3 in host.ready()


def test_a_retired_version_that_a_power_cut_brings_back_has_no_files_of_a_later_one(host: Host) -> None:
    host.start()
    epoch = host.claim("job")
    host.publish(epoch, 1)
    record = host.begin(epoch, 2)
    crash = host.medium.crash = Crash(0, True, "fsync", "config.json.part")  # the first small file in the files of a retired one
    host.act(lambda: host.store.lifecycle.commit(record, {"a": 0}, ()))
    assert host.medium.crash is not crash
    host.files.changes = host.files.changes[-1:]  # all that is left is the file's name in the folder
    host.restart(power=True, kept=1.0)
    assert host.ready()
    for number in host.ready():
        names = host.files.names(f"{STORE}/models/policy/versions/{number:08}")
        assert {*names} == {*SMALL, manifest.MANIFEST_FILE, LAYOUTS[0].path}


def test_a_version_whose_commit_failed_is_not_ready_after_a_power_cut(host: Host) -> None:
    host.start()
    epoch = host.claim("job")
    host.publish(epoch, 1)
    record = host.begin(epoch, 2)
    host.medium.plan = Refusals(("sync folder", "/versions", 1))
    with pytest.raises(DaemonError, match="EIO"):
        host.act(lambda: host.store.lifecycle.commit(record, {"a": 0}, ()))
    versions = host.files.find(f"{STORE}/models/policy/versions")
    renamed = [change for change in host.files.changes if any(folder is versions for folder in change.folders)]
    assert len(renamed) == 2
    host.files.changes = renamed[:1]  # the rename is left, the way back is not
    host.restart(power=True, kept=1.0)
    assert host.ready() == {1: 1}


def test_folders_that_could_not_be_removed_at_the_start_are_removed_later(host: Host) -> None:
    host.start()
    epoch = host.claim("job")
    host.publish(epoch, 1)
    host.medium.plan = Refusals(("unlink", ".safetensors", 9))
    host.restart(power=False)
    host.medium.plan = None
    assert host.files.names(f"{STORE}/models/policy/pool")
    left = host.store.catalogue.model("policy")
    assert sum(left.stuck.values()) == left.used() - LAYOUTS[0].size > 0
    host.publish(host.claim("later"), 2)
    pool = host.store.catalogue.model("policy").reservation
    assert pool is not None
    assert set(host.files.names(f"{STORE}/models/policy/pool")) == {path.name for path in pool.free}


def test_a_folder_that_cannot_be_looked_up_is_not_taken_for_removed(host: Host) -> None:
    host.start()
    host.claim("job")
    host.medium.plan = Refusals(("unlink", ".safetensors", 1), ("stat", "/pool/1-1", 3))
    host.claim("later")
    model = host.store.catalogue.model("policy")
    assert [path.name for path in model.stuck] == ["1-1"]


def test_small_files_that_could_not_be_removed_are_never_the_models(host: Host) -> None:
    host.start()
    epoch = host.claim("job")
    host.medium.plan = Refusals(("sync folder", "/files", 1), ("unlink", "tokenizer.json", 1))
    with pytest.raises(DaemonError, match="EIO"):
        host.act(lambda: host.store.epochs.reserve(NewEpoch("policy", epoch, LAYOUTS, LATER)))
    assert host.act(lambda: host.store.reader.model_files("policy")) == SMALL


def test_small_files_whose_write_failed_are_whole_after_a_power_cut(host: Host) -> None:
    host.start()
    epoch = host.claim("job")
    host.medium.plan = Refusals(("sync folder", "/files", 1))
    with pytest.raises(DaemonError, match="EIO"):
        host.act(lambda: host.store.epochs.reserve(NewEpoch("policy", epoch, LAYOUTS, LATER)))
    host.medium.plan = Refusals(("sync folder", "/files", 1))
    with pytest.raises(DaemonError, match="EIO"):  # of what the first call has left, if it left anything
        host.act(lambda: host.store.epochs.reserve(NewEpoch("policy", epoch, LAYOUTS, LATER)))
    host.files.changes = [change for change in host.files.changes if not _renames(change, "new.part", into=True)]
    host.restart(power=True, kept=1.0)
    assert host.act(lambda: host.store.reader.model_files("policy")) in (SMALL, LATER)


def test_earlier_small_files_stay_until_later_ones_are_durable(host: Host) -> None:
    host.start()
    epoch = host.claim("job")
    host.medium.crash = Crash(0, False, "sync folder", "/files")
    host.act(lambda: host.store.epochs.reserve(NewEpoch("policy", epoch, LAYOUTS, LATER)))
    host.restart(power=False)
    host.files.changes = [change for change in host.files.changes if not _renames(change, "new.part", into=False)]
    host.restart(power=True, kept=1.0)
    assert host.act(lambda: host.store.reader.model_files("policy")) in (SMALL, LATER)


def _renames(change: Change, name: str, *, into: bool) -> bool:
    """Return whether a change gives something a name, or takes the name from something that has another one then."""
    given = {other: inode is not None for _, other, inode in change.entries}
    return len(given) == 2 and given.get(name) is into
