"""Sets of files on a node: laid out, verified, taken over by a READY version, and used again once nobody has them open."""

import mmap
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from resharder.converters.geometry.layout import Range, TensorSpec, full_box
from resharder.converters.storage.digest import digest
from resharder.converters.storage.files import BITS, FileLayout, MappedFiles, lay_out
from resharder.server.holding import file_proofs, set_pool
from resharder.server.holding.file_proofs import FileProofs, ProofFailed, SetProof, begin_proof
from resharder.server.holding.part_files import AHEAD, FileProof, FilesOnNode, GatheredBoxes, boxes_of_file_to_proto
from resharder.server.holding.transfers import FetchFailed, ReceivedBytes
from resharder.server.infra.filesystem import unused_elsewhere
from resharder.server.node.box_gathering import BoxGatherer
from resharder.server.node.copies import NodeCopies
from resharder.server.node.daemon_client import RemoteVersion
from resharder.server.node.file_sets import FileSet, FileSets
from resharder.server.store.digests import digest_tensors
from resharder.v1 import node_pb2
from xxhash import xxh3_64_intdigest

from tests.support.observing import wait_until
from tests.support.publishing import random_weights

SPECS = [TensorSpec("a", "BF16", (3000, 1024)), TensorSpec("b", "F32", (64,)), TensorSpec("elsewhere", "BF16", (64, 64))]
FILES = lay_out(SPECS, homes={"elsewhere": "another"})
OWN = tuple(file for file in FILES if "a" in file.by_name)
OTHERS = [(placed.spec.name, placed.spec.shape) for file in OWN for placed in file.tensors if placed.spec.name != "a"]
PUBLISHER, VERSION = "models/policy/publishers/1", "models/policy/versions/1"
State = node_pb2.FileSetOrder.State
read_part = file_proofs._read_part
WEIGHTS = random_weights(SPECS, 1)


class Daemon:
    """Requests of a node to a daemon."""

    def __init__(self) -> None:
        self.proofs: list[tuple[str, str, dict[str, FileProof]]] = []
        self.frozen = frozenset[str]()

    def reserved_files(self, publisher: str, reservation: str, node: str) -> FilesOnNode:
        return FilesOnNode(OWN, frozen=self.frozen)

    def put_proof(
        self, version: str, node: str, instance: str, set: str, problem: str, files: dict[str, FileProof], unreachable: str
    ) -> None:
        self.proofs.append((set, problem, files))

    def version(self, name: str) -> RemoteVersion:
        return RemoteVersion(name, "fingerprint", FILES, "daemon:1")


class Site:
    """A node's sets and versions, in shared memory."""

    def __init__(self, root: Path, limit: int = 1 << 30) -> None:
        self.root, self.daemon, self.copies = root, Daemon(), NodeCopies(root, limit)
        self.gatherer = BoxGatherer(None, ReceivedBytes())
        self.sets = FileSets(root, self.copies, self.daemon, "one", "instance", self.gatherer)  # type: ignore[arg-type]

    def follow(self, *sets: tuple[str, int], reservation: str = "r", drained: bool = False, closed: Sequence[str] = ()) -> None:
        orders = [node_pb2.FileSetOrder(id=id, version=VERSION, state=state, closed=closed) for id, state in sets]  # type: ignore[arg-type]
        self.sets.follow([node_pb2.ReservationOrder(id=reservation, publisher=PUBLISHER, sets=orders)], drained=drained)

    def reported(self) -> dict[str, Path]:
        return {found.id: Path(found.folder) for each in self.sets.report() for found in each.sets}

    def free(self, reservation: str = "r") -> tuple[str, Path]:
        """The first set that is laid out."""
        self.follow(reservation=reservation)
        wait_until(lambda: bool(self.reported()))
        return next(iter(self.reported().items()))

    def ready(self) -> Path:
        """The folder of a version that ranks have written here."""
        set, folder = self.free()
        write(folder)
        self.follow((set, State.UPLOADING))
        self.follow((set, State.VERIFYING))
        wait_until(lambda: not self.sets.has(VERSION) or (bool(self.daemon.proofs) and not self._busy(set)))
        self.follow((set, State.READY))
        wait_until(lambda: self.copies.get(VERSION) is not None)
        version = self.copies.get(VERSION)
        assert version is not None
        return version.folder

    def of(self, set: str) -> FileSet:
        return next(found for each in self.sets._reservations.values() for found in each.taken.values() if found.id == set)

    def _busy(self, set: str) -> bool:
        return any(found.id == set and found.busy for each in self.sets._reservations.values() for found in each.taken.values())


def write(folder: Path) -> None:
    with MappedFiles(folder, OWN, writable=True) as maps:
        for name in maps.specs:
            maps.arrays[name][...] = WEIGHTS[name]


def proved(folder: Path, patience: float = 60.0, files: Sequence[FileLayout] = OWN) -> SetProof:
    return FileProofs(folder, files, begin_proof).prove(files, patience)


def inodes(folder: Path) -> set[int]:
    return {(folder / file.path).stat().st_ino for file in OWN}


@pytest.fixture
def site(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setattr(set_pool, "_PAUSE", 0.02)
    root = Path(tempfile.mkdtemp(prefix="resharder-sets-", dir="/dev/shm"))
    made = Site(root)
    yield made
    made.sets.close()
    shutil.rmtree(root)


def test_a_proof_has_the_digests_of_what_ranks_have_written(site: Site) -> None:
    _, folder = site.free()
    write(folder)
    (proof,) = proved(folder).values()
    names = list(OWN[0].by_name)
    arrays = {name: WEIGHTS[name].view(BITS[WEIGHTS[name].itemsize]) for name in names}
    expected = [digest(array, full_box(array.shape), array.shape) for array in arrays.values()]
    assert list(proof.digests) == expected
    assert len(proof.checksums) == 1
    with (folder / OWN[0].path).open("r+b"), pytest.raises(ProofFailed, match=r"open for writing after 0.05 s"):
        proved(folder, 0.05)
    with (folder / OWN[0].path).open("r+b") as file:
        file.seek(20)
        file.write(b"?")
    with pytest.raises(ProofFailed, match="header was overwritten"):
        proved(folder)


def test_a_proof_that_fails_leaves_no_lease_on_a_file(site: Site) -> None:
    _, folder = site.free()
    write(folder)
    files = lay_out(SPECS, 1 << 20)
    for file in files[:-1]:
        (folder / file.path).write_bytes(file.header + bytes(file.size - len(file.header)))
    with pytest.raises(OSError, match="No such file"):
        proved(folder, files=files)
    assert len(files) > 1
    assert all(unused_elsewhere(folder / file.path) for file in files[:-1])


def test_a_proof_is_the_same_however_blocks_cut_the_tensors(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_proofs, "_BLOCK_BYTES", 4096)
    shapes = {"BF16": [(70, 33), (5, 7, 11)], "F32": [(3000,), (1, 9)], "F64": [(513, 3), ()], "I8": [(12289,), (0, 4)]}
    specs = [TensorSpec(f"{dtype} {shape}", dtype, shape) for dtype, some in shapes.items() for shape in some]
    (file,) = lay_out(specs)
    random = np.random.default_rng(1)
    content = file.header + random.bytes(file.size - len(file.header))
    (site.sets._root / file.path).write_bytes(content)
    monkeypatch.setattr(file_proofs, "PIECE_BYTES", 3 * 4096)
    proof = proved(site.sets._root, files=[file])[file.path]
    with MappedFiles(site.sets._root, [file]) as maps:
        assert list(proof.digests) == list(digest_tensors(maps, 1).values())
    parts = [content[at : at + 3 * 4096] for at in range(0, file.size, 3 * 4096)]
    assert list(proof.checksums) == [xxh3_64_intdigest(part) for part in parts]


@pytest.mark.parametrize("changed", [False, True])
def test_closed_files_are_verified_before_the_last_seal_and_again_once_a_process_has_opened_them(
    site: Site, monkeypatch: pytest.MonkeyPatch, changed: bool
) -> None:
    read, (file,) = list[str](), OWN
    monkeypatch.setattr(file_proofs, "_read_part", lambda *part: (read.append(part[1].path), read_part(*part))[1])
    set, folder = site.free()
    write(folder)
    site.follow((set, State.UPLOADING), closed=[file.path])
    site.of(set).proofs._begun[file.path].wait()
    parts = len(read)
    with ThreadPoolExecutor(1) as pool:
        if changed:
            late = pool.submit((folder / file.path).open, "r+b")
            wait_until(lambda: not site.of(set).proofs._begun[file.path].lease.is_intact)
        site.follow((set, State.VERIFYING))
        if changed:
            with late.result() as opened:  # the digests were discarded, which ends the lease
                opened.seek(file.size - 1)
                opened.write(b"?")
    wait_until(lambda: bool(site.daemon.proofs))
    assert len(read) == (2 * parts if changed else parts)
    ((_, problem, found),) = site.daemon.proofs
    if not problem or not changed:  # the writer may come while the files are verified again
        assert found == proved(folder)
    else:
        assert "for writing while it was verified" in problem


def test_a_ready_version_has_the_files_of_its_set_and_holes_for_the_others(site: Site) -> None:
    folder = site.ready()
    version = site.copies.get(VERSION)
    assert version is not None
    own = {piece for file in OWN for piece in version.numbering.touched(file.path, 0, file.size)}
    assert set(version.held()) == set(version.wanted()) == own < set(range(version.numbering.count))
    with MappedFiles(folder, FILES) as maps:
        assert all((maps.arrays[name] == WEIGHTS[name]).all() for name in ("a", "b"))
    assert version.daemon_address == "daemon:1"
    wait_until(lambda: site.copies.reserved_bytes == 2 * OWN[0].size or site.copies.reserved_bytes == OWN[0].size)


def test_files_of_a_dropped_version_are_used_again_once_no_process_has_mapped_them(site: Site) -> None:
    folder = site.ready()
    used, before = inodes(folder), set(site.reported())
    with (folder / OWN[0].path).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        content = mapped[:]
        assert not site.copies.drop(VERSION), "a worker has it mapped"
        assert mapped[:] == content
    assert site.copies.drop(VERSION)
    assert not folder.exists()
    wait_until(lambda: any(inodes(path) == used for path in site.reported().values()))
    (again,) = (id for id, path in site.reported().items() if inodes(path) == used)
    assert again not in before, "under another id"
    assert sorted(path.name for path in site.reported()[again].iterdir()) == sorted(file.path for file in OWN)
    write(site.reported()[again])
    assert proved(site.reported()[again])


def test_files_that_a_late_rank_keeps_open_for_long_are_unlinked_rather_than_used_again(site: Site) -> None:
    set, folder = site.free()
    with (folder / OWN[0].path).open("r+b") as late:
        site.follow((set, State.UPLOADING))
        former = inodes(folder)
        site.follow((set, State.ENDED))

        def kept() -> bool:
            site.follow()
            try:
                return any(inodes(path) == former for path in (site.root / "sets").iterdir())
            except FileNotFoundError:  # a thread moves a set, or lays one out: look again
                return True

        wait_until(lambda: not folder.exists() and not kept())
        late.write(b"too late")
        late.flush()
    site.free()
    assert all(inodes(path).isdisjoint(former) for path in site.reported().values())


def test_a_version_does_not_wait_for_files_that_a_late_rank_keeps_open(site: Site) -> None:
    first, folder = site.free()
    with (folder / OWN[0].path).open("r+b"):
        former = inodes(folder)
        site.follow((first, State.UPLOADING))
        wait_until(lambda: len(site.reported()) == 2)
        second = next(id for id in site.reported() if id != first)
        began = time.monotonic()

        def further() -> set[str]:
            site.follow((first, State.ENDED), (second, State.UPLOADING))
            return {*site.reported()} - {first, second}

        wait_until(lambda: bool(further()), "another set is laid out")
        assert time.monotonic() - began < 2.0
    wait_until(lambda: any(inodes(path) == former for path in site.reported().values()), "its files are used again")


def test_files_of_an_ended_reservation_are_never_used_again(site: Site) -> None:
    folder = site.ready()
    used = inodes(folder)
    site.follow(reservation="of the next epoch")
    assert site.copies.drop(VERSION)
    wait_until(lambda: bool(site.reported()))
    assert all(inodes(path).isdisjoint(used) for path in site.reported().values())
    assert len(site.reported()) == 1


def test_a_set_that_cannot_be_verified_is_reported_and_never_held(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_proofs, "PATIENCE", 0.05)
    set, folder = site.free()
    (folder / OWN[0].path).write_bytes(b"another content")
    site.follow((set, State.UPLOADING))
    site.follow((set, State.VERIFYING))
    wait_until(lambda: bool(site.daemon.proofs))
    ((reported, problem, files),) = site.daemon.proofs
    assert (reported, files) == (set, {})
    assert "its header was overwritten" in problem
    wait_until(lambda: not site._busy(set))
    site.follow((set, State.READY))
    wait_until(lambda: set not in site.reported())
    assert site.copies.get(VERSION) is None


def test_a_node_without_memory_for_a_set_says_so(site: Site) -> None:
    site.copies.limit_bytes = 1 << 20
    site.follow()
    wait_until(lambda: any("memory full: it needs" in each.problem for each in site.sets.report()))
    assert site.reported() == {}


def test_a_drained_node_has_no_free_set(site: Site) -> None:
    _, folder = site.free()
    site.follow(drained=True)
    wait_until(lambda: not folder.exists())
    assert site.reported() == {}


def test_of_sets_that_end_together_as_many_are_kept_as_memory_is_reserved_for(site: Site) -> None:
    taken = list[str]()
    for _ in range(4):
        site.follow(*((id, State.UPLOADING) for id in taken))
        wait_until(lambda: len(site.reported()) == len(taken) + 1)
        taken.append(next(id for id in site.reported() if id not in taken))
    site.follow(*((id, State.UPLOADING) for id in taken))
    wait_until(lambda: len(site.reported()) == 5)
    site.follow(*((id, State.ENDED) for id in taken))
    wait_until(lambda: len(list((site.root / "sets").iterdir())) == AHEAD, timeout=60)
    wait_until(lambda: len(site.reported()) == AHEAD, timeout=60)
    assert site.copies.reserved_bytes == AHEAD * OWN[0].size


def test_boxes_of_a_version_that_has_ended_are_waited_for_no_longer(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting, given_up = threading.Event(), threading.Event()

    def gather(
        version: str, tag: str, folder: Path, own: FilesOnNode, sources: dict[str, str], stopped: Callable[[], bool]
    ) -> None:
        waiting.set()
        wait_until(stopped)
        given_up.set()
        raise FetchFailed("the version has ended")

    monkeypatch.setattr(site.gatherer, "gather", gather)
    set, folder = site.free()
    write(folder)
    site.follow((set, State.VERIFYING))
    assert waiting.wait(60)
    site.follow((set, State.VERIFYING))
    assert not given_up.wait(0.2)
    site.follow((set, State.ENDED))
    assert given_up.wait(60)
    wait_until(lambda: set not in site.reported() or not site._busy(set))
    site.follow((set, State.ENDED))
    wait_until(lambda: len(site.reported()) == 1 and set not in site.reported(), "its files are used again")


NEXT = "models/policy/versions/2"
HALF = (Range(0, 1500), Range(0, 1024))


@pytest.mark.parametrize("left", ["a whole file", "boxes", "nothing"])
def test_what_ranks_leave_as_it_was_is_that_of_the_version_before_which_stays_as_it_is(site: Site, left: str) -> None:
    site.daemon.frozen = frozenset({OWN[0].path})
    before = site.ready()
    content = (before / OWN[0].path).read_bytes()
    wait_until(lambda: site.sets.report()[0].base == VERSION)
    wait_until(lambda: site.copies.drop(VERSION), "the node keeps the file, and not the version")
    wait_until(lambda: bool(site.sets.report()[0].sets))
    (found, *_) = site.sets.report()[0].sets
    folder = Path(found.folder)
    boxes = {"a whole file": [], "boxes": [("a", HALF), *[(name, full_box(shape)) for name, shape in OTHERS]]}.get(left)
    if left != "a whole file":
        with MappedFiles(folder, OWN, writable=True) as maps:
            rows = slice(1500 if left == "boxes" else 0, 3000)
            maps.arrays["a"][rows] = WEIGHTS["a"][rows] ^ 1
            for name, _ in OTHERS if left == "nothing" else ():
                maps.arrays[name][...] = WEIGHTS[name]
    unchanged = [boxes_of_file_to_proto(GatheredBoxes(OWN[0].path, "", tuple(boxes)))] if boxes is not None else []
    for state in (State.UPLOADING, State.VERIFYING):
        order = node_pb2.FileSetOrder(
            id=found.id, version=NEXT, state=state, base=VERSION, unchanged=unchanged if state == State.VERIFYING else ()
        )
        site.sets.follow([node_pb2.ReservationOrder(id="r", publisher=PUBLISHER, sets=[order])], drained=False)
    wait_until(lambda: site.daemon.proofs[-1][0] == found.id)
    _, problem, proofs = site.daemon.proofs[-1]
    assert not problem
    expected = WEIGHTS["a"].copy()
    rows = {"a whole file": slice(0, 0), "boxes": slice(1500, 3000), "nothing": slice(0, 3000)}[left]
    expected[rows] ^= 1
    assert proofs[OWN[0].path].digests[list(OWN[0].by_name).index("a")] == digest(expected, full_box((3000, 1024)), (3000, 1024))
    kept = next(path for path in site.root.glob(f"sets/*/{OWN[0].path}") if path.read_bytes() == content)
    assert ((folder / OWN[0].path).stat().st_ino == kept.stat().st_ino) == (left == "a whole file")


def test_a_set_whose_version_before_is_gone_is_reported_and_never_proven(site: Site) -> None:
    site.daemon.frozen = frozenset({OWN[0].path})
    site.ready()
    wait_until(lambda: site.sets.report()[0].base == VERSION and bool(site.sets.report()[0].sets))
    (found, *_) = site.sets.report()[0].sets
    unchanged = [boxes_of_file_to_proto(GatheredBoxes(OWN[0].path, "", ()))]
    order = node_pb2.FileSetOrder(
        id=found.id, version=NEXT, state=State.VERIFYING, base="models/policy/versions/0", unchanged=unchanged
    )
    site.sets.follow([node_pb2.ReservationOrder(id="r", publisher=PUBLISHER, sets=[order])], drained=False)
    wait_until(lambda: site.daemon.proofs[-1][0] == found.id)
    _, problem, proofs = site.daemon.proofs[-1]
    assert (proofs, "the frozen files of models/policy/versions/0 are gone" in problem) == ({}, True), problem


def test_the_files_of_a_set_that_another_version_has_too_are_not_used_again(site: Site) -> None:
    site.daemon.frozen = frozenset({OWN[0].path})
    before = site.ready()
    number, content = (before / OWN[0].path).stat().st_ino, (before / OWN[0].path).read_bytes()
    with (before / OWN[0].path).open("rb") as opened:
        wait_until(lambda: site.sets.report()[0].base == VERSION)
        assert site.copies.drop(VERSION), "who reads it, keeps it"
        wait_until(lambda: len(site.sets.report()[0].sets) >= 1)
        for folder in site.reported().values():
            assert (folder / OWN[0].path).stat().st_ino != number
            write(folder)
        assert opened.read() == content
