"""The store by itself: retention, holds, room, recycling, recovery."""

import json
import mmap
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from resharder.converters.geometry.layout import TensorSpec, full_box
from resharder.converters.storage.digest import digest
from resharder.converters.storage.files import lay_out
from resharder.server.holding import set_pool
from resharder.server.state.errors import (
    AlreadyExists,
    DaemonError,
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    ResourceExhausted,
    ResourceNotFound,
)
from resharder.server.state.version import READY, VersionRecord
from resharder.server.store.epochs import NewEpoch
from resharder.server.store.retention import Retention, peak
from resharder.server.store.store import Store

from tests.support.observing import wait_until
from tests.support.store_versions import FILES, LAYOUTS, SIZE, SPECS, claim, numbers, publish, settle


def inodes(folder: Path) -> set[int]:
    return {path.stat().st_ino for path in folder.glob("*.safetensors")}


def edit(path: Path, old: bytes, new: bytes) -> None:
    assert old in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(old, new))


def test_old_versions_go_and_held_ones_stay_until_released(store: Store) -> None:
    epoch = claim(store)
    publish(store, epoch, 0)
    store.lifecycle.pin("policy", 1, "servers/s")
    for step in range(1, 5):
        publish(store, epoch, step)
    assert numbers(store) == [1, 4, 5]
    assert store.lifecycle.holders("policy", 1) == ["servers/s"]
    store.lifecycle.release("policy", 1, "servers/s")
    assert numbers(store) == [4, 5]
    with pytest.raises(ResourceNotFound, match="RETIRED"):
        store.lifecycle.pin("policy", 1, "servers/s")


def test_uploads_and_files_laid_out_are_room_for_further_versions_and_versions_that_are_held_are_not(root: Path) -> None:
    store = Store(root / "store", keep_count=2, limit_bytes=3 * SIZE)
    epoch = claim(store)
    publish(store, epoch, 0)
    store.lifecycle.pin("policy", 1, "servers/s")
    publish(store, epoch, 1)
    settle(store)
    assert store.capacity.available_bytes() == {"policy": SIZE}
    uploading = store.lifecycle.begin("policy", epoch, 2, "job")
    assert store.capacity.available_bytes() == {"policy": SIZE}
    store.lifecycle.abort("policy", uploading.number, "a test")
    settle(store)
    assert store.capacity.available_bytes() == {"policy": SIZE}
    publish(store, epoch, 3)
    settle(store)
    assert store.capacity.available_bytes() == {"policy": 0}
    store.lifecycle.release("policy", 1, "servers/s")
    settle(store)
    assert store.capacity.available_bytes() == {"policy": SIZE}
    store.close()


def obstruct(store: Store, number: int) -> Path:
    """Make the folder of a version one that cannot be moved, as if it were immutable."""
    target = store.folder.root / f"models/policy/retired/{number:08}/in-the-way"
    target.mkdir(parents=True)
    return target.parent


def test_a_version_whose_folder_cannot_be_moved_does_not_keep_the_others(store: Store) -> None:
    epoch = claim(store)
    publish(store, epoch, 0)
    obstacle = obstruct(store, 1)
    for step in range(1, 6):
        publish(store, epoch, step)
        settle(store)
    assert numbers(store) == [1, 5, 6]
    reason = store.catalogue.get("policy", 1).reason
    assert reason == (
        f"beyond retention, but {store.folder.root}/models/policy/versions/00000001 cannot be moved "
        "(ENOTEMPTY, Directory not empty): remove what protects it; the next version tries again"
    )
    assert reason in store.capacity.holdings()
    publish(store, epoch, 6)
    assert store.lifecycle.retire("policy", keep=3).retired == (), "nothing else is in the way"
    shutil.rmtree(obstacle)
    publish(store, epoch, 7)
    assert numbers(store) == [7, 8]
    assert store.catalogue.get("policy", 1).reason == "newer versions took its place"


def test_a_command_retires_the_other_versions_and_raises_what_kept_one(store: Store) -> None:
    epoch = claim(store)
    for step in range(3):
        publish(store, epoch, step)
        store.lifecycle.pin("policy", step + 1, "servers/s")
    for number in (1, 2):
        store.catalogue.model("policy").holders.pop(number)
    obstruct(store, 1)
    with pytest.raises(DaemonError, match="ENOTEMPTY"):
        store.lifecycle.retire("policy", [1, 2])
    assert numbers(store) == [1, 3]


def test_a_version_whose_folder_somebody_has_removed_is_retired_like_the_others(store: Store) -> None:
    epoch = claim(store)
    shutil.rmtree(store.folder.path(publish(store, epoch, 0)))
    for step in range(1, 4):
        publish(store, epoch, step)
        settle(store)
    assert numbers(store) == [3, 4]
    assert store.catalogue.get("policy", 1).state == "RETIRED"
    assert not store.catalogue.model("policy").stuck


@given(st.lists(st.integers(1, 100), max_size=8), st.sets(st.integers(1, 8)), st.integers(1, 4), st.integers(0, 250))
def test_retention_keeps_the_newest_the_held_and_no_more_than_it_may(sizes, held, count, size) -> None:
    ready = [VersionRecord("m", i, READY, 1, i, "j", n, 1, 0.0) for i, n in enumerate(sizes, start=1)]
    dropped = Retention(count, size).surplus(ready, held)
    kept = [record for record in ready if record not in dropped]
    assert not {record.number for record in dropped} & held
    assert not ready or ready[-1] in kept
    free = [record for record in kept[:-1] if record.number not in held]
    assert all(sum(later.number >= record.number for later in ready) <= count for record in free)
    assert not size or all(sum(later.size_bytes for later in ready if later.number >= record.number) <= size for record in free)


@given(st.integers(1, 50), st.integers(1, 4), st.lists(st.integers(1, 50), max_size=4))
def test_the_peak_is_what_replacing_one_version_after_another_takes(size: int, keep: int, old: list[int]) -> None:
    sets, alive, most = Retention(keep).sets(size), list(old), 0
    for _ in range(10):
        alive = alive[-(sets - 1) :]
        most = max(most, sum(alive) + size)
        alive.append(size)
    assert peak(size, sets, old[-(sets - 1) :]) == most


def test_room_is_refused_at_registration_with_who_holds_what(root: Path) -> None:
    store = Store(root / "store", keep_count=2, limit_bytes=int(SIZE * 4.5))
    publish(store, claim(store), 0)
    epoch = store.epochs.begin("draft", "other", 1).epoch
    with pytest.raises(
        ResourceExhausted,
        match=r"raise --store-limit-bytes .*policy/versions/1 READY .* MiB; models/policy reserves 3 times",
    ) as caught:
        store.epochs.reserve(NewEpoch("draft", epoch, LAYOUTS, FILES))
    assert caught.value.reason == "NO_ROOM"
    assert not list((root / "store/models/draft").glob("pool/*"))
    store.close()


def test_a_version_beyond_the_limit_is_refused_while_held_ones_take_the_room(root: Path) -> None:
    store = Store(root / "store", keep_count=2, limit_bytes=int(SIZE * 3.5))
    epoch = claim(store)
    for step in range(3):
        publish(store, epoch, step)
        store.lifecycle.pin("policy", step + 1, f"servers/{step}")
    with pytest.raises(ResourceExhausted, match="used by servers/0"):
        store.lifecycle.begin("policy", epoch, 3, "job")
    store.lifecycle.release("policy", 1, "servers/0")
    settle(store)
    assert store.lifecycle.begin("policy", epoch, 3, "job").number == 4
    store.close()


def test_files_are_recycled_within_an_epoch(store: Store) -> None:
    epoch, seen = claim(store), []
    for step in range(8):
        seen.append(inodes(store.folder.path(publish(store, epoch, step))))
        settle(store)
    assert len(set().union(*seen)) <= 3, "more files were made than are used in turn"
    with store.reader.open("policy", 8) as files:
        assert int(files.arrays["a"][0, 0]) == 8


def test_files_that_a_reader_lets_go_of_soon_are_recycled(store: Store) -> None:
    epoch, seen = claim(store), []
    for step in range(8):
        record = publish(store, epoch, step)
        seen.append(inodes(store.folder.path(record)))
        with (store.folder.path(record) / LAYOUTS[0].path).open("rb") as file:  # a worker that installs this version
            held = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        threading.Timer(1.0, held.close).start()  # when the next one is READY and this one is retired
        settle(store, released=True)
    assert len(set().union(*seen)) <= 3, "more files were made than are used in turn"


@contextmanager
def mapped(store: Store, number: int) -> Iterator[set[int]]:
    """Map a version's files during the block, as a worker does, and yield their inodes."""
    folder = store.folder.path(store.catalogue.get("policy", number))
    maps = []
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            maps.append(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
    try:
        yield inodes(folder)
    finally:
        for each in maps:
            each.close()


def disk_bytes(store: Store) -> int:
    """Return the bytes of all sets, while none is renamed."""
    with store.catalogue.changed:
        sets = [
            path for kind in ("pool", "staging", "versions", "retired") for path in store.folder.root.glob(f"models/*/{kind}/*")
        ]
        return SIZE * sum((path / LAYOUTS[0].path).exists() for path in sets)


def test_a_version_does_not_wait_for_files_that_a_worker_still_maps_where_there_is_room_for_others(store: Store) -> None:
    epoch = claim(store)
    for step in range(2):
        publish(store, epoch, step)
    with mapped(store, 1) as held:
        publish(store, epoch, 2)  # retires version 1
        seen = set[int]()
        for step in range(3, 6):
            began = time.monotonic()
            record = publish(store, epoch, step)
            assert time.monotonic() - began < 1.0
            seen |= inodes(store.folder.path(record))
        settle(store)
        assert not seen & held
        assert store.catalogue.used_bytes() == 4 * SIZE == disk_bytes(store), "what is mapped takes memory, and counts"
        uploading = store.lifecycle.begin("policy", epoch, 6, "job")
    settle(store, released=True)
    assert inodes(store.folder.path(store.lifecycle.begin("policy", epoch, 7, "job"))) == held, "its files are used again"
    store.lifecycle.abort("policy", uploading.number, "a test")
    for step in range(8, 11):
        publish(store, epoch, step)
        settle(store)
    store.lifecycle.abort("policy", uploading.number + 1, "a test")
    settle(store)
    assert store.catalogue.used_bytes() == 3 * SIZE == disk_bytes(store), "and no more sets are kept than before"


def test_another_set_is_laid_out_while_a_worker_keeps_one_for_long(store: Store) -> None:
    epoch = claim(store)
    for step in range(2):
        publish(store, epoch, step)
    with mapped(store, 1):
        publish(store, epoch, 2)
        reservation = store.catalogue.model("policy").reservation
        assert reservation is not None
        with store.catalogue.changed:
            assert store.catalogue.changed.wait_for(lambda: reservation.held and reservation.free, 10)


def test_without_room_for_others_a_version_waits_for_files_that_a_worker_still_maps_and_the_bound_holds(root: Path) -> None:
    store = Store(root / "store", keep_count=2, limit_bytes=3 * SIZE)
    epoch = claim(store)
    for step in range(2):
        publish(store, epoch, step)
    with ThreadPoolExecutor() as threads, ExitStack() as reader:
        held = reader.enter_context(mapped(store, 1))
        publish(store, epoch, 2)
        later = threads.submit(store.lifecycle.begin, "policy", epoch, 3, "job")
        with pytest.raises(TimeoutError):
            later.result(1.0)
        assert disk_bytes(store) == store.catalogue.used_bytes() == 3 * SIZE
        assert store.capacity.available_bytes() == {"policy": SIZE}, "once it is released, or given up"
        reader.close()
        assert inodes(store.folder.path(later.result(10))) == held
    store.close()


def test_without_room_for_others_a_version_goes_on_without_the_files_of_a_worker_that_hangs(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(set_pool, "_PATIENCE", 2)
    store = Store(root / "store", keep_count=2, limit_bytes=3 * SIZE)
    epoch = claim(store)
    for step in range(2):
        publish(store, epoch, step)
    with mapped(store, 1) as held:
        for step in range(2, 5):
            assert not inodes(store.folder.path(publish(store, epoch, step))) & held
    store.close()


def test_files_beyond_a_reservation_are_given_to_a_model_that_needs_the_room(root: Path) -> None:
    store = Store(root / "store", keep_count=2, limit_bytes=6 * SIZE)
    epoch = claim(store)
    for step in range(2):
        publish(store, epoch, step)
    with mapped(store, 1):
        publish(store, epoch, 2)
        publish(store, epoch, 3)
        assert store.catalogue.used_bytes() == 4 * SIZE, "beyond the three sets that are reserved"
    other = claim(store, model="draft")
    for step in range(4):
        publish(store, other, step, model="draft")
        publish(store, epoch, step + 4)
        assert disk_bytes(store) <= 6 * SIZE
    assert numbers(store) == [7, 8]
    store.close()


def test_a_version_whose_files_a_worker_still_maps_can_come_back(root: Path, tmp_path: Path) -> None:
    store = Store(root / "store", keep_count=2)
    epoch = claim(store)
    for step in range(2):
        publish(store, epoch, step)
    record = store.catalogue.get("policy", 1)
    copy = shutil.copytree(store.folder.path(record), tmp_path / "copy")

    def restore(folder: Path) -> None:
        shutil.copytree(copy, folder, dirs_exist_ok=True)

    with mapped(store, 1):
        publish(store, epoch, 2)
        settle(store)
        back = store.lifecycle.adopt("policy", 1, record.fingerprint, SIZE, restore)
        assert back.state == READY
    store.close()


def test_a_versions_small_files_are_copied_before_it_begins(store: Store) -> None:
    epoch = claim(store)
    for step in range(5):  # in files that were laid out, and in recycled ones
        settle(store)
        reservation = store.catalogue.model("policy").reservation
        assert reservation is not None
        assert reservation.small is not None
        assert {name: (reservation.free[0] / name).read_bytes() for name in FILES} == FILES
        copies = {name: (reservation.free[0] / name).stat().st_ino for name in FILES}
        folder = store.folder.path(publish(store, epoch, step))
        assert {name: (folder / name).stat().st_ino for name in FILES} == copies
        assert not any((reservation.small / name).samefile(folder / name) for name in FILES)


def test_the_next_version_takes_the_files_that_were_named_for_it(store: Store) -> None:
    publish(store, claim(store), 0)
    for step in range(1, 5):
        settle(store)
        named = store.lifecycle.next_files("policy", step)
        assert named is not None
        files = inodes(named)
        publish(store, store.catalogue.get("policy", step).epoch, step)
        assert inodes(store.folder.path(store.catalogue.get("policy", step + 1))) == files
    claim(store, job="successor")
    assert store.lifecycle.next_files("policy", 5) is None, "files of another epoch may have another layout"
    with pytest.raises(ResourceNotFound):
        store.lifecycle.next_files("policy", 99)


def test_files_of_another_size_are_not_recycled_when_a_job_is_back_with_other_shapes(root: Path) -> None:
    store = Store(root / "store", keep_count=2)
    epoch = claim(store)
    for step in range(2):
        publish(store, epoch, step)
    store.close()
    store = Store(root / "store", keep_count=2)
    larger = lay_out([TensorSpec("a", "BF16", (64, 128)), TensorSpec("b", "F32", (16,))])
    store.epochs.reserve(NewEpoch("policy", epoch, larger, FILES))
    for step in range(2, 6):
        record = store.lifecycle.begin("policy", epoch, step, "job")
        assert [(store.folder.path(record) / layout.path).stat().st_size for layout in larger] == [
            layout.size for layout in larger
        ]
        store.lifecycle.commit(record, {}, ())
        settle(store)
    store.close()


def test_files_of_a_job_that_registers_twice_at_once_are_those_of_its_last_registration(store: Store) -> None:
    epoch = claim(store)
    settle(store)
    model, free = store.catalogue.model("policy"), threading.Event()
    for _ in range(2):  # all threads that lay out files
        model.background.submit(free.wait)
    for _ in range(2):
        store.epochs.reserve(NewEpoch("policy", epoch, LAYOUTS, FILES))
    free.set()
    settle(store)
    assert model.reservation is not None
    assert (len(model.reservation.free), model.reservation.failure) == (1, None)
    wait_until(lambda: disk_bytes(store) == store.catalogue.used_bytes() == SIZE, "the files of the first registration are gone")


def test_a_file_that_somebody_maps_is_never_recycled(store: Store) -> None:
    epoch = claim(store)
    path = store.folder.path(publish(store, epoch, 0)) / LAYOUTS[0].path
    inode = path.stat().st_ino
    program = (
        "import mmap, sys\nwith open(sys.argv[1], 'rb') as file: held = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)\n"
        "print('mapped', flush=True)\nsys.stdin.read()\nprint(sum(held[-8192:]), flush=True)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "mapped\n"
        before = sum(path.read_bytes()[-8192:])
        later = []
        for step in range(1, 6):
            later.append(inodes(store.folder.path(publish(store, epoch, step))))
            settle(store)
        assert all(inode not in files for files in later)
        answer, _ = reader.communicate("")
        assert int(answer) == before, "the reader's bytes changed"


def test_an_epoch_never_gets_files_of_another(store: Store) -> None:
    first = claim(store)
    old = set()
    for step in range(3):
        old |= inodes(store.folder.path(publish(store, first, step)))
    settle(store)
    keep = [path.open("rb") for path in store.folder.root.rglob("*.safetensors")]  # else a freed inode's number may come again
    second = claim(store, "second")
    for step in range(4):
        assert not inodes(store.folder.path(publish(store, second, step))) & old
    for file in keep:
        file.close()
    with pytest.raises(FailedPrecondition, match="epoch 1"):
        store.lifecycle.begin("policy", first, 9, "job")


def test_numbers_and_epochs_never_come_twice(root: Path) -> None:
    seen = []
    for life in range(3):
        store = Store(root / "store", keep_count=2)
        epoch = claim(store, f"job{life}")
        aborted = store.lifecycle.begin("policy", epoch, 0, "job")
        store.lifecycle.abort("policy", aborted.number, "a test")
        seen += [(epoch, aborted.number), (epoch, publish(store, epoch, 1).number)]
        store.lifecycle.begin("policy", epoch, 2, "job")
        store.close()
    assert [number for _, number in seen] == [1, 2, 4, 5, 7, 8]
    assert sorted({epoch for epoch, _ in seen}) == [1, 2, 3]


def test_ready_versions_come_back_and_others_do_not(root: Path) -> None:
    store = Store(root / "store", keep_count=2)
    epoch = claim(store)
    made = [publish(store, epoch, step) for step in range(3)]
    store.lifecycle.begin("policy", epoch, 3, "job")
    store.close()
    again = Store(root / "store", keep_count=2)
    assert [again.catalogue.get("policy", n) for n in (2, 3)] == made[1:]
    assert again.catalogue.get("policy", 1).state == "RETIRED"
    assert again.catalogue.newest("policy") == made[2]
    assert again.epochs.claim("policy") is not None
    assert again.reader.model_files("policy") == FILES
    with again.reader.open("policy", 3) as files:
        assert np.all(files.arrays["a"] == 3)
    assert not list(again.folder.root.glob("models/policy/staging/*"))
    again.epochs.reserve(NewEpoch("policy", epoch, LAYOUTS, FILES))
    assert publish(again, epoch, 3).number == 5
    again.close()


@pytest.mark.parametrize(
    "harm",
    [
        lambda folder: (folder / "resharder.json").unlink(),
        lambda folder: edit(folder / "resharder.json", b'"step":1', b'"step":9'),
        lambda folder: (folder / LAYOUTS[0].path).write_bytes(b"short"),
        lambda folder: (folder / "config.json").write_bytes(b"[]"),
    ],
)
def test_a_damaged_version_does_not_come_back(root: Path, harm) -> None:
    store = Store(root / "store")
    epoch = claim(store)
    publish(store, epoch, 0)
    folder = store.folder.path(publish(store, epoch, 1))
    store.close()
    harm(folder)
    again = Store(root / "store")
    assert numbers(again) == [1]
    again.close()


def test_a_manifest_says_what_is_in_the_folder(store: Store) -> None:
    record = publish(store, claim(store), 0)
    manifest = store.reader.manifest("policy", 1)
    assert (manifest.record, manifest.files, sorted(manifest.other_files)) == (record, LAYOUTS, sorted(FILES))
    with store.reader.open("policy", 1) as files:
        for spec in SPECS:
            assert manifest.digests[spec.name] == digest(files.arrays[spec.name], full_box(spec.shape), spec.shape)
    assert json.loads((store.folder.path(record) / "resharder.json").read_bytes())["fingerprint"] == record.fingerprint


def test_folders_and_files_are_the_owners_alone(store: Store) -> None:
    publish(store, claim(store), 0)
    modes = {path.stat().st_mode & 0o777 for path in store.folder.root.rglob("*") if path.is_file()}
    assert modes == {0o600}
    assert {path.stat().st_mode & 0o777 for path in [store.folder.root, *store.folder.root.rglob("*")] if path.is_dir()} == {
        0o700
    }


def test_a_second_daemon_on_the_same_store_is_refused(store: Store) -> None:
    with pytest.raises(FailedPrecondition, match="another process uses"):
        Store(store.folder.root)


def test_subscribers_hear_of_ready_retired_and_aborted(store: Store) -> None:
    changed: list[tuple[int, str]] = []
    store.catalogue.version_changed.connect(lambda record: changed.append((record.number, record.state)))
    epoch = claim(store)
    for step in range(3):
        publish(store, epoch, step)
    store.lifecycle.abort("policy", store.lifecycle.begin("policy", epoch, 3, "job").number, "a test")
    assert changed == [(1, "READY"), (2, "READY"), (3, "READY"), (1, "RETIRED"), (4, "ABORTED")]


@pytest.mark.parametrize("name", ["..", "a/b", "", "x" * 65])
def test_names_that_are_paths_are_refused(store: Store, name: str) -> None:
    with pytest.raises(InvalidArgument):
        store.epochs.begin(name, "job", 1)
    with pytest.raises(InvalidArgument):
        store.catalogue.versions(name)


def test_a_reader_sees_read_only_arrays(store: Store) -> None:
    publish(store, claim(store), 0)
    with store.reader.open("policy", 1) as files:
        array = files.arrays["a"]
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
        assert store.lifecycle.holders("policy", 1)
        del array
    assert not store.lifecycle.holders("policy", 1)


def test_an_operator_drops_what_nobody_uses_and_never_the_newest(root: Path) -> None:
    store = Store(root / "store", keep_count=5)
    epoch = claim(store)
    made = [publish(store, epoch, step) for step in range(4)]
    arriving = store.lifecycle.begin("policy", epoch, 4, "job")
    store.lifecycle.pin("policy", 2, "servers/s")
    wanted = store.lifecycle.retire("policy", keep=1, dry_run=True)
    assert (wanted.retired, wanted.kept, wanted.freed_bytes) == ((made[0], made[2]), (made[1],), 2 * SIZE)
    assert numbers(store) == [1, 2, 3, 4]
    changed: list[VersionRecord] = []
    store.catalogue.version_changed.connect(changed.append)
    done = store.lifecycle.retire("policy", [1, 2, 4, 5])
    assert [(r.number, r.state, r.reason) for r in done.retired] == [(1, "RETIRED", "retired by an operator")]
    assert done.kept == (made[1], made[3], arriving)
    assert (numbers(store), changed) == ([2, 3, 4], list(done.retired))
    assert store.lifecycle.retire("policy", [1]).retired == ()
    with pytest.raises(ResourceNotFound, match="versions/9"):
        store.lifecycle.retire("policy", [9])
    with pytest.raises(InvalidArgument, match="keep the newest 1 at least"):
        store.lifecycle.retire("policy")
    store.close()


def copy_of(store: Store, record: VersionRecord, root: Path) -> Path:
    return Path(shutil.copytree(store.folder.path(record), root / f"copy-{record.number}"))


def adopt(store: Store, record: VersionRecord, copy: Path) -> VersionRecord:
    write = lambda folder: shutil.copytree(copy, folder, dirs_exist_ok=True)  # noqa: E731
    return store.lifecycle.adopt("policy", record.number, record.fingerprint, record.size_bytes, write)


def test_an_old_version_comes_back_and_stays_until_the_room_is_needed(root: Path) -> None:
    store = Store(root / "store", keep_count=2, limit_bytes=int(SIZE * 4.5))
    epoch = claim(store)
    old = publish(store, epoch, 0)
    copy = copy_of(store, old, root)
    for step in (1, 2):
        publish(store, epoch, step)
    settle(store)
    assert adopt(store, old, copy) == old
    assert adopt(store, old, root / "nowhere") == old, "the same again is no change"
    store.reader.manifest("policy", 1)  # holds and releases it
    assert numbers(store) == [1, 2, 3]
    publish(store, epoch, 3)
    settle(store)
    assert numbers(store) == [1, 3, 4]
    assert store.lifecycle.begin("policy", epoch, 4, "job").number == 5
    assert store.lifecycle.begin("policy", epoch, 5, "job").number == 6
    assert numbers(store) == [3, 4]
    assert store.catalogue.get("policy", 1).state == "RETIRED"
    store.close()


def test_a_version_that_cannot_come_back_leaves_everything_as_it_was(root: Path) -> None:
    store = Store(root / "store", keep_count=2)
    epoch = claim(store)
    old, other = publish(store, epoch, 0), publish(store, epoch, 1)
    copy = copy_of(store, old, root)
    with pytest.raises(AlreadyExists, match="READY here"):
        store.lifecycle.adopt("policy", other.number, old.fingerprint, SIZE, lambda folder: None)
    publish(store, epoch, 2)
    settle(store)
    changed = bytearray((copy / LAYOUTS[0].path).read_bytes())
    changed[-1] ^= 1
    (copy / LAYOUTS[0].path).write_bytes(changed)
    before = store.catalogue.used_bytes()
    with pytest.raises(DataLoss, match="1 tensors are not what was published: a"):
        adopt(store, old, copy)
    with pytest.raises(ResourceExhausted, match="no room for a version of"):
        store.lifecycle.adopt("policy", 9, "", store.capacity.limit_bytes, lambda folder: None)
    assert (numbers(store), store.catalogue.used_bytes()) == ([2, 3], before)
    assert not list((store.folder.root / "models/policy/staging").iterdir())
    assert publish(store, epoch, 3).number == 10
    store.close()
