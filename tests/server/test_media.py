"""Each file operation of a job's life fails once: the call says so by name, the same job goes on, and nothing is left behind."""

import contextlib
import errno
import http.client
import itertools
import os
import re
import resource
import shutil
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from fnmatch import fnmatch
from pathlib import Path
from typing import TypeVar

import grpc
import numpy as np
import pytest
import xxhash
from resharder.converters.geometry.layout import ITEM_SIZES, TensorSpec, full_box
from resharder.converters.storage.digest import digest
from resharder.converters.storage.files import BITS, MappedFiles
from resharder.converters.wire.chunk_frame import ChunkHeader
from resharder.server.archive.archive import Archive
from resharder.server.fleets.persistence import FleetFiles
from resharder.server.infra.descriptors import DescriptorErrorFilter, Descriptors
from resharder.server.infra.event_log import Events
from resharder.server.infra.medium import MEDIUM, medium_errors
from resharder.server.ingest.boxes import pack
from resharder.server.ingest.intake import Intake
from resharder.server.ingest.publisher import ACTIVE
from resharder.server.state.errors import DaemonError, FailedPrecondition, Unavailable
from resharder.server.state.fleet import Fleet
from resharder.server.state.version import ABORTED, READY, RETIRED, VersionRecord
from resharder.server.store.store import Store
from resharder.v1 import operator_pb2
from resharder.v1.operator_pb2_grpc import OperatorServiceStub
from structlog import DropEvent
from structlog.testing import capture_logs

from tests.support.daemon import Daemon
from tests.support.faults import Faults
from tests.support.observing import wait_until
from tests.support.ports import free_port
from tests.support.publishing import Job, reason_of, whole
from tests.support.store_versions import claim, publish, settle
from tests.support.variants import sampled
from tests.support.waits import completed

SPECS = [TensorSpec("a", "BF16", (8, 16)), TensorSpec("b", "F32", (4,))]
FILES = {"config.json": b"{}", "tokenizer.json": b"[]"}
OPENED = [
    *("*/claim.json*", "*/files/new.part/config.json*", "*/versions", "*/versions/*/resharder.json", "*/history.jsonl"),
    *("*/events.jsonl", "*/fleets/policy.json*", "*/fleets/starts*", "*/pool/*.safetensors", "*/lock", "*/nonce*"),
]
TOUCHED = {
    errno.EMFILE: OPENED,
    errno.ENOSPC: [
        "mkdir */pool/*",
        "posix_fallocate *",
        "rename *",
        "fsync */versions",
        "write */history.jsonl",
        "write */events.jsonl",
    ],
    errno.EIO: [
        *OPENED,
        "mmap *",
        "lease *",
        "unlink *",
        "rmdir *",
        "fsync */claim.json.part",
        "rename */files/new.part",
    ],
}
"""Some of what is refused in a sweep, so that a seam that comes loose is seen."""
SWEPT = [errno.EIO, errno.ENOSPC, errno.EMFILE]
Answer = TypeVar("Answer")


class Life:
    """A job of one rank, and the daemon's parts that touch the medium. A client that is refused calls again."""

    def __init__(self, root: Path, faults: Faults) -> None:
        self.root, self.faults = root, faults
        self.refusals: list[str] = []
        self.numbers: list[int] = []
        self.fleet = Fleet("policy", "policy")
        self._steps = itertools.count()

    def call(self, act: Callable[[], Answer]) -> Answer:
        for _ in range(2):
            try:
                with medium_errors():  # as `errors.abort` does last
                    return act()
            except DaemonError as error:
                if error.reason not in MEDIUM:
                    raise
                self.refusals.append(f"{error.reason}: {error}")
        raise AssertionError(f"the medium works again, the call does not: {self.refusals}")

    def run(self) -> None:
        self.begin("job")
        self.publish(mapped=False)
        self.publish(mapped=True)
        self.publish(mapped=True)
        self.call(lambda: self.store.reader.manifest("policy", self.newest))
        self.call(lambda: self.store.reader.model_files("policy"))
        oldest = min(record.number for record in self.store.catalogue.versions("policy") if record.state == READY)
        self.call(lambda: self.store.lifecycle.retire("policy", [oldest]))
        settle(self.store)
        self.end()
        self.begin("job")
        self.publish(mapped=True)

    def begin(self, job: str) -> None:
        self.store = self.call(lambda: Store(self.root / "store", keep_count=2))
        self.events = self.call(lambda: Events(self.root / "store"))
        self.files = self.call(lambda: FleetFiles(self.root / "store/fleets"))
        self.call(self.files.next_start)
        self.call(lambda: self.events.add("operator", "fleets/policy", "update"))
        self.call(lambda: self.files.save(self.fleet, 0.0))
        self.store.catalogue.version_changed.connect(
            lambda record: self.events.add("version", record.name, record.state.lower()) and None
        )
        self.intake = Intake(self.store, chunk_bytes=256, writer_patience=5)
        self.name = self.call(lambda: self.intake.create_publisher("policy", job, 1, FILES)).name
        boxes = pack((i, full_box(spec.shape), False) for i, spec in enumerate(SPECS))
        assert self.call(lambda: self.intake.register_slot(self.name, 0, "same", SPECS, boxes)).state == ACTIVE
        settle(self.store)

    def publish(self, *, mapped: bool) -> None:
        """One that the commit aborts says why, and comes again."""
        step = next(self._steps)
        for _ in range(2):
            record = self.call(lambda: completed(self.intake.create_version, self.name, 0, step, max(self.numbers, default=0)))
            self.numbers.append(record.number)
            done = self._deliver(record, step, mapped)
            settle(self.store)
            if done.state == READY:
                self.newest = done.number
                return
            assert done.state == ABORTED, done
            assert any(reason in done.reason for reason in MEDIUM), done
            self.refusals.append(done.reason)
        raise AssertionError(f"step {step} does not become READY again: {self.refusals}")

    def _deliver(self, record: VersionRecord, step: int, mapped: bool) -> VersionRecord:
        model, number, epoch = record.model, record.number, record.epoch
        values = {spec.name: np.full(spec.shape, step + 1, BITS[ITEM_SIZES[spec.dtype]]) for spec in SPECS}
        if mapped:
            with (
                self.faults.paused(),
                MappedFiles(self.store.folder.path(record), self.store.lifecycle.layouts(record), writable=True) as files,
            ):
                for name, value in values.items():
                    files.arrays[name][...] = value
        else:
            data = b"".join(value.tobytes() for value in values.values())
            slot = self.intake.open_upload(model, number, epoch).slot(0)
            ends = list(itertools.accumulate(int(size) for size in slot.sizes))
            for index, end in enumerate(ends):
                chunk = data[end - int(slot.sizes[index]) : end]
                header = ChunkHeader(number, epoch, 0, index, xxhash.xxh3_64_intdigest(chunk))
                self.call(lambda header=header, chunk=chunk: self.intake.land(model, header, memoryview(chunk)))
        digests = [digest(values[spec.name], full_box(spec.shape), spec.shape) for spec in SPECS]
        self.call(lambda: self.intake.seal_slot(model, number, epoch, 0, digests, mapped))
        done = completed(self.intake.wait_version, model, number, 20, False)
        wait_until(lambda: not self.intake.uploads(), "the version has left the intake")
        return done

    def end(self) -> None:
        self.events.close()
        self.store.close()


def ready(store: Store) -> dict[int, str]:
    known = store.catalogue.find("policy")
    return {record.number: record.fingerprint for record in known.of(READY)} if known else {}


def folders(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


def check(life: Life) -> None:
    """Memory and medium say the same, and so does the next daemon."""
    store, model = life.store, life.root / "store/models/policy"
    settle(store, released=True)  # a thread that has read a version may still unmap its files
    known, room = ready(store), store.catalogue.model("policy").reservation
    assert room is not None
    assert not store.catalogue.model("policy").stuck
    assert len(known) == 2
    assert folders(model / "versions") == {f"{number:08}" for number in known}
    assert folders(model / "pool") == {path.name for path in room.free}
    assert folders(model / "staging") == folders(model / "retired") == set()
    assert not list(life.root.rglob("*.part"))
    assert life.numbers == sorted(set(life.numbers))
    past = {record.number: record.state for record in store.catalogue.versions("policy")}
    events = [event.id for event in life.events.last(1000)]
    epoch = store.epochs.claim("policy")
    life.end()
    again = Store(life.root / "store", keep_count=2)
    assert ready(again) == known
    assert {record.number: record.state for record in again.catalogue.versions("policy")} == past
    assert set(past.values()) <= {READY, RETIRED, ABORTED}
    assert again.epochs.claim("policy") == epoch
    assert len(folders(model / "files")) == 1
    assert not any(folders(model / kind) for kind in ("pool", "staging", "retired"))
    with closing(Events(life.root / "store")) as kept:
        assert [event.id for event in kept.last(1000)] == events == list(range(1, len(events) + 1))
    assert FleetFiles(life.root / "store/fleets").load(0.0) == {"policy": life.fleet}
    assert again.epochs.begin("policy", "later", 1).epoch == life.store.epochs.claim("policy").epoch + 1
    assert again.catalogue.newest_number("policy") >= max(life.numbers)
    again.close()


def lived(root: Path, at: int, number: int) -> Faults:
    """One life with a fault, checked."""
    place = root / f"{number}-{at}"
    faults = Faults(place, at, number)
    life = Life(place, faults)
    with capture_logs() as logs:
        with faults.active():
            life.run()
        life.publish(mapped=True)  # what could not be removed is removed now
        check(life)
    assert not [entry for entry in logs if entry.get("exc_info")], faults.hit
    for refusal in life.refusals:
        assert errno.errorcode[number] in refusal, (faults.hit, refusal)
        assert str(place) in refusal, (faults.hit, refusal)
        expected = {errno.EIO: "STORE_FAILED", errno.ENOSPC: "STORE_FULL", errno.EMFILE: "NO_DESCRIPTORS"}[number]
        assert expected in refusal
    assert len(life.refusals) <= 1, life.refusals
    shutil.rmtree(place)
    return faults


@pytest.mark.parametrize("number", sampled(SWEPT, []), ids=errno.errorcode.get)
def test_every_file_operation_of_a_jobs_life_can_fail(root: Path, number: int) -> None:
    hit = sweep(root, number, 1)
    for place in TOUCHED[number]:
        assert any(fnmatch(operation, place) for operation in hit), place


@pytest.mark.parametrize("number", sampled(SWEPT, [errno.EIO]), ids=errno.errorcode.get)
def test_some_file_operations_of_a_jobs_life_can_fail(root: Path, number: int) -> None:
    assert len(set(sweep(root, number, 7))) > 5


def sweep(root: Path, number: int, every: int) -> list[str]:
    """Operations that failed, each in a life of its own: one of `every`."""
    whole = lived(root, 0, number)
    hit: list[str] = []
    for at in itertools.count(1, every):
        try:
            faults = lived(root, at, number)
        except BaseException as error:
            error.add_note(f"operation {at} of {whole.seen}, {errno.errorcode[number]}")
            raise
        if not faults.hit:
            break
        hit.append(faults.hit)
    # The last life had fewer operations than `at`: each of them was refused in an earlier one.
    assert len(hit) > (whole.seen - 10) // every
    return hit


@pytest.mark.parametrize("number", sampled(SWEPT, [errno.EIO]), ids=errno.errorcode.get)
def test_every_file_operation_of_a_version_that_comes_back_can_fail(root: Path, store: Store, number: int) -> None:
    record = publish(store, claim(store), 7)
    archived = Archive(store, str(root / "archive")).archive_now("policy", 1)
    hit: list[str] = []
    for at in itertools.count():
        faults = Faults(root / f"other-{at}", at, number)
        with faults.active(), capture_logs() as logs:
            restore_twice(root / f"other-{at}", str(root / "archive"), record, faults)
        assert not [entry for entry in logs if entry.get("exc_info")], faults.hit
        shutil.rmtree(root / f"other-{at}")
        if at and not faults.hit:
            break
        hit += [faults.hit] if at else []
    assert len(hit) > 20
    assert archived.number == record.number


def restore_twice(place: Path, url: str, record: VersionRecord, faults: Faults) -> None:
    """An operation that failed succeeds when repeated, and a store without a READY version has no files."""
    other = opened(place)
    archive = Archive(other, url)
    refusal = ""
    try:
        archive.restore("policy", 1)
    except DaemonError as error:
        refusal = f"{error.reason} {error}"
    if refusal:
        assert faults.hit
        assert refusal.split()[0] in MEDIUM
        assert str(place) in refusal
        assert ready(other) == {}
        assert folders(place / "models/policy/versions") == set()
        assert archive.restore("policy", 1) == record
    settle(other)
    assert ready(other) == {1: record.fingerprint}
    used = other.catalogue.used_bytes()
    other.close()
    with faults.paused():
        again = Store(place, keep_count=2)
        assert ready(again) == {1: record.fingerprint}
        assert used == again.catalogue.used_bytes() == record.size_bytes
        assert again.reader.model_files("policy") == FILES
        again.close()


def opened(place: Path) -> Store:
    try:
        return Store(place, keep_count=2)
    except DaemonError as error:
        if error.reason not in MEDIUM:
            raise
        return Store(place, keep_count=2)


def test_a_claim_that_fails_fences_nobody(root: Path) -> None:
    life = Life(root, Faults(root, 0, errno.EIO))
    life.begin("job")
    life.publish(mapped=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        with pytest.raises(Unavailable, match=r"claim\.json: EIO") as caught:
            life.intake.create_publisher("policy", "other", 1, FILES)
    assert caught.value.reason == "STORE_FAILED"
    life.publish(mapped=True)
    other = life.intake.create_publisher("policy", "other", 1, FILES)
    assert other.epoch == 2
    life.intake.register_slot(other.name, 0, "same", SPECS, pack((i, full_box(s.shape), False) for i, s in enumerate(SPECS)))
    with pytest.raises(FailedPrecondition, match="epoch 1 is over"):
        completed(life.intake.create_version, life.name, 0, 9, 0)
    life.end()


def test_ranks_that_wait_are_told_that_the_medium_refused_the_registration_and_any_rank_may_try_again(root: Path) -> None:
    store = Store(root / "store", keep_count=2)
    intake = Intake(store)
    name = intake.create_publisher("policy", "job", 2, FILES).name
    boxes = [pack([(0, full_box(spec.shape), False)]) for spec in SPECS]
    intake.register_slot(name, 0, "0", SPECS[:1], boxes[0])
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1) as waiting:
        asked = waiting.submit(completed, intake.assignment, name, 0, 60)
        patch.setattr(os, "fsync", refuse)
        with pytest.raises(Unavailable, match=r"models/policy.*: EIO"):
            intake.register_slot(name, 1, "1", SPECS[1:], boxes[1])
        with pytest.raises(Unavailable, match=r"models/policy.*: EIO"):
            asked.result(60)
    assert intake.register_slot(name, 0, "0", SPECS[:1], boxes[0]).state == ACTIVE
    assert completed(intake.assignment, name, 1, 0)[1] == [0]
    store.close()


def test_where_the_way_back_fails_too_a_version_that_stands_is_ready(root: Path) -> None:
    store = Store(root / "store", keep_count=2)
    record = store.lifecycle.begin("policy", claim(store), 0, "job")
    versions, real_fsync, real_rename = root / "store/models/policy/versions", os.fsync, os.rename
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            os, "fsync", lambda file: refuse() if os.readlink(f"/proc/self/fd/{file}") == str(versions) else real_fsync(file)
        )
        patch.setattr(os, "rename", lambda a, b: refuse() if Path(a).parent == versions else real_rename(a, b))
        assert store.lifecycle.commit(record, dict.fromkeys(("a", "b"), 0), ()).state == READY
    store.close()
    assert folders(versions) == {"00000001"}


def test_where_sync_and_the_way_back_fail_now_and_then_a_version_is_ready_once_it_is_durable(root: Path) -> None:
    store = Store(root / "store", keep_count=2)
    record = store.lifecycle.begin("policy", claim(store), 0, "job")
    versions, real_fsync, real_rename = root / "store/models/policy/versions", os.fsync, os.rename
    synced: list[bool] = []

    def fsync(file: int) -> None:
        if os.readlink(f"/proc/self/fd/{file}") == str(versions):
            synced.append(len(synced) == 2)
            if not synced[-1]:
                refuse()
        real_fsync(file)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        patch.setattr(os, "rename", lambda a, b: refuse() if Path(a).parent == versions else real_rename(a, b))
        assert store.lifecycle.commit(record, dict.fromkeys(("a", "b"), 0), ()).state == READY
    store.close()
    assert synced == [False, False, True]


def refuse(*_: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_pool_file_has_all_its_pages_so_that_a_full_medium_kills_no_writer(store: Store) -> None:
    epoch = claim(store)
    for step in range(3):
        publish(store, epoch, step)
        settle(store)
    files = [path for path in store.folder.root.rglob("*.safetensors") if path.parent.parent.name in ("pool", "versions")]
    assert len(files) >= 3
    assert all(path.stat().st_blocks * 512 >= path.stat().st_size for path in files)


def test_a_warning_comes_before_the_last_descriptor_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    used = len(os.listdir("/proc/self/fd"))
    found = Descriptors()
    with capture_logs() as logs:
        for limit in (used + 1000, used + 20, used + 10, used + 1000, used + 20):
            monkeypatch.setattr(resource, "getrlimit", lambda kind, limit=limit: (limit, limit))
            found.look()
    assert [(entry["event"], entry["limit"]) for entry in logs] == [("few_descriptors_left", used + 20)] * 2
    assert all(entry["used"] < entry["limit"] for entry in logs)


def test_a_daemon_without_descriptors_says_so_and_goes_on_when_it_has_some() -> None:
    with Daemon() as daemon:
        job = Job(daemon.channel, SPECS, [whole(SPECS)])
        OperatorServiceStub(daemon.channel).GetDaemon(operator_pb2.GetDaemonRequest())
        before = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
        used = {int(name) for name in os.listdir(f"/proc/{daemon.pid}/fd")}
        free = next(number for number in itertools.count() if number not in used)
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (free, before[1]))
        try:
            with pytest.raises(grpc.RpcError) as caught:
                job.create()
        finally:
            resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, before)
        assert (caught.value.code().name, reason_of(caught.value)) == ("RESOURCE_EXHAUSTED", "NO_DESCRIPTORS")
        assert f"EMFILE (Too many open files); the limit is {free} descriptors" in caught.value.details()
        assert job.connect().sends[0]
        assert "Traceback" not in daemon.log.read_text()


def test_a_daemon_without_descriptors_logs_a_line_a_minute_of_the_connections_that_it_cannot_accept() -> None:
    ports = [free_port(), free_port()]
    options = dict(zip(("web_listen", "data_listen"), (f"127.0.0.1:{port}" for port in ports), strict=True))
    with Daemon(command=("bash", "-c", 'ulimit -Sn 128; exec "$@"', "-"), **options) as daemon:
        before = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
        assert before[0] == min(before[1], 1 << 20) > 128, "as far as it may"
        logged = rf"descriptor_limit .*before=128 .*limit={before[0]}\b"  # after the line with which it is up
        wait_until(lambda: re.search(logged, daemon.log.read_text()), "the limit")
        used = {int(name) for name in os.listdir(f"/proc/{daemon.pid}/fd")}
        free = next(number for number in itertools.count() if number not in used)
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (free, before[1]))
        with contextlib.ExitStack() as waiting:
            for port in ports * 10:
                waiting.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
            wait_until(lambda: "no file descriptors left" in daemon.log.read_text(), "a line")
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, before)
        wait_until(lambda: "ready" in exposition_of(ports[0]), "it accepts again")
        text = daemon.log.read_text()
        assert text.count("no file descriptors left") == 1
        assert "Traceback" not in text


def exposition_of(port: int) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with closing(connection):
        connection.request("GET", "/readyz")
        return connection.getresponse().read().decode()


def test_of_errors_for_want_of_descriptors_one_a_minute_is_logged_without_a_traceback() -> None:
    now = [0.0]
    process = DescriptorErrorFilter(lambda: now[0])
    error = RuntimeError("could not start")
    error.__cause__ = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    passed = []
    for now[0] in (0.0, 1.0, 59.0, 60.0):
        with contextlib.suppress(DropEvent):
            passed.append(process(None, "error", {"event": "failed", "exc_info": error}))
    assert [(entry["error"], entry["left_out"]) for entry in passed] == [
        ("no file descriptors left: could not start", 0),
        ("no file descriptors left: could not start", 2),
    ]
    assert all("exc_info" not in entry for entry in passed)
    others = [{"event": "failed", "exc_info": OSError(errno.EIO, "EIO")}, {"event": "listening"}]
    assert [process(None, "error", dict(entry)) for entry in others] == others
