"""A node's files of versions: what is there, whole, and dropped."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from resharder.converters.geometry.layout import TensorSpec
from resharder.converters.storage.files import lay_out
from resharder.converters.wire.pieces import Bitmap, PieceSpan
from resharder.converters.wire.ranges import HELD_FILE, PIECE_BYTES
from resharder.server.node.copies import HeldVersion, NodeCopies
from resharder.server.state.errors import ResourceExhausted, ResourceNotFound

FILES = tuple(lay_out([TensorSpec("a", "BF16", (10 << 10, 1024))]))  # two pieces
NAME, FILE = "models/policy/versions/7", FILES[0].path


@pytest.fixture
def copies(root: Path) -> Iterator[NodeCopies]:
    return NodeCopies(root, 1 << 30)


def fill(version: HeldVersion, *pieces: int) -> None:
    for piece in pieces:
        for part in version.numbering.parts(piece):
            version.write(part, np.full(part.end - part.start, piece + 1, np.uint8))
        version.add(piece)


def test_a_part_can_be_read_once_its_pieces_are_held_and_workers_see_which_are(copies: NodeCopies) -> None:
    version = copies.add(NAME, "fingerprint", FILES)
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
    first = copies.add(NAME, "fingerprint", FILES)
    fill(first, 0, 1)
    with (first.folder / FILE).open("rb"):
        assert not copies.drop(NAME), "a process has it open"
    assert copies.drop(NAME)
    assert not first.folder.exists()
    assert copies.add(NAME, "fingerprint", FILES).folder != first.folder


def test_an_earlier_processes_versions_are_removed_and_capacity_is_a_bound(root: Path) -> None:
    left = NodeCopies(root, 1 << 30).add(NAME, "fingerprint", FILES)
    again = NodeCopies(root, FILES[0].size)
    assert not left.folder.exists()
    again.add(NAME, "fingerprint", FILES)
    with pytest.raises(ResourceExhausted, match="memory full: it needs"):
        again.add("models/policy/versions/8", "fingerprint", FILES)


def test_a_version_takes_the_memory_of_its_wanted_pieces_and_grows_within_the_bound(root: Path) -> None:
    first, last = PIECE_BYTES, FILES[0].size - PIECE_BYTES
    copies = NodeCopies(root, PIECE_BYTES + last - 1)
    version = copies.add(NAME, "fingerprint", FILES, Bitmap.of(2, [0]))
    assert (copies.used_bytes(), list(version.missing())) == (first, [0])
    fill(version, 0)
    assert not len(version.missing())
    with pytest.raises(ResourceExhausted, match=f"memory full: it needs {last} bytes, {last - 1} of"):
        copies.want(version, Bitmap.full(2))
    assert list(version.wanted()) == [0], "which a refusal leaves as it was"
    copies.limit_bytes += 1
    copies.want(version, Bitmap.full(2))
    assert (copies.used_bytes(), list(version.missing())) == (first + last, [1])
