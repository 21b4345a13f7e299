"""Pieces as arrays: the same boxes, processes and places as in the objects, whatever their dimensions."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from resharder.converters.errors import LayoutError
from resharder.converters.geometry import piece_arrays
from resharder.converters.geometry.layout import Box, Layout, Piece, Range, TensorSpec, box_size, full_box, intersect
from resharder.converters.geometry.piece_arrays import (
    Pieces,
    distinct,
    intersect_all,
    join,
    join_boxes,
    pack,
    pack_boxes,
    pairs,
)

ranges = st.builds(lambda s, n, t: Range(s, n, t if n > 1 else 1), st.integers(0, 20), st.integers(1, 6), st.integers(1, 4))
boxes = st.lists(st.lists(ranges, max_size=3).map(tuple), max_size=8)


@given(boxes, st.integers(1, 5))
def test_packed_boxes_are_those_that_were_packed(given_boxes: list[Box], width: int) -> None:
    packed = pack_boxes(given_boxes, width)
    wide = max([width, *map(len, given_boxes)])
    more, same = packed.widened(wide + 2), packed.widened(1)
    assert packed.start.shape == packed.count.shape == packed.step.shape == same.start.shape == (len(given_boxes), wide)
    assert more.start.shape == (len(given_boxes), wide + 2)
    for i, box in enumerate(given_boxes):
        assert packed.box(i, len(box)) == more.box(i, len(box)) == box
        assert packed.box(i, wide)[len(box) :] == (Range(0, 1),) * (wide - len(box))
        assert more.box(i, wide + 2)[wide:] == (Range(0, 1),) * 2
    assert packed.volume.tolist() == more.volume.tolist() == [box_size(box) for box in given_boxes]
    later = packed.take(slice(1, None))
    assert [later.box(i, len(box)) for i, box in enumerate(given_boxes[1:])] == given_boxes[1:]


@given(st.lists(boxes, max_size=3))
def test_joined_boxes_follow_each_other(parts: list[list[Box]]) -> None:
    joined = join_boxes([pack_boxes(part) for part in parts])
    every = [box for part in parts for box in part]
    assert joined.start.shape == (len(every), max([1, *map(len, every)]))
    assert [joined.box(i, len(box)) for i, box in enumerate(every)] == every


@given(st.lists(st.tuples(ranges, ranges), min_size=1, max_size=6), st.integers(1, 2))
def test_boxes_are_intersected_row_by_row_as_one_by_one(rows: list[tuple[Range, Range]], width: int) -> None:
    one, other = ([row[side] for row in rows] for side in (0, 1))
    left, right = ([(r, *(one[:1] * (width - 1))) for r in side] for side in (one, other))
    found, some = intersect_all(pack_boxes(left), pack_boxes(right))
    for i, (a, b) in enumerate(zip(left, right, strict=True)):
        common = intersect(a, b)
        assert bool(some[i]) == (common is not None)
        assert common is None or found.box(i, width) == common


@given(st.lists(st.tuples(st.integers(0, 2), st.tuples(ranges, st.sampled_from([Range(0, 2), Range(1, 2)])))), st.booleans())
def test_equal_boxes_of_a_tensor_are_one_even_if_their_hashes_collide(held: list[tuple[int, Box]], collide: bool) -> None:
    tensor = np.array([number for number, _ in held], np.int64)
    before = piece_arrays._MULTIPLIERS
    piece_arrays._MULTIPLIERS = before * np.uint64(0) if collide else before
    try:
        found = distinct(tensor, pack_boxes([box for _, box in held], 2))
    finally:
        piece_arrays._MULTIPLIERS = before
    each = [(int(number), found.boxes.box(i, 2)) for i, number in enumerate(found.tensor)]
    assert len(each) == len(set(held))
    assert [each[of] for of in found.of] == held
    assert found.tensor.tolist() == sorted(found.tensor.tolist())


def test_hashes_see_every_column_of_a_box(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two boxes that differ in one number alone, and in two numbers by opposite amounts, are two without a look at their rows."""
    boxes = [
        (Range(3, 5, 2), Range(4, 6, 3)),
        (Range(4, 5, 2), Range(4, 6, 3)),
        (Range(3, 5, 2), Range(5, 6, 3)),
        (Range(4, 5, 2), Range(3, 6, 3)),
        (Range(3, 6, 2), Range(4, 5, 3)),
        (Range(3, 5, 3), Range(4, 6, 2)),
    ]
    packed = pack_boxes(boxes)
    columns = np.column_stack([np.zeros(6, np.int64), packed.start, packed.count, packed.step])
    hashed = (columns.astype(np.uint64) * piece_arrays._MULTIPLIERS[: columns.shape[1]]).sum(axis=1, dtype=np.uint64)
    assert len(set(hashed.tolist())) == len(boxes)
    grouped, calls = piece_arrays._grouped, []
    monkeypatch.setattr(piece_arrays, "_grouped", lambda *given: calls.append(given) or grouped(*given))
    assert len(distinct(np.zeros(6, np.int64), packed).tensor) == len(boxes)
    assert len(calls) == 1, "sorted by their hashes alone"
    assert (piece_arrays._MULTIPLIERS % np.uint64(2) == 1).all()
    assert len(piece_arrays._MULTIPLIERS) == 1 + 3 * 64  # as many dimensions as numpy has


@given(st.lists(st.integers(0, 4)), st.lists(st.integers(0, 4)).map(sorted), st.integers(5, 7))
def test_pairs_are_those_of_equal_numbers_in_order(left: list[int], right: list[int], groups: int) -> None:
    i, j = pairs(np.array(left, np.int64), np.array(right, np.int64), groups)
    expected = [(a, b) for a, x in enumerate(left) for b, y in enumerate(right) if x == y]
    assert list(zip(i.tolist(), j.tolist(), strict=True)) == expected


W, NORM, SCALE = TensorSpec("w", "BF16", (6, 4)), TensorSpec("norm", "F32", (5,)), TensorSpec("scale", "F64", ())


def layouts() -> dict[str, Layout]:
    """Three processes with tensors of two, one and no dimensions."""
    w = [Piece("w", (Range(rank, 3, 2), Range(0, 4)), f"w{rank}", 7 + rank, (1, 3)) for rank in range(2)]
    norm, scale = Piece("norm", full_box((5,)), "norm", 2, (2,), plus=1.5), Piece("scale", (), "w0", 3, ())
    return {
        "a": Layout({"w": W, "norm": NORM}, (w[0], norm)),
        "b": Layout({"scale": SCALE, "w": W}, (scale, w[1])),
        "c": Layout({"norm": NORM}, (norm._replace(replica=True),)),
    }


def unpacked(pieces: Pieces[Any]) -> dict[Any, list[tuple[Any, ...]]]:
    """Everything of each process's pieces, in order."""
    found: dict[Any, list[tuple[Any, ...]]] = {process: [] for process in pieces.processes}
    for i in range(len(pieces)):
        spec, n = pieces.specs[pieces.tensor[i]], pieces.dimensions(i)
        assert not pieces.strides[i, n:].any()
        place = pieces.locals[pieces.local[i]], int(pieces.offset[i]), tuple(pieces.strides[i, :n].tolist())
        found[pieces.processes[pieces.process[i]]].append((spec, pieces.boxes.box(i, n), *place, float(pieces.plus[i])))
    return found


def expected(given_layouts: dict[Any, Layout]) -> dict[Any, list[tuple[Any, ...]]]:
    return {
        process: [(layout.tensors[p.tensor], p.box, p.local, p.offset, p.strides, p.plus) for p in layout.pieces]
        for process, layout in given_layouts.items()
    }


def test_packed_pieces_are_those_of_each_process() -> None:
    packed = pack(layouts())
    assert unpacked(packed) == expected(layouts())
    assert packed.specs == (W, NORM, SCALE)
    assert packed.strides.shape == packed.boxes.start.shape == (5, 2)
    assert len(packed.locals) == len(set(packed.locals)) == 3
    wide = packed.widened(4)
    assert wide.strides.shape == wide.boxes.start.shape == (5, 4)
    assert unpacked(wide) == expected(layouts())
    assert packed.widened(1).strides.shape == (5, 2)


def test_processes_without_pieces_are_numbered_too() -> None:
    each = {"a": Layout({}, ()), **{f"{name}2": layout for name, layout in layouts().items()}, "z": Layout({"w": W}, ())}
    assert unpacked(pack(each)) == expected(each)
    assert unpacked(pack({})) == {}
    assert pack({"a": Layout({}, ())}).strides.shape == (0, 1)


def test_pieces_that_are_joined_are_those_that_are_packed_together() -> None:
    each = layouts()
    packed, joined = pack(each), join([pack({name: layout}) for name, layout in each.items()])
    assert unpacked(joined) == expected(each)
    assert (joined.specs, joined.processes, joined.locals) == (packed.specs, packed.processes, packed.locals)
    two = join([pack({"c": each["c"]}), pack({"a": each["a"], "b": each["b"]})])
    assert unpacked(two) == {name: expected(each)[name] for name in ("c", "a", "b")}


def test_processes_with_different_tensors_of_one_name_are_refused() -> None:
    each = layouts() | {"d": Layout({"norm": NORM._replace(dtype="F16")}, ())}
    with pytest.raises(LayoutError, match=r"norm: a holds it as F32 \[5\], d as F16 \[5\]"):
        pack(each)
    with pytest.raises(LayoutError, match=r"norm: held as F32 \[5\], but as F16 \[5\] by d"):
        join([pack({name: layout}) for name, layout in each.items()])
