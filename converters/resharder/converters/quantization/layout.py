"""A rank's layout once its matrices are cast: boxes of FP8 weights and of their scales, and the blocks that ranks share.

The cast weights and scales of a rank are two flat tensors, in which every box has a place. Other tensors stay where they are.

Ranks may share a block that boxes cut. The owners of its boxes contribute the largest absolute value of theirs; a rank that
casts some of its elements without having all of them receives the largest of all. The owner of all boxes of a block contributes
too, because another rank may have a replica of one of them.

A parameter that the trainer keeps in FP8 blocks is published from its own memory where a piece has whole blocks of the parameter
that are whole blocks of the matrix. Its other pieces are cast from the master weight. If data-parallel ranks have parts of it,
each casts and delivers its own: their boxes cut blocks, which they share as other ranks do.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from resharder.converters.errors import UnsupportedModel
from resharder.converters.geometry.layout import Box, Layout, Piece, Range, TensorSpec, box_shape, box_size, contiguous_strides
from resharder.converters.geometry.piece_arrays import Ints
from resharder.converters.models.blockwise import SIDE, UNDIVIDED, Blockwise, MasterPart, factors_of, master_of
from resharder.converters.quantization.blocks import (
    Region,
    elements_in_blocks,
    grid_of,
    region_of,
    scale_box,
    scale_spec,
    whole_blocks,
)
from resharder.converters.quantization.scheme import Scheme

WEIGHTS, SCALES = "quantised.weights", "quantised.scales"
"""Names of the local tensors that hold cast weights, F8_E4M3, and scales, F32."""
SOURCES = ("BF16", "F16", "F32")
"""dtypes that are cast."""
_NONE: Mapping[str, Blockwise] = {}
_ALIGN = 256  # elements, so that kernels move boxes in wide words


class CastPiece(NamedTuple):
    """Piece of a matrix to cast.

    Attributes:
        source: The piece in the rank's own tensors.
        at: Position of its first element in the cast weights.
        scales: Scales that go with it.
        scales_at: Position of their first element in the rank's scales.
    """

    source: Piece
    at: int
    scales: Box | None
    scales_at: int


class Matrix(NamedTuple):
    """Parts of one matrix that a rank has, and where the maxima of the blocks that they touch are kept."""

    spec: TensorSpec
    region: Region
    maxima_at: int
    pieces: tuple[CastPiece, ...]


class Shared(NamedTuple):
    """Blocks that a rank shares: positions among its maxima, and numbers (in C order) by name of the scales' tensor."""

    at: Ints
    blocks: dict[str, list[int]]


@dataclass(frozen=True)
class QuantisedLayout:
    """Layout of a rank with cast matrices.

    Attributes:
        layout: Boxes to publish, in the rank's own tensors, `WEIGHTS` and `SCALES`. It names the scales of every matrix, also of
            those whose scales other ranks deliver.
        matrices: Matrices to cast.
        weights: Elements of the tensor `WEIGHTS`.
        scales: Elements of the tensor `SCALES`.
        maxima: Number of blocks that the rank touches.
        contributed: Cut blocks of which the rank owns a box.
        received: Cut blocks of which the rank casts a part without having all elements.
        recast: Matrices of FP8 parameters that are cast from master weights.
    """

    layout: Layout
    matrices: tuple[Matrix, ...]
    weights: int
    scales: int
    maxima: int
    contributed: Shared
    received: Shared
    recast: tuple[str, ...] = ()


def quantised_layout(
    layout: Layout, scheme: Scheme, blockwise: Mapping[str, Blockwise] = _NONE, divided: Mapping[str, MasterPart] = UNDIVIDED
) -> QuantisedLayout:
    """Return the layout of a rank whose matrices are cast.

    Args:
        layout: The rank's layout. Tensors in F8_E4M3 are those of `blockwise`.
        scheme: Format to cast to.
        blockwise: Local tensors in FP8 blocks.
        divided: Parts of the master weights that data-parallel ranks divide, by local tensor.

    Raises UnsupportedModel for a matrix of a dtype not in `SOURCES`, and for an FP8 tensor that the format does not convert.
    """
    specs, places = dict[str, TensorSpec](), _Places()
    by_matrix: dict[str, list[CastPiece]] = defaultdict(list)
    pieces, recast = list[Piece](), list[str]()
    for name, spec in layout.tensors.items():
        specs[name] = spec
        if scheme.converts(name, spec.shape):
            if spec.dtype not in SOURCES and spec.dtype != "F8_E4M3":
                raise UnsupportedModel(f"{name}: expected one of {', '.join(SOURCES)} to cast to FP8, got {spec.dtype}")
            specs[name], scales = spec._replace(dtype="F8_E4M3"), scale_spec(spec, scheme)
            specs[scales.name] = scales
        elif spec.dtype == "F8_E4M3":
            raise UnsupportedModel(
                f"{name} stays unconverted, and the trainer has it in FP8: train it in one of {', '.join(SOURCES)}"
            )
    for piece in layout.pieces:
        spec = layout.tensors[piece.tensor]
        if not scheme.converts(spec.name, spec.shape):
            pieces.append(piece)
            continue
        block, scale = scheme.block_of(spec.shape), scheme.scale_of(spec.name)
        sources = [piece]
        if (local := blockwise.get(piece.local)) is not None:
            scales_box = scale_box(piece.box, spec.shape, block)
            if scales_box is not None and not scheme.channels and has_whole_blocks(piece, local, spec.shape):
                pieces += piece, _factors(piece, local, scale, scales_box)
                continue
            part, master = divided.get(piece.local), piece._replace(local=master_of(piece.local))
            sources = [master] if part is None else pieces_within(master, part)
            recast.append(spec.name)
        for source in sources:
            cast = places.add(source, scale_box(source.box, spec.shape, block))
            by_matrix[spec.name].append(cast)
            pieces.append(_at(source, spec.name, source.box, WEIGHTS, cast.at))
            if cast.scales is not None:
                pieces.append(_at(source, scale, cast.scales, SCALES, cast.scales_at))
    matrices, maxima = [], 0
    for name, parts in by_matrix.items():
        block = scheme.block_of(layout.tensors[name].shape)
        region = region_of((part.source.box for part in parts), block)
        matrices.append(Matrix(layout.tensors[name], region, maxima, tuple(parts)))
        maxima += region.shape[0] * region.shape[1]
    contributed, received = _shared(matrices, scheme)
    return QuantisedLayout(
        Layout(specs, tuple(pieces)),
        tuple(matrices),
        places.weights,
        places.scales,
        maxima,
        contributed,
        received,
        tuple(dict.fromkeys(recast)),
    )


def has_whole_blocks(piece: Piece, local: Blockwise, shape: tuple[int, ...]) -> bool:
    """Return whether a piece has whole blocks of its local tensor that are whole blocks of the matrix, of `shape`."""
    if piece.strides != (local.columns, 1):
        return False
    starts = divmod(piece.offset, local.columns)
    return all(
        r.step == 1
        and at % SIDE == r.start % SIDE == 0
        and (r.count % SIDE == 0 or (r.start + r.count, at + r.count) == (whole, here))
        for r, at, whole, here in zip(piece.box, starts, shape, local, strict=True)
    )


def pieces_within(piece: Piece, part: MasterPart) -> list[Piece]:
    """Return the pieces of a piece's elements in a part of its local tensor: whole rows, and parts of the rows beside them.

    Offsets and strides are those of the part as a flat tensor.
    """
    (rows, columns), stride = piece.box, piece.strides[0]
    if piece.strides[1] != 1:
        raise UnsupportedModel(f"{piece.local}: the rows of its divided master weight are not contiguous: {piece.strides}")
    low = min(rows.count, max(0, -((piece.offset - part.start) // stride)))
    high = min(rows.count, max(low, (part.end - columns.count - piece.offset) // stride + 1))
    cuts = [(low, high - low, 0, columns.count)]
    for row in {low - 1, high} & set(range(rows.count)):
        at = piece.offset + row * stride
        left, right = max(0, part.start - at), min(columns.count, part.end - at)
        cuts.append((row, 1, left, right - left))
    return [
        piece._replace(
            box=(_cut(rows, row, count), _cut(columns, column, width)),
            offset=piece.offset + row * stride + column - part.start,
            replica=not part.owned,
        )
        for row, count, column, width in sorted(cuts)
        if count > 0 and width > 0
    ]


def _cut(r: Range, first: int, count: int) -> Range:
    return Range(r.start + first * r.step, count, r.step if count > 1 else 1)


def _factors(piece: Piece, local: Blockwise, name: str, box: Box) -> Piece:
    """Return the place of a piece's scales among the factors of its local tensor."""
    (row, column), across = divmod(piece.offset, local.columns), local.factors[1]
    return Piece(name, box, factors_of(piece.local), row // SIDE * across + column // SIDE, (across, 1), piece.replica)


def scale_blocks(plan: QuantisedLayout) -> Ints:
    """Return the position among the rank's maxima of the block of each element of the tensor `SCALES`."""
    found = np.zeros(plan.scales, np.int64)
    for matrix in plan.matrices:
        first, (_, across) = matrix.region.first, matrix.region.shape
        for part in matrix.pieces:
            if part.scales is not None:
                rows, columns = (np.arange(r.start, r.last + 1, r.step) - low for r, low in zip(part.scales, first, strict=True))
                blocks = matrix.maxima_at + rows[:, None] * across + columns[None, :]
                found[part.scales_at : part.scales_at + blocks.size] = blocks.ravel()
    return found


class _Places:
    """Places of boxes in the flat tensors, one after the other."""

    def __init__(self) -> None:
        self.weights = self.scales = 0

    def add(self, piece: Piece, scales: Box | None) -> CastPiece:
        found = CastPiece(piece, self.weights, scales, self.scales)
        self.weights += _aligned(box_size(piece.box))
        self.scales += _aligned(box_size(scales)) if scales is not None else 0
        return found


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _at(piece: Piece, tensor: str, box: Box, local: str, offset: int) -> Piece:
    return Piece(tensor, box, local, offset, contiguous_strides(box_shape(box)), piece.replica)


def _shared(matrices: Iterable[Matrix], scheme: Scheme) -> tuple[Shared, Shared]:
    """Return (contributed, received)."""
    positions: tuple[list[Ints], list[Ints]] = ([], [])
    blocks: tuple[dict[str, list[int]], dict[str, list[int]]] = ({}, {})
    for matrix in matrices:
        shape, region = matrix.spec.shape, matrix.region
        whole, held = whole_blocks(shape, region), np.zeros(region.shape, np.int64)
        cut = np.zeros(region.shape, bool)
        owned = {part.source.box for part in matrix.pieces if not part.source.replica}
        for box in {part.source.box for part in matrix.pieces}:
            inside = elements_in_blocks(box, region)
            held += inside
            cut |= (inside > 0) & (inside < whole) & (box in owned)
        masks = cut, (held > 0) & (held < whole)
        for mask, at, numbers in zip(masks, positions, blocks, strict=True):
            if mask.any():
                at.append(matrix.maxima_at + np.flatnonzero(mask))
                rows, columns = np.nonzero(mask)
                found = (rows + region.first[0]) * grid_of(shape, region.block)[1] + columns + region.first[1]
                numbers[scheme.scale_of(matrix.spec.name)] = found.tolist()
    first, second = (
        Shared(np.concatenate([np.zeros(0, np.int64), *at]), by_name) for at, by_name in zip(positions, blocks, strict=True)
    )
    return first, second
