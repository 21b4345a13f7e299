"""Tables of copies: a plan's copies in bytes, between as few processes as its replicas permit."""

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from resharder.converters.geometry.copy_table import Copies, copies_of, with_fewer_pairs
from resharder.converters.geometry.layout import Layout, Piece, Range, TensorSpec, full_box
from resharder.converters.geometry.plan import Plan, plan

W, NORM = TensorSpec("w", "BF16", (6, 4)), TensorSpec("norm", "F32", (5,))


def plan_of_two_and_two() -> Plan[str, str]:
    """Two ranks with alternate rows of a transposed `w`, one also with `norm`; two workers with halves of the columns."""
    specs = {spec.name: spec for spec in (W, NORM)}
    rows = [Piece("w", (Range(rank, 3, 2), Range(0, 4)), "wT", 7, (1, 3)) for rank in range(2)]
    norm = Piece("norm", full_box((5,)), "norm", 2, (1,))
    halves = [Piece("w", (Range(0, 6), Range(2 * worker, 2)), "half", 0, (2, 1)) for worker in range(2)]
    sources = {"a": Layout(specs, (rows[0], norm._replace(plus=1.5))), "b": Layout(specs, (rows[1],))}
    targets = {"x": Layout(specs, (norm._replace(plus=0.25, strides=(3,)), halves[0])), "y": Layout(specs, (halves[1],))}
    return plan(sources, targets)


@pytest.mark.parametrize(("ranks", "sources", "targets"), [((None, None), [0, 1], [2, 3]), (([4, 2], [2, 9]), [4, 2], [2, 9])])
def test_a_table_has_the_copies_of_its_plan_in_bytes(ranks: Any, sources: list[int], targets: list[int]) -> None:
    found = plan_of_two_and_two()
    table = copies_of(found, *ranks)
    assert len(table) == len(found) == 5
    for i, copy in enumerate(found.copies()):
        item = {"w": 2, "norm": 4}[copy.tensor]
        assert table.source[i] == sources["ab".index(copy.source)]
        assert table.target[i] == targets["xy".index(copy.target)]
        assert table.source_locals[table.source_local[i]] == copy.source_local
        assert table.target_locals[table.target_local[i]] == copy.target_local
        assert (table.item[i], table.plus[i]) == (item, copy.plus)
        assert copy.plus == (1.25 if copy.tensor == "norm" else 0)
        assert (table.source_offset[i], table.target_offset[i]) == (
            copy.source_view.offset * item,
            copy.target_view.offset * item,
        )
        n = len(copy.box)
        assert tuple(table.counts[i, :n]) == copy.source_view.shape
        assert table.sizes[i] == np.prod(copy.source_view.shape) * item
        assert tuple(table.source_strides[i, :n]) == tuple(stride * item for stride in copy.source_view.strides)
        assert tuple(table.target_strides[i, :n]) == tuple(stride * item for stride in copy.target_view.strides)


def table(pairs: list[tuple[int, int]], elements: list[int], plus: list[float]) -> Copies:
    """Copies of rows of `elements` elements, three rows each, of 4 bytes."""
    n, zero = len(pairs), np.zeros(len(pairs), np.int64)
    source, target = (np.array([pair[side] for pair in pairs], np.int64) for side in (0, 1))
    counts = np.array([(3, count) for count in elements], np.int64).reshape(n, 2)
    strides = np.arange(2 * n).reshape(n, 2)
    offset = 100 * np.arange(n)
    locals_ = ("s",), ("t",)
    return Copies(
        *locals_,
        source,
        target,
        zero,
        zero,
        offset,
        offset + 1,
        counts,
        strides,
        strides + 1,
        zero + 4,
        np.array(plus),
        np.zeros(n, np.bool_),
    )


def test_a_constant_needs_an_aligned_buffer_at_the_source() -> None:
    one = table([(0, 1), (0, 1), (2, 1), (0, 0)], [64, 1, 64, 22], [1.0, -1.0, 0.0, 0.5])
    assert one.sizes.tolist() == [768, 12, 768, 264]
    assert one.made.tolist() == [768, 256, 0, 512]
    assert one.most_made == 768 + 256 + 512
    assert table([(0, 1), (1, 0)], [1, 1], [0.0, 0.0]).most_made == 0
    assert table([], [], []).most_made == 0


def test_peers_are_counted_once_for_each_direction_and_a_process_is_not_its_own() -> None:
    pairs = [(0, 1), (0, 1), (0, 2), (1, 0), (3, 3), (3, 2)]
    assert table(pairs, [1] * 6, [0.0] * 6).most_peers == 3
    assert table([(1, 0), (2, 0), (3, 0), (3, 1)], [1] * 4, [0.0] * 4).most_peers == 3
    assert table([(0, 3), (1, 2)], [1] * 2, [0.0] * 2).most_peers == 1
    assert table([(3, 3), (3, 3)], [1] * 2, [0.0] * 2).most_peers == 0
    assert table([], [], []).most_peers == 0


def test_a_rank_takes_the_rows_of_its_copies_with_every_column() -> None:
    whole = table([(0, 1), (1, 2), (2, 0), (2, 3)], [1, 2, 3, 4], [0.0, 0.5, 1.0, 1.5])
    mine = whole.of(2)
    assert (mine.source_locals, mine.target_locals) == (("s",), ("t",))
    for field in fields(Copies):
        if field.name not in ("source_locals", "target_locals"):
            assert np.array_equal(getattr(mine, field.name), getattr(whole, field.name)[1:]), field.name


SIZES = (1, 2, 3, 64, 65, 127, 128, 129, 4096)


@st.composite
def replicated_plans(draw: st.DrawFn) -> Plan[int, int]:
    """Plans of whole tensors, each sent by any of its holders."""
    sizes = draw(st.lists(st.sampled_from(SIZES), min_size=1, max_size=8))
    specs = [TensorSpec(f"w{i}", "U8", (size,)) for i, size in enumerate(sizes)]
    holders = [sorted(draw(st.frozensets(st.integers(0, 3), min_size=1))) for _ in specs]
    wanted = [sorted(draw(st.frozensets(st.integers(0, 2), min_size=1))) for _ in specs]

    def layouts(number: int, where: list[list[int]]) -> dict[int, Layout]:
        of = [[spec for spec, ranks in zip(specs, where, strict=True) if rank in ranks] for rank in range(number)]
        return {
            rank: Layout({s.name: s for s in mine}, tuple(Piece(s.name, full_box(s.shape), s.name, 0, (1,)) for s in mine))
            for rank, mine in enumerate(of)
        }

    found = plan(layouts(4, holders), layouts(3, wanted))
    tensor = found.sources.tensor
    have = [draw(st.sampled_from(np.flatnonzero(tensor == tensor[piece]).tolist())) for piece in found.have]
    return replace(found, have=np.array(have, np.int64))


@given(replicated_plans())
def test_what_a_source_sends_below_a_64th_of_the_main_source_is_taken_over_by_the_busiest_holder(found: Plan[int, int]) -> None:
    process, target = found.sources.process, found.targets.process[found.want]
    between = np.zeros((4, 3), int)
    for have, to, size in zip(found.have, target, found.sizes, strict=True):
        between[process[have], to] += size
    expected = []
    for have, to in zip(found.have, target, strict=True):
        same = [piece for piece in range(len(process)) if found.sources.tensor[piece] == found.sources.tensor[have]]
        little = between[process[have], to] * 64 < between[:, to].max()
        expected.append(max(same, key=lambda piece: (between[process[piece], to], -piece)) if little else have)
    before = found.have.copy()
    assert with_fewer_pairs(found).have.tolist() == expected
    assert found.have.tolist() == before.tolist()


def test_a_plan_without_copies_stays_without() -> None:
    empty = Layout({"w": W}, ())
    source = Layout({"w": W}, (Piece("w", full_box(W.shape), "w", 0, (4, 1)),))
    assert len(copies_of(plan({0: source}, {0: empty}))) == 0
    assert with_fewer_pairs(plan({0: source}, {})).have.tolist() == []
    assert with_fewer_pairs(plan({}, {0: Layout({}, ())})).have.tolist() == []


def test_of_many_equal_holders_the_first_one_takes_over() -> None:
    little, large = TensorSpec("little", "U8", (1,)), [TensorSpec(f"large{i}", "U8", (4096,)) for i in range(2)]
    specs = {spec.name: spec for spec in (little, *large)}
    piece = {name: Piece(name, full_box(spec.shape), name, 0, (1,)) for name, spec in specs.items()}
    own = {70: ("large0",), 150: ("large1",)}
    sources = {rank: Layout(specs, tuple(piece[name] for name in ("little", *own.get(rank, ())))) for rank in range(200)}
    found = with_fewer_pairs(plan(sources, {0: Layout(specs, tuple(piece.values()))}))
    assert found.sources.process[found.have].tolist() == [70, 70, 150]
