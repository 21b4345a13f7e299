"""Kernels for the digest of `resharder.converters.storage.digest`, of many boxes at once."""

import torch
import triton  # type: ignore[import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-untyped,unused-ignore]

ROWS, COLUMNS, WARPS = 16, 256, 4  # of a block
Block = tuple[int, int, int]  # rows, columns in words, warps
WORDS: Block = (4, 128, 1)  # one warp, so that no warps wait for each other

# splitmix64 and the seed of rows of converters/storage/digest.py, in two's complement: Triton's literals are signed.
_GAMMA = tl.constexpr(0x9E3779B97F4A7C15 - (1 << 64))
_FIRST = tl.constexpr(0xBF58476D1CE4E5B9 - (1 << 64))
_SECOND = tl.constexpr(0x94D049BB133111EB - (1 << 64))


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _shifted(x, by: tl.constexpr):  # type: ignore[no-untyped-def]
    return (x.to(tl.uint64, bitcast=True) >> by).to(tl.int64, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _row_weights(row):  # type: ignore[no-untyped-def]
    x = (row + 1) * _GAMMA + _GAMMA
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return (x ^ _shifted(x, 31)) | 1


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _digest(items, weights, found, TYPE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    item = items + tl.program_id(0) * 8
    memory = tl.load(item).to(tl.pointer_type(TYPE))
    rows = tl.load(item + 1).to(tl.int32)
    width = tl.load(item + 2).to(tl.int32)
    row_stride = tl.load(item + 3)
    column_stride = tl.load(item + 4)
    first_row = tl.load(item + 5)
    steps = tl.load(item + 6)
    where = tl.load(item + 7)
    row_step = steps >> 32
    column_step = (steps & 0x7FFFFFFF).to(tl.int32)
    first_column = (where & 0x7FFFFFFF).to(tl.int32)
    total = tl.zeros((), tl.int64)
    for above in range(0, rows, ROWS):
        row = above + tl.arange(0, ROWS)
        sums = tl.zeros((ROWS, COLUMNS), tl.int64)
        for left in range(0, width, COLUMNS):
            column = left + tl.arange(0, COLUMNS)
            inside = (row < rows)[:, None] & (column < width)[None, :]
            at = row.to(tl.int64)[:, None] * row_stride + (column.to(tl.int64) * column_stride)[None, :]
            value = tl.load(memory + at, mask=inside, other=0).to(tl.int64)
            if TYPE.primitive_bitwidth == 64:
                value = value ^ _shifted(value, 32)
            weight = tl.load(weights + first_column + column * column_step, mask=column < width, other=0)
            sums += value * weight.to(tl.int64)[None, :]
        total += tl.sum(tl.sum(sums, axis=1) * _row_weights(first_row + row.to(tl.int64) * row_step), axis=0)
    tl.atomic_add(found + (where >> 32), total)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _digest_words(  # type: ignore[no-untyped-def]
    items, low, high, found, HALVES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Add two elements of 16 bits or one of 32 bits at a time.

    A product of 32 by 32 bits with a 64-bit sum is one instruction.
    """
    item = items + tl.program_id(0) * 8
    memory = tl.multiple_of(tl.load(item).to(tl.pointer_type(tl.int32)), 16)
    rows = tl.load(item + 1).to(tl.int32)
    width = tl.multiple_of(tl.load(item + 2).to(tl.int32), 4)
    row_stride = tl.load(item + 3) * 4
    first_row = tl.load(item + 5)
    row_step = tl.load(item + 6) >> 32
    where = tl.load(item + 7)
    first_column = tl.multiple_of((where & 0x7FFFFFFF).to(tl.int32), 4)
    total = tl.zeros((), tl.int64)
    for above in range(0, rows, ROWS):
        row = above + tl.arange(0, ROWS)
        begins = memory + row.to(tl.int64) * row_stride
        sums = tl.zeros((ROWS, COLUMNS), tl.uint64)
        for left in range(0, width, COLUMNS):
            column = left + tl.arange(0, COLUMNS)
            inside = (row < rows)[:, None] & (column < width)[None, :]
            value = tl.load(begins[:, None] + column[None, :], mask=inside, other=0).to(tl.uint32, bitcast=True)
            number = first_column + column
            below = tl.load(low + number, mask=column < width, other=0).to(tl.uint32, bitcast=True).to(tl.uint64)
            if HALVES:
                over = tl.load(high + number, mask=column < width, other=0).to(tl.uint32, bitcast=True).to(tl.uint64)
                sums += (value & 0xFFFF).to(tl.uint64) * below[None, :] + (value >> 16).to(tl.uint64) * over[None, :]
            else:
                sums += value.to(tl.uint64) * below[None, :]
        of_rows = tl.sum(sums.to(tl.int64, bitcast=True), axis=1)
        total += tl.sum(of_rows * _row_weights(first_row + row.to(tl.int64) * row_step), axis=0)
    tl.atomic_add(found + (where >> 32), total)


def add_digests(items: torch.Tensor, weights: torch.Tensor, found: torch.Tensor, size: int) -> None:
    """Add the digests of items to `found`, on the current stream.

    Args:
        items: int64, (items, 8). Each row has the address, rows, columns, row stride and column stride in elements, number of
            the first row, step of rows << 32 | step of columns, and index in `found` << 32 | first column.
        weights: int32, weights of the columns.
        found: int64, digests.
        size: Bytes of an element.
    """
    kind = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32, 8: tl.int64}[size]
    _digest[(len(items),)](items, weights, found, kind, ROWS, COLUMNS, num_warps=WARPS)


def add_digests_of_words(items: torch.Tensor, weights: torch.Tensor, found: torch.Tensor, block: Block = WORDS) -> None:
    """Add the digests of items whose rows are contiguous, aligned to 16 bytes and a multiple of 16 bytes long.

    Args:
        items: As for `add_digests`, with columns in words of 4 bytes and row strides in units of 16 bytes.
        weights: int32; (2, words) for elements of 16 bits, the low and the high half of each word; (1, words) for 32 bits.
        found: int64, digests.
        block: Size of the kernel's blocks.
    """
    rows, columns, warps = block
    _digest_words[(len(items),)](items, weights[0], weights[-1], found, len(weights) == 2, rows, columns, num_warps=warps)
