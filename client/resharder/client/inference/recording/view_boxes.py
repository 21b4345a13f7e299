"""Strided views of a contiguous tensor: as boxes, so that a loader's slices become pieces, and the number of elements covered."""

from collections.abc import Iterable
from itertools import product
from math import prod
from typing import NamedTuple

import numpy as np
from resharder.converters.geometry.layout import Box, Piece, Range, StridedView, contiguous_strides, full_box

MAX_PARTS = 4096  # a copy that needs more boxes is treated as a permutation


class ViewPart(NamedTuple):
    """A box of the tensor whose element `i` is copied to element `offset + sum(i[d] * strides[d])` of the destination."""

    box: Box
    offset: int
    strides: tuple[int, ...]


class _Axis(NamedTuple):
    """`length` steps of `step` indices in one dimension of the tensor; each is `stride` elements in the destination."""

    length: int
    step: int
    stride: int


def boxes_of_view(shape: tuple[int, ...], source: StridedView, offset: int, strides: tuple[int, ...]) -> list[ViewPart] | None:
    """Return the boxes of a contiguous tensor that a view of it covers.

    Args:
        shape: Shape of the tensor.
        source: The view. Its element `i` is copied to element `offset + sum(i[d] * strides[d])` of the destination.
        offset: Offset in the destination, in elements.
        strides: Strides in the destination, in elements, one for each dimension of the view.

    Returns:
        The boxes; `None` if boxes cannot describe the copy (broadcasts, permutations).
    """
    if prod(source.shape) == 0:
        return []
    whole = contiguous_strides(shape)
    start, rest = [], source.offset
    for stride in whole:
        start.append(rest // stride)
        rest %= stride
    axes: list[list[_Axis]] = [[] for _ in shape]
    for count, stride, to in zip(source.shape, source.strides, strides, strict=True):
        while count > 1:
            d = next((d for d in range(len(shape)) if whole[d] <= stride and shape[d] > 1), None)
            if d is None or stride % whole[d]:
                return None
            step = stride // whole[d]
            inside = -(-(shape[d] - start[d]) // step)  # number of steps that stay in this dimension
            if count <= inside:
                axes[d].append(_Axis(count, step, to))
                break
            if shape[d] % step or start[d] >= step or count % (shape[d] // step):
                return None
            inside = shape[d] // step
            axes[d].append(_Axis(inside, step, to))
            count, stride, to = count // inside, stride * inside, to * inside
    return _parts(axes, start, shape, offset)


def boxes_of_copy(
    shape: tuple[int, ...], copied: StridedView, source: StridedView, offset: int, strides: tuple[int, ...]
) -> list[ViewPart] | None:
    """Return `boxes_of_view` for a view `source` of a contiguous copy of the view `copied` of the tensor."""
    parts = boxes_of_view(copied.shape, source, offset, strides)
    if parts is None:
        return None
    whole = Piece("", full_box(copied.shape), "", copied.offset, copied.strides)
    found = [boxes_of_view(shape, whole.view(part.box), part.offset, part.strides) for part in parts]
    return None if None in found else [part for some in found if some for part in some]


def _parts(axes: list[list[_Axis]], start: list[int], shape: tuple[int, ...], offset: int) -> list[ViewPart] | None:
    """Return one part for each combination of the outer axes' indices.

    The longest axis of each dimension becomes a range of the box; the others are outer axes.
    """
    inner: list[_Axis] = []
    outer: list[tuple[int, _Axis]] = []
    for d, found in enumerate(axes):
        merged: list[_Axis] = []
        for axis in sorted(found, key=lambda a: a.step):
            last = merged[-1] if merged else None
            if last and axis.step == last.length * last.step and axis.stride == last.length * last.stride:
                merged[-1] = _Axis(last.length * axis.length, last.step, last.stride)
            else:
                merged.append(axis)
        longest = max(merged, key=lambda a: a.length, default=_Axis(1, 1, 1))
        inner.append(longest)
        outer += [(d, axis) for axis in merged if axis is not longest]
        if start[d] + sum((a.length - 1) * a.step for a in merged) >= shape[d]:
            return None
    if prod(axis.length for _, axis in outer) > MAX_PARTS:
        return None
    parts = []
    for index in product(*(range(axis.length) for _, axis in outer)):
        first, to = list(start), offset
        for i, (d, axis) in zip(index, outer, strict=True):
            first[d] += i * axis.step
            to += i * axis.stride
        box = tuple(Range(s, a.length, a.step if a.length > 1 else 1) for s, a in zip(first, inner, strict=True))
        parts.append(ViewPart(box, to, tuple(a.stride for a in inner)))
    return parts


def covered_elements(writes: Iterable[StridedView]) -> int:
    """Count the elements of memory that at least one write covers."""
    runs, strided = list[tuple[int, int]](), list[StridedView]()
    for write in writes:
        end = write.offset + 1 + sum((n - 1) * stride for n, stride in zip(write.shape, write.strides, strict=True))
        if end - write.offset == prod(write.shape):
            runs.append((write.offset, end))
        elif 0 not in write.shape:
            strided.append(write)
            runs.append((end, end))
    if strided:  # marked element by element, which takes a byte for each
        taken = np.zeros(max(end for _, end in runs), dtype=bool)
        for begin, end in runs:
            taken[begin:end] = True
        for write in strided:
            np.lib.stride_tricks.as_strided(taken[write.offset :], write.shape, write.strides)[...] = True
        return int(np.count_nonzero(taken))
    covered = last = 0
    for begin, end in sorted(runs):
        covered += max(0, end - max(begin, last))
        last = max(last, end)
    return covered
