"""The pieces of a version that a worker's boxes touch, and no others."""

import pytest
from resharder.client.versions.read_plan import needed_pieces
from resharder.converters.geometry.layout import Box, Range, TensorSpec, full_box
from resharder.converters.storage.files import lay_out
from resharder.converters.wire.ranges import PIECE_BYTES

EXPERTS = TensorSpec("experts", "BF16", (8, 16, 1 << 20))  # 32 MiB for each expert
FILES = tuple(lay_out([EXPERTS, TensorSpec("other", "BF16", (1 << 20, 16))]))


@pytest.mark.parametrize(
    ("name", "box", "spans"),
    [
        ("experts", full_box(EXPERTS.shape), [(0, 8)]),
        ("experts", (Range(2, 2), Range(0, 16), Range(0, 1 << 20)), [(2, 4)]),
        ("experts", (Range(1, 2, 4), Range(0, 16), Range(0, 1 << 20)), [(1, 2), (5, 6)]),
        ("experts", (Range(0, 8), Range(0, 2), Range(0, 1 << 20)), [(e, e + 1 / 8) for e in range(8)]),
        ("experts", (Range(3, 1), Range(0, 16), Range(0, 512)), [(3, 3 + 15 / 16 + 1 / 32768)]),
        ("other", (Range(0, 1 << 20), Range(8, 8)), [(0, 1)]),
    ],
    ids=["all", "two experts", "two experts apart", "rows of each expert", "columns of an expert", "narrow columns"],
)
def test_the_needed_pieces_are_those_with_an_element_of_a_box(name: str, box: Box, spans: list[tuple[float, float]]) -> None:
    """`spans` are in units of 32 MiB from the tensor's first byte."""
    file = next(file for file in FILES if name in file.by_name)
    first = sum(-(-other.size // PIECE_BYTES) for other in FILES[: FILES.index(file)])
    offset = file.by_name[name][1]
    touched = set[int]()
    for start, end in spans:
        low, high = offset + int(start * (32 << 20)), offset + int(end * (32 << 20)) - 1
        touched |= set(range(first + low // PIECE_BYTES, first + high // PIECE_BYTES + 1))
    assert set(needed_pieces(FILES, {name: (box,)})) == touched


def test_the_pieces_of_several_boxes_are_joined_and_no_box_needs_none() -> None:
    one, other = ((Range(e, 1), Range(0, 16), Range(0, 1 << 20)) for e in (0, 5))
    assert set(needed_pieces(FILES, {})) == set()
    both = needed_pieces(FILES, {"experts": (one, other)})
    assert both == needed_pieces(FILES, {"experts": (one,)}) | needed_pieces(FILES, {"experts": (other,)})
