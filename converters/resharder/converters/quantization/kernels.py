"""Kernels that measure and cast all pieces of a rank at once, one program for each tile: `tiles.py` has the table."""

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
    inside = (row < tl.load(tile + 4))[:, None] & (column < (tl.load(tile + 5) & 0x7FFFFFFF))[None, :]
    if ALIGNED:
        memory = tl.multiple_of(memory, 16)
        at = tl.multiple_of(offset, 8) + (row * tl.multiple_of(row_stride, 8))[:, None] + column[None, :]
        return tl.load(memory + at).to(tl.float32), inside
    at = offset + (row * row_stride)[:, None] + (column * column_stride)[None, :]
    return tl.load(memory + at, mask=inside, other=0).to(tl.float32), inside


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _maxima_of_rows(tile, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the number of the maximum of each row, and which of the rows there are."""
    row = tl.arange(0, ROWS).to(tl.int64)
    return (tl.load(tile + 7) >> 32) + row * (tl.load(tile + 5) >> 32), row < tl.load(tile + 4)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _measure(  # type: ignore[no-untyped-def]
    tiles,
    bases,
    maxima,
    TYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    tile = tiles + tl.program_id(0).to(tl.int64) * 8
    value, _ = _values(tile, bases, TYPE, ALIGNED, ROWS, COLUMNS)
    # Bits of absolute values compare as integers, with NaN above infinity.
    bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    if CHANNELS:
        number, there = _maxima_of_rows(tile, ROWS)
        tl.atomic_max(maxima + number, tl.max(bits, axis=1), mask=there)
    else:
        tl.atomic_max(maxima + (tl.load(tile + 7) >> 32), tl.max(tl.max(bits, axis=1), axis=0))


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _cast(  # type: ignore[no-untyped-def]
    tiles,
    bases,
    factors,
    target,
    TYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    tile = tiles + tl.program_id(0).to(tl.int64) * 8
    value, inside = _values(tile, bases, TYPE, ALIGNED, ROWS, COLUMNS)
    where = tl.load(tile + 7)
    if CHANNELS:
        number, there = _maxima_of_rows(tile, ROWS)
        multiplied = value * tl.load(factors + number, mask=there, other=1)[:, None]
    else:
        multiplied = value * tl.load(factors + (where >> 32))
    scaled = tl.minimum(tl.maximum(multiplied, -_LARGEST), _LARGEST).to(tl.float8e4nv)
    position, width = tl.load(tile + 6), where & 0x7FFFFFFF
    row, column = tl.arange(0, ROWS).to(tl.int64), tl.arange(0, COLUMNS).to(tl.int64)
    if ALIGNED:
        at = tl.multiple_of(position, 16) + (row * tl.multiple_of(width, 16))[:, None] + column[None, :]
        tl.store(target + at, scaled)
    else:
        tl.store(target + position + (row * width)[:, None] + column[None, :], scaled, mask=inside)


def measure(
    tiles: torch.Tensor,
    bases: torch.Tensor,
    maxima: torch.Tensor,
    kind: torch.dtype,
    shape: tuple[int, int],
    *,
    aligned: bool,
    channels: bool,
) -> None:
    """Raise `maxima`, float32, to the largest absolute values of tiles, on the current stream.

    Args:
        tiles: int64, (tiles, 8), on the device: `tiles.py`.
        bases: int64, addresses of the local tensors.
        maxima: Of all blocks.
        kind: dtype of the elements.
        shape: Rows and columns of a tile at most, powers of two.
        aligned: Whether all tiles have that shape, and contiguous rows at multiples of 16 bytes.
        channels: Whether each row of a tile has a maximum of its own.
    """
    bits = maxima.view(torch.int32)
    _measure[(len(tiles),)](tiles, bases, bits, _TYPES[kind], aligned, *shape, channels, num_warps=_WARPS)


def cast(
    tiles: torch.Tensor,
    bases: torch.Tensor,
    factors: torch.Tensor,
    target: torch.Tensor,
    kind: torch.dtype,
    shape: tuple[int, int],
    *,
    aligned: bool,
    channels: bool,
) -> None:
    """Cast tiles into `target`, float8_e4m3fn, with the factors of their blocks. The other arguments are those of `measure`."""
    _cast[(len(tiles),)](tiles, bases, factors, target, _TYPES[kind], aligned, *shape, channels, num_warps=_WARPS)
