"""Kernel that copies tiles on a GPU. Triton is part of CUDA builds of torch."""

import torch
import triton  # type: ignore[import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-untyped,unused-ignore]

WARPS = 8
VECTORS = 2048  # vectors in flight; 32 KiB if they have 16 bytes
COLUMNS = 6
WORDS = {16: (tl.int64, 2), 8: (tl.int64, 1), 4: (tl.int32, 1), 2: (tl.int16, 1), 1: (tl.int8, 1)}
"""(type, number) of the elements that make up a vector of so many bytes."""


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator,unused-ignore]
def _move(table, count, source_base, target_base, TYPE: tl.constexpr, LANES: tl.constexpr, VECTORS: tl.constexpr):  # type: ignore[no-untyped-def]
    bytes_each: tl.constexpr = TYPE.primitive_bitwidth // 8 * LANES
    lane = tl.arange(0, LANES)[None, :]
    for i in range(tl.program_id(0), count, tl.num_programs(0)):
        tile = table + i * 6
        source = (tl.load(tile) + source_base).to(tl.pointer_type(TYPE))
        target = (tl.load(tile + 1) + target_base).to(tl.pointer_type(TYPE))
        source = tl.multiple_of(source, bytes_each)
        target = tl.multiple_of(target, bytes_each)
        rows = tl.load(tile + 2)
        width = tl.load(tile + 3).to(tl.int32)
        source_stride = tl.load(tile + 4)
        target_stride = tl.load(tile + 5)
        total = rows.to(tl.int32) * width
        for first in range(0, total, VECTORS):
            vector = first + tl.arange(0, VECTORS)
            row = (vector // width).to(tl.int64)
            column = (vector % width).to(tl.int64)
            there = (vector < total)[:, None]
            values = tl.load(source + ((row * source_stride + column) * LANES)[:, None] + lane, mask=there)
            tl.store(target + ((row * target_stride + column) * LANES)[:, None] + lane, values, mask=there)


def move(table: torch.Tensor, word: int, source_base: int, target_base: int, programs: int) -> None:
    """Copy tiles, on the current stream.

    Args:
        table: int64 on the device, (tiles, 6). Each row has the start of a tile relative to `source_base` and to `target_base`,
            in bytes, its rows, its width, and the row strides of source and target, the last three in words.
        word: Bytes of a word: 1, 2, 4, 8 or 16, to which all addresses are aligned.
        source_base: Address.
        target_base: Address.
        programs: Most programs of the kernel.
    """
    kind, lanes = WORDS[word]
    _move[(max(1, min(programs, len(table))),)](
        table, len(table), source_base, target_base, kind, lanes, VECTORS, num_warps=WARPS
    )
