"""What goes through buffers arrives as if it had gone straight, in as few pieces as its rows allow."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from resharder.client.gpu.device_to_host import Rounds, last_rounds, through_buffers
from resharder.client.gpu.schedule import Moves
from resharder.client.gpu.table import Table
from resharder.client.gpu.tiles import TILE

CPU = torch.device("cpu")
SPACE = 8 << 20


def moves_of(rows: list[tuple[int, int, int, int]]) -> Moves:
    """Of (source_at, rows, width, gap): rows without gaps go to rows with gaps, one after the other, in two targets in turn."""
    ends, found = [0, 0], []
    for i, (source_at, count, width, gap) in enumerate(rows):
        found.append((0, 0, source_at, width, i % 2, ends[i % 2], width + gap, count, width))
        ends[i % 2] += count * (width + gap)
    return Moves(*np.array(found, np.int64).reshape(-1, len(Moves._fields)).T)


def moved(moves: Moves, buffer_bytes: int | None, groups: tuple[int, int] = (0, 0)) -> tuple[np.ndarray, int]:
    """What lies in the targets then, and in how many pieces it was written."""
    source = np.random.default_rng(1).integers(0, 256, SPACE, np.uint8)
    targets = np.zeros((2, SPACE), np.uint8)
    begins = np.array([source.ctypes.data, 0]), np.array([targets[0].ctypes.data, targets[1].ctypes.data, 0])
    if buffer_bytes is None:
        Table(moves, *begins, CPU).run(0)
        return targets, len(moves.rows)
    fills, empties = through_buffers(moves, buffer_bytes, np.array(groups))
    buffer = np.zeros(buffer_bytes + 64, np.uint8)
    at = -(-buffer.ctypes.data // 16) * 16
    fill, empty = Table(fills, *begins, CPU), Table(empties, *begins, CPU)
    for k in range(int(fills.round.max()) + 1):
        buffer[:] = 0
        fill.run(k, target_base=at)
        assert not buffer[at - buffer.ctypes.data + buffer_bytes :].any(), "written past the buffer"
        empty.run(k, source_base=at)
    return targets, len(empties.rows)


@given(
    rows=st.lists(
        st.tuples(st.integers(0, SPACE - TILE), st.integers(1, 40), st.integers(1, 3000), st.sampled_from((0, 0, 1, 16, 700))),
        min_size=1,
        max_size=40,
    ),
    buffer_bytes=st.sampled_from((TILE, TILE + 16, 1 << 20)),
    groups=st.sampled_from(((0, 0), (0, 1), (1, 0))),
)
def test_it_arrives_as_if_it_had_gone_straight(
    rows: list[tuple[int, int, int, int]], buffer_bytes: int, groups: tuple[int, int]
) -> None:
    moves = moves_of(rows)
    straight, _ = moved(moves, None)
    through, _ = moved(moves, buffer_bytes, groups)
    assert np.array_equal(straight, through)


@pytest.mark.parametrize("gap", [0, 64], ids=["runs", "rows with gaps"])
def test_neighbours_are_written_in_one_piece(gap: int) -> None:
    tiles = [(i * 32 * 1024, 32, 1024, gap) for i in range(40)]
    even = Moves(*(column[::2] for column in moves_of([tile for tile in tiles for _ in range(2)])))  # one target
    straight, _ = moved(even, None)
    through, written = moved(even, 2 << 20)
    assert np.array_equal(straight, through)
    assert written == 1


@given(sizes=st.lists(st.integers(1, 2 * TILE), min_size=1, max_size=40), order=st.permutations(range(4)))
def test_groups_follow_each_other_and_each_is_complete_with_its_last_round(sizes: list[int], order: list[int]) -> None:
    tiles = [(0, 1, min(size, TILE), 0) for size in sizes]
    moves, groups = moves_of(tiles), np.array(order)
    moves = moves._replace(target=np.arange(len(sizes)) % 4)
    _, empties = through_buffers(moves, 2 * TILE, groups)
    of_moves = groups[empties.target]
    assert list(of_moves) == sorted(of_moves)
    last = last_rounds(empties, groups)
    assert last == sorted(last)
    for group in range(4):
        mine = empties.round[of_moves == group]
        assert not len(mine) or last[group] == mine.max()


@given(last=st.lists(st.integers(-1, 9), min_size=1, max_size=5).map(sorted), finishing=st.permutations(range(10)))
def test_a_group_is_complete_once_all_rounds_up_to_its_last_one_are_finished(last: list[int], finishing: list[int]) -> None:
    complete: list[int] = []
    rounds = Rounds(10, last, complete.append)
    assert [rounds.take() for _ in range(11)] == [*range(10), None]
    finished: set[int] = set()
    for number in finishing:
        rounds.finish(number)
        finished.add(number)
        assert complete == [group for group in range(len(last)) if set(range(last[group] + 1)) <= finished or group in complete]
        assert all(set(range(last[group] + 1)) <= finished for group in complete)
    assert complete == list(range(len(last)))


def test_no_thread_takes_another_round_after_one_has_failed() -> None:
    rounds = Rounds(10, [9], lambda group: None)
    assert rounds.take() == 0
    rounds.stop()
    assert rounds.take() is None
