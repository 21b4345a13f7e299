"""Each file operation of a job's life fails once: the call says so by name, the same job goes on, and nothing is left behind."""

import errno
import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
import xxhash
from resharder.converters.chunks import ChunkHeader
from resharder.converters.digest import digest
from resharder.converters.files import BITS, MappedFiles
from resharder.converters.layout import ITEM_SIZES, TensorSpec, full_box
from resharder.server.errors import MEDIUM, DaemonError, medium_errors
from resharder.server.events import Events
from resharder.server.fleet_files import FleetFiles
from resharder.server.fleet_state import Fleet
from resharder.server.intake import Intake
from resharder.server.manifest import ABORTED, READY, RETIRED, VersionRecord
from resharder.server.publisher import ACTIVE
from resharder.server.slots import pack
from resharder.server.store import Store
from structlog.testing import capture_logs

from tests.support.faults import Faults

SPECS = [TensorSpec("a", "BF16", (8, 16)), TensorSpec("b", "F32", (4,))]
FILES = {"config.json": b"{}", "tokenizer.json": b"[]"}
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
        self.call(lambda: self.store.manifest("policy", self.newest))
        self.call(lambda: self.store.model_files("policy"))
        oldest = min(record.number for record in self.store.versions("policy") if record.state == READY)
        self.call(lambda: self.store.retire("policy", [oldest]))
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
        self.store.subscribe(lambda record: self.events.add("version", record.name, record.state.lower()) and None)
        self.intake = Intake(self.store, chunk_bytes=256, writer_patience=5)
        self.name = self.call(lambda: self.intake.create_publisher("policy", job, 1, FILES)).name
        boxes = pack((i, full_box(spec.shape), False) for i, spec in enumerate(SPECS))
        assert self.call(lambda: self.intake.register(self.name, 0, "same", SPECS, boxes)).state == ACTIVE
        settle(self.store)

    def publish(self, *, mapped: bool) -> None:
        """One that the commit aborts says why, and comes again."""
        step = next(self._steps)
        for _ in range(2):
            record = self.call(lambda: self.intake.create_version(self.name, 0, step, max(self.numbers, default=0)))
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
            with self.faults.paused(), MappedFiles(self.store.folder(record), self.store.layouts(record), writable=True) as files:
                for name, value in values.items():
                    files.arrays[name][...] = value
        else:
            data = b"".join(value.tobytes() for value in values.values())
            slot = self.intake.staged(model, number, epoch).slot(0)
            ends = list(itertools.accumulate(int(size) for size in slot.sizes))
            for index, end in enumerate(ends):
                chunk = data[end - int(slot.sizes[index]) : end]
                header = ChunkHeader(number, epoch, 0, index, xxhash.xxh3_64_intdigest(chunk))
                self.call(lambda header=header, chunk=chunk: self.intake.land(model, header, memoryview(chunk)))
        digests = [digest(values[spec.name], full_box(spec.shape), spec.shape) for spec in SPECS]
        self.call(lambda: self.intake.seal(model, number, epoch, 0, digests, mapped))
        done = self.intake.wait(model, number, 20, False, lambda: True)
        with self.intake._changed:
            assert self.intake._changed.wait_for(lambda: not self.intake._staged, 20)
        return done

    def end(self) -> None:
        self.events.close()
        self.store.close()


def settle(store: Store) -> None:
    with store._changed:
        model = store._models["policy"]
        assert store._changed.wait_for(lambda: not model.leaving and not (model.room and model.room.pending), 20)


def ready(store: Store) -> dict[int, str]:
    return {record.number: record.fingerprint for record in store.versions("policy") if record.state == READY}


def folders(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


def check(life: Life) -> None:
    """Memory and medium say the same, and so does the next daemon."""
    store, model = life.store, life.root / "store/models/policy"
    known, room = ready(store), store._models["policy"].room
    assert room is not None
    assert not store._models["policy"].stuck
    assert len(known) == 2
    assert folders(model / "versions") == {f"{number:08}" for number in known}
    assert folders(model / "pool") == {path.name for path in room.pool}
    assert folders(model / "staging") == folders(model / "retired") == set()
    assert not list(life.root.rglob("*.part"))
    assert life.numbers == sorted(set(life.numbers))
    past = {record.number: record.state for record in store.versions("policy")}
    events = [event.id for event in life.events.last(1000)]
    epoch = store.claim("policy")
    life.end()
    again = Store(life.root / "store", keep_count=2)
    assert ready(again) == known
    assert {record.number: record.state for record in again.versions("policy")} == past
    assert set(past.values()) <= {READY, RETIRED, ABORTED}
    assert again.claim("policy") == epoch
    assert len(folders(model / "files")) == 1
    assert not any(folders(model / kind) for kind in ("pool", "staging", "retired"))
    assert [event.id for event in Events(life.root / "store").last(1000)] == events == list(range(1, len(events) + 1))
    assert FleetFiles(life.root / "store/fleets").load(0.0) == {"policy": life.fleet}
    assert again.new_claim("policy", "later", 1).epoch == life.store.claim("policy").epoch + 1
    assert again.newest_number("policy") >= max(life.numbers)
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
    for said in life.refusals:
        assert errno.errorcode[number] in said, (faults.hit, said)
        assert str(place) in said, (faults.hit, said)
        expected = {errno.EIO: "STORE_FAILED", errno.ENOSPC: "STORE_FULL", errno.EMFILE: "NO_DESCRIPTORS"}[number]
        assert expected in said
    assert len(life.refusals) <= 1, life.refusals
    shutil.rmtree(place)
    return faults


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EMFILE], ids=errno.errorcode.get)
def test_every_file_operation_of_a_jobs_life_can_fail(root: Path, number: int) -> None:
    whole = lived(root, 0, number)
    hit: list[str] = []
    for at in itertools.count(1):
        try:
            faults = lived(root, at, number)
        except BaseException as error:
            error.add_note(f"operation {at} of {whole.seen}, {errno.errorcode[number]}")
            raise
        if not faults.hit:
            break
        hit.append(faults.hit)
    assert len(hit) >= whole.seen
