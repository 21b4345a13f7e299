"""The algebra on random shardings, against plain numpy indexing."""

import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from resharder.converters.geometry.layout import (
    ITEM_SIZES,
    PUBLISHABLE,
    Box,
    Layout,
    Piece,
    Range,
    TensorSpec,
    box_index,
    box_shape,
    box_size,
    format_box,
    full_box,
    intersect,
    intersect_ranges,
    is_inside,
    run_start,
)
from resharder.converters.geometry.plan import plan
from resharder.converters.geometry.tiling import check_tiling

from tests.support.shardings import held_boxes, sharding

ranges = st.builds(lambda s, n, t: Range(s, n, t if n > 1 else 1), st.integers(0, 40), st.integers(1, 12), st.integers(1, 7))


@given(ranges, ranges)
def test_intersecting_two_ranges_gives_exactly_their_common_indices(a: Range, b: Range) -> None:
    common = sorted(set(range(40 * 8)[a.as_slice()]) & set(range(40 * 8)[b.as_slice()]))
    both = intersect_ranges(a, b)
    assert (list(range(40 * 8)[both.as_slice()]) if both else []) == common
    assert (both is None) == (common == [])
    assert both is None or both.count > 1 or both.step == 1


def test_ranges_of_every_residue_and_overlap_meet_exactly_where_their_indices_do() -> None:
    """Steps with and without a common divisor, and either range first."""
    counts, steps = (1, 2, 3, 5), (1, 2, 3, 4, 6)
    fixed = [Range(12, n, step) for n in counts for step in steps if n > 1 or step == 1]
    moved = [Range(first, n, step) for first in range(25) for n in counts for step in steps if n > 1 or step == 1]
    for a in moved:
        for b in fixed:
            common = sorted(set(range(a.start, a.last + 1, a.step)) & set(range(b.start, b.last + 1, b.step)))
            step = common[1] - common[0] if len(common) > 1 else 1
            expected = Range(common[0], len(common), step) if common else None
            assert intersect_ranges(a, b) == intersect_ranges(b, a) == expected


def test_boxes_of_different_dimensions_cannot_be_intersected() -> None:
    with pytest.raises(ValueError, match="shorter"):
        intersect(full_box((2, 3)), full_box((2,)))


@st.composite
def tensors_and_shardings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[list[Box]], list[list[Box]]]:
    shape = tuple(draw(st.lists(st.integers(1, 13), min_size=1, max_size=3)))
    return shape, draw(sharding(shape)), draw(sharding(shape))


def layout_of(spec: TensorSpec, boxes: list[Box], order: list[int]) -> tuple[Layout, dict[str, np.ndarray]]:
    """Each box in a local tensor of its own, its dimensions in `order` (a transposed weight), behind some padding."""
    pieces, local = [], {}
    for i, box in enumerate(boxes):
        name, shape = f"local{i}", box_shape(box)
        stored = [shape[d] for d in order]
        strides_of_stored = [math.prod(stored[k + 1 :]) for k in range(len(stored))]
        strides = [0] * len(shape)
        for k, d in enumerate(order):
            strides[d] = strides_of_stored[k]
        local[name] = np.full(3 + math.prod(shape), -1)
        pieces.append(Piece(spec.name, box, name, 3, tuple(strides)))
    return Layout({spec.name: spec}, tuple(pieces)), local


def strided(flat: np.ndarray, view) -> np.ndarray:
    return np.lib.stride_tricks.as_strided(flat[view.offset :], view.shape, [s * flat.itemsize for s in view.strides])


@given(tensors_and_shardings(), st.randoms(use_true_random=False))
def test_the_copies_of_a_plan_fill_every_destination_element_exactly_once(case, random) -> None:
    shape, source_boxes, destination_boxes = case
    spec = TensorSpec("w", "I64", shape)
    full = np.arange(math.prod(shape)).reshape(shape)
    orders = [random.sample(range(len(shape)), len(shape)) for _ in (source_boxes, destination_boxes)]
    sources, source_data = {}, {}
    for rank, boxes in enumerate(source_boxes):
        sources[rank], source_data[rank] = layout_of(spec, boxes, orders[0])
        for piece in sources[rank].pieces:
            strided(source_data[rank][piece.local], piece.view(piece.box))[...] = full[box_index(piece.box)]
    for boxes in destination_boxes:
        layout, data = layout_of(spec, boxes, orders[1])
        written = {name: np.zeros_like(flat) for name, flat in data.items()}
        for copy in plan(sources, {0: layout}).copies():
            source = strided(source_data[copy.source][copy.source_local], copy.source_view)
            strided(data[copy.target_local], copy.target_view)[...] = source
            strided(written[copy.target_local], copy.target_view)[...] += 1
        for piece in layout.pieces:
            assert np.array_equal(strided(data[piece.local], piece.view(piece.box)), full[box_index(piece.box)])
            assert written[piece.local][3:].min() == written[piece.local][3:].max() == 1
            assert not written[piece.local][:3].any()


@given(tensors_and_shardings())
def test_a_sharding_tiles_its_tensor(case) -> None:
    shape, boxes, _ = case
    check_tiling(TensorSpec("w", "BF16", shape), held_boxes(boxes))


@given(tensors_and_shardings())
def test_a_plan_of_a_layout_onto_itself_copies_each_piece_whole(case) -> None:
    shape, boxes, _ = case
    spec = TensorSpec("w", "BF16", shape)
    for rank_boxes in boxes:
        layout, _ = layout_of(spec, rank_boxes, list(range(len(shape))))
        assert [copy.box for copy in plan({0: layout}, {0: layout}).copies()] == rank_boxes


def test_boxes_of_different_residues_do_not_meet() -> None:
    even, odd = (Range(0, 5, 2), Range(0, 3)), (Range(1, 5, 2), Range(0, 3))
    assert intersect(even, odd) is None
    assert intersect(even, full_box((10, 3))) == even


@pytest.mark.parametrize(
    ("box", "inside"),
    [
        ((), False),
        ((Range(0, 10),), False),
        ((Range(0, 10), Range(0, 6), Range(0, 1)), False),
        ((Range(0, 10), Range(0, 6)), True),
        ((Range(9, 1), Range(5, 1)), True),
        ((Range(1, 5, 2), Range(0, 6)), True),
        ((Range(2, 5, 2), Range(0, 6)), False),
        ((Range(0, 11), Range(0, 6)), False),
        ((Range(0, 10), Range(1, 6)), False),
        ((Range(-1, 2), Range(0, 6)), False),
        ((Range(0, 0), Range(0, 6)), False),
        ((Range(0, 2, 0), Range(0, 6)), False),
        ((Range(5, 2, -1), Range(0, 6)), False),
    ],
)
def test_a_box_is_inside_with_all_its_elements_or_not_at_all(box: Box, inside: bool) -> None:
    assert is_inside(box, (10, 6)) is inside


def test_a_scalar_has_the_empty_box() -> None:
    assert is_inside((), ())
    assert full_box(()) == box_shape(()) == box_index(()) == ()
    assert box_size(()) == 1


def test_boxes_read_like_indices_of_numpy() -> None:
    assert format_box((Range(0, 128), Range(3, 31, 2), Range(7, 1))) == "[0:128, 3:64:2, 7:8]"
    assert format_box(()) == "[]"


def test_items_of_safetensors_have_the_bits_in_their_names() -> None:
    assert {name: 8 * size for name, size in ITEM_SIZES.items()} == {
        name: int(re.sub(r"^\D+", "", name).partition("_")[0] or 8)
        for name in (
            *("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"),
            *("BF16", "F16", "I16", "U16", "F32", "I32", "U32", "F64", "I64", "U64"),
        )
    }
    assert TensorSpec("w", "F64", (3, 5)).size == 120
    assert TensorSpec("w", "BF16", ()).size == 2


def test_floats_of_8_bits_with_5_of_exponent_and_wide_unsigned_integers_cannot_be_published() -> None:
    assert set(PUBLISHABLE) == {name for name in ITEM_SIZES if not re.match(r"F8_E5|U\d\d", name)}


@given(st.data())
def test_a_part_of_a_piece_has_its_elements_where_the_piece_has_them(data: st.DataObject) -> None:
    box = tuple(data.draw(st.lists(ranges, min_size=1, max_size=3)))
    strides = tuple(data.draw(st.lists(st.integers(1, 50), min_size=len(box), max_size=len(box))))
    piece = Piece("w", box, "local", data.draw(st.integers(0, 9)), strides, replica=True, plus=0.5)
    within = []
    for r in box:
        first, step = data.draw(st.integers(0, r.count - 1)), data.draw(st.integers(1, 3))
        count = data.draw(st.integers(1, (r.count - 1 - first) // step + 1))
        within.append(Range(first, count, step if count > 1 else 1))
    part = tuple(
        Range(r.start + w.start * r.step, w.count, r.step * w.step if w.count > 1 else 1)
        for r, w in zip(box, within, strict=True)
    )
    view = piece.view(part)
    assert view.shape == box_shape(part)
    assert all(there == here for there, here, n in zip(view.strides, strides, view.shape, strict=True) if n == 1)
    for at in np.ndindex(view.shape):
        place = [w.start + i * w.step for w, i in zip(within, at, strict=True)]
        assert view.offset + np.dot(at, view.strides) == piece.offset + np.dot(place, strides)
    assert piece.part(part) == piece._replace(box=part, offset=view.offset, strides=view.strides)
    assert piece.view(box) == (box_shape(box), strides, piece.offset)
    with pytest.raises(ValueError, match="longer"):
        piece.view(part[1:])


def test_a_layout_owns_what_is_no_replica() -> None:
    whole = Piece("w", full_box((4,)), "a", 0, (1,))
    other, replica = whole._replace(local="b"), whole._replace(local="c", replica=True)
    assert list(Layout({"w": TensorSpec("w", "BF16", (4,))}, (whole, replica, other)).owned()) == [whole, other]


def test_rows_of_a_run_begin_after_the_rows_before() -> None:
    spec = TensorSpec("w", "BF16", (4, 3, 5))
    assert run_start((Range(2, 1), Range(1, 2), Range(0, 5)), spec) == 2 * (2 * 15 + 5)
    assert run_start((Range(1, 3), Range(0, 3), Range(0, 5)), spec) == 30
    assert run_start((Range(1, 2), Range(0, 2), Range(0, 5)), spec) is None
    assert run_start((Range(0, 2, 2), Range(0, 3), Range(0, 5)), spec) is None
    assert run_start((Range(3, 1), Range(2, 1), Range(4, 1)), spec) == 2 * (3 * 15 + 2 * 5 + 4)
    assert run_start((Range(0, 2), Range(0, 1), Range(0, 2)), TensorSpec("w", "BF16", (4, 1, 5))) is None
    with pytest.raises(ValueError, match="longer"):
        run_start((Range(0, 2),), spec)
