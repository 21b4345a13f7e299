"""Schedule of one process: the bytes that it sends and receives in each round, derived once from its copies and reused.

Each pair of processes divides its bytes in the same way (`pairs`), from the copies alone. Round 0 has all bytes that are not
packed, so that the link is busy from the start. In each later round, a pair moves at most `quota` bytes through slots. While
one round is in transit, the next is packed and the last is unpacked, hence two slots on each side.

Frozen boxes have rounds of their own after all others, so that a version can end before them.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from resharder.client.gpu.pairs import PairExchange, pair_of, up
from resharder.client.gpu.ready import Ready, ready_of
from resharder.client.gpu.tiles import TILE, Tiles, shape_of, tiles_of
from resharder.converters.geometry.copy_table import ALIGN, Copies
from resharder.converters.geometry.piece_arrays import Ints

DIRECT_BYTES = 16 << 20
SLOTS = 2


class Moves(NamedTuple):
    """Tiles that are packed, unpacked or copied in a round, as arrays with one entry per tile.

    A tile goes from byte `source_at` of `source` to byte `target_at` of `target`. These are numbers of local tensors, -1 for
    the slot, or -2 for the buffer of computed elements. Strides and widths are in bytes.
    """

    round: Ints
    source: Ints
    source_at: Ints
    source_stride: Ints
    target: Ints
    target_at: Ints
    target_stride: Ints
    rows: Ints
    width: Ints


class Post(NamedTuple):
    """Message as one side posts it: `size` bytes at byte `at` of local tensor `local`, or of the slot if `local` is -1."""

    peer: int
    local: int
    at: int
    size: int


class Round(NamedTuple):
    """Messages of one round. The two sides of a pair have theirs in the same order."""

    sends: tuple[Post, ...]
    receives: tuple[Post, ...]


@dataclass(frozen=True)
class Schedule:
    """Work of one rank.

    `packs` and `unpacks` are sorted by round. Sizes are in bytes. `pack_slot` and `unpack_slot` are the sizes of slots, of
    which there are `SLOTS` each if there are enough rounds; `ready_size` is that of the one buffer of computed elements. Rounds
    from `frozen_from` on have the frozen boxes.
    """

    rank: int
    source_locals: tuple[str, ...]
    target_locals: tuple[str, ...]
    rounds: tuple[Round, ...]
    packs: Moves
    unpacks: Moves
    local: Moves
    ready: tuple[Ready, ...]
    pack_slot: int
    unpack_slot: int
    ready_size: int
    frozen_from: int

    @property
    def staging(self) -> int:
        """Bytes of all buffers, the memory needed beyond the parameters."""
        return SLOTS * (self.pack_slot + self.unpack_slot) + self.ready_size

    @property
    def complete(self) -> dict[str, int]:
        """Last round that writes into each target tensor, by its name."""
        into = [(post.local, k) for k, each in enumerate(self.rounds) for post in each.receives if post.local >= 0]
        for moves in (self.unpacks, self.local):
            into += zip(moves.target.tolist(), moves.round.tolist(), strict=True)
        found: dict[str, int] = {}
        for local, k in into:
            found[self.target_locals[local]] = max(k, found.get(self.target_locals[local], 0))
        return found

    @property
    def messages(self) -> int:
        """Number of messages that the rank sends and receives."""
        return sum(len(r.sends) + len(r.receives) for r in self.rounds)

    @property
    def sent(self) -> int:
        """Bytes sent to other ranks."""
        return sum(post.size for r in self.rounds for post in r.sends)

    @property
    def received(self) -> int:
        """Bytes received from other ranks."""
        return sum(post.size for r in self.rounds for post in r.receives)

    @property
    def frozen_size(self) -> int:
        """Bytes of frozen boxes received from other ranks."""
        return sum(post.size for r in self.rounds[self.frozen_from :] for post in r.receives)


def quota_of(most_peers: int, most_made: int, staging_bytes: int) -> int:
    """Return the bytes that each pair may move through a slot in a round.

    Args:
        most_peers: `Copies.most_peers` of the whole plan.
        most_made: `Copies.most_made` of the whole plan.
        staging_bytes: Bound on the buffers of every process.

    Raises:
        ValueError: `staging_bytes` is too small.
    """
    quota = (staging_bytes - most_made) // (SLOTS * max(1, most_peers)) // ALIGN * ALIGN
    if quota < (needed := up(2 * (TILE + ALIGN), ALIGN)):
        least = SLOTS * max(1, most_peers) * needed + most_made
        raise ValueError(f"expected at least {least} bytes for packing and unpacking, got {staging_bytes}")
    return quota


def schedule(copies: Copies, rank: int, quota: int, direct_bytes: int = DIRECT_BYTES) -> Schedule:
    """Return the schedule of one rank.

    Args:
        copies: All copies of a plan, or those of the rank.
        rank: Rank of this process.
        quota: Result of `quota_of`, the same on all ranks.
        direct_bytes: Shortest run, in bytes, that is not packed or not unpacked; the same on all ranks.
    """
    copies = copies.of(rank)
    first, last = (_schedule(copies.take(copies.frozen == frozen), rank, quota, direct_bytes) for frozen in (False, True))
    return _followed(first, last) if copies.frozen.any() else first


def _followed(first: Schedule, last: Schedule) -> Schedule:
    """Return two schedules as one, the rounds of which follow each other."""
    shift = len(first.rounds)

    def joined(one: Moves, other: Moves, by: int) -> Moves:
        source_at = other.source_at + np.where(other.source == -2, first.ready_size, 0)
        return _joined([one, other._replace(round=other.round + by, source_at=source_at)])

    return replace(
        first,
        rounds=first.rounds + last.rounds,
        packs=joined(first.packs, last.packs, shift),
        unpacks=joined(first.unpacks, last.unpacks, shift),
        local=joined(first.local, last.local, 0),
        ready=first.ready + tuple(each._replace(at=each.at + first.ready_size) for each in last.ready),
        pack_slot=max(first.pack_slot, last.pack_slot),
        unpack_slot=max(first.unpack_slot, last.unpack_slot),
        ready_size=first.ready_size + last.ready_size,
        frozen_from=shift,
    )


def _schedule(copies: Copies, rank: int, quota: int, direct_bytes: int) -> Schedule:
    pairs = sorted({*zip(copies.source.tolist(), copies.target.tolist(), strict=True)})
    ready, ready_at = ready_of(copies, rank)
    rounds: dict[int, tuple[list[Post], list[Post]]] = {}
    packed: list[Moves] = []
    unpacked: list[Moves] = []
    within: list[Moves] = []
    used: tuple[dict[int, int], dict[int, int]] = ({}, {})  # bytes of each round in the slots for packing and unpacking
    for source, target in pairs:
        which = np.flatnonzero((copies.source == source) & (copies.target == target))
        mine = copies.take(which)
        if source == target:
            tiles = tiles_of(shape_of(mine), np.where(mine.plus != 0, ready_at[which], mine.source_offset), mine.target_offset)
            within.append(_within(mine, tiles))
            continue
        pair = pair_of(mine, quota, direct_bytes)
        sends = source == rank
        slot = used[0] if sends else used[1]
        base = {k: slot.get(k, 0) for k in range(1, pair.rounds)}
        for message in pair.messages:
            local, at = message[1:3] if sends else message[3:5]
            at += base[message.round] if local < 0 else 0
            posts = rounds.setdefault(message.round, ([], []))[0 if sends else 1]
            posts.append(Post(target if sends else source, local, at, message.size))
        moves = _moves(mine, pair, base, ready_at[which], sends)
        (packed if sends else unpacked).append(moves)
        for k, size in enumerate(pair.packed if sends else pair.unpacked):
            slot[k] = up(slot.get(k, 0) + size, ALIGN)
    empty: tuple[list[Post], list[Post]] = ([], [])
    return Schedule(
        rank,
        copies.source_locals,
        copies.target_locals,
        tuple(Round(*(tuple(posts) for posts in rounds.get(k, empty))) for k in range(max(rounds, default=-1) + 1)),
        _joined(packed),
        _joined(unpacked),
        _joined(within),
        ready,
        max(used[0].values(), default=0),
        max(used[1].values(), default=0),
        int(copies.made[copies.source == rank].sum()),
        max(rounds, default=-1) + 1,
    )


def _moves(copies: Copies, pair: PairExchange, base: dict[int, int], ready_at: Ints, sends: bool) -> Moves:
    """Return the tiles that one side of the pair packs or unpacks."""
    at = pair.packed_at if sends else pair.unpacked_at
    which = at >= 0
    tiles, number = pair.tiles.take(which), pair.round[which]
    in_slot = at[which] + np.array([0, *base.values()], np.int64)[number]
    slot = np.full(len(number), -1)
    box = tiles.box
    if sends:
        made = copies.plus[box] != 0
        source = np.where(made, -2, copies.source_local[box])
        begins = np.where(made, tiles.source - copies.source_offset[box] + ready_at[box], tiles.source)
        return Moves(number, source, begins, tiles.source_stride, slot, in_slot, tiles.width, tiles.rows, tiles.width)
    target = copies.target_local[box]
    return Moves(number, slot, in_slot, tiles.width, target, tiles.target, tiles.target_stride, tiles.rows, tiles.width)


def _within(copies: Copies, tiles: Tiles) -> Moves:
    box, number = tiles.box, np.zeros(len(tiles.box), np.int64)
    source, target = np.where(copies.plus[box] != 0, -2, copies.source_local[box]), copies.target_local[box]
    return Moves(
        number, source, tiles.source, tiles.source_stride, target, tiles.target, tiles.target_stride, tiles.rows, tiles.width
    )


def reads_of(copies: Copies, ready_at: Ints, rounds: int) -> Moves:
    """Return the tiles that a process copies from another's memory, in rounds of about the same size, in the order of `copies`.

    Args:
        copies: Copies from one rank to one other.
        ready_at: Start of each copy in the other process's buffer of computed elements.
        rounds: Number of rounds.
    """
    tiles = tiles_of(shape_of(copies), np.where(copies.plus != 0, ready_at, copies.source_offset), copies.target_offset)
    moves = _within(copies, tiles)
    ends = np.cumsum(tiles.sizes)
    return moves._replace(round=(ends - tiles.sizes) * rounds // max(1, int(ends[-1]) if len(ends) else 0))


def _joined(moves: list[Moves]) -> Moves:
    """Concatenate moves and sort them by round."""
    if not moves:
        return Moves(*(np.zeros(0, np.int64) for _ in Moves._fields))
    joined = Moves(*(np.concatenate(columns) for columns in zip(*moves, strict=True)))
    order = np.argsort(joined.round, kind="stable")
    return Moves(*(column[order] for column in joined))
