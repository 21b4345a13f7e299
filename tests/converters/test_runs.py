"""Boxes as runs of bytes of a file."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from resharder.converters.geometry.layout import Box, TensorSpec, box_index, box_size, run_start
from resharder.converters.geometry.rows import ByteRows, box_rows

from tests.support.shardings import sharding

Drawn = tuple[tuple[int, ...], Box]


@st.composite
def boxes(draw: st.DrawFn) -> Drawn:
    """A shape and a box of it."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=0, max_size=4)))
    found = [box for mine in draw(sharding(shape)) for box in mine] if shape else [()]
    return shape, draw(st.sampled_from(found))


def places(shape: tuple[int, ...], box: Box) -> list[int]:
    """The places of a box's elements in its tensor, in their order."""
    found: list[int] = np.arange(np.prod(shape, dtype=int)).reshape(shape)[box_index(box)].reshape(-1).tolist()
    return found


def elements(row: ByteRows, run: int) -> range:
    """The bytes at which elements of a run begin."""
    start = row.start + run * row.stride
    return range(start, start + row.length, 4)


@given(boxes())
def test_a_box_is_written_at_once_exactly_where_its_elements_follow_each_other_in_the_file(drawn: Drawn) -> None:
    shape, box = drawn
    found = places(shape, box)
    in_one_run = bool(np.all(np.diff(found) == 1))
    assert run_start(box, TensorSpec("t", "F32", shape)) == (4 * found[0] if in_one_run else None)


@given(boxes(), st.integers(0, 60))
def test_the_rows_of_a_box_have_its_elements_in_their_order(drawn: Drawn, gap: int) -> None:
    shape, box = drawn
    spec = TensorSpec("t", "F32", shape)
    rows = list(box_rows(box, spec))
    starts = [at for row in rows for run in range(row.count) for at in elements(row, run)]
    assert starts == [4 * place for place in places(shape, box)]
    assert sum(row.size for row in rows) == 4 * box_size(box)
    assert (len(rows) == 1 and rows[0].count == 1) == (run_start(box, spec) is not None)
    for row in rows:
        spans = row.spans(gap)
        inside = {at for start, end in spans for at in range(start, end, 4)}
        assert {at for run in range(row.count) for at in elements(row, run)} <= inside
        assert len(spans) == (1 if row.stride - row.length <= gap else row.count)
        assert (spans[0][0], spans[-1][1]) == (row.start, row.end)
