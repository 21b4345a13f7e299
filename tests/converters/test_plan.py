"""Tilings refused with the exact difference, replicas shared out evenly, chunks cut alike on both sides."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from resharder.converters.errors import LayoutError
from resharder.converters.geometry.chunking import cut_chunks
from resharder.converters.geometry.copy_table import with_fewer_pairs
from resharder.converters.geometry.layout import Box, Layout, Piece, Range, TensorSpec, box_size, full_box, intersect
from resharder.converters.geometry.piece_arrays import Distinct, pack, pack_boxes
from resharder.converters.geometry.plan import _part, _replicas, plan, plan_pieces
from resharder.converters.geometry.senders import senders
from resharder.converters.geometry.tiling import Held, check_tiling

from tests.support.shardings import held_boxes, sharding

SPEC = TensorSpec("w", "BF16", (10, 6))


def rows(first: int, count: int) -> Box:
    return (Range(first, count), Range(0, 6))


def test_a_hole_is_named_with_its_first_element_and_size() -> None:
    with pytest.raises(LayoutError, match=r"element \[4, 0\] is held by no rank; so are 6 of its 60 elements"):
        check_tiling(SPEC, [Held(0, 0, rows(0, 4), False), Held(1, 0, rows(5, 5), False)])


def test_an_overlap_is_named_with_its_ranks() -> None:
    with pytest.raises(LayoutError, match=r"element \[4, 0\] is held by more than one rank: \[0, 1\]; so are 6 of its 60"):
        check_tiling(SPEC, [Held(0, 0, rows(0, 5), False), Held(1, 0, rows(4, 6), False)])


def test_of_a_hole_and_an_overlap_the_hole_is_named() -> None:
    with pytest.raises(LayoutError, match=r"element \[9, 0\] is held by no rank; so are 6 of its 60"):
        check_tiling(SPEC, [Held(0, 0, rows(0, 5), False), Held(1, 0, rows(4, 5), False)])


def test_a_hole_between_interleaved_rows_is_counted_exactly() -> None:
    with pytest.raises(LayoutError, match=r"element \[1, 0\] is held by no rank; so are 30 of its 60"):
        check_tiling(SPEC, [Held(0, 0, (Range(0, 5, 2), Range(0, 6)), False)])


def test_a_tensor_nobody_holds_is_a_hole() -> None:
    with pytest.raises(LayoutError, match="held by no rank"):
        check_tiling(SPEC, [])


@pytest.mark.parametrize(
    "box",
    [
        (Range(0, 11), Range(0, 6)),
        (Range(-1, 2), Range(0, 6)),
        (Range(0, 10),),
        (Range(0, 6, 2), Range(0, 6)),
        (Range(0, 0), Range(0, 6)),
    ],
)
def test_a_box_outside_the_tensor_is_refused(box: Box) -> None:
    with pytest.raises(LayoutError, match="outside of shape"):
        check_tiling(SPEC, [Held(3, 0, box, False)])


def test_a_replica_needs_the_box_of_an_owner() -> None:
    check_tiling(SPEC, [Held(0, 0, full_box(SPEC.shape), False), Held(1, 0, full_box(SPEC.shape), True)])
    with pytest.raises(LayoutError, match="no owner's box"):
        check_tiling(SPEC, [Held(0, 0, full_box(SPEC.shape), False), Held(1, 0, rows(0, 5), True)])


@given(st.data())
def test_removing_or_doubling_any_box_of_a_tiling_is_noticed(data: st.DataObject) -> None:
    shape = data.draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))
    pieces = held_boxes(data.draw(sharding(shape)))
    victim = data.draw(st.sampled_from(pieces))
    spec = TensorSpec("w", "F32", shape)
    check_tiling(spec, pieces)
    with pytest.raises(LayoutError, match="held by no rank"):
        check_tiling(spec, [p for p in pieces if p != victim])
    with pytest.raises(LayoutError, match="more than one rank"):
        check_tiling(spec, [*pieces, victim])


def test_a_plan_with_a_missing_source_is_refused_by_name() -> None:
    source = Layout({"w": SPEC}, (Piece("w", rows(0, 9), "a", 0, (6, 1)),))
    wanted = Layout({"w": SPEC}, (Piece("w", full_box(SPEC.shape), "b", 0, (6, 1)),))
    with pytest.raises(LayoutError, match=r"w.*expected 60 elements, the sources give 54"):
        plan({0: source}, {0: wanted})


def test_a_tensor_that_no_source_has_is_refused_by_name() -> None:
    source = Layout({"w": SPEC}, (Piece("w", full_box(SPEC.shape), "a", 0, (6, 1)),))
    wanted = Layout({"v": SPEC._replace(name="v")}, (Piece("v", full_box(SPEC.shape), "b", 0, (6, 1)),))
    with pytest.raises(LayoutError, match="v is missing: no source has it"):
        plan({0: source}, {0: wanted})


def test_a_plan_between_different_dtypes_is_refused() -> None:
    source = Layout({"w": SPEC}, (Piece("w", full_box(SPEC.shape), "a", 0, (6, 1)),))
    wanted = Layout({"w": SPEC._replace(dtype="F32")}, (Piece("w", full_box(SPEC.shape), "b", 0, (6, 1)),))
    with pytest.raises(LayoutError, match="expect F32"):
        plan({0: source}, {0: wanted})


def test_what_sources_hold_alike_is_sent_evenly() -> None:
    specs = {f"w{i}": TensorSpec(f"w{i}", "BF16", (4 + i, 6)) for i in range(40)}
    whole = Layout(specs, tuple(Piece(name, full_box(spec.shape), name, 0, (6, 1)) for name, spec in specs.items()))
    alike = Layout(specs, tuple(piece._replace(replica=True) for piece in whole.pieces))
    found = plan({0: whole, 1: alike, 2: alike}, {"a": whole, "b": whole})
    total = sum(spec.size for spec in specs.values())
    assert found.received.tolist() == [total, total]
    assert found.sent.sum() == 2 * total
    assert found.sent.max() < 1.02 * found.sent.mean()


def test_evenly_means_bytes_not_elements() -> None:
    wide, narrow = TensorSpec("wide", "F64", (100,)), [TensorSpec(f"narrow{i}", "U8", (400,)) for i in range(2)]
    specs = {spec.name: spec for spec in (wide, *narrow)}
    whole = Layout(specs, tuple(Piece(name, full_box(spec.shape), name, 0, (1,)) for name, spec in specs.items()))
    found = plan({0: whole, 1: whole}, {"a": whole})
    assert found.sent.tolist() == [800, 800]


def replicated(tp: int, dp: int) -> dict[int, Layout]:
    """Ranks in Megatron's order, `tp` next to each other: each has its rows of one tensor, and all of another; the first and the
    last stage, as with a tied embedding, hold the same."""
    small, tied = TensorSpec("norm", "BF16", (6,)), TensorSpec("tied", "BF16", (64, 6))
    found = {}
    for stage in range(2):
        w = TensorSpec(f"w{stage}", "BF16", (96, 6))
        for i in range(tp * dp):
            t = i % tp
            pieces = [
                Piece(spec.name, rows(t * spec.shape[0] // tp, spec.shape[0] // tp), spec.name, 0, (6, 1)) for spec in (w, tied)
            ]
            pieces.append(Piece("norm", full_box((6,)), "norm", 0, (1,)))
            found[stage * tp * dp + i] = Layout({"norm": small, "tied": tied, w.name: w}, tuple(pieces))
    return found


def wanted(tp: int) -> dict[int, Layout]:
    specs = {name: spec for layout in replicated(1, 1).values() for name, spec in layout.tensors.items()}
    each = {name: spec.shape[0] // tp for name, spec in specs.items() if name != "norm"}
    norm = Piece("norm", full_box((6,)), "norm", 0, (1,))
    return {
        i: Layout(specs, (norm, *(Piece(name, rows(i * n, n), name, 0, (6, 1)) for name, n in each.items()))) for i in range(tp)
    }


@pytest.mark.parametrize("server", [1, 2, 8])
def test_servers_take_from_one_replica_each_where_that_is_enough(server: int) -> None:
    sources, targets = pack(replicated(8, 4)), pack(wanted(server))
    plans = [plan_pieces(sources, targets, number) for number in range(5)]
    senders = [frozenset(found.sources.process[with_fewer_pairs(found).have].tolist()) for found in plans]
    assert {found.parts for found in plans} == {4}
    assert senders[0] == senders[4]
    assert senders[:4] == [frozenset(range(8 * i, 8 * i + 8)) | frozenset(range(32 + 8 * i, 40 + 8 * i)) for i in range(4)]
    for found in plans:
        assert found.received.tolist() == plan_pieces(sources, targets).received.tolist()


def test_servers_take_from_as_many_replicas_as_do_not_hold_them_up() -> None:
    """A rank of two has four times as much of a stage as a worker of eight wants of it, and each worker wants two stages."""
    sources = pack(replicated(2, 8))
    targets = pack({i: layout for i, layout in wanted(8).items()})
    whole = plan_pieces(pack(replicated(2, 1)), targets)
    assert whole.sent.max() == pytest.approx(2 * whole.received.max(), rel=0.02)
    found = plan_pieces(sources, targets, 1)
    assert found.parts == 4
    assert found.sent.max() <= 1.01 * found.received.max()


@pytest.mark.parametrize(("small", "parts"), [(100, 2), (101, 1)])
def test_one_replica_is_enough_if_it_sends_a_hundredth_more_than_the_busiest_target_receives(small: int, parts: int) -> None:
    specs = {name: TensorSpec(name, "U8", (size,)) for name, size in (("large", 10_000), ("small", small))}
    pieces = [Piece(name, full_box(spec.shape), name, 0, (1,)) for name, spec in specs.items()]
    whole = Layout(specs, tuple(pieces))
    workers = {piece.tensor: Layout({piece.tensor: specs[piece.tensor]}, (piece,)) for piece in pieces}
    assert plan_pieces(pack({0: whole, 1: whole}), pack(workers), 0).parts == parts


def test_a_plan_for_nobody_in_particular_takes_from_all_replicas() -> None:
    found = plan_pieces(pack(replicated(2, 4)), pack(wanted(1)))
    assert found.parts == 1
    assert not frozenset(np.flatnonzero(found.sent).tolist()) <= {0, 1, 8, 9}


def test_holders_whose_boxes_overlap_without_being_the_same_are_refused() -> None:
    one = Layout({"w": SPEC}, (Piece("w", rows(0, 6), "a", 0, (6, 1)),))
    other = Layout({"w": SPEC}, (Piece("w", rows(5, 5), "a", 0, (6, 1)),))
    wanted = Layout({"w": SPEC}, (Piece("w", full_box(SPEC.shape), "b", 0, (6, 1)),))
    with pytest.raises(LayoutError, match=r"w: ranks have the same element in different boxes, \[0:6, 0:6\] and \[5:10, 0:6\]"):
        plan({0: one, 1: other}, {0: wanted})


def test_a_constant_between_values_is_in_the_copy() -> None:
    source = Layout({"w": SPEC}, (Piece("w", full_box(SPEC.shape), "a", 0, (6, 1), plus=1.0),))
    wanted = Layout({"w": SPEC}, (Piece("w", full_box(SPEC.shape), "b", 0, (6, 1)),))
    assert [copy.plus for copy in plan({0: source}, {0: wanted}).copies()] == [1.0]
    assert [copy.plus for copy in plan({0: source}, {0: source}).copies()] == [0.0]


@given(st.integers(1, 8), st.lists(st.integers(1, 50), min_size=1, max_size=40))
def test_replicas_are_shared_out_so_that_no_rank_sends_more_than_one_tensor_too_many(ranks: int, sizes: list[int]) -> None:
    tensor, process = np.tile(np.arange(len(sizes)), ranks), np.repeat(np.arange(ranks), len(sizes))
    boxes = pack_boxes([full_box((n,)) for n in sizes] * ranks)
    sent = senders(tensor, boxes, process, ranks, np.full(len(sizes), 2))
    assert sorted(tensor[sent]) == list(range(len(sizes)))
    load = np.bincount(process[sent], np.array(sizes)[tensor[sent]], ranks)
    assert max(load) - min(load) <= max(sizes)


def test_boxes_may_have_as_many_dimensions_as_numpy_has() -> None:
    boxes = pack_boxes([full_box((1,) * 64), (Range(0, 1),) * 63 + (Range(1, 1),)])
    assert senders(np.array([0, 0]), boxes, np.array([0, 0]), 1, np.array([2])).tolist() == [0, 1]


def test_each_distinct_box_is_sent_once_whatever_its_dimensions() -> None:
    pieces = [(0, ()), (1, rows(0, 5)), (1, rows(5, 5)), (0, ()), (1, rows(0, 5))]
    sent = senders(
        np.array([tensor for tensor, _ in pieces]),
        pack_boxes([box for _, box in pieces]),
        np.array([0, 0, 0, 1, 1]),
        2,
        np.array([4, 2]),
    )
    assert sorted(pieces[i] for i in sent) == sorted({(0, ()), (1, rows(0, 5)), (1, rows(5, 5))})
    assert 4 in sent  # rank 0 has the only copy of one half, so rank 1 sends the other


@given(st.data(), st.integers(1, 200))
def test_chunks_hold_every_element_once_and_stay_within_their_size(data: st.DataObject, limit: int) -> None:
    shape = data.draw(st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9)))
    boxes = [box for mine in data.draw(sharding(shape)) for box in mine]
    sizes = [data.draw(st.sampled_from([1, 2, 4])) for _ in boxes]
    chunks = cut_chunks(boxes, sizes, limit)
    for position, box in enumerate(boxes):
        parts = [part.box for chunk in chunks for part in chunk if part.position == position]
        assert sum(box_size(part) for part in parts) == box_size(box)
        check_tiling(TensorSpec("w", "U8", shape), [*held_boxes([parts]), *held_boxes([[b for b in boxes if b is not box]])])
    for chunk in chunks:
        size = sum(box_size(part.box) * sizes[part.position] for part in chunk)
        assert size <= limit or (len(chunk) == 1 and math.prod(r.count for r in chunk[0].box) == 1)


def held_by(of: list[int]) -> Distinct:
    """Boxes of one element, of which piece `i` has box `of[i]`."""
    boxes = [(Range(number, 1),) for number in range(max(of, default=-1) + 1)]
    return Distinct(np.zeros(len(boxes), np.int64), pack_boxes(boxes), np.array(of, np.int64))


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 40)), max_size=80, unique=True), st.data())
def test_the_replica_of_a_process_is_its_place_among_the_holders_of_the_boxes_that_the_fewest_hold(
    holding: list[tuple[int, int]], data: st.DataObject
) -> None:
    numbers = sorted({box for box, _ in holding})
    of, process = [numbers.index(box) for box, _ in holding], [process for _, process in holding]
    copied = data.draw(st.lists(st.sampled_from(range(len(numbers))), max_size=4)) if numbers else []
    holders = {box: sorted(p for b, p in zip(of, process, strict=True) if b == box) for box in range(len(numbers))}
    count = min([len(holding), *(len(holders[box]) for box in copied)])
    expected: dict[int, int] = {}
    for fewest in (False, True):
        for box in range(len(numbers)):
            if (len(holders[box]) == count) == fewest:
                expected |= {p: place * count // len(holders[box]) for place, p in enumerate(holders[box])}
    found, parts = _replicas(held_by(of), np.array(process, np.int64), np.array(copied, np.int64))
    assert found.tolist() == [expected[p] for p in process]
    assert parts == max(1, count)


def test_of_many_boxes_with_as_many_holders_the_last_one_gives_a_process_its_replica() -> None:
    of = [box for box in range(200) for _ in range(2)]
    process = [(box * 7 + place * 3) % 31 for box in range(200) for place in range(2)]
    expected: dict[int, int] = {}
    for box in range(200):
        expected |= {p: place for place, p in enumerate(sorted(process[2 * box : 2 * box + 2]))}
    found, parts = _replicas(held_by(of), np.array(process, np.int64), np.arange(200))
    assert (found.tolist(), parts) == ([expected[p] for p in process], 2)


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=8))
def test_a_part_has_the_pieces_of_its_replicas_and_all_pieces_of_a_box_that_these_do_not_have(
    pieces: list[tuple[int, bool]],
) -> None:
    of, taken = [box for box, _ in pieces], [taken for _, taken in pieces]
    covered = {box for box, taken in pieces if taken}
    found = _part(held_by(of), np.array(taken, bool))
    assert found.tolist() == [i for i in range(len(of)) if taken[i] or of[i] not in covered]


def test_the_views_of_a_copy_are_those_of_its_pieces() -> None:
    spec = TensorSpec("w", "BF16", (9, 4))
    have = [Piece("w", (Range(first, 3, 3), Range(0, 4)), "s", 5 + first, (4, 1)) for first in range(3)]
    want = [
        Piece("w", (Range(4, 1), Range(1, 2)), "t", 3, (7, 2)),
        Piece("w", (Range(0, 2, 6), Range(3, 1)), "t", 90, (2, 1)),
        Piece("w", (Range(0, 9), Range(0, 1)), "t", 40, (3, 5)),
    ]
    sources, targets = Layout({"w": spec}, tuple(have)), Layout({"w": spec}, tuple(want))
    found = list(plan({"a": sources}, {"b": targets}).copies())
    for copy in found:
        assert copy.source_view in [piece.view(copy.box) for piece in have if intersect(piece.box, copy.box) == copy.box]
        assert copy.target_view in [piece.view(copy.box) for piece in want if intersect(piece.box, copy.box) == copy.box]
    assert sum(box_size(copy.box) for copy in found) == 2 + 2 + 9


@pytest.mark.parametrize("number", [None, 0, 1])
def test_nothing_is_copied_for_targets_without_pieces(number: int | None) -> None:
    nothing = pack({"t": Layout({"w": SPEC}, ())})
    whole = Layout({"w": SPEC}, (Piece("w", full_box(SPEC.shape), "s", 0, (6, 1)),))
    for sources in (whole, Layout({"w": SPEC}, ())):
        found = plan_pieces(pack({"s": sources}), nothing, number)
        assert (len(found), found.sent.tolist(), found.received.tolist()) == (0, [0], [0])
