"""A node's files of versions: what is there, whole, and dropped."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from resharder.converters.geometry.layout import TensorSpec
from resharder.converters.storage.files import lay_out
from resharder.converters.wire.ranges import PIECE_BYTES, WHOLE_FILE, FilePart
from resharder.server.node.copies import HeldVersion, NodeCopies
from resharder.server.state.errors import ResourceExhausted

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


def test_a_part_can_be_read_once_its_pieces_are_held_and_the_sign_comes_with_the_last_one(copies: NodeCopies) -> None:
    version = copies.add(NAME, "fingerprint", FILES)
    fill(version, 1)
    inside = FilePart("policy", 7, FILE, PIECE_BYTES, PIECE_BYTES + 5)
    assert version.lacks(inside) == ""
    assert version.lacks(inside._replace(start=PIECE_BYTES - 5)) == f"this node does not hold piece 0 of {NAME} yet"
    assert not (version.folder / WHOLE_FILE).exists()
    fill(version, 0)
    assert (version.folder / WHOLE_FILE).exists()
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
