"""Copies from GPU tensors to host pages through pinned buffers: a kernel fills one buffer while threads empty another.

A kernel could write to the pages directly if they were registered with CUDA for each version. But the verification of the
version waits for registration and release, and so do other threads' kernels. 61 GB were READY after 7.3 s that way and after
5.6 s this way (benchmarks/results/direct_install.md).
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np
import torch
from resharder.client.gpu.digest import CachedDigester
from resharder.client.gpu.schedule import Moves, schedule
from resharder.client.gpu.streams import Mark, WorkStream
from resharder.client.gpu.table import Table, addresses_of, check_fit
from resharder.client.runtime.driver_lock import DRIVER_LOCK
from resharder.client.runtime.switch_interval import short_switch_interval
from resharder.converters.geometry.copy_table import copies_of
from resharder.converters.geometry.layout import Layout, Piece
from resharder.converters.geometry.piece_arrays import Ints, pack
from resharder.converters.geometry.plan import plan_pieces

Tensors = Mapping[str, torch.Tensor]
BUFFER_BYTES = 64 << 20
_BUFFERS = 3
_ALIGN = 16  # bytes: the widest words of the kernel
_RUN = 2 << 20  # bytes that a thread copies at a time, which divides the work evenly


class DeviceToHost:
    """Copy that is planned once for a layout and run for every version. Its buffers, pinned for GPU
    tensors, exist as long as it does. `targets` has the names of the HF tensors.
    """

    def __init__(self, layout: Layout, device: torch.device, threads: int, buffer_bytes: int = BUFFER_BYTES) -> None:
        """Plan the copy. Values are copied without the pieces' `plus`.

        Args:
            layout: Boxes in the device's tensors.
            device: Device of the tensors.
            threads: Threads that empty buffers.
            buffer_bytes: Size of each of three buffers.
        """
        self._device, self._threads = device, threads
        copies = copies_of(plan_pieces(pack({0: layout}), pack({0: _whole(layout)})), [0], [0])
        self._sources, self.targets = copies.source_locals, copies.target_locals
        self._fills, self._empties = through_buffers(schedule(copies, 0, 0).local, buffer_bytes, threads)
        self._rounds = int(self._fills.round.max(initial=-1)) + 1
        size = min(buffer_bytes, int((self._fills.target_at + self._fills.rows * self._fills.width).max(initial=0)))
        self._buffers = [
            torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda") for _ in range(min(_BUFFERS, self._rounds))
        ]
        self._copies, self._digester = WorkStream(device), CachedDigester(layout, device)
        self._fill: tuple[list[int], Ints, Table] | None = None  # pointers, ranges and table of the local tensors

    def run(self, target: Ints, tensors: Tensors) -> list[int]:
        """Copy, after the current stream's pending work, and return when all boxes are at `target`.

        Args:
            target: (tensors, 2): first and end address of each whole HF tensor of `targets`, in mapped pages.
            tensors: Local tensors by name, of the layout's shapes and strides.

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
        _, source, fill = self._fill
        check_fit(self._empties, self._sources, source, self.targets, target)
        empty = Table(self._empties, np.append(source[:, 0], 0), np.append(target[:, 0], 0), torch.device("cpu"))
        digester = self._digester.at(tensors)
        self._copies.begin()
        with ThreadPoolExecutor(self._threads, "resharder-to-host") as pool, short_switch_interval():
            try:
                self._copy(fill, empty, pool)
            finally:
                self._copies.drain()
        return digester.digests()

    def _copy(self, fill: Table, empty: Table, pool: ThreadPoolExecutor) -> None:
        filled: list[Mark] = []
        emptied: list[Sequence[Future[None]]] = []

        def begin(k: int) -> None:
            if k >= len(self._buffers):
                _all(emptied[k - len(self._buffers)])
            with (
                DRIVER_LOCK.background(),
                self._copies.work(),
            ):  # without the lock, concurrent transfers took 300 ms instead of 180
                fill.run(k, target_base=self._at(k))
                filled.append(self._copies.mark())

        for k in range(self._rounds):
            for ahead in range(len(filled), min(k + 2, self._rounds)):  # fills the next buffer while waiting for this one
                begin(ahead)
            if filled[k] is not None:
                filled[k].synchronize()
            shares = range(k * self._threads, (k + 1) * self._threads)
            emptied.append([pool.submit(empty.run, share, self._at(k)) for share in shares])
        for futures in emptied[-len(self._buffers) :]:
            _all(futures)

    def _at(self, k: int) -> int:
        return self._buffers[k % len(self._buffers)].data_ptr()


def _all(futures: Sequence[Future[None]]) -> None:
    """Wait for all futures, then raise the exception of one that failed."""
    for future in wait(futures).done:
        future.result()


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


def through_buffers(moves: Moves, buffer_bytes: int, shares: int) -> tuple[Moves, Moves]:
    """Return two moves for each box: into a buffer, and out of it.

    The buffer is the slot of the moves; it must be larger than any box. The moves out of it have `shares` rounds, with about
    equal bytes, for each round of the moves into it. Adjacent moves with equal strides are joined.
    """
    order = np.lexsort((moves.target_at, moves.target))
    m = Moves(*(column[order] for column in moves))
    sizes = -(-m.rows * m.width // _ALIGN) * _ALIGN
    number, at = _rounds(sizes, buffer_bytes)
    slot = np.full(len(at), -1)
    fills = m._replace(round=number, target=slot, target_at=at, target_stride=m.width)
    empties = _joined(m._replace(round=number, source=slot, source_at=at, source_stride=m.width))
    return fills, empties._replace(round=empties.round * shares + _share(empties, shares))


def _rounds(sizes: Ints, most: int) -> tuple[Ints, Ints]:
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
    next_to &= (m.source_at[1:] == m.source_at[:-1] + size[:-1]) & (m.source_at[1:] // _RUN == m.source_at[:-1] // _RUN)
    end = m.target_at + np.where(flat, size, rows * m.target_stride)
    next_to &= (flat[1:] == flat[:-1]) & (m.target_at[1:] == end[:-1])
    next_to &= flat[1:] | ((width[1:] == width[:-1]) & (m.target_stride[1:] == m.target_stride[:-1]))
    if not len(size):
        return m
    heads = np.flatnonzero(np.append(True, ~next_to))
    width = np.where(flat[heads], np.add.reduceat(size, heads), width[heads])
    rows = np.where(flat[heads], 1, np.add.reduceat(rows, heads))
    return Moves(*(column[heads] for column in m))._replace(rows=rows, width=width, source_stride=width)


def _share(m: Moves, shares: int) -> Ints:
    """Return the share of each move, from the number of bytes before it in its round."""
    most = (m.source_at + m.rows * m.width).max(initial=1)
    found: Ints = m.source_at * shares // most
    return found
