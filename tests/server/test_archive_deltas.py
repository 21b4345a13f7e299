"""Deltas in an archive: exact or refused by name, never longer chains than allowed, and nothing removed that is needed."""

import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from pathlib import Path

import pytest
from resharder.server.archive import checkpoints
from resharder.server.archive.archive import Archive
from resharder.server.archive.archived import BaseVersion
from resharder.server.state.errors import AlreadyExists, DataLoss
from resharder.server.state.version import VersionRecord
from resharder.server.store.store import Store

from tests.support import bucket
from tests.support.archived_steps import HARM, LAYOUTS, Trainer, content, place, small_pieces, spoil  # noqa: F401
from tests.support.observing import wait_until
from tests.support.store_versions import numbers


@pytest.fixture
def opened(root: Path) -> Iterator[Callable[..., Archive]]:
    started: list[Archive] = []

    def open_(store: Store, url: str = "", **options: int) -> Archive:
        reports: list[str] = []
        report = lambda name, what, reason: reports.append(reason)  # noqa: E731
        archive = Archive(store, url or str(root / "archive"), pause=0.01, report=report, **options)
        archive.reports = reports
        started.append(archive)
        archive.start(restore=False)
        return archive

    yield open_
    for archive in started:
        archive.close()


def found(archive: Archive) -> dict[int, int]:
    """The depth of each archived version."""
    return {each.number: each.depth for each in archive.archived("policy")}


def other_store(root: Path, name: str = "other") -> Store:
    return Store(root / name, keep_count=9)


@pytest.fixture
def steps(root: Path) -> Iterator[tuple[Store, list[VersionRecord], list[dict[str, bytes]]]]:
    """A store with six versions, and the contents of their folders."""
    store = Store(root / "store", keep_count=9)
    trainer = Trainer(store)
    records = [trainer.publish(step) for step in range(6)]
    yield store, records, [content(store, record) for record in records]
    store.close()


Steps = tuple[Store, list[VersionRecord], list[dict[str, bytes]]]


@pytest.mark.parametrize("on", ["folder", "s3", pytest.param("azure", marks=pytest.mark.process)])
def test_every_version_of_a_chain_comes_back_as_it_was(
    steps: Steps,
    root: Path,
    opened: Callable[..., Archive],
    on: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, records, contents = steps
    with bucket.opened(monkeypatch) as s3:
        url = request.getfixturevalue("azure") if on == "azure" else s3.url if on == "s3" else ""
        archive = opened(store, url, full_every=3)
        for record in records:
            archive.archive_now("policy", record.number)
        assert found(archive) == {1: 0, 2: 1, 3: 2, 4: 0, 5: 1, 6: 2}
        fourth = archive.checkpoints.find("policy", 4)
        assert fourth.stored_bytes(delta=True) < fourth.stored_bytes(delta=False) / 2, "it is there in both ways"
        other = other_store(root)
        back = opened(other, url)
        for record, expected in zip(records[::-1], contents[::-1], strict=True):
            assert back.restore("policy", record.number) == record
            assert content(other, record) == expected
        archive.close()
        back.close()
        other.close()


def test_without_its_base_in_the_store_a_version_is_archived_in_full(root: Path, opened: Callable[..., Archive]) -> None:
    store = Store(root / "store", keep_count=1)
    trainer, archive = Trainer(store), opened(store)
    for step in range(2):
        archive.archive_now("policy", trainer.publish(step).number)
    assert found(archive) == {1: 0, 2: 0}
    store.close()


def test_the_newest_archived_version_stays_for_the_next_delta(root: Path, opened: Callable[..., Archive]) -> None:
    store = Store(root / "store", keep_count=1)
    trainer, archive = Trainer(store), opened(store, every=2)
    for step in range(6):
        trainer.publish(step)
        wait_until(lambda step=step: step % 2 == 0 or store.lifecycle.holders("policy", step + 1) == ["archive-base"])
    assert found(archive) == {2: 0, 4: 1, 6: 2}
    assert numbers(store) == [6]
    store.close()


def test_a_store_whose_bytes_have_changed_makes_no_delta_of_them(
    steps: Steps, root: Path, opened: Callable[..., Archive]
) -> None:
    store, records, contents = steps
    archive = opened(store)
    archive.archive_now("policy", 1)
    path = store.folder.path(records[0]) / LAYOUTS[0].path
    harmed = bytearray(path.read_bytes())
    harmed[-1] ^= 1
    path.write_bytes(harmed)
    archive.archive_now("policy", 2)
    assert found(archive) == {1: 0, 2: 0}
    other = other_store(root)
    opened(other).restore("policy", 2)
    assert content(other, records[1]) == contents[1]
    other.close()


@pytest.mark.parametrize("how", HARM)
@pytest.mark.parametrize(("number", "held"), [(1, False), (1, True), (2, False), (2, True), (3, True)])
@pytest.mark.parametrize("which", ["file", "pieces", "manifest"])
def test_a_harmed_object_is_named_and_the_version_before_stays(
    steps: Steps, root: Path, opened: Callable[..., Archive], how: str, number: int, which: str, held: bool
) -> None:
    store, records, contents = steps
    archive = opened(store)
    for each in (1, 2, 3, 4):
        archive.archive_now("policy", each)
    other = other_store(root)
    back = opened(other)
    if held:
        back.restore("policy", 1)
    suffix = "" if number == 1 else ".delta"
    name = {"file": LAYOUTS[0].path, "pieces": "pieces.json", "manifest": "resharder.json"}[which] + suffix
    replaced_by = place(root, 4 if how == "another" else 3 if number == 2 else 2)
    spoil(place(root, number) / name, how, replaced_by / (name if number > 1 else f"{name}.delta"))
    unused = which == "manifest" and number < 3  # a manifest is that of its version alone
    if unused or (held and number == 1):
        back.restore("policy", 3)
    else:
        with pytest.raises(DataLoss, match=rf"0000000{number}/\w+/{name}"):
            back.restore("policy", 3)
        assert numbers(other) == [1] * held
        assert not held or content(other, records[0]) == contents[0]
        archive.archive_now("policy", number)  # writes it again, in full
        back.restore("policy", 3)
    assert content(other, records[2]) == contents[2]
    other.close()


def read_bytes(archive: Archive) -> list[int]:
    """Counts the bytes of files and deltas that an archive reads from now on."""
    remote, counted = archive.checkpoints._remote, [0]
    read = remote.read

    def counting(path: str, start: int, end: int) -> bytes:
        counted[0] += end - start
        return read(path, start, end)

    remote.read = counting
    return counted


@pytest.mark.parametrize("held", [held for count in range(3) for held in combinations(range(1, 6), count)])
def test_a_version_comes_by_the_way_with_the_fewest_bytes(
    steps: Steps, root: Path, opened: Callable[..., Archive], held: tuple[int, ...]
) -> None:
    store, records, contents = steps
    archive = opened(store, full_every=3)
    for record in records:
        archive.archive_now("policy", record.number)
    other = other_store(root)
    back = opened(other)
    for number in held:
        back.restore("policy", number)
    there = {number: archive.checkpoints.find("policy", number) for number in range(1, 7)}
    best = {number: 0 if number in held else 1 << 40 for number in range(7)}
    for number, each in there.items():
        if number not in held:
            delta = best[number - 1] + each.stored_bytes(delta=True) if each.base else 1 << 40
            best[number] = min(delta, each.stored_bytes(delta=False) if each.full else 1 << 40)
    back.reports.clear()
    counted = read_bytes(back)
    back.restore("policy", 6)
    assert content(other, records[5]) == contents[5]
    way = back.checkpoints.ways(there[6], {BaseVersion(n, records[n - 1].fingerprint): None for n in held})[0]
    assert way.size == best[6]
    assert counted[0] <= best[6]
    newest = max(held, default=0)
    deltas = 6 - newest if newest else 2
    start = f"from version {newest} of the store" if newest else "in full"
    assert f"{start} and {deltas} delta" in back.reports[0]
    other.close()


def test_small_pieces_share_requests(
    steps: Steps, root: Path, opened: Callable[..., Archive], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, records, contents = steps
    archive = opened(store)
    for record in records[:3]:
        archive.archive_now("policy", record.number)
    for block in (100, 1000, 1 << 20):  # smaller and larger than a piece
        monkeypatch.setattr(checkpoints, "_BLOCK", block)
        other = other_store(root, f"other-{block}")
        back = opened(other)
        back.restore("policy", 1)
        read, requests = back.checkpoints._remote.read, []
        back.checkpoints._remote.read = lambda *span, read=read, requests=requests: requests.append(span) or read(*span)
        back.restore("policy", 3)
        assert content(other, records[2]) == contents[2]
        if block == 1 << 20:
            files = len(archive.checkpoints.find("policy", 3).files)
            assert len(requests) <= 2 * files, "one of each delta, however many pieces it has"
        other.close()


def test_a_base_in_the_store_that_was_altered_is_not_used(steps: Steps, root: Path, opened: Callable[..., Archive]) -> None:
    store, records, contents = steps
    archive = opened(store)
    for each in (1, 2, 3):
        archive.archive_now("policy", each)
    other = other_store(root)
    back = opened(other)
    back.restore("policy", 2)
    spoil(other.folder.path(records[1]) / LAYOUTS[0].path, "flipped", root)
    back.restore("policy", 3)
    assert "in full and 2 deltas" in back.reports[-1]
    assert content(other, records[2]) == contents[2]
    other.close()


def test_a_base_that_leaves_the_store_meanwhile_is_done_without(
    steps: Steps, root: Path, opened: Callable[..., Archive], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, records, contents = steps
    archive = opened(store)
    for each in (1, 2, 3):
        archive.archive_now("policy", each)
    other = other_store(root)
    back = opened(other)
    back.restore("policy", 1)
    back.restore("policy", 2)
    pieces = back.checkpoints.pieces

    def retired_first(*arguments: object, **options: bool) -> object:
        found = pieces(*arguments, **options)
        for record in records[:2]:
            shutil.rmtree(other.folder.path(record), ignore_errors=True)
        return found

    monkeypatch.setattr(back.checkpoints, "pieces", retired_first)
    back.restore("policy", 3)
    assert content(other, records[2]) == contents[2]
    other.close()


def test_a_damaged_delta_is_passed_by_where_the_version_is_there_in_full(
    steps: Steps, root: Path, opened: Callable[..., Archive]
) -> None:
    store, records, contents = steps
    archive = opened(store, full_every=3)
    for record in records:
        archive.archive_now("policy", record.number)
    other = other_store(root)
    back = opened(other)
    back.restore("policy", 3)
    spoil(place(root, 4) / f"{LAYOUTS[0].path}.delta", "cut", root)
    back.restore("policy", 5)
    assert "in full and 1 delta:" in back.reports[-1]
    assert content(other, records[4]) == contents[4]
    other.close()


@pytest.mark.parametrize("how", ["missing", "another's"])
def test_a_delta_is_never_applied_to_another_base(steps: Steps, root: Path, opened: Callable[..., Archive], how: str) -> None:
    store, _, _ = steps
    archive = opened(store)
    for each in (1, 2, 3):
        archive.archive_now("policy", each)
    marker = root / "archive" / "policy" / "00000002" / "archived.json"
    if how == "missing":
        marker.unlink()
    else:
        stranger = Store(root / "stranger", keep_count=9)
        trainer = Trainer(stranger, seed=1)
        foreign = Archive(stranger, str(root / "foreign"))
        trainer.publish(0)
        foreign.archive_now("policy", trainer.publish(1).number)
        shutil.rmtree(marker.parent)
        shutil.copytree(root / "foreign" / "policy" / "00000002", marker.parent)
        stranger.close()
    other = other_store(root)
    with pytest.raises(
        DataLoss, match=r"is a delta of policy/00000002 with fingerprint \w+, (that is missing|found fingerprint)"
    ):
        opened(other).restore("policy", 3)
    assert numbers(other) == []
    other.close()


def test_of_two_daemons_that_archive_at_once_one_wins_and_the_other_takes_it_or_says_so(
    steps: Steps, root: Path, opened: Callable[..., Archive]
) -> None:
    store, records, _ = steps
    twin, stranger = other_store(root, "twin"), other_store(root, "stranger")
    first = opened(store)
    first.archive_now("policy", 1)
    opened(twin).restore("policy", 1)
    first.close()
    shutil.rmtree(root / "archive")
    Trainer(stranger, seed=1).publish(0)
    together = threading.Barrier(3)

    def archive(store: Store) -> str:
        one = Archive(store, str(root / "archive"))
        write = one.checkpoints._write_objects

        def wait_and_write(*arguments: object, **options: bool) -> object:
            done = write(*arguments, **options)
            together.wait(60)
            return done

        one.checkpoints._write_objects = wait_and_write
        return one.archive_now("policy", 1).fingerprint

    def answer(store: Store) -> str:
        try:
            return archive(store)
        except AlreadyExists as error:
            return error.reason

    with ThreadPoolExecutor(3) as threads:
        answers = list(threads.map(answer, (store, twin, stranger)))
    kept = opened(store).archived("policy")
    assert [each.number for each in kept] == [1]
    ours = kept[0].fingerprint == records[0].fingerprint
    assert answers == (
        [kept[0].fingerprint] * 2 + ["VERSION_DIFFERS"] if ours else ["VERSION_DIFFERS"] * 2 + [kept[0].fingerprint]
    )
    assert [path.name for path in place(root, 1).parent.iterdir() if path.is_dir()] == [kept[0].folder]
    twin.close()
    stranger.close()


def test_what_no_kept_version_needs_is_removed_and_a_base_stays(steps: Steps, root: Path, opened: Callable[..., Archive]) -> None:
    store, records, contents = steps
    archive = opened(store, full_every=3, keep=1)
    left = root / "archive" / "policy" / "00000001" / "interrupted"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"left")
    kept = []
    for record in records[1:]:
        archive.archive_now("policy", record.number)
        kept.append(sorted(found(archive)))
    assert kept == [[2], [2, 3], [2, 3, 4], [5], [5, 6]]
    assert sorted(path.name for path in (root / "archive" / "policy").iterdir()) == ["00000005", "00000006", "latest.json"]
    other = other_store(root)
    opened(other).restore("policy", 6)
    assert content(other, records[5]) == contents[5]
    other.close()
