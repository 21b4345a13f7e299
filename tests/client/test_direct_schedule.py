"""What the direct path sends, in one process: every byte once, from the right place, through no more memory than is allowed."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from math import prod
from random import Random
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from resharder.client.gpu import pairs, tiles
from resharder.client.gpu import schedule as schedules
from resharder.client.gpu.schedule import Moves, Schedule, quota_of, schedule
from resharder.client.gpu.table import Table, addresses_of
from resharder.converters.geometry.copy_table import Copies, copies_of
from resharder.converters.geometry.layout import Box, Layout, Piece, Range, TensorSpec, box_index, box_shape, box_size
from resharder.converters.geometry.piece_arrays import Ints
from resharder.converters.geometry.plan import plan
from resharder.converters.models.tensor_io import read_piece, view_of

from tests.support.shardings import sharding

TINY_TILE = 64
_NO_ROUND = 1 << 40
Tensors = dict[str, torch.Tensor]


@contextmanager
def tiny_tiles() -> Iterator[None]:
    """So that small tensors are cut as large ones are."""
    with (
        patch.object(tiles, "TILE", TINY_TILE),
        patch.object(pairs, "TILE", TINY_TILE),
        patch.object(schedules, "TILE", TINY_TILE),
    ):
        yield


def held(random: Random, name: str, boxes: list[Box], plus: float = 0.0) -> tuple[list[Piece], dict[str, int]]:
    """Boxes in local tensors, alone or one after another, some of them transposed; and how many elements those have."""
    pieces, sizes, local = [], dict[str, int](), ""
    for i, box in enumerate(boxes):
        if not local or random.random() < 0.5:
            local = f"{name}.{i}"
        shape, gap = box_shape(box), random.choice((0, 0, 0, 3))
        order = list(range(len(shape)))
        if random.random() < 0.3:
            random.shuffle(order)
        steps = list(accumulate((shape[d] for d in reversed(order)), lambda a, b: a * b, initial=1))
        strides = [0] * len(shape)
        for d, step in zip(reversed(order), steps, strict=False):
            strides[d] = step
        pieces.append(Piece(name, box, local, sizes.get(local, 0), tuple(strides), plus=plus))
        sizes[local] = sizes.get(local, 0) + box_size(box) + gap
    return pieces, sizes


def sides(data: st.DataObject, random: Random) -> tuple[dict[str, Layout], dict[str, Layout], Tensors, Tensors]:
    """Trainer ranks and workers that hold a few tensors, and the tensors of them all: names begin with their process's."""
    dtypes = {"BF16": torch.bfloat16, "F32": torch.float32, "U8": torch.uint8}
    layouts: list[dict[str, Layout]] = [{}, {}]
    tensors: list[Tensors] = [{}, {}]
    for t in range(data.draw(st.integers(1, 3))):
        shape = data.draw(st.sampled_from([(7,), (40, 6), (33, 8), (4, 5, 16), (3, 200)]))
        dtype = data.draw(st.sampled_from(sorted(dtypes)))
        spec = TensorSpec(f"t{t}", dtype, shape)
        plus = 1.0 if dtype == "F32" and random.random() < 0.3 else 0.0
        for side in (0, 1):
            for rank, boxes in enumerate(data.draw(sharding(shape))):
                process = f"{'sr'[side]}{rank}"
                found, sizes = held(random, f"{spec.name}", boxes, plus * (1 - side))
                found = [piece._replace(local=f"{process}.{piece.local}") for piece in found]
                before = layouts[side].get(process, Layout({}, ()))
                layouts[side][process] = Layout(before.tensors | {spec.name: spec}, before.pieces + tuple(found))
                tensors[side] |= {f"{process}.{n}": torch.zeros(size, dtype=dtypes[dtype]) for n, size in sizes.items()}
    for tensor in tensors[0].values():
        tensor.view(torch.uint8)[:] = torch.from_numpy(np.frombuffer(random.randbytes(tensor.nbytes), np.uint8).copy())
        if tensor.is_floating_point():
            tensor.nan_to_num_(0.5)
    for tensor in tensors[1].values():
        tensor.view(torch.uint8).fill_(0xA5)
    return layouts[0], layouts[1], *tensors


class World:
    """All processes of a plan, how often each byte of a target was written, and in which round a target was last."""

    def __init__(self, copies: Copies, quota: int, direct_bytes: int, sources: Tensors, targets: Tensors) -> None:
        ranks = sorted({*copies.source.tolist(), *copies.target.tolist()})
        self.schedules = {rank: schedule(copies.of(rank), rank, quota, direct_bytes) for rank in ranks}
        self.sources, self.targets = sources, targets
        self.written = {name: np.zeros(tensor.nbytes, np.int64) for name, tensor in targets.items()}
        self.last: dict[str, int] = {}

    def run(self, *, kept: bool = False) -> None:
        slots = {rank: (buffer(s.pack_slot), buffer(s.unpack_slot)) for rank, s in self.schedules.items()}
        tables = {rank: self.tables(s) for rank, s in self.schedules.items()}
        for rank, s in self.schedules.items():
            tables[rank][2].run(0)
            self.count(s, s.local, 0)
        ends = {rank: (s.frozen_from, len(s.rounds)) for rank, s in self.schedules.items()}
        parts = [{rank: (0, first) for rank, (first, _) in ends.items()}, ends]  # frozen boxes come after all others
        steps = ((part, i) for part in parts for i in range(max(end - begin for begin, end in part.values())))
        for part, i in steps if not kept else (step for step in steps if step[0] is parts[0]):
            rounds = {rank: begin + i if begin + i < end else _NO_ROUND for rank, (begin, end) in part.items()}
            posted: dict[tuple[int, int], list[torch.Tensor]] = defaultdict(list)
            for rank, s in self.schedules.items():
                k = rounds[rank]
                tables[rank][0].run(k, target_base=slots[rank][0].data_ptr())
                for post in s.rounds[k].sends if k < len(s.rounds) else ():
                    memory = slots[rank][0] if post.local < 0 else raw(self.sources[s.source_locals[post.local]])
                    posted[rank, post.peer].append(memory[post.at : post.at + post.size])
            for rank, s in self.schedules.items():
                k = rounds[rank]
                slots[rank][1].fill_(0x5A)
                for post in s.rounds[k].receives if k < len(s.rounds) else ():
                    memory = slots[rank][1] if post.local < 0 else raw(self.targets[s.target_locals[post.local]])
                    memory[post.at : post.at + post.size] = posted[post.peer, rank].pop(0)  # fails where sizes differ
                    if post.local >= 0:
                        self.last[s.target_locals[post.local]] = k
                        self.written[s.target_locals[post.local]][post.at : post.at + post.size] += 1
                tables[rank][1].run(k, source_base=slots[rank][1].data_ptr())
                self.count(s, s.unpacks, k)
            assert not any(posted.values())

    def tables(self, s: Schedule) -> tuple[Table, ...]:
        made = buffer(s.ready_size)
        for ready in s.ready:
            values = view_of(self.sources[s.source_locals[ready.local]], ready.view) + ready.plus
            raw(made)[ready.at : ready.at + values.nbytes] = values.contiguous().view(-1).view(torch.uint8)
        s_at = addresses_of(s.source_locals, self.sources, used(s.packs.source, s.local.source))
        t_at = addresses_of(s.target_locals, self.targets, used(s.unpacks.target, s.local.target))
        self.made = [*getattr(self, "made", []), made]
        begins = np.append(s_at[:, 0], made.data_ptr()), np.append(t_at[:, 0], 0)
        return tuple(Table(moves, *begins, torch.device("cpu")) for moves in (s.packs, s.unpacks, s.local))

    def count(self, s: Schedule, moves: Moves, k: int) -> None:
        for i in np.flatnonzero(moves.round == k):
            self.last[s.target_locals[moves.target[i]]] = k
            for row in range(moves.rows[i]):
                first = moves.target_at[i] + row * moves.target_stride[i]
                self.written[s.target_locals[moves.target[i]]][first : first + moves.width[i]] += 1


def used(*locals_: Ints) -> list[int]:
    return sorted({*np.concatenate(locals_).tolist()} - {-1, -2})


def buffer(size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


def expected(sources: dict[str, Layout], targets: dict[str, Layout], have: Tensors, want: Tensors) -> Tensors:
    """Through whole HF tensors."""
    full: Tensors = {}
    for layout in sources.values():
        for piece in layout.pieces:
            values = read_piece(have, piece)
            whole = full.setdefault(piece.tensor, torch.zeros(layout.tensors[piece.tensor].shape, dtype=values.dtype))
            whole[box_index(piece.box)] = values
    result = {name: tensor.clone() for name, tensor in want.items()}
    for layout in targets.values():
        for piece in layout.pieces:
            view_of(result[piece.local], piece.view(piece.box)).copy_(full[piece.tensor][box_index(piece.box)])
    return result


@given(st.data(), st.integers(0, 2**32), st.sampled_from([1, 100, 1 << 30]), st.booleans())
def test_every_byte_of_every_target_is_written_once_with_its_sources_value(
    data: st.DataObject, seed: int, direct_bytes: int, shared: bool
) -> None:
    sources, targets, have, want = sides(data, Random(seed))
    wanted = expected(sources, targets, have, want)
    # Some processes are sender and receiver.
    copies = copies_of(plan(sources, targets), target_ranks=range(1, 1 + len(targets)) if shared else None)
    flags = data.draw(st.lists(st.booleans(), min_size=len(copies), max_size=len(copies)))
    copies = replace(copies, frozen=np.array(flags, np.bool_))
    with tiny_tiles():
        staging = copies.most_made + 2 * 768 * max(1, copies.most_peers) + data.draw(st.integers(0, 4000))
        world = World(copies, quota_of(copies.most_peers, copies.most_made, staging), direct_bytes, have, want)
        world.run()
    for name, tensor in wanted.items():
        assert torch.equal(raw(want[name]), raw(tensor)), name
    filled = {name: np.zeros(tensor.nbytes, np.int64) for name, tensor in want.items()}
    for layout in targets.values():
        for piece in layout.pieces:
            item = want[piece.local].element_size()
            there = torch.from_numpy(filled[piece.local]).view(-1, item)[:, 0]
            elements = torch.arange(prod(there.shape))
            for i in view_of(elements, piece.view(piece.box)).reshape(-1).tolist():
                filled[piece.local][i * item : (i + 1) * item] += 1
    assert all(np.array_equal(world.written[name], filled[name]) for name in filled)
    assert all(s.staging <= staging for s in world.schedules.values())
    assert world.last == {name: k for s in world.schedules.values() for name, k in s.complete.items()}


def test_a_version_without_its_frozen_boxes_has_all_others_and_sends_no_byte_of_them() -> None:
    specs = {name: TensorSpec(name, "BF16", (64, 96)) for name in ("still", "trained")}
    have = {rank: Layout(specs, tuple(part(name, rank) for name in specs)) for rank in range(2)}
    want = {"w": Layout(specs, tuple(Piece(name, (Range(0, 64), Range(0, 96)), name, 0, (96, 1)) for name in specs))}
    found = plan(have, want)
    still = np.array([found.targets.specs[number].name == "still" for number in found.targets.tensor.tolist()])
    copies = copies_of(found, frozen=still[found.want])
    sources = {name: torch.randn(64, 96).to(torch.bfloat16) for name in specs}
    targets = {name: torch.zeros(64, 96, dtype=torch.bfloat16) for name in specs}
    with tiny_tiles():
        world = World(copies, quota_of(copies.most_peers, 0, 4096), 1 << 30, local_halves(sources), targets)
        world.run(kept=True)
        assert not targets["still"].any()
        assert torch.equal(targets["trained"], sources["trained"])
        receiver = world.schedules[2]
        assert (receiver.received, receiver.frozen_size) == (4 * 64 * 96, 2 * 64 * 96)
        world.run()
    assert torch.equal(targets["still"], sources["still"])


def part(name: str, rank: int) -> Piece:
    """Half of the columns of a tensor."""
    return Piece(name, (Range(0, 64), Range(48 * rank, 48)), f"{name}.{rank}", 0, (48, 1))


def local_halves(whole: Tensors) -> Tensors:
    return {f"{name}.{rank}": tensor[:, 48 * rank :][:, :48].contiguous() for name, tensor in whole.items() for rank in range(2)}


def test_a_run_on_one_side_is_packed_or_unpacked_on_the_other_alone() -> None:
    spec = TensorSpec("w", "BF16", (64, 4096))
    box = (Range(0, 64), Range(0, 4096))
    whole = Layout({"w": spec}, (Piece("w", box, "a", 0, (4096, 1)),))
    halves = tuple((Range(0, 64), Range(2048 * i, 2048)) for i in (0, 1))
    parts = [Layout({"w": spec}, (Piece("w", half, "b", 0, (2048, 1)),)) for half in halves]
    out = copies_of(plan({0: whole}, dict(enumerate(parts))))
    back = copies_of(plan(dict(enumerate(parts)), {0: whole}))
    quota = quota_of(out.most_peers, out.most_made, 4 << 20)
    sender, receiver = schedule(out, 0, quota, 1 << 16), schedule(out, 1, quota, 1 << 16)
    assert sender.pack_slot > 0
    assert receiver.unpack_slot == 0
    sender, receiver = schedule(back, 0, quota, 1 << 16), schedule(back, 2, quota, 1 << 16)
    assert sender.pack_slot == 0
    assert receiver.unpack_slot > 0
    same = copies_of(plan({0: whole}, {0: whole}))
    assert schedule(same, 0, quota, 1 << 16).messages == 1
    assert schedule(same, 0, quota, 1 << 16).staging == 0


def test_what_every_rank_holds_comes_from_the_one_that_a_worker_is_connected_to_anyway() -> None:
    """A norm for each of eight layers would be shared out among the ranks otherwise."""
    specs = {"w": TensorSpec("w", "BF16", (64, 4096))} | {f"norm.{i}": TensorSpec(f"norm.{i}", "BF16", (16,)) for i in range(8)}
    norms = tuple(Piece(name, (Range(0, 16),), name, 0, (1,)) for name in specs if name != "w")
    halves = [Piece("w", (Range(32 * i, 32), Range(0, 4096)), "w", 0, (4096, 1)) for i in (0, 1)]
    layouts = {i: Layout(specs, (halves[i], *norms)) for i in (0, 1)}
    copies = copies_of(plan(layouts, layouts))
    assert {*zip(copies.source.tolist(), copies.target.tolist(), strict=True)} == {(0, 2), (1, 3)}
    assert len(copies) == 2 + 16
    assert copies.most_peers == 1


def test_too_little_memory_is_refused_with_what_is_needed() -> None:
    with pytest.raises(ValueError, match=r"expected at least \d+ bytes for packing and unpacking, got 1000"):
        quota_of(1, 0, 1000)
