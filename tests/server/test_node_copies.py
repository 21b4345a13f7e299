"""A node's files of versions: what is there, whole, and dropped."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from resharder.converters.geometry.layout import TensorSpec
from resharder.converters.storage.files import lay_out
from resharder.converters.wire.pieces import Bitmap, PieceSpan
from resharder.converters.wire.ranges import HELD_FILE, PIECE_BYTES
from resharder.server.node.copies import HeldVersion, NodeCopies
from resharder.server.node.daemon_client import RemoteVersion
from resharder.server.state.errors import ResourceExhausted, ResourceNotFound

FILES = tuple(lay_out([TensorSpec("a", "BF16", (10 << 10, 1024))]))  # two pieces
NAME, FILE = "models/policy/versions/7", FILES[0].path
REMOTE = RemoteVersion(NAME, "fingerprint", FILES, "daemon:1")
PARTED = tuple(lay_out([TensorSpec("still", "BF16", (10 << 10, 1024)), TensorSpec("b", "F32", (7,))], homes={"still": "frozen"}))
STILL = next(file for file in PARTED if "still" in file.by_name)


def parted(number: int, still: int = 1) -> RemoteVersion:
    """A version of two files: one of two pieces, whose tensor has the digest `still`, and one of one piece."""
    return RemoteVersion(f"models/policy/versions/{number}", f"{number}", PARTED, "daemon:1", {"still": still, "b": number})


@pytest.fixture
def copies(root: Path) -> Iterator[NodeCopies]:
    return NodeCopies(root, 1 << 30)


def fill(version: HeldVersion, *pieces: int) -> None:
    for piece in pieces:
        for part in version.numbering.parts(piece):
            version.write(part, np.full(part.end - part.start, piece + 1, np.uint8))
        version.add(piece)


def test_a_part_can_be_read_once_its_pieces_are_held_and_workers_see_which_are(copies: NodeCopies) -> None:
    version = copies.add(REMOTE)
    fill(version, 1)
    inside = PieceSpan(FILE, PIECE_BYTES, PIECE_BYTES + 5)
    with version.reading([inside]):
        pass
    with (
        pytest.raises(ResourceNotFound, match=f"this node does not hold piece 0 of {NAME} yet"),
        version.reading([inside, inside._replace(start=PIECE_BYTES - 5)]),
    ):
        pass
    assert (version.folder / HELD_FILE).read_bytes() == bytes([0b10])
    fill(version, 0)
    assert (version.folder / HELD_FILE).read_bytes() == bytes([0b11])
    content = (version.folder / FILE).read_bytes()
    assert (content[0], content[-1], len(content)) == (1, 2, FILES[0].size)


def test_a_dropped_version_comes_back_at_another_path(copies: NodeCopies) -> None:
    """Else a worker that heard of the former copy would map the later one before it is whole."""
    first = copies.add(REMOTE)
    fill(first, 0, 1)
    with (first.folder / FILE).open("rb"):
        assert not copies.drop(NAME), "a process has it open"
    assert copies.drop(NAME)
    assert not first.folder.exists()
    assert copies.add(REMOTE).folder != first.folder


def test_an_earlier_processes_versions_are_removed_and_capacity_is_a_bound(root: Path) -> None:
    left = NodeCopies(root, 1 << 30).add(REMOTE)
    again = NodeCopies(root, FILES[0].size)
    assert not left.folder.exists()
    again.add(REMOTE)
    with pytest.raises(ResourceExhausted, match="memory full: it needs"):
        again.add(replace(REMOTE, name="models/policy/versions/8"))


def test_a_version_takes_the_memory_of_its_wanted_pieces_and_grows_within_the_bound(root: Path) -> None:
    first, last = PIECE_BYTES, FILES[0].size - PIECE_BYTES
    copies = NodeCopies(root, PIECE_BYTES + last - 1)
    version = copies.add(REMOTE, Bitmap.of(2, [0]))
    assert (copies.used_bytes(), list(version.missing())) == (first, [0])
    fill(version, 0)
    assert not len(version.missing())
    with pytest.raises(ResourceExhausted, match=f"memory full: it needs {last} bytes, {last - 1} of"):
        copies.want(version, Bitmap.full(2))
    assert list(version.wanted()) == [0], "which a refusal leaves as it was"
    copies.limit_bytes += 1
    copies.want(version, Bitmap.full(2))
    assert (copies.used_bytes(), list(version.missing())) == (first + last, [1])


def pieces(version: HeldVersion, *positions: int) -> Bitmap:
    """Pieces of the file that stays, by their positions in it."""
    own = list(version.pieces_in(STILL.path))
    return Bitmap.of(version.numbering.count, [own[position] for position in positions])


def inode(version: HeldVersion, file: str = STILL.path) -> int:
    return (version.folder / file).stat().st_ino


def test_a_file_with_the_same_digests_is_that_of_the_version_before_and_counts_once(copies: NodeCopies) -> None:
    one = copies.add(parted(1))
    assert inode(copies.add(parted(2))) != inode(one), "while pieces of it are missing, it is fetched"
    fill(one, *one.wanted())
    content = (one.folder / STILL.path).read_bytes()
    two = copies.add(parted(3))
    assert (inode(two), two.held()) == (inode(one), two.pieces_in(STILL.path))
    assert (two.folder / HELD_FILE).read_bytes() == two.held().to_bytes(), "which workers map"
    assert copies.used_bytes() == 2 * STILL.size + 3 * (sum(file.size for file in PARTED) - STILL.size)
    changed = copies.add(parted(4, still=2))
    assert (inode(changed) == inode(one), len(changed.held())) == (False, 0)
    with (two.folder / STILL.path).open("rb"):
        assert copies.drop(one.name), "what a process reads, it keeps by the other version"
    assert (two.folder / STILL.path).read_bytes() == content
    for number in (2, 3, 4):
        assert copies.drop(parted(number).name)
    assert copies.used_bytes() == 0


def test_of_a_shared_file_a_version_gets_a_copy_before_further_pieces_are_written(copies: NodeCopies) -> None:
    one = copies.add(parted(1), pieces(HeldVersion(parted(1), Path()), 0))
    fill(one, *one.wanted())
    two = copies.add(parted(2), pieces(one, 0))
    three = copies.add(parted(3), pieces(one, 1))
    assert (inode(two) == inode(one), inode(three) == inode(one)) == (True, False), "it lacks a piece that is wanted"
    with (two.folder / STILL.path).open("rb") as opened:
        copies.want(two, pieces(two, 0, 1))
        assert list(two.missing()) == list(pieces(two, 1))
        fill(two, *two.missing())
        opened.seek(PIECE_BYTES)
        assert not any(opened.read()), "of a process that has mapped it, and of the version before"
    assert inode(two) != inode(one)
    found = (two.folder / STILL.path).read_bytes()
    assert found[:PIECE_BYTES] == (one.folder / STILL.path).read_bytes()[:PIECE_BYTES]
    assert len(set(found[PIECE_BYTES:])) == 1
    assert two.shared == {}


def test_a_copy_that_fails_leaves_the_shared_file_and_nothing_else(copies: NodeCopies) -> None:
    one = copies.add(parted(1), pieces(HeldVersion(parted(1), Path()), 0))
    fill(one, *one.wanted())
    two = copies.add(parted(2), pieces(one, 0))
    shared, files = inode(two), sorted(two.folder.iterdir())
    os.truncate(two.folder / STILL.path, PIECE_BYTES - 1)
    with pytest.raises(OSError, match="ends before"):
        copies.want(two, pieces(two, 0, 1))
    assert (inode(two), sorted(two.folder.iterdir())) == (shared, files)
    assert list(two.wanted()) == list(pieces(two, 0))


def test_no_file_is_shared_that_somebody_writes_and_a_piece_that_comes_twice_writes_nothing(copies: NodeCopies) -> None:
    one = copies.add(parted(1))
    fill(one, *one.wanted())
    with (one.folder / STILL.path).open("r+b"):
        assert inode(copies.add(parted(2))) != inode(one)
    two = copies.add(parted(3))
    assert inode(two) == inode(one)
    before = (one.folder / STILL.path).read_bytes()
    for version in (one, two):
        for part in version.numbering.parts(min(pieces(version, 0))):
            version.write(part, np.full(part.end - part.start, 77, np.uint8))
    assert (one.folder / STILL.path).read_bytes() == before
