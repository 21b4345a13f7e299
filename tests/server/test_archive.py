"""The archive: written behind publishes, verified, never in their way; and back into a store, whole or not at all."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from resharder.converters.geometry.layout import TensorSpec, full_box
from resharder.converters.models.tensor_io import DTYPES
from resharder.converters.storage.digest import digest
from resharder.converters.storage.files import MappedFiles, lay_out
from resharder.server.archive.archive import Archive, needed
from resharder.server.state.errors import (
    AlreadyExists,
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    ResourceNotFound,
    Unavailable,
)
from resharder.server.store.epochs import NewEpoch
from resharder.server.store.store import Store
from resharder.v1 import operator_pb2, server_pb2
from resharder.v1.operator_pb2_grpc import OperatorServiceStub
from resharder.v1.server_pb2_grpc import ServerServiceStub
from transformers import AutoModelForCausalLM

from tests.support import bucket
from tests.support.daemon import Daemon
from tests.support.observing import wait_until
from tests.support.publishing import Job, read_folder, whole
from tests.support.publishing import random_weights as made_up
from tests.support.store_versions import FILES, LAYOUTS, SIZE, SPECS, claim, numbers, publish
from tests.support.tiny_hf import tiny_config
from tests.support.weights import random_weights

PLACE = "policy/00000001"


@pytest.fixture
def opened(root: Path) -> Iterator[Callable[..., Archive]]:
    """Starts archives, in a folder if no URL is given."""
    started: list[Archive] = []

    def open_(store: Store, every: int = 0, url: str = "", restore: bool = True) -> Archive:
        reports: list[tuple[str, str]] = []

        def report(name: str, what: str, reason: str) -> None:
            reports.append((name.rpartition("/")[2], what))

        archive = Archive(store, url or str(root / "archive"), every, pause=0.01, report=report)
        archive.reports = reports
        started.append(archive)
        archive.start(restore)
        return archive

    yield open_
    for archive in started:
        archive.close()


class Gate:
    """Lets an archive write only while it is open; `reached` says that it wants to."""

    def __init__(self, archive: Archive) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        write = archive.checkpoints._remote.write

        def wait_and_write(path: str, chunks: object, size: int) -> None:
            self.reached.set()
            assert self.open.wait(60)
            write(path, chunks, size)

        archive.checkpoints._remote.write = wait_and_write


def place(root: Path, number: int = 1) -> Path:
    """The folder of a version's objects."""
    found = root / "archive" / "policy" / f"{number:08}"
    return found / json.loads((found / "archived.json").read_bytes())["folder"]


def archived(archive: Archive) -> list[int]:
    return [found.number for found in archive.archived("policy")]


def is_archived(archive: Archive, number: int) -> bool:
    return number in archived(archive)


def new_store(root: Path, **options: int) -> Store:
    return Store(root / "other", keep_count=2, **options)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.fixture(params=["", "s3"])
def url(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if not request.param:
        yield ""
        return
    with bucket.opened(monkeypatch) as found:
        yield found.url


def test_an_archived_version_is_every_file_of_its_folder_and_comes_back_as_it_was(
    store: Store, root: Path, opened: Callable[..., Archive], url: str
) -> None:
    record = publish(store, claim(store), 7)
    archive = opened(store, url=url)
    found = archive.archive_now("policy", 1)
    assert (found.name, found.size_bytes, found.fingerprint) == (record.name, SIZE, record.fingerprint)
    folder = store.folder.path(record)
    remote = archive.checkpoints._remote
    kept = {path.name: remote.content(f"{found.place}/{path.name}").bytes for path in folder.iterdir()}
    assert kept == {path.name: path.read_bytes() for path in folder.iterdir()}
    assert archive.archived() == [found]
    other = new_store(root)
    assert opened(other, url=url, restore=False).restore("policy", 1) == record
    assert {path.name: path.read_bytes() for path in other.folder.path(record).iterdir()} == kept
    assert {path.stat().st_mode & 0o777 for path in other.folder.path(record).iterdir()} == {0o600}
    other.close()


def test_an_archived_folder_opens_as_a_pretrained_model(store: Store, opened: Callable[..., Archive]) -> None:
    config = tiny_config("qwen3_tied")
    weights = random_weights(config, 1)
    layouts = lay_out([TensorSpec(name, DTYPES[tensor.dtype], tuple(tensor.shape)) for name, tensor in weights.items()], 1 << 20)
    epoch = store.epochs.begin("policy", "job", 1).epoch
    store.epochs.reserve(NewEpoch("policy", epoch, layouts, {"config.json": json.dumps(config).encode()}))
    record = store.lifecycle.begin("policy", epoch, 1, "job")
    digests = {}
    with MappedFiles(store.folder.path(record), layouts, writable=True) as files:
        for name, tensor in weights.items():
            files.arrays[name][...] = tensor.view(torch.int32).numpy().view(np.uint32)
            digests[name] = digest(files.arrays[name], full_box(tuple(tensor.shape)), tuple(tensor.shape))
    store.lifecycle.commit(record, digests, ())
    found = opened(store).archive_now("policy", 1)
    model = AutoModelForCausalLM.from_pretrained(found.url.removeprefix("file://"), dtype=torch.float32)
    state = model.state_dict()
    assert len(found.files) > 4
    assert all(torch.equal(state[name], tensor) for name, tensor in weights.items())


def test_every_nth_version_is_archived_also_over_restarts(store: Store, opened: Callable[..., Archive]) -> None:
    epoch, archive = claim(store), opened(store, every=2)
    for step in range(3):
        publish(store, epoch, step)
    wait_until(lambda: archived(archive) == [2])
    archive.close()
    again = opened(store, every=2)
    publish(store, epoch, 3)
    wait_until(lambda: archived(again) == [4, 2])
    wait_until(lambda: store.lifecycle.holders("policy", 4) == ["archive-base"])
    assert store.lifecycle.holders("policy", 2) == []


def test_versions_that_are_overtaken_while_they_wait_are_skipped(store: Store, opened: Callable[..., Archive]) -> None:
    epoch, archive = claim(store), opened(store, every=1)
    gate = Gate(archive)
    publish(store, epoch, 0)
    assert gate.reached.wait(60)
    for step in range(1, 6):
        publish(store, epoch, step)
    assert numbers(store) == [1, 5, 6], "the one that is being written is kept, those that were overtaken are not"
    gate.open.set()
    wait_until(lambda: archived(archive) == [6, 1])
    wait_until(lambda: numbers(store) == [5, 6])


def test_a_slow_archive_gives_way_to_a_publish_that_needs_the_room(root: Path, opened: Callable[..., Archive]) -> None:
    store = Store(root / "store", keep_count=2, limit_bytes=int(SIZE * 3.5))
    epoch, archive = claim(store), opened(store, every=1)
    gate = Gate(archive)
    publish(store, epoch, 0)
    assert gate.reached.wait(60)
    for step in range(1, 4):
        publish(store, epoch, step)
    assert numbers(store) == [3, 4]
    gate.open.set()
    wait_until(lambda: 4 in archived(archive))
    archive.close()
    store.close()


def test_what_the_archive_fails_at_is_tried_again_and_then_said(store: Store, opened: Callable[..., Archive]) -> None:
    epoch, archive = claim(store), opened(store, every=1)
    objects, failures = archive.checkpoints._remote._objects, [2]
    put = objects.put

    def fail(*args: object, **kwargs: object) -> object:
        failures[0] -= 1
        if failures[0] >= 0:
            raise ConnectionResetError("cut")
        return put(*args, **kwargs)

    objects.put = fail
    publish(store, epoch, 0)
    wait_until(lambda: archived(archive) == [1])
    failures[0] = 1000
    publish(store, epoch, 1)
    wait_until(lambda: ("2", "failed") in archive.reports)
    with pytest.raises(Unavailable, match="ConnectionResetError: cut"):
        archive.archive_now("policy", 2)
    assert numbers(store) == [1, 2]


@pytest.mark.parametrize("name", [LAYOUTS[0].path, "config.json", "resharder.json"])
@pytest.mark.parametrize("harm", [flip, Path.unlink], ids=["flip", "unlink"])
def test_a_damaged_file_is_refused_and_leaves_nothing_behind(
    store: Store, root: Path, opened: Callable[..., Archive], name: str, harm: Callable[[Path], None]
) -> None:
    publish(store, claim(store), 0)
    archive = opened(store)
    archive.archive_now("policy", 1)
    harm(place(root) / name)
    other = new_store(root)
    with pytest.raises(DataLoss, match=name):
        opened(other, restore=False).restore("policy", 1)
    assert numbers(other) == []
    assert not list(other.folder.root.rglob("*.safetensors"))
    other.close()
    archive.archive_now("policy", 1)  # mends it
    assert archive.restore("policy", 1).number == 1


def test_a_folder_without_a_whole_archived_json_does_not_count(store: Store, root: Path, opened: Callable[..., Archive]) -> None:
    publish(store, claim(store), 0)
    archive = opened(store)
    archive.archive_now("policy", 1)
    flip(root / "archive" / PLACE / "archived.json")
    assert archive.archived() == []
    with pytest.raises(ResourceNotFound, match="no complete models/policy/versions/1"):
        archive.restore("policy", 1)
    assert archive.archive_now("policy", 1).number == 1


def test_another_version_of_the_same_number_is_never_overwritten(
    store: Store, root: Path, opened: Callable[..., Archive]
) -> None:
    publish(store, claim(store), 0)
    opened(store).archive_now("policy", 1)
    other = new_store(root)
    publish(other, claim(other), 5)
    archive = opened(other, every=1)
    with pytest.raises(AlreadyExists, match="another models/policy/versions/1"):
        archive.archive_now("policy", 1)
    with pytest.raises(AlreadyExists, match="READY here"):
        archive.restore("policy", 1)
    publish(other, 1, 6)
    wait_until(lambda: archived(archive) == [2, 1])
    other.close()


def test_an_empty_store_gets_the_newest_whole_version_and_counts_on_from_there(
    store: Store, root: Path, opened: Callable[..., Archive]
) -> None:
    claim(store, "one")
    epoch, archive = claim(store, "two"), opened(store, every=1)
    for step in range(3):
        record = publish(store, epoch, step)
        wait_until(partial(is_archived, archive, record.number))
    flip(place(root, 3) / f"{LAYOUTS[0].path}.delta")
    other = new_store(root)
    changed: list[int] = []
    other.catalogue.version_changed.connect(lambda record: changed.append(record.number))
    restored = opened(other)
    wait_until(lambda: restored.reports == [("3", "failed"), ("2", "restored")])
    assert (other.catalogue.models(), numbers(other), changed) == (["policy"], [2], [2])
    assert other.catalogue.newest("policy") == store.catalogue.get("policy", 2)
    assert other.reader.model_files("policy") == FILES
    with other.reader.open("policy", 2) as files:
        assert int(files.arrays["a"][0, 0]) == 2
    later = claim(other, "three")
    assert later == 3
    assert publish(other, later, 0).number == 4
    other.close()
    again = new_store(root)
    assert numbers(again) == [2, 4]
    again.close()


def test_numbers_and_epochs_go_on_where_the_archive_ends_even_if_nothing_is_restored(
    store: Store, root: Path, opened: Callable[..., Archive]
) -> None:
    publish(store, claim(store), 0)
    opened(store).archive_now("policy", 1)
    other = new_store(root)
    opened(other, restore=False)
    assert (other.catalogue.models(), other.catalogue.newest("policy")) == ([], None)
    epoch = claim(other)
    assert (epoch, publish(other, epoch, 0).number) == (2, 2)
    other.close()


PROGRAM = """
import sys
from pathlib import Path
from resharder.server.archive.archive import Archive
from resharder.server.store.store import Store
from tests.support.store_versions import claim, publish
store = Store(Path(sys.argv[1]), keep_count=2)
archive = Archive(store, sys.argv[2], 1)
if sys.argv[3] == "publish":
    publish(store, claim(store), 0)
archive.start()
archive.archive_now("policy", 1) if sys.argv[3] == "publish" else archive.restore("policy", 1)
"""


def die(failpoint: str, *arguments: str | Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, arguments)],
        env=os.environ | {"RESHARDER_FAILPOINT": f"{failpoint}=kill"},
        cwd=Path(__file__).parents[2],
        timeout=120,
        check=False,
    )
    assert run.returncode == -signal.SIGKILL


def test_a_daemon_killed_in_mid_archive_leaves_nothing_that_counts_and_the_next_one_goes_on(
    root: Path, opened: Callable[..., Archive]
) -> None:
    die("archive.before-marker", root / "store", root / "archive", "publish")
    left = next((root / "archive" / PLACE).iterdir())
    assert (left / LAYOUTS[0].path).stat().st_size == LAYOUTS[0].size
    store = Store(root / "store")
    archive = opened(store)
    assert archived(archive) == []
    assert not (root / "archive" / "policy" / "latest.json").exists()
    archive.close()
    archive = opened(store, every=1)
    wait_until(lambda: archived(archive) == [1])
    archive.close()
    store.close()
    for failpoint, left in (("adopt.before-proof", []), ("adopt.before-rename", []), ("adopt.after-rename", [1])):
        die(failpoint, root / "other", root / "archive", "restore")
        other = new_store(root)
        assert [record.number for record in other.catalogue.versions("policy") if record.state == "READY"] == left, failpoint
        assert not list((other.folder.root / "models" / "policy" / "staging").glob("*"))
        other.close()


def test_a_daemon_killed_before_it_names_a_version_the_latest_does_so_when_it_starts(
    root: Path, opened: Callable[..., Archive]
) -> None:
    die("archive.before-latest", root / "store", root / "archive", "publish")
    latest = root / "archive" / "policy" / "latest.json"
    assert not latest.exists()
    store = Store(root / "store")
    archive = opened(store, restore=False)
    assert archived(archive) == [1]
    assert json.loads(latest.read_bytes())["number"] == 1
    store.close()


def test_a_daemon_on_an_empty_host_serves_what_the_archive_has(tmp_path: Path) -> None:
    with Daemon(archive_url=tmp_path, archive_every=1) as daemon:
        operator, servers = OperatorServiceStub(daemon.channel), ServerServiceStub(daemon.channel)
        job = Job(daemon.channel, SPECS, [whole(SPECS)]).connect()
        weights = made_up(SPECS, 1)
        made = job.publish(3, weights)
        wait_until(lambda: bool(operator.ListArchive(operator_pb2.ListArchiveRequest()).versions))
        daemon.kill()
        shutil.rmtree(daemon.store)
        daemon.start()
        claim = servers.ClaimServer(server_pb2.ClaimServerRequest(server="s", wait_seconds=60, boot=True), wait_for_ready=True)
        assert claim.boot_version == made.number
        back = operator.GetVersion(operator_pb2.GetVersionRequest(version=made.name))
        assert (back.fingerprint, back.step, back.job, back.epoch) == (made.fingerprint, 3, "job", 1)
        assert {name: array.tobytes() for name, array in read_folder(back.folder).items()} == {
            name: array.tobytes() for name, array in weights.items()
        }
        assert servers.GetModel(server_pb2.GetModelRequest()).files[0].path == "config.json"
        assert job.connect().epoch == 2
        assert job.publish(4, weights).number == 2


def test_a_url_that_nobody_knows_and_a_daemon_without_an_archive_are_told_what_is_missing(store: Store, root: Path) -> None:
    with pytest.raises(FailedPrecondition, match="expected a folder, or a URL of s3, gs, az or file"):
        Archive(store, "nothing://there")
    with pytest.raises(FailedPrecondition, match="archive_url"):
        needed(None)
    with pytest.raises(InvalidArgument, match="expected a model name"):
        Archive(store, str(root / "archive")).archived("../somewhere")
