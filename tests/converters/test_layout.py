"""The algebra on random shardings, against plain numpy indexing."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from resharder.converters.geometry.layout import (
    Box,
    Layout,
    Piece,
    Range,
    TensorSpec,
    box_index,
    box_shape,
    full_box,
    intersect,
    intersect_ranges,
)
from resharder.converters.geometry.plan import plan
from resharder.converters.geometry.tiling import check_tiling

from tests.support.shardings import held, sharding

ranges = st.builds(lambda s, n, t: Range(s, n, t if n > 1 else 1), st.integers(0, 40), st.integers(1, 12), st.integers(1, 7))


@given(ranges, ranges)
def test_intersecting_two_ranges_gives_exactly_their_common_indices(a: Range, b: Range) -> None:
    common = sorted(set(range(40 * 8)[a.as_slice()]) & set(range(40 * 8)[b.as_slice()]))
    both = intersect_ranges(a, b)
    assert (list(range(40 * 8)[both.as_slice()]) if both else []) == common
    assert both is None or both.count > 1 or both.step == 1


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
    check_tiling(TensorSpec("w", "BF16", shape), held(boxes))


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
