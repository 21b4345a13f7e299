"""Copies from GPU tensors to host pages through pinned buffers: each thread has one, which a kernel fills and the thread empties.

Threads take rounds, a buffer's bytes each, in order and without waiting for each other. Eight with 16 MiB each copied 30 GB/s,
and 25 beside the daemon's digests; sixteen were no faster and left less to the digests (benchmarks/results/staged_gpu.md).

This is the way for pages that are not registered. A registration for each version takes longer: 61 GB were READY after 7.3 s
that way and after 5.6 s through buffers (benchmarks/results/direct_install.md). `device_to_pages.py` is for those that stay so.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np
import torch
from resharder.client.gpu.digest import CachedDigester
from resharder.client.gpu.schedule import Moves, schedule
from resharder.client.gpu.streams import WorkStream
from resharder.client.gpu.table import Table, addresses_of, check_fit
from resharder.client.runtime.driver_lock import DRIVER_LOCK
from resharder.client.runtime.switch_interval import short_switch_interval
from resharder.converters.geometry.copy_table import copies_of
from resharder.converters.geometry.layout import Layout, Piece
from resharder.converters.geometry.piece_arrays import Ints, pack
from resharder.converters.geometry.plan import plan_pieces

Tensors = Mapping[str, torch.Tensor]
BUFFER_BYTES = 16 << 20
_ALIGN = 16  # bytes: the widest words of the kernel


class DeviceToHost:
    """Copy that is planned once for a layout and run for every version. Its buffers, pinned for GPU
    tensors, exist as long as it does. `targets` has the names of the HF tensors.
    """

    def __init__(
        self,
        layout: Layout,
        device: torch.device,
        threads: int,
        groups: Mapping[str, int],
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:
        """Plan the copy. Values are copied without the pieces' `plus`.

        Args:
            layout: Boxes in the device's tensors.
            device: Device of the tensors.
            threads: Threads that copy.
            groups: Group of each HF tensor, from 0 on. Groups are copied in order.
            buffer_bytes: Size of the buffer of each thread.
        """
        self._device = device
        self._sources, self.targets, moves = planned(layout)
        of_target = np.array([groups[name] for name in self.targets], np.int64)
        self._fills, self._empties = through_buffers(moves, buffer_bytes, of_target)
        self._last = last_rounds(self._empties, of_target)
        self._rounds = int(self._fills.round.max(initial=-1)) + 1
        size = min(buffer_bytes, int((self._fills.target_at + self._fills.rows * self._fills.width).max(initial=0)))
        self._buffers = [
            torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda") for _ in range(min(threads, self._rounds))
        ]
        self._copies, self._digester = WorkStream(device), CachedDigester(layout, device)
        self._fill: tuple[list[int], Ints, Table] | None = None  # pointers, ranges and table of the local tensors

    def run(self, target: Ints, tensors: Tensors, complete: Callable[[int], None] = lambda group: None) -> list[int]:
        """Copy, after the current stream's pending work, and return when all boxes are at `target`.

        Args:
            target: (tensors, 2): first and end address of each whole HF tensor of `targets`, in mapped pages.
            tensors: Local tensors by name, of the layout's shapes and strides.
            complete: Called with each group once all of its boxes are at `target`. Must not block.

        Returns:
            Digests of the boxes as the device has them, in the order of the layout's pieces.

        Raises:
            KeyError, ValueError: Tensors differ from the layout.
        """
        pointers = [tensors[name].data_ptr() for name in self._sources]
        if self._fill is None or self._fill[0] != pointers:
            source = addresses_of(self._sources, tensors, range(len(self._sources)))
            check_fit(self._fills, self._sources, source, self.targets, target)
            begins = np.append(source[:, 0], 0), np.append(target[:, 0], 0)
            self._fill = pointers, source, Table(self._fills, *begins, self._device)
            for buffer in self._buffers[:1]:
                self._fill[2].compile(target_base=buffer.data_ptr())  # not by several threads at once
        _, source, fill = self._fill
        check_fit(self._empties, self._sources, source, self.targets, target)
        empty = Table(self._empties, np.append(source[:, 0], 0), np.append(target[:, 0], 0), torch.device("cpu"))
        digester, rounds = self._digester.at(tensors), Rounds(self._rounds, self._last, complete)
        self._copies.begin()
        with ThreadPoolExecutor(max(1, len(self._buffers)), "resharder-to-host") as pool, short_switch_interval():
            try:
                _all([pool.submit(self._copy, rounds, fill, empty, buffer.data_ptr()) for buffer in self._buffers])
            finally:
                self._copies.drain()
        return digester.digests()

    def _copy(self, rounds: "Rounds", fill: Table, empty: Table, buffer: int) -> None:
        """Copy rounds through one buffer until none is left."""
        try:
            while (k := rounds.take()) is not None:
                with DRIVER_LOCK.background(), self._copies.work():  # without the lock, transfers took 300 ms instead of 180
                    fill.run(k, target_base=buffer)
                    filled = self._copies.mark(blocking=True)
                if filled is not None:
                    filled.synchronize()
                empty.run(k, buffer)
                rounds.finish(k)
        except BaseException:
            rounds.stop()
            raise


class Rounds:
    """Rounds that threads take in order and finish in any order. Thread-safe.

    Args:
        count: Number of rounds.
        last: Last round of each group, by group, ascending. A group without a round has the last one of the group before it.
        complete: Called with each group, in order, once all rounds up to its last one are finished.
    """

    def __init__(self, count: int, last: Sequence[int], complete: Callable[[int], None]) -> None:
        self._count, self._last, self._complete = count, last, complete
        self._lock = threading.Lock()
        self._next = self._first_open = self._group = 0
        self._finished: set[int] = set()

    def take(self) -> int | None:
        """Return the next round; None if there is none left."""
        with self._lock:
            if self._next >= self._count:
                return None
            self._next += 1
            return self._next - 1

    def finish(self, number: int) -> None:
        """Record that a round's bytes are in place."""
        with self._lock:
            self._finished.add(number)
            while self._first_open in self._finished:
                self._finished.remove(self._first_open)
                self._first_open += 1
            while self._group < len(self._last) and self._last[self._group] < self._first_open:
                self._group += 1
                self._complete(self._group - 1)

    def stop(self) -> None:
        """Let no thread take another round."""
        with self._lock:
            self._next = self._count


def _all(futures: Sequence[Future[None]]) -> None:
    """Wait for all futures, then raise the exception of one that failed."""
    for future in wait(futures).done:
        future.result()


def planned(layout: Layout) -> tuple[tuple[str, ...], tuple[str, ...], Moves]:
    """Return the names of the local tensors and of the HF tensors, and the tiles that go from these into whole ones of those."""
    copies = copies_of(plan_pieces(pack({0: layout}), pack({0: _whole(layout)})), [0], [0])
    return copies.source_locals, copies.target_locals, schedule(copies, 0, 0).local


def _whole(layout: Layout) -> Layout:
    """Return the layout of the same boxes in whole HF tensors."""
    pieces = []
    for piece in layout.pieces:
        offset, strides, step = 0, list[int](), 1
        for r, n in zip(reversed(piece.box), reversed(layout.tensors[piece.tensor].shape), strict=True):
            offset += r.start * step
            strides.append(r.step * step)
            step *= n
        pieces.append(Piece(piece.tensor, piece.box, piece.tensor, offset, tuple(reversed(strides))))
    return Layout(layout.tensors, tuple(pieces))


def through_buffers(moves: Moves, buffer_bytes: int, groups: Ints) -> tuple[Moves, Moves]:
    """Return two moves for each box: into a buffer, and out of it, in rounds of at most `buffer_bytes`.

    The buffer is the slot of the moves; it must be larger than any box. `groups` has the group of each target, and rounds go
    through the groups in order. Adjacent moves with equal strides are joined.
    """
    m = in_order(moves, groups)
    number, at = rounds_of(-(-m.rows * m.width // _ALIGN) * _ALIGN, buffer_bytes)
    slot = np.full(len(at), -1)
    fills = m._replace(round=number, target=slot, target_at=at, target_stride=m.width)
    return fills, _joined(m._replace(round=number, source=slot, source_at=at, source_stride=m.width))


def in_order(moves: Moves, groups: Ints) -> Moves:
    """Return moves in the order of their groups, and of their places there."""
    order = np.lexsort((moves.target_at, moves.target, groups[moves.target]))
    return Moves(*(column[order] for column in moves))


def last_rounds(moves: Moves, groups: Ints) -> list[int]:
    """Return the last round of each group; of a group without a round, that of the group before it."""
    last = np.full(int(groups.max(initial=-1)) + 1, -1)
    np.maximum.at(last, groups[moves.target], moves.round)
    return [int(each) for each in np.maximum.accumulate(last)]


def rounds_of(sizes: Ints, most: int) -> tuple[Ints, Ints]:
    """Return the round of each item and its start in the round, with at most `most` bytes per round. Items keep their order."""
    ends = np.cumsum(sizes)
    number, at = np.zeros(len(sizes), np.int64), ends - sizes
    first, k = 0, 0
    while first < len(sizes):
        begin = at[first]
        end = max(first + 1, int(np.searchsorted(ends, begin + most, "right")))
        number[first:end] = k
        at[first:end] -= begin
        first, k = end, k + 1
    return number, at


def _joined(m: Moves) -> Moves:
    """Join moves that follow each other both in the slot and in the target: without a gap, or as rows with equal gaps."""
    flat = (m.rows == 1) | (m.target_stride == m.width)
    rows, width = np.where(flat, 1, m.rows), np.where(flat, m.rows * m.width, m.width)
    m = m._replace(rows=rows, width=width)
    size = rows * width
    next_to = (m.round[1:] == m.round[:-1]) & (m.target[1:] == m.target[:-1])
    next_to &= m.source_at[1:] == m.source_at[:-1] + size[:-1]
    end = m.target_at + np.where(flat, size, rows * m.target_stride)
    next_to &= (flat[1:] == flat[:-1]) & (m.target_at[1:] == end[:-1])
    next_to &= flat[1:] | ((width[1:] == width[:-1]) & (m.target_stride[1:] == m.target_stride[:-1]))
    if not len(size):
        return m
    heads = np.flatnonzero(np.append(True, ~next_to))
    width = np.where(flat[heads], np.add.reduceat(size, heads), width[heads])
    rows = np.where(flat[heads], 1, np.add.reduceat(rows, heads))
    return Moves(*(column[heads] for column in m))._replace(rows=rows, width=width, source_stride=width)
