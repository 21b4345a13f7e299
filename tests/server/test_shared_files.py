"""Files of frozen tensors in the store by itself: linked into the next version, counted once, and never used again."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from resharder.converters.geometry.layout import TensorSpec, full_box
from resharder.converters.storage.digest import digest
from resharder.converters.storage.files import MappedFiles, lay_out
from resharder.server.state.errors import FailedPrecondition
from resharder.server.state.version import VersionRecord
from resharder.server.store.epochs import NewEpoch
from resharder.server.store.store import Store

from tests.support.store_versions import FILES, settle

SPECS = [TensorSpec("still", "F32", (64, 64)), TensorSpec("trained", "F32", (32, 64))]
LAYOUTS = lay_out(SPECS, homes={"still": "/frozen"})
FROZEN = tuple(layout for layout in LAYOUTS if "still" in layout.by_name)
TRAINED = tuple(layout for layout in LAYOUTS if layout not in FROZEN)
SIZE = sum(layout.size for layout in LAYOUTS)
OWN = sum(layout.size for layout in TRAINED)


def claim(store: Store, job: str = "job") -> int:
    epoch = store.epochs.begin("policy", job, 1).epoch
    store.epochs.reserve(NewEpoch("policy", epoch, LAYOUTS, FILES, frozen=FROZEN))
    return epoch


def write(store: Store, record: VersionRecord, value: float, *, still: bool) -> VersionRecord:
    """Write a version's trained tensor, and with `still` the frozen one, and commit it."""
    folder = store.folder.path(record)
    for layouts in (TRAINED, FROZEN) if still else (TRAINED,):
        with MappedFiles(folder, layouts, writable=True) as files:
            for name in files.arrays:
                files.arrays[name][...] = np.float32(value).view(np.uint32)
    with MappedFiles(folder, LAYOUTS) as files:
        digests = {spec.name: digest(files.arrays[spec.name], full_box(spec.shape), spec.shape) for spec in SPECS}
    return store.lifecycle.commit(record, digests, ((0, "00"),))


def publish(store: Store, epoch: int, step: int, *, still: bool) -> VersionRecord:
    record = store.lifecycle.begin("policy", epoch, step, "job")
    if still and store.lifecycle.frozen_from(record):
        store.lifecycle.thaw(record, [layout.path for layout in FROZEN])
    return write(store, record, step, still=still)


def inode(store: Store, record: VersionRecord) -> int:
    return (store.folder.path(record) / FROZEN[0].path).stat().st_ino


def values(store: Store, record: VersionRecord) -> tuple[float, float]:
    found = []
    for layout in (*FROZEN, *TRAINED):
        content = (store.folder.path(record) / layout.path).read_bytes()
        assert content[: len(layout.header)] == layout.header
        numbers = set(np.frombuffer(content[len(layout.header) :], np.float32).tolist())
        found.append(numbers.pop())
        assert not numbers
    return found[0], found[1]


def disk_bytes(store: Store) -> int:
    found = [path.stat() for path in store.folder.root.rglob("*.safetensors")]
    return sum({each.st_ino: each.st_size for each in found}.values())


def test_the_next_version_has_the_same_file_and_it_counts_once(store: Store) -> None:
    epoch = claim(store)
    first = publish(store, epoch, 1, still=True)
    second = publish(store, epoch, 2, still=False)
    assert inode(store, first) == inode(store, second)
    assert (values(store, first), values(store, second)) == ((1.0, 1.0), (1.0, 2.0))
    settle(store)
    assert store.catalogue.used_bytes() == disk_bytes(store) == SIZE + 2 * OWN


def test_a_version_gets_a_copy_before_anybody_writes(store: Store) -> None:
    epoch = claim(store)
    first = publish(store, epoch, 1, still=True)
    record = store.lifecycle.begin("policy", epoch, 2, "job")
    assert store.lifecycle.frozen_from(record) == first.number
    store.lifecycle.thaw(record, [FROZEN[0].path])
    assert inode(store, record) != inode(store, first)
    source, copy = (store.folder.path(each) / FROZEN[0].path for each in (first, record))
    assert source.read_bytes() == copy.read_bytes()
    second = write(store, record, 2, still=True)
    assert (values(store, first), values(store, second)) == ((1.0, 1.0), (2.0, 2.0))
    settle(store)
    assert store.catalogue.used_bytes() == disk_bytes(store) == 2 * SIZE + OWN


def test_a_retired_version_keeps_no_set_with_a_shared_file_and_alters_none(store: Store) -> None:
    epoch = claim(store)
    publish(store, epoch, 0, still=True)
    for step in range(1, 8):
        newest = publish(store, epoch, step, still=step == 4)
        settle(store)
        pool = store.folder.root / "models/policy/pool"
        assert not [path for path in pool.rglob("*.safetensors") if path.name == FROZEN[0].path]
        assert values(store, newest) == (4.0 if step >= 4 else 0.0, float(step))
        assert store.catalogue.used_bytes() == disk_bytes(store)


def test_an_aborted_version_leaves_the_file_to_the_others(store: Store) -> None:
    epoch = claim(store)
    first = publish(store, epoch, 1, still=True)
    record = store.lifecycle.begin("policy", epoch, 2, "job")
    store.lifecycle.abort("policy", record.number, "a test")
    settle(store)
    with pytest.raises(FailedPrecondition, match="was aborted"):
        store.lifecycle.thaw(record, [FROZEN[0].path])
    assert values(store, first) == (1.0, 1.0)
    assert values(store, publish(store, epoch, 3, still=False)) == (1.0, 3.0)
    settle(store)
    assert store.catalogue.used_bytes() == disk_bytes(store)


def test_after_a_proof_that_failed_the_file_is_not_shared_again(store: Store) -> None:
    epoch = claim(store)
    publish(store, epoch, 1, still=True)
    record = store.lifecycle.begin("policy", epoch, 2, "job")
    store.lifecycle.abort("policy", record.number, "other bytes", reuse=False)
    assert not store.lifecycle.frozen_from(store.lifecycle.begin("policy", epoch, 3, "job"))


def test_a_file_that_somebody_has_open_for_writing_is_not_shared(store: Store) -> None:
    epoch = claim(store)
    first = publish(store, epoch, 1, still=True)
    with (store.folder.path(first) / FROZEN[0].path).open("r+b"):
        record = store.lifecycle.begin("policy", epoch, 2, "job")
    assert not store.lifecycle.frozen_from(record)
    assert inode(store, first) != inode(store, record)


def test_where_files_cannot_be_linked_each_version_has_its_own(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*names: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    epoch = claim(store)
    first = publish(store, epoch, 1, still=True)
    monkeypatch.setattr(os, "link", refused)
    record = store.lifecycle.begin("policy", epoch, 2, "job")
    assert not store.lifecycle.frozen_from(record)
    assert values(store, write(store, record, 2, still=True)) == (2.0, 2.0)
    assert values(store, first) == (1.0, 1.0)


def test_another_job_shares_nothing_and_a_restart_counts_what_is_shared(root: Path) -> None:
    store = Store(root / "store", keep_count=3)
    epoch = claim(store)
    publish(store, epoch, 1, still=True)
    second = publish(store, epoch, 2, still=False)
    store.close()
    store = Store(root / "store", keep_count=3)
    assert store.catalogue.used_bytes() == disk_bytes(store) == SIZE + OWN
    assert values(store, second) == (1.0, 2.0)
    third = store.lifecycle.begin("policy", claim(store, "another"), 3, "another")
    assert not store.lifecycle.frozen_from(third)
    assert inode(store, third) != inode(store, second)
    store.close()


def test_the_files_for_the_next_version_are_those_that_it_will_have(store: Store) -> None:
    epoch = claim(store)
    first = publish(store, epoch, 1, still=True)
    settle(store)
    folder = store.lifecycle.next_files("policy", first.number)
    assert folder is not None
    before = {layout.path: (folder / layout.path).stat().st_ino for layout in LAYOUTS}
    record = store.lifecycle.begin("policy", epoch, 2, "job")
    path = store.folder.path(record)
    assert {layout.path: (path / layout.path).stat().st_ino for layout in LAYOUTS} == before
    assert before[FROZEN[0].path] == inode(store, first)
