"""Division of strided boxes into tiles: rows of bytes, small enough that a kernel's programs share them evenly."""

from typing import Any, NamedTuple

import numpy as np
from resharder.converters.geometry.copy_table import Copies
from resharder.converters.geometry.piece_arrays import Ints

TILE = 128 << 10  # bytes of the largest tile


class Shape(NamedTuple):
    """Boxes as bytes, one row per box, with dimensions in the order of the target's memory.

    Dimensions without a gap on both sides are joined. The last dimension is contiguous on both sides.
    """

    counts: Ints  # (boxes, dimensions)
    source_strides: Ints
    target_strides: Ints

    def take(self, which: Any) -> "Shape":
        """Return the boxes selected by `which`: an index array, a mask or a slice."""
        return Shape(*(array[which] for array in self))

    @property
    def sizes(self) -> Ints:
        """Bytes of each box."""
        found: Ints = self.counts.prod(axis=1)
        return found

    @property
    def dense_in_source(self) -> "np.ndarray[Any, np.dtype[np.bool_]]":
        """Whether each box is one run of bytes in the source, in the target's order."""
        return _dense(self.counts, self.source_strides)

    @property
    def dense_in_target(self) -> "np.ndarray[Any, np.dtype[np.bool_]]":
        """Whether each box is one run of bytes in the target."""
        return _dense(self.counts, self.target_strides)


def _dense(counts: Ints, strides: Ints) -> "np.ndarray[Any, np.dtype[np.bool_]]":
    inner = np.cumprod(counts[:, ::-1], axis=1)[:, ::-1] // counts  # bytes of one step
    found: np.ndarray[Any, np.dtype[np.bool_]] = ((counts == 1) | (strides == inner)).all(axis=1)
    return found


def shape_of(copies: Copies) -> Shape:
    """Return the shape of copies. If a constant is added, the source is a contiguous box in a
    buffer, computed before sending.
    """
    counts = np.column_stack([copies.counts, copies.item])
    one = np.ones((len(copies), 1), np.int64)
    own = np.cumprod(counts[:, ::-1], axis=1)[:, ::-1] // counts
    source = np.where((copies.plus != 0)[:, None], own, np.column_stack([copies.source_strides, one]))
    target = np.column_stack([copies.target_strides, one])
    # Dimensions of length 1 come first, where they can be joined with any other.
    order = np.argsort(np.where(counts == 1, np.iinfo(np.int64).min, -target), axis=1, kind="stable")
    order = np.where(order == counts.shape[1] - 1, -1, order)  # bytes stay last
    order = np.take_along_axis(order, np.argsort(order == -1, axis=1, kind="stable"), axis=1)
    shape = Shape(*(np.take_along_axis(array, order, axis=1) for array in (counts, source, target)))
    for _ in range(counts.shape[1]):
        for j in range(counts.shape[1] - 1, 0, -1):
            _join(shape, j)
    return shape


def _join(shape: Shape, j: int) -> None:
    """Join dimension `j - 1` with `j`, in place, if there is no gap between them. Earlier dimensions move up."""
    counts, source, target = shape
    span = counts[:, j]
    gapless = (source[:, j - 1] == source[:, j] * span) & (target[:, j - 1] == target[:, j] * span)
    which = np.flatnonzero((counts[:, j - 1] == 1) | gapless)
    counts[which, j] *= counts[which, j - 1]
    for array, first in ((counts, 1), (source, 0), (target, 0)):
        array[which, 1:j] = array[which, : j - 1]
        array[which, 0] = first


class Tiles(NamedTuple):
    """Tiles, one entry per tile.

    Tile `i` is `rows[i]` rows of `width[i]` bytes of box `box[i]`. `source` and `target` have its start on either side, `at`
    its start among the box's bytes in the order of the target's memory. Strides are those of its rows, in bytes.
    """

    box: Ints
    at: Ints
    rows: Ints
    width: Ints
    source: Ints
    target: Ints
    source_stride: Ints
    target_stride: Ints

    @property
    def sizes(self) -> Ints:
        """Bytes of each tile."""
        found: Ints = self.rows * self.width
        return found

    def take(self, which: Any) -> "Tiles":
        """Return the tiles selected by `which`: an index array, a mask or a slice."""
        return Tiles(*(array[which] for array in self))


def tiles_of(shape: Shape, source: Ints, target: Ints) -> Tiles:
    """Return the tiles of boxes that begin at bytes `source` and `target`: box by box, in the order of the target's memory."""
    counts, rows, width = shape.counts, shape.counts[:, -2], shape.counts[:, -1]
    outer = counts[:, :-2].prod(axis=1)
    wide = width > TILE
    heights = np.where(wide, 1, np.minimum(rows, np.maximum(1, TILE // width)))  # rows of a tile
    across, down = np.where(wide, -(-width // TILE), 1), -(-rows // heights)
    box, rest = expand(outer * down * across)
    rest, column = np.divmod(rest, across[box])
    rest, row = np.divmod(rest, down[box])
    row, column = row * heights[box], column * TILE
    at = rest * rows[box] * width[box] + row * width[box] + column
    begin = []
    for start, strides in ((source, shape.source_strides), (target, shape.target_strides)):
        where, left = start[box] + row * strides[box, -2] + column, rest
        for d in range(counts.shape[1] - 3, -1, -1):
            left, index = np.divmod(left, counts[box, d])
            where = where + index * strides[box, d]
        begin.append(where)
    return Tiles(
        box,
        at,
        np.minimum(heights[box], rows[box] - row),
        np.where(wide[box], np.minimum(TILE, width[box] - column), width[box]),
        begin[0],
        begin[1],
        shape.source_strides[box, -2],
        shape.target_strides[box, -2],
    )


def expand(counts: Ints) -> tuple[Ints, Ints]:
    """Return (i, j) for each `i` and each `j` below `counts[i]`, sorted by i, then j."""
    parent = np.repeat(np.arange(len(counts)), counts)
    return parent, np.arange(len(parent)) - np.repeat(np.cumsum(counts) - counts, counts)
