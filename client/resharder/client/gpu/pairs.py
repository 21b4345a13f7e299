"""Messages between two processes, derived on both sides from their copies alone.

A run of `direct_bytes` or more that is contiguous on both sides goes from memory to memory. A run that is contiguous on one
side only is packed or unpacked on the other. All other bytes are packed and unpacked.
"""

from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
from resharder.client.gpu.tiles import TILE, Shape, Tiles, shape_of, tiles_of
from resharder.converters.geometry.copy_table import ALIGN, Copies
from resharder.converters.geometry.piece_arrays import Ints

Number = TypeVar("Number", int, Ints)
_MEMORY, _PACKED, _UNPACKED, _BOTH = range(4)


class Message(NamedTuple):
    """Message of `size` bytes from byte `source_at` of `source` to byte `target_at` of `target`.

    `source` and `target` are the numbers of local tensors, or -1 for the pair's part of a slot. Both sides list messages in the
    same order.
    """

    round: int
    source: int
    source_at: int
    target: int
    target_at: int
    size: int


@dataclass(frozen=True)
class PairExchange:
    """Exchange of one pair, in rounds.

    Tile `i` is in round `round[i]`, at `packed_at[i]` and `unpacked_at[i]` of the pair's part of the slots; -1 if it is not
    packed or not unpacked. `packed[k]` and `unpacked[k]` are the sizes of these parts in round `k`, in bytes.
    """

    rounds: int
    messages: tuple[Message, ...]
    tiles: Tiles
    round: Ints
    packed_at: Ints
    unpacked_at: Ints
    packed: tuple[int, ...]
    unpacked: tuple[int, ...]


def pair_of(copies: Copies, quota: int, direct_bytes: int) -> PairExchange:
    """Divide the copies of one pair into messages and rounds. Both sides compute the same.

    Args:
        copies: All copies from one rank to another.
        quota: Most bytes of the pair in a slot, per round.
        direct_bytes: Shortest run, in bytes, that is sent from memory or received into memory.
    """
    shape = shape_of(copies)
    kind, run, order = _kinds(copies, shape, direct_bytes)
    sizes = shape.sizes
    messages = _from_memory_to_memory(copies, sizes, run, order[kind[order] == _MEMORY])
    order = order[kind[order] != _MEMORY]  # all others, run by run
    kind, run, sizes = kind[order], run[order], sizes[order]
    begins = np.ones(len(order), bool)
    begins[1:] = (run[1:] != run[:-1]) | (kind[1:] == _BOTH)
    at = _stream(sizes, begins)
    where = (_stream(np.where(kind != _UNPACKED, sizes, 0), begins), _stream(np.where(kind != _PACKED, sizes, 0), begins))
    tiles = tiles_of(shape.take(order), copies.source_offset[order], copies.target_offset[order])
    position = at[tiles.box] + tiles.at
    total = int(position[-1] + tiles.sizes[-1]) if len(position) else 0
    most = quota - TILE - ALIGN
    share = int(up(-(-total // max(1, -(-total // most))), 16))
    number = position // max(1, share) + 1
    _, number = np.unique(number, return_inverse=True)  # without empty rounds
    number = number.astype(np.int64) + 1
    rounds = int(number.max(initial=0)) + 1
    kinds, runs = kind[tiles.box], run[tiles.box]
    in_slot, parts = [], []
    for stream, other in zip(where, (_UNPACKED, _PACKED), strict=True):
        place = stream[tiles.box] + tiles.at
        there = kinds != other
        first = np.full(rounds, np.iinfo(np.int64).max)
        np.minimum.at(first, number[there], place[there])
        first = first // 16 * 16
        last = np.zeros(rounds, np.int64)
        np.maximum.at(last, number[there], (place + tiles.sizes)[there])
        parts.append(tuple(np.where(last > 0, last - first, 0).tolist()))
        in_slot.append(np.where(there, place - first[number], -1))
    # Contiguous bytes are one message: a run's tiles of one round, or all tiles of a round that are both packed and unpacked.
    new = np.ones(len(number), bool)
    both = kinds == _BOTH
    new[1:] = (number[1:] != number[:-1]) | (kinds[1:] != kinds[:-1]) | (~both[1:] & (runs[1:] != runs[:-1]))
    starts = np.flatnonzero(new)
    ends = np.append(starts[1:], len(new)) - 1 if len(starts) else starts
    for i, j in zip(starts.tolist(), ends.tolist(), strict=True):
        box, k = int(order[tiles.box[i]]), int(kinds[i])
        source = (-1, int(in_slot[0][i])) if k != _UNPACKED else (int(copies.source_local[box]), int(tiles.source[i]))
        target = (-1, int(in_slot[1][i])) if k != _PACKED else (int(copies.target_local[box]), int(tiles.target[i]))
        through = 0 if k != _UNPACKED else 1  # a slot that the message passes through
        size = int(in_slot[through][j] + tiles.sizes[j] - in_slot[through][i])
        messages.append(Message(int(number[i]), *source, *target, size))
    tiles = tiles._replace(box=order[tiles.box])
    return PairExchange(rounds, tuple(messages), tiles, number, in_slot[0], in_slot[1], parts[0], parts[1])


def _stream(sizes: Ints, begins: "np.ndarray[tuple[int], np.dtype[np.bool_]]") -> Ints:
    """Return the start of each box in a sequence of boxes. The first box of each run is aligned to 16 bytes."""
    group = np.cumsum(begins) - 1
    total = np.bincount(group, sizes, int(group[-1]) + 1 if len(group) else 0).astype(np.int64)
    padded = up(total, 16)
    before = np.cumsum(sizes) - sizes
    first = before[begins]
    starts: Ints = (np.cumsum(padded) - padded)[group] + before - first[group]
    return starts


def _kinds(copies: Copies, shape: Shape, direct_bytes: int) -> tuple[Ints, Ints, Ints]:
    """Return the kind of each copy, its run, and an order in which runs are contiguous and follow their memory."""
    sizes, made = shape.sizes, copies.plus != 0
    in_source, in_target = shape.dense_in_source & ~made, shape.dense_in_target
    kind = np.full(len(copies), _BOTH)
    run = np.zeros(len(copies), np.int64)
    order = []
    left = np.arange(len(copies))
    runs = 0
    for chosen, sides in ((_MEMORY, (0, 1)), (_PACKED, (1,)), (_UNPACKED, (0,))):
        locals_, offsets = (copies.source_local, copies.target_local), (copies.source_offset, copies.target_offset)
        by = sides[-1]
        left = left[np.lexsort((offsets[by][left], locals_[by][left]))]
        follows = np.zeros(len(left), bool)
        follows[1:] = True
        fits = np.ones(len(left), bool)
        for side in sides:
            name, at, dense = locals_[side][left], offsets[side][left], (in_source, in_target)[side][left]
            fits &= dense
            follows[1:] &= (name[1:] == name[:-1]) & (at[1:] == at[:-1] + sizes[left][:-1]) & dense[1:] & dense[:-1]
        group = np.cumsum(~follows) - 1
        total = np.bincount(group, sizes[left], int(group[-1]) + 1 if len(group) else 0)
        taken = fits & (total[group] >= direct_bytes) if len(left) else fits
        kind[left[taken]], run[left[taken]] = chosen, runs + group[taken]
        order.append(left[taken])
        runs += len(total)
        left = left[~taken]
    left = left[np.lexsort((copies.target_offset[left], copies.target_local[left]))]
    run[left] = runs
    return kind, run, np.concatenate([*order, left])


def _from_memory_to_memory(copies: Copies, sizes: Ints, run: Ints, which: Ints) -> list[Message]:
    """Return one message for each run, in the order of `which`."""
    begins = np.flatnonzero(np.diff(run[which], prepend=-1))
    total = np.add.reduceat(sizes[which], begins) if len(begins) else begins
    return [
        Message(
            0,
            *(int(copies.source_local[i]), int(copies.source_offset[i])),
            *(int(copies.target_local[i]), int(copies.target_offset[i])),
            int(size),
        )
        for i, size in zip(which[begins], total, strict=True)
    ]


def up(n: Number, to: int) -> Number:
    """Round up to a multiple of `to`."""
    return -(-n // to) * to
