"""What goes through buffers arrives as if it had gone straight, in as few pieces as its rows allow."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from resharder.client.gpu.device_to_host import through_buffers
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


def moved(moves: Moves, buffer_bytes: int | None, shares: int) -> tuple[np.ndarray, int]:
    """What lies in the targets then, and in how many pieces it was written."""
    source = np.random.default_rng(1).integers(0, 256, SPACE, np.uint8)
    targets = np.zeros((2, SPACE), np.uint8)
    begins = np.array([source.ctypes.data, 0]), np.array([targets[0].ctypes.data, targets[1].ctypes.data, 0])
    if buffer_bytes is None:
        Table(moves, *begins, CPU).run(0)
        return targets, len(moves.rows)
    fills, empties = through_buffers(moves, buffer_bytes, shares)
    buffer = np.zeros(buffer_bytes + 64, np.uint8)
    at = -(-buffer.ctypes.data // 16) * 16
    fill, empty = Table(fills, *begins, CPU), Table(empties, *begins, CPU)
    for k in range(int(fills.round.max()) + 1):
        buffer[:] = 0
        fill.run(k, target_base=at)
        assert not buffer[at - buffer.ctypes.data + buffer_bytes :].any(), "written past the buffer"
        for share in reversed(range(k * shares, (k + 1) * shares)):  # in any order
            empty.run(share, source_base=at)
    return targets, len(empties.rows)


@given(
    rows=st.lists(
        st.tuples(st.integers(0, SPACE - TILE), st.integers(1, 40), st.integers(1, 3000), st.sampled_from((0, 0, 1, 16, 700))),
        min_size=1,
        max_size=40,
    ),
    buffer_bytes=st.sampled_from((TILE, TILE + 16, 1 << 20)),
    shares=st.integers(1, 5),
)
def test_it_arrives_as_if_it_had_gone_straight(rows: list[tuple[int, int, int, int]], buffer_bytes: int, shares: int) -> None:
    moves = moves_of(rows)
    straight, _ = moved(moves, None, 1)
    through, _ = moved(moves, buffer_bytes, shares)
    assert np.array_equal(straight, through)


@pytest.mark.parametrize("gap", [0, 64], ids=["runs", "rows with gaps"])
def test_neighbours_are_written_in_one_piece(gap: int) -> None:
    tiles = [(i * 32 * 1024, 32, 1024, gap) for i in range(40)]
    even = Moves(*(column[::2] for column in moves_of([tile for tile in tiles for _ in range(2)])))  # one target
    straight, _ = moved(even, None, 1)
    through, written = moved(even, 2 << 20, 1)
    assert np.array_equal(straight, through)
    assert written == 1


def test_threads_have_about_as_much_to_do() -> None:
    tiles = [(0, 1, TILE, 0)] * 1024
    _, empties = through_buffers(moves_of(tiles), 512 * TILE, 8)
    work = np.bincount(empties.round, empties.rows * empties.width)
    assert len(work) == 2 * 8
    assert work.min() >= 0.75 * work.mean()
    assert work.max() <= 1.25 * work.mean()
