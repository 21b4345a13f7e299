"""Chunks of boxes: the rule of proto `Chunk`, which a sender and the daemon compute independently."""

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st
from resharder.converters.geometry.chunking import Part, cut_chunks
from resharder.converters.geometry.layout import Box, Range


def box(*counts: int) -> Box:
    return tuple(Range(0, count) for count in counts)


def test_small_boxes_share_a_chunk_up_to_its_bound() -> None:
    boxes = [box(2), box(3), box(1), box(5)]
    first = [Part(0, boxes[0]), Part(1, boxes[1])]
    assert cut_chunks(boxes, [2, 2, 2, 2], 12) == [[*first, Part(2, boxes[2])], [Part(3, boxes[3])]]
    assert cut_chunks(boxes, [2, 2, 2, 2], 11) == [first, [Part(2, boxes[2])], [Part(3, boxes[3])]]


def test_the_first_chunk_takes_a_box_of_exactly_its_bound() -> None:
    assert cut_chunks([box(3), box(1)], [4, 4], 12) == [[Part(0, box(3))], [Part(1, box(1))]]
    assert cut_chunks([box(1)], [1], 1) == [[Part(0, box(1))]]


def test_a_large_box_is_cut_by_whole_rows() -> None:
    parts = [Part(0, (Range(0, 2), Range(0, 3))), Part(0, (Range(2, 2), Range(0, 3))), Part(0, (Range(4, 1), Range(0, 3)))]
    assert cut_chunks([box(5, 3)], [4], 24) == [[part] for part in parts]


def test_rows_that_are_too_large_are_cut_themselves_beyond_axes_of_one() -> None:
    parts = [Part(0, (Range(0, 1), Range(row, 1), Range(first, count))) for row in (0, 1) for first, count in ((0, 2), (2, 1))]
    assert cut_chunks([box(1, 2, 3)], [4], 11) == [[part] for part in parts]


def test_parts_of_strided_boxes_keep_their_stride_unless_they_have_one_element() -> None:
    strided = (Range(3, 5, 4),)
    parts = [Part(0, (Range(3, 2, 4),)), Part(0, (Range(11, 2, 4),)), Part(0, (Range(19, 1, 1),))]
    assert cut_chunks([strided], [2], 5) == [[part] for part in parts]


def test_an_element_larger_than_a_chunk_has_a_chunk_of_its_own() -> None:
    assert cut_chunks([box(2), ()], [8, 8], 4) == [[Part(0, (Range(0, 1),))], [Part(0, (Range(1, 1),))], [Part(1, ())]]


def test_boxes_without_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        cut_chunks([box(2), box(2)], [4], 8)


@given(st.lists(st.tuples(st.lists(st.integers(1, 5), max_size=3), st.sampled_from((1, 2, 4))), max_size=5), st.integers(1, 40))
def test_chunks_have_every_element_once_within_the_bound(shapes: list[tuple[list[int], int]], bound: int) -> None:
    boxes, sizes = [box(*counts) for counts, _ in shapes], [size for _, size in shapes]
    chunks = cut_chunks(boxes, sizes, bound)
    counts = [0] * len(boxes)
    for chunk in chunks:
        size = sum(prod(r.count for r in part.box) * sizes[part.position] for part in chunk)
        assert size <= bound or (len(chunk) == 1 and all(r.count == 1 for r in chunk[0].box))
        for part in chunk:
            counts[part.position] += prod(r.count for r in part.box)
    assert counts == [prod(r.count for r in each) for each in boxes]
