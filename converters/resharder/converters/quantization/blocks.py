"""Geometry of scales: which blocks a box of a tensor touches, and which process delivers the scale of each.

A block is a range of rows and columns of a tensor, and has one element of the tensor's scales. The process that delivers the
block's first element delivers its scale, so boxes that tile a tensor yield boxes that tile its scales.
"""

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from resharder.converters.geometry.layout import Box, Range, TensorSpec, intersect_ranges
from resharder.converters.geometry.piece_arrays import Ints
from resharder.converters.quantization.scheme import Block, Scheme


def grid_of(shape: tuple[int, ...], block: Block) -> tuple[int, int]:
    """Return the number of blocks along each dimension of a matrix, which is the shape of its scales."""
    rows, columns = (-(-n // size) for n, size in zip(shape, block, strict=True))
    return rows, columns


def scale_spec(spec: TensorSpec, scheme: Scheme) -> TensorSpec:
    """Return the tensor of a matrix's scales."""
    return TensorSpec(scheme.scale_of(spec.name), "F32", grid_of(spec.shape, scheme.block_of(spec.shape)))


def scale_box(box: Box, shape: tuple[int, ...], block: Block) -> Box | None:
    """Return the scales of the blocks whose first element is in `box`; None if there are none."""
    found = []
    for r, n, size in zip(box, shape, block, strict=True):
        blocks = -(-n // size)
        first = intersect_ranges(r, Range(0, blocks, size if blocks > 1 else 1))
        if first is None:
            return None
        found.append(Range(first.start // size, first.count, first.step // size if first.count > 1 else 1))
    return tuple(found)


class Run(NamedTuple):
    """Consecutive blocks with the same number of elements in a range.

    Blocks `block … block + blocks` contain `length` elements of the range each, from its element `at` on.
    """

    block: int
    at: int
    blocks: int
    length: int


@lru_cache(maxsize=1 << 14)
def runs_of(r: Range, size: int) -> tuple[Run, ...]:
    """Return the blocks of `size` indices that a range touches, in order."""
    if size == 1 and (r.step == 1 or r.count == 1):
        return (Run(r.start, 0, r.count, 1),)
    runs: list[Run] = []
    for block, at, length in _touched(r, size):
        last = runs[-1] if runs else None
        if last is not None and last.length == length and last.block + last.blocks == block:
            runs[-1] = last._replace(blocks=last.blocks + 1)
        else:
            runs.append(Run(block, at, 1, length))
    return tuple(runs)


def _touched(r: Range, size: int) -> Iterator[tuple[int, int, int]]:
    """Yield (block, first element of the range in it, number of its elements)."""
    at = 0
    while at < r.count:
        block = (r.start + at * r.step) // size
        end = min(r.count, -(-((block + 1) * size - r.start) // r.step))
        yield block, at, end - at
        at = end


class Region(NamedTuple):
    """Rectangle of the blocks of a tensor.

    Attributes:
        first: First block along each dimension.
        shape: Number of blocks along each dimension.
        block: Rows and columns of a block.
    """

    first: tuple[int, int]
    shape: tuple[int, int]
    block: Block


def region_of(boxes: Iterable[Box], block: Block) -> Region:
    """Return the smallest region that has all blocks that the boxes touch."""
    ends = [[(r.start // size, r.last // size + 1) for r, size in zip(box, block, strict=True)] for box in boxes]
    low = tuple(min(end[d][0] for end in ends) for d in range(2))
    high = tuple(max(end[d][1] for end in ends) for d in range(2))
    return Region((low[0], low[1]), (high[0] - low[0], high[1] - low[1]), block)


def elements_in_blocks(box: Box, region: Region) -> Ints:
    """Return the number of elements of a box in each block of a region."""
    rows, columns = (
        _counts(r, size, low, n) for r, size, low, n in zip(box, region.block, region.first, region.shape, strict=True)
    )
    found: Ints = rows[:, None] * columns[None, :]
    return found


@lru_cache(maxsize=1 << 14)
def _counts(r: Range, size: int, low: int, blocks: int) -> Ints:
    counts = np.zeros(blocks, np.int64)
    for run in runs_of(r, size):
        counts[run.block - low : run.block - low + run.blocks] += run.length
    return counts


def whole_blocks(shape: tuple[int, ...], region: Region) -> Ints:
    """Return the number of elements of each block of a region in the whole tensor, at whose end blocks may be smaller."""
    first = [low * size for low, size in zip(region.first, region.block, strict=True)]
    ends = [min(n, at + blocks * size) for n, at, blocks, size in zip(shape, first, region.shape, region.block, strict=True)]
    return elements_in_blocks(tuple(Range(at, end - at) for at, end in zip(first, ends, strict=True)), region)
