"""Files are digested once every writer has closed them, and a digest counts as long as nobody opens the file for writing."""

import os
import tempfile
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from resharder.converters.geometry.chunking import cut_chunks
from resharder.converters.geometry.layout import Range, TensorSpec, full_box
from resharder.converters.storage.digest import digest
from resharder.converters.storage.files import FileLayout, MappedFiles, lay_out
from resharder.converters.wire.chunk_frame import ChunkHeader
from resharder.server.holding.file_proofs import FileProofs
from resharder.server.infra.filesystem import read_lease
from resharder.server.ingest import publisher
from resharder.server.ingest.boxes import pack
from resharder.server.ingest.intake import Intake
from resharder.server.ingest.upload import ReleasedFiles
from resharder.server.state.errors import InvalidArgument
from resharder.server.state.version import VersionRecord
from resharder.server.store import digests
from resharder.server.store.store import Store
from xxhash import xxh3_64_intdigest

from tests.support.observing import wait_until
from tests.support.waits import completed

SPECS = [TensorSpec("a", "F32", (2, 8)), TensorSpec("b", "F32", (2, 8)), TensorSpec("c", "F32", (8,))]
FILES = lay_out(SPECS, max_file_bytes=64)
A, B, C = (file.path for file in FILES)
BOXES = {0: [(0, (Range(0, 1), Range(0, 8))), (1, full_box((2, 8)))], 1: [(0, (Range(1, 1), Range(0, 8))), (2, full_box((8,)))]}


@given(
    writers=st.dictionaries(st.sampled_from("abc"), st.sets(st.integers(0, 2), min_size=1), min_size=1),
    releases=st.lists(st.tuples(st.integers(0, 2), st.sampled_from("abc")), max_size=20),
)
def test_a_file_is_complete_once_when_its_last_writer_has_released_it(
    writers: dict[str, set[int]], releases: list[tuple[int, str]]
) -> None:
    files, released, complete = ReleasedFiles(writers), set[tuple[int, str]](), list[str]()
    for rank, file in releases:
        if file not in writers:
            with pytest.raises(InvalidArgument, match="expected files of the version"):
                files.release(rank, [file])
            continue
        complete += files.release(rank, [file])
        released.add((rank, file))
        assert sorted(complete) == sorted(f for f, ranks in writers.items() if {(rank, f) for rank in ranks} <= released)


class Site:
    """Two ranks that both write into `a`, while `b` and `c` are the first's and the second's alone."""

    def __init__(self, folder: Path) -> None:
        self.store = Store(folder / "store")
        self.intake = Intake(self.store, writer_patience=5, chunk_bytes=256)
        name = self.intake.create_publisher("policy", "job", 2, {"config.json": b"{}"}).name
        for rank, boxes in BOXES.items():
            packed = pack((tensor, box, False) for tensor, box in boxes)
            self.intake.register_slot(name, rank, str(rank), SPECS, packed)
        self.record: VersionRecord = completed(self.intake.create_version, name, 0, 1)
        completed(self.intake.create_version, name, 1, 1)
        self.folder = self.store.folder.path(self.record)
        random = np.random.default_rng(1)
        self.values = {spec.name: random.integers(0, 1 << 32, spec.shape, np.uint32) for spec in SPECS}

    def write(self, rank: int, file: str, add: int = 0) -> None:
        (layout,) = (each for each in FILES if each.path == file)
        with MappedFiles(self.folder, [layout], writable=True) as maps:
            for tensor, box in BOXES[rank]:
                name = SPECS[tensor].name
                if name in layout.by_name:
                    index = tuple(slice(r.start, r.start + r.count) for r in box)
                    maps.arrays[name][index] = self.values[name][index] + np.uint32(add)

    def release(self, rank: int, *files: str) -> None:
        self.intake.release_files("policy", self.record.number, self.record.epoch, rank, files)

    def digests(self, rank: int) -> list[int]:
        found = []
        for tensor, box in BOXES[rank]:
            part = self.values[SPECS[tensor].name][tuple(slice(r.start, r.start + r.count) for r in box)]
            found.append(digest(np.ascontiguousarray(part), box, SPECS[tensor].shape))
        return found

    def seal(self, rank: int, mapped: bool = True) -> None:
        self.intake.seal_slot("policy", self.record.number, self.record.epoch, rank, self.digests(rank), mapped)

    def ended(self) -> VersionRecord:
        wait_until(lambda: not self.intake.uploads(), "the version has ended")
        return self.store.catalogue.get("policy", self.record.number)

    @property
    def early(self) -> FileProofs:
        upload = self.intake.upload("policy", self.record.number)
        assert upload is not None
        return upload._proofs

    def digested(self, *files: str) -> None:
        wait_until(lambda: self.early._begun.keys() == set(files), f"{files} are digested")


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setattr(publisher, "lay_out", lambda specs, homes, **_: lay_out(specs, 64, homes))
    with tempfile.TemporaryDirectory(prefix="resharder-test-", dir="/dev/shm") as folder:
        made = Site(Path(folder))
        yield made
        made.intake.drain(0)
        made.store.close()


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Files in the order in which they were mapped to be read, early and after the seals."""
    found, plain = list[str](), MappedFiles.__init__

    def opened(self: MappedFiles, folder: Path, files: Iterable[FileLayout], *, writable: bool = False) -> None:
        plain(self, folder, files, writable=writable)
        if not writable:
            found.extend(file.path for file in self._files)

    monkeypatch.setattr(MappedFiles, "__init__", opened)
    return found


def test_a_file_is_digested_when_its_last_writer_has_closed_it_and_not_again_after_the_seals(site: Site, read: list[str]) -> None:
    site.write(0, A)
    site.write(0, B)
    site.release(0, B, A)
    site.digested(B)
    site.write(1, A)
    site.release(1, A)
    site.digested(A, B)
    site.write(1, C)
    for rank in (0, 1):
        site.seal(rank)
    assert site.ended().state == "READY"
    assert read == [B, A, C]


def test_a_file_that_is_still_open_for_writing_is_digested_after_the_seals(site: Site, read: list[str]) -> None:
    (layout,) = (each for each in FILES if each.path == B)
    with MappedFiles(site.folder, [layout], writable=True):
        site.release(0, B)
        site.digested()
        site.write(0, B)
    for rank in (0, 1):
        site.write(rank, A)
    site.write(1, C)
    for rank in (0, 1):
        site.seal(rank)
    assert site.ended().state == "READY"
    assert sorted(read) == [A, B, C]


def test_a_file_that_is_opened_for_writing_after_its_release_is_digested_again(site: Site, read: list[str]) -> None:
    site.write(0, B)
    site.release(0, B)
    site.digested(B)
    for rank in (0, 1):
        site.write(rank, A)
    site.write(1, C)
    writer = threading.Thread(target=site.write, args=(0, B))  # waits in open() for the lease to end
    writer.start()
    wait_until(lambda: not site.early._begun[B].lease.is_intact, "the kernel breaks the lease")
    for rank in (0, 1):
        site.seal(rank)
    ended = site.ended()
    writer.join()
    assert read[0] == B
    assert sorted(read) == [A, B, B, C]
    assert ended.state == "READY"


def test_bytes_that_were_not_sent_are_refused_with_an_early_digest_too(site: Site) -> None:
    site.write(0, B, add=1)
    site.release(0, B)
    site.digested(B)
    for rank in (0, 1):
        site.write(rank, A)
    site.write(1, C)
    for rank in (0, 1):
        site.seal(rank)
    ended = site.ended()
    assert ended.state == "ABORTED"
    assert "1 of 3 tensors are not what was sent: b" in ended.reason


def test_chunks_of_another_rank_take_early_digests_back(site: Site, read: list[str]) -> None:
    for file in (A, B):
        site.write(0, file)
    site.release(0, A, B)
    site.digested(B)
    boxes = [box for _, box in BOXES[1]]
    values = [site.values[SPECS[tensor].name][tuple(slice(r.start, r.start + r.count) for r in box)] for tensor, box in BOXES[1]]
    (chunk,) = cut_chunks(boxes, [4, 4], 256)
    assert len(chunk) == len(boxes)
    data = b"".join(value.tobytes() for value in values)
    header = ChunkHeader(site.record.number, site.record.epoch, 1, 0, xxh3_64_intdigest(data))
    site.intake.land("policy", header, memoryview(data))
    site.seal(0)
    site.seal(1, mapped=False)
    assert site.ended().state == "READY"
    assert read[0] == B
    assert sorted(read) == [A, B, B, C]


def test_files_that_no_rank_has_reported_are_read_while_the_last_reported_ones_are(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank's seal may overtake its last report."""
    begun, go_on, plain = list[str](), threading.Event(), digests._digests

    def slow(files: MappedFiles, reads: Any, boxes: Any) -> list[int]:
        begun.append(boxes[0].spec.name)
        assert go_on.wait(60)
        return plain(files, reads, boxes)

    monkeypatch.setattr(digests, "_digests", slow)
    site.early._threads = 3
    for rank, file in ((0, A), (0, B), (1, A), (1, C)):
        site.write(rank, file)
    site.release(0, B)
    for rank in (0, 1):
        site.seal(rank)
    wait_until(lambda: sorted(begun) == ["a", "b", "c"], "all files are read", 10)
    go_on.set()
    assert site.ended().state == "READY"


def test_digests_of_an_aborted_version_are_not_waited_for(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on, plain = threading.Event(), threading.Event(), digests._digests

    def slow(*arguments: Any) -> list[int]:
        begun.set()
        assert go_on.wait(60)
        return plain(*arguments)

    monkeypatch.setattr(digests, "_digests", slow)
    site.early._threads = 1
    site.write(0, B)
    site.write(1, C)
    site.release(0, B)
    site.release(1, C)
    assert begun.wait(60)
    proofs, found = site.early, list[str]()
    waits = threading.Thread(target=lambda: found.extend(proofs._settle()))
    waits.start()
    site.intake.abort_version("policy", site.record.number, site.record.epoch, "enough")
    go_on.set()
    waits.join(60)
    assert (waits.is_alive(), found) == (False, [])


def test_an_aborted_version_leaves_no_lease_behind(site: Site) -> None:
    site.write(0, B)
    site.release(0, B)
    site.digested(B)
    lease = site.early._begun[B].lease
    site.intake.abort_version("policy", site.record.number, site.record.epoch, "enough")
    assert not lease.is_intact
    site.release(0, A)  # late, and no error


def test_a_release_of_an_unknown_file_is_refused(site: Site) -> None:
    with pytest.raises(InvalidArgument, match="expected files of the version, got 'model"):
        site.release(0, "model.bin")


def test_a_lease_is_granted_only_without_writers_and_ends_with_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"1")
    with path.open("r+b"):
        assert read_lease(path) is None
    lease = read_lease(path)
    assert lease is not None
    assert path.read_bytes() == b"1"
    assert lease.is_intact
    with pytest.raises(BlockingIOError):
        os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    assert not lease.is_intact
    lease.close()
    path.write_bytes(b"2")
