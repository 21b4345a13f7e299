"""Kernels that measure and cast all pieces of a rank at once, one program for each part of a block: `tiles.py` has the table."""

import torch
import triton  # type: ignore[import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-untyped,unused-ignore]

_WARPS = 8
_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
_LARGEST = tl.constexpr(448.0)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _values(tile, bases, TYPE: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the elements of a tile in float32, and which of them there are."""
    memory = tl.load(bases + tl.load(tile)).to(tl.pointer_type(TYPE))
    offset, row_stride, column_stride = tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
    row, column = tl.arange(0, ROWS).to(tl.int64), tl.arange(0, COLUMNS).to(tl.int64)
    inside = (row < tl.load(tile + 4))[:, None] & (column < tl.load(tile + 5))[None, :]
    if ALIGNED:
        memory = tl.multiple_of(memory, 16)
        at = tl.multiple_of(offset, 8) + (row * tl.multiple_of(row_stride, 8))[:, None] + column[None, :]
        return tl.load(memory + at).to(tl.float32), inside
    at = offset + (row * row_stride)[:, None] + (column * column_stride)[None, :]
    return tl.load(memory + at, mask=inside, other=0).to(tl.float32), inside


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _measure(tiles, bases, maxima, TYPE: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    tile = tiles + tl.program_id(0).to(tl.int64) * 8
    value, _ = _values(tile, bases, TYPE, ALIGNED, ROWS, COLUMNS)
    # Bits of absolute values compare as integers, with NaN above infinity.
    bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    tl.atomic_max(maxima + (tl.load(tile + 7) >> 32), tl.max(tl.max(bits, axis=1), axis=0))


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _cast(tiles, bases, factors, target, TYPE: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    tile = tiles + tl.program_id(0).to(tl.int64) * 8
    value, inside = _values(tile, bases, TYPE, ALIGNED, ROWS, COLUMNS)
    where = tl.load(tile + 7)
    scaled = tl.minimum(tl.maximum(value * tl.load(factors + (where >> 32)), -_LARGEST), _LARGEST).to(tl.float8e4nv)
    position, width = tl.load(tile + 6), where & 0x7FFFFFFF
    row, column = tl.arange(0, ROWS).to(tl.int64), tl.arange(0, COLUMNS).to(tl.int64)
    if ALIGNED:
        at = tl.multiple_of(position, 16) + (row * tl.multiple_of(width, 16))[:, None] + column[None, :]
        tl.store(target + at, scaled)
    else:
        tl.store(target + position + (row * width)[:, None] + column[None, :], scaled, mask=inside)


def measure(
    tiles: torch.Tensor, bases: torch.Tensor, maxima: torch.Tensor, kind: torch.dtype, block: tuple[int, int], aligned: bool
) -> None:
    """Raise `maxima`, float32, to the largest absolute values of tiles, on the current stream.

    Args:
        tiles: int64, (tiles, 8), on the device: `tiles.py`.
        bases: int64, addresses of the local tensors.
        maxima: Of all blocks.
        kind: dtype of the elements.
        block: Rows and columns of a block, powers of two.
        aligned: Whether all tiles are whole blocks with contiguous rows, at multiples of 16 bytes.
    """
    _measure[(len(tiles),)](tiles, bases, maxima.view(torch.int32), _TYPES[kind], aligned, *block, num_warps=_WARPS)


def cast(
    tiles: torch.Tensor,
    bases: torch.Tensor,
    factors: torch.Tensor,
    target: torch.Tensor,
    kind: torch.dtype,
    block: tuple[int, int],
    aligned: bool,
) -> None:
    """Cast tiles into `target`, float8_e4m3fn, with the factors of their blocks. The other arguments are those of `measure`."""
    _cast[(len(tiles),)](tiles, bases, factors, target, _TYPES[kind], aligned, *block, num_warps=_WARPS)
