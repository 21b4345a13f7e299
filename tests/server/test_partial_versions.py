"""READY versions of which the store lacks pieces: what can be read, how they become whole, and what a restart finds."""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from random import Random

import numpy as np
import pytest
from resharder.converters.geometry.layout import full_box
from resharder.converters.wire import pieces
from resharder.converters.wire.pieces import Bitmap, PieceSpan, number_pieces
from resharder.converters.wire.ranges import HELD_FILE
from resharder.converters.wire.windows import boxes_request
from resharder.server.data.versions import PinnedVersion, StoredVersions
from resharder.server.ingest.publisher import check_files
from resharder.server.nodes.decisions import ReplicasShort
from resharder.server.rpc.operator_service import _export
from resharder.server.state.errors import DaemonError, FailedPrecondition, InvalidArgument, ResourceNotFound, Unavailable
from resharder.server.state.version import READY, RETIRED, UPLOADING, VersionRecord
from resharder.server.store import manifest
from resharder.server.store.manifest import verify
from resharder.server.store.partial import PIECES_FILE, MissingPieces, VerifiedVersion
from resharder.server.store.retention import Retention
from resharder.server.store.store import Store

from tests.support.partial_versions import SMALL_PIECES, contents, deliver_pieces, publish_partial
from tests.support.store_versions import FILES, LAYOUTS, SPECS, claim, numbers, publish, settle

WHOLE = {*FILES, manifest.MANIFEST_FILE, LAYOUTS[0].path}
FILE = LAYOUTS[0].path


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", SMALL_PIECES)


@pytest.fixture
def store(root: Path) -> Iterator[Store]:
    made = opened(root)
    yield made
    made.close()


def opened(root: Path, keep: int = 3) -> Store:
    store = Store(root / "store", limit_bytes=1 << 24, keep_count=keep)
    store.reader._patience = 0.0
    return store


def count() -> int:
    return number_pieces(LAYOUTS).count


def partial_of(store: Store, number: int = 1) -> VerifiedVersion:
    found = store.reader.partial("policy", number)
    assert found is not None
    return found


def read(store: Store, number: int, tensors: set[str] | None = None) -> dict[str, bytes]:
    with store.reader.open("policy", number, tensors) as files:
        return {spec.name: files.arrays[spec.name].tobytes() for spec in SPECS if tensors is None or spec.name in tensors}


def refused(store: Store, number: int, tensors: set[str] | None = None) -> str:
    with pytest.raises(DaemonError) as refusal:
        read(store, number, tensors)
    return f"{refusal.value.reason}: {refusal.value}"


def test_a_version_that_lacks_pieces_is_ready_and_not_a_byte_of_a_missing_piece_is_read(store: Store) -> None:
    record, _ = publish_partial(store, claim(store), 0, [1, count() - 1], ["two", "one"])
    assert (record.state, store.catalogue.newest("policy")) == (READY, record)
    assert set(path.name for path in store.folder.path(record).iterdir()) == WHOLE | {HELD_FILE, PIECES_FILE}
    assert refused(store, 1) == (
        f"PIECES_ELSEWHERE: models/policy/versions/1: the daemon holds {count() - 2} of {count()} pieces and fetches the others; "
        "nodes that held them: one, two; try again"
    )
    partial = partial_of(store)
    for piece in range(count()):
        span = partial.numbering.span(piece)
        if piece in (1, count() - 1):
            with pytest.raises(Unavailable, match="holds"):
                partial.await_bytes([span], 0.0)
            with pytest.raises(Unavailable):
                partial.await_bytes([span._replace(start=span.end - 1)], 0.0)
        else:
            partial.await_bytes([span], 0.0)


def test_once_its_pieces_have_arrived_it_is_an_ordinary_version(store: Store) -> None:
    record, content = publish_partial(store, claim(store), 0, [0, 2])
    partial, folder = partial_of(store), store.folder.path(record)
    deliver_pieces(partial, content, [2])
    assert not store.lifecycle.settle(partial)
    assert (folder / HELD_FILE).read_bytes() == partial.held().to_bytes()
    deliver_pieces(partial, content, [0])
    assert set(read(store, 1)) == {spec.name for spec in SPECS}
    assert store.lifecycle.settle(partial)
    assert store.lifecycle.partials() == []
    assert contents(folder, LAYOUTS) == content
    assert set(path.name for path in folder.iterdir()) == WHOLE
    assert verify(folder, "policy", 1, record.fingerprint).whole


def test_a_tensor_can_be_read_once_its_own_pieces_are_there(store: Store) -> None:
    _, content = publish_partial(store, claim(store), 0, range(count()))
    partial = partial_of(store)
    small = SPECS[1]
    assert (small.name, list(partial.numbering.touched(*store.reader.manifest("policy", 1).spans_of(["b"])[0]))) == ("b", [0])
    assert refused(store, 1, {"b"}).startswith("PIECES_ELSEWHERE")
    deliver_pieces(partial, content, [0])
    assert not store.lifecycle.settle(partial)
    assert read(store, 1, {"b"})["b"] == np.full(small.shape, 1, np.uint32).tobytes()
    assert refused(store, 1, {"a", "b"}).startswith("PIECES_ELSEWHERE")
    assert refused(store, 1).startswith("PIECES_ELSEWHERE")


def test_pieces_that_arrive_before_ready_are_durable_from_ready_on(root: Path) -> None:
    store = opened(root)
    lacks, arrives = [0, 1, 2], [0, 2]
    kept: list[VerifiedVersion] = []

    def fetched(versions: Sequence[VerifiedVersion], content: dict[str, bytes]) -> None:
        (version,) = versions
        deliver_pieces(version, content, arrives)
        assert (version.folder / HELD_FILE).read_bytes() != version.held().to_bytes(), "not before READY"
        kept.append(version)

    record, content = publish_partial(store, claim(store), 0, lacks, before_ready=fetched)
    assert partial_of(store) is kept[0]
    assert kept[0].folder == store.folder.path(record)
    store.close()
    store = opened(root)
    assert list(partial_of(store).held().missing()) == [1]
    deliver_pieces(partial_of(store), content, [1])
    assert store.lifecycle.settle(partial_of(store))
    assert contents(store.folder.path(record), LAYOUTS) == content
    store.close()


def test_a_version_whose_pieces_have_all_arrived_before_ready_is_whole_at_ready(store: Store) -> None:
    def fetched(versions: Sequence[VerifiedVersion], content: dict[str, bytes]) -> None:
        deliver_pieces(versions[0], content, [1])

    record, content = publish_partial(store, claim(store), 0, [1], before_ready=fetched)
    folder = store.folder.path(record)
    assert store.lifecycle.partials() == []
    assert set(path.name for path in folder.iterdir()) == WHOLE
    assert verify(folder, "policy", 1, record.fingerprint).whole
    assert contents(folder, LAYOUTS) == content
    assert set(read(store, 1)) == {spec.name for spec in SPECS}


@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize("lacks", [[], [1]])
def test_a_version_waits_for_ready_until_it_is_or_fails(store: Store, lacks: list[int], fails: bool) -> None:
    def hold(versions: Sequence[VerifiedVersion], content: dict[str, bytes]) -> None:
        assert store.reader.waiting("policy", 1) is versions[0]
        assert store.lifecycle.partials(UPLOADING) == [*versions]
        assert refused(store, 1).startswith("VERSION_GONE"), "by servers"
        if fails:
            raise ReplicasShort("no node")

    with pytest.raises(ReplicasShort) if fails else nullcontext():
        publish_partial(store, claim(store), 0, lacks, before_ready=hold)
    assert store.reader.waiting("policy", 1) is None
    assert store.lifecycle.partials(UPLOADING) == []
    assert len(store.lifecycle.partials()) == (not fails and len(lacks))


def test_a_version_that_is_aborted_while_it_waits_for_ready_waits_no_longer(store: Store) -> None:
    def abort(versions: Sequence[VerifiedVersion], content: dict[str, bytes]) -> None:
        store.lifecycle.abort("policy", 1, "an operator's command")

    with pytest.raises((FailedPrecondition, Unavailable)):
        publish_partial(store, claim(store), 0, [1], before_ready=abort)
    assert store.reader.verified("policy", 1) is None


def test_a_version_whose_headers_are_damaged_is_lost_and_never_whole(store: Store) -> None:
    epoch = claim(store)
    publish(store, epoch, 0)
    record, content = publish_partial(store, epoch, 1, [1])
    with (store.folder.path(record) / FILE).open("r+b") as file:
        file.write(b"\xff")
    deliver_pieces(partial_of(store, 2), content, [1])
    assert store.lifecycle.settle(partial_of(store, 2))
    lost = store.catalogue.get("policy", 2)
    assert (lost.state, lost.reason.partition(":")[0]) == (RETIRED, "LOST")
    assert refused(store, 2).startswith("VERSION_GONE")
    assert numbers(store) == [1]


def test_a_lost_version_refuses_its_readers_even_those_that_wait_and_pin_it(root: Path) -> None:
    store = opened(root)
    publish_partial(store, claim(store), 0, [1])
    partial = partial_of(store)
    store.lifecycle.pin("policy", 1, "servers/one")
    changed = []
    store.catalogue.version_changed.connect(changed.append)
    lost = store.lifecycle.lose("policy", 1, "1 of its pieces has no holder")
    assert changed == [lost]
    assert (lost.state, lost.reason) == (RETIRED, "LOST: 1 of its pieces has no holder")
    with pytest.raises(ResourceNotFound, match="no longer READY"):
        partial.await_bytes(None, 0.0)
    with pytest.raises(DaemonError):
        partial.await_bytes([PieceSpan(FILE, 0, 1)], 0.0)
    with pytest.raises(OSError, match="No such file"):
        partial.add(1)
    assert store.lifecycle.lose("policy", 1, "again") == lost
    settle(store)
    store.close()
    again = opened(root)
    assert (again.catalogue.get("policy", 1).reason, again.lifecycle.partials()) == (lost.reason, [])
    again.close()


@pytest.mark.parametrize("reads", ["its folder", "its bytes", "the data port's file", "the data port's boxes", "an export"])
def test_a_reader_that_misses_a_file_of_a_version_lost_meanwhile_is_told_so(store: Store, reads: str) -> None:
    store.reader.borrow = lambda partial, spans: nullcontext()  # as in a daemon that holds no versions
    record, _ = publish_partial(store, claim(store), 0, [1])
    boxes = boxes_request(record.name, [(SPECS[0].name, full_box(SPECS[0].shape))])
    served = PinnedVersion(StoredVersions(store.reader), "policy", 1, replicates=False)
    exported = _export(store.reader, "policy", 1)
    next(exported)  # the first file alone

    def lose() -> None:
        store.lifecycle.lose("policy", 1, "its node is gone")

    def read() -> None:
        if reads == "its folder":
            with store.reader.folder("policy", 1) as (_, folder):
                lose()
                (folder / FILE).read_bytes()
        elif reads == "its bytes":
            with store.reader.reading("policy", 1, [PieceSpan(FILE, 0, 1)]):
                lose()
                (store.folder.path(record) / FILE).read_bytes()
        elif reads == "the data port's file":
            lose()
            served.open(FILE)
        elif reads == "the data port's boxes":
            checked = served.boxes(boxes, store.reader.manifest("policy", 1))
            lose()
            with served.packed(checked) as chunks:
                list(chunks)
        else:
            lose()
            list(exported)

    with pytest.raises(ResourceNotFound, match="models/policy/versions/1 is RETIRED, not READY") as gone:
        read()
    assert gone.value.reason == "VERSION_GONE"


def test_holes_of_a_lost_version_are_never_read_from_files_that_were_opened_before(store: Store) -> None:
    store.reader.borrow = lambda partial, spans: nullcontext()
    record, _ = publish_partial(store, claim(store), 0, [1])
    boxes = boxes_request(record.name, [(SPECS[0].name, full_box(SPECS[0].shape))])
    served = PinnedVersion(StoredVersions(store.reader), "policy", 1, replicates=False)
    checked = served.boxes(boxes, store.reader.manifest("policy", 1))
    with served.packed(checked) as chunks:
        next(chunks)  # its files are mapped from now on
    served.open(FILE)
    store.lifecycle.lose("policy", 1, "its node is gone")
    with pytest.raises(ResourceNotFound, match="is RETIRED"), served.packed(checked):
        pass
    with pytest.raises(ResourceNotFound, match="is RETIRED"), served.served.reading([PieceSpan(FILE, 0, 1)]):
        pass
    served.close()


def test_a_whole_version_is_never_lost(store: Store) -> None:
    record = publish(store, claim(store), 0)
    assert store.lifecycle.lose("policy", 1, "no") == record
    assert read(store, 1)


@pytest.mark.parametrize("seed", range(20))
def test_restarts_find_what_had_arrived_and_never_a_hole(root: Path, seed: int) -> None:
    random, store = Random(seed), opened(root)
    lacks = random.sample(range(count()), random.randint(1, count()))
    record, content = publish_partial(store, claim(store), 3, lacks, ["one", "two"])
    while store.reader.partial("policy", 1) is not None:
        partial = partial_of(store)
        assert partial.nodes == {"one", "two"}
        left = list(partial.held().missing())
        arrived = random.sample(left, random.randint(0, len(left)))
        deliver_pieces(partial, content, arrived)
        held = partial.held()
        if random.random() < 0.5:
            store.close()
            if random.random() < 0.2:
                shutil.copyfile(store.folder.path(record) / HELD_FILE, root / "kept")
                (store.folder.path(record) / HELD_FILE).write_bytes(b"damaged" * 9)
            store = opened(root)
            found = partial_of(store).held()
            assert found == held or (found.bits == 0).all()
            assert store.catalogue.get("policy", 1) == record
        if partial_of(store).held().whole():
            assert store.lifecycle.settle(partial_of(store))
        else:
            assert refused(store, 1).startswith("PIECES_ELSEWHERE")
    assert contents(store.folder.path(record), LAYOUTS) == content
    store.close()
    store = opened(root)
    assert store.lifecycle.partials() == []
    assert set(read(store, 1)) == {"a", "b"}
    store.close()


def test_without_its_checksums_a_version_cannot_be_completed_and_is_dropped_as_damaged(root: Path) -> None:
    store = opened(root)
    epoch = claim(store)
    publish(store, epoch, 0)
    record, _ = publish_partial(store, epoch, 1, [1])
    path = store.folder.path(record) / PIECES_FILE
    store.close()
    path.write_bytes(path.read_bytes().replace(b'"one"', b'"two"'))
    again = opened(root)
    assert numbers(again) == [1]
    again.close()


def test_files_of_the_pieces_that_a_killed_daemon_left_of_a_whole_version_are_removed(root: Path) -> None:
    store = opened(root)
    record, content = publish_partial(store, claim(store), 0, [1])
    deliver_pieces(partial_of(store), content, [1])
    folder = store.folder.path(record)
    left = {name: (folder / name).read_bytes() for name in (HELD_FILE, PIECES_FILE)}
    assert store.lifecycle.settle(partial_of(store))
    store.close()
    for name, data in left.items():
        (folder / name).write_bytes(data)
    again = opened(root)
    assert (numbers(again), again.lifecycle.partials()) == ([1], [])
    assert set(path.name for path in folder.iterdir()) == WHOLE
    again.close()


def test_pieces_of_another_version_are_refused_before_anything_is_ready(store: Store) -> None:
    record = store.lifecycle.begin("policy", claim(store), 0, "job")
    with pytest.raises(ValueError, match="pieces with"):
        store.lifecycle.commit(record, {"a": 0, "b": 0}, (), missing=MissingPieces(Bitmap(3), (1, 2, 3), frozenset(["one"])))
    assert numbers(store) == []


def test_the_newest_whole_version_outlives_newer_ones_that_lack_pieces(root: Path) -> None:
    store = opened(root, keep=2)
    epoch = claim(store)
    publish(store, epoch, 0)
    published = [publish_partial(store, epoch, step, [1]) for step in (1, 2, 3)]
    assert numbers(store) == [1, 4]
    deliver_pieces(partial_of(store, 4), published[-1][1], [1])
    assert store.lifecycle.settle(partial_of(store, 4))
    publish(store, epoch, 4)
    assert numbers(store) == [4, 5]
    settle(store)
    store.close()


@pytest.mark.parametrize("seed", range(30))
def test_retention_keeps_the_newest_and_the_newest_whole_version_and_no_more_than_it_may(seed: int) -> None:
    random = Random(seed)
    ready = [VersionRecord("m", n, READY, 1, n, "j", 10, 1, 0.0) for n in random.sample(range(1, 30), random.randint(1, 8))]
    partial = {record.number for record in ready if random.random() < 0.5}
    keep = random.randint(1, 4)
    kept = {r.number for r in ready} - {r.number for r in Retention(keep).surplus(ready, (), partial)}
    whole = {record.number for record in ready} - partial
    assert max(record.number for record in ready) in kept
    assert not whole or max(whole) in kept
    assert len(kept) <= max(keep, 2)


def test_a_models_files_cannot_have_the_names_of_the_stores_own(store: Store) -> None:
    for name in (HELD_FILE, PIECES_FILE):
        with pytest.raises(InvalidArgument, match="not the store's own"):
            check_files({name: b""})
