"""Copies from GPU tensors straight into registered host pages: runs of bytes by the copy engine, the rest by a kernel.

The copy engine leaves the multiprocessors to others and reaches the speed of the link, from 64 KiB a copy on. Strided boxes and
small tensors are written by one kernel for all that a round has of them.
"""

import ctypes
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from resharder.client.gpu.cuda_driver import copy_to_host
from resharder.client.gpu.device_to_host import Rounds, in_order, last_rounds, planned, rounds_of
from resharder.client.gpu.digest import CachedDigester
from resharder.client.gpu.schedule import Moves
from resharder.client.gpu.streams import Mark, WorkStream
from resharder.client.gpu.table import Table, addresses_of, check_fit
from resharder.client.runtime.driver_lock import DRIVER_LOCK
from resharder.client.runtime.switch_interval import short_switch_interval
from resharder.converters.geometry.layout import Layout
from resharder.converters.geometry.piece_arrays import Ints

Tensors = Mapping[str, torch.Tensor]
ROUND_BYTES = 64 << 20
"""Bytes of a round: what may be in transit when a process is killed is `_DEPTH` of them."""
_DEPTH = 4
_RUN_BYTES = 64 << 10


class DeviceToPages:
    """Copy that is planned once for a layout and run for every version. `targets` has the names of the HF tensors."""

    def __init__(self, layout: Layout, device: torch.device, groups: Mapping[str, int], round_bytes: int = ROUND_BYTES) -> None:
        """Plan the copy. Values are copied without the pieces' `plus`.

        Args:
            layout: Boxes in the device's tensors.
            device: Device of the tensors.
            groups: Group of each HF tensor, from 0 on. Groups are copied in order.
            round_bytes: Most bytes of a round.
        """
        self._device = device
        self._sources, self.targets, moves = planned(layout)
        of_target = np.array([groups[name] for name in self.targets], np.int64)
        self._moves = straight(moves, round_bytes, of_target)
        self._last = last_rounds(self._moves, of_target)
        self._rounds = int(self._moves.round.max(initial=-1)) + 1
        self._copies, self._digester = WorkStream(device, before=1), CachedDigester(layout, device)

    def run(self, target: Ints, tensors: Tensors, complete: Callable[[int], None] = lambda group: None) -> list[int]:
        """Copy, after the current stream's pending work, and return when all boxes are at `target`.

        No copy runs any more when it returns or raises.

        Args:
            target: (tensors, 2): first and end address of each whole HF tensor of `targets`, in registered pages.
            tensors: Local tensors by name, of the layout's shapes and strides.
            complete: Called with each group, in order, once all of its boxes are at `target`. Must not block.

        Returns:
            Digests of the boxes as the device has them, in the order of the layout's pieces.

        Raises:
            KeyError, ValueError: Tensors differ from the layout.
        """
        source = addresses_of(self._sources, tensors, range(len(self._sources)))
        check_fit(self._moves, self._sources, source, self.targets, target)
        begins = np.append(source[:, 0], 0), np.append(target[:, 0], 0)
        runs = (self._moves.rows == 1) & (self._moves.width >= _RUN_BYTES)
        table = Table(_taken(self._moves, ~runs), *begins, self._device)
        by_engine = _Runs(_taken(self._moves, runs), *begins, self._device)
        digester, rounds = self._digester.at(tensors), Rounds(self._rounds, self._last, complete)
        marks: list[Mark] = []
        self._copies.begin()
        with self._drained(), short_switch_interval():
            while (k := rounds.take()) is not None:
                with DRIVER_LOCK.background():
                    with self._copies.work():
                        by_engine.run(k)
                        table.run(k)
                        marks.append(self._copies.mark(blocking=True))
                    if k == self._rounds // 2:  # beside the copies, and later than servers read the same memory
                        digester.begin()  # anew, also after a version that failed
                        digester.begin_all()
                if k >= _DEPTH:
                    _finish(rounds, k - _DEPTH, marks)
            for k in range(max(0, self._rounds - _DEPTH), self._rounds):
                _finish(rounds, k, marks)
        return digester.digests()

    @contextmanager
    def _drained(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._copies.drain()


def straight(moves: Moves, most: int, groups: Ints) -> Moves:
    """Return moves in rounds of at most `most` bytes, or of one tile, that go through the groups in order.

    Those that follow each other without a gap on both sides are joined. `groups` has the group of each target.
    """
    m = in_order(moves, groups)
    m = m._replace(round=rounds_of(m.rows * m.width, most)[0])
    flat = (m.rows == 1) | ((m.source_stride == m.width) & (m.target_stride == m.width))
    size = m.rows * m.width
    m = m._replace(rows=np.where(flat, 1, m.rows), width=np.where(flat, size, m.width))
    next_to = flat[1:] & flat[:-1]
    for of, at in ((m.source, m.source_at), (m.target, m.target_at)):
        next_to &= (of[1:] == of[:-1]) & (at[1:] == at[:-1] + size[:-1])
    heads = np.flatnonzero(np.append(True, ~(next_to & (m.round[1:] == m.round[:-1])))[: len(size)])
    width = np.where(flat[heads], np.add.reduceat(size, heads) if len(heads) else size, m.width[heads])
    return _taken(m, heads)._replace(width=width)


def _finish(rounds: Rounds, k: int, marks: list[Mark]) -> None:
    if marks[k] is not None:
        marks[k].synchronize()
    rounds.finish(k)


def _taken(moves: Moves, which: "np.ndarray[tuple[int], np.dtype[np.bool_]] | Ints") -> Moves:
    return Moves(*(column[which] for column in moves))


class _Runs:
    """Copies of whole runs of bytes, by round, on the current stream."""

    def __init__(self, moves: Moves, sources: Ints, targets: Ints, device: torch.device) -> None:
        self._copy = _engine(device)
        rows = np.column_stack([targets[moves.target] + moves.target_at, sources[moves.source] + moves.source_at, moves.width])
        self._rows: list[tuple[int, int, int]] = list(map(tuple, rows.tolist()))
        rounds = np.arange(int(moves.round.max(initial=-1)) + 2)
        self._begins = np.searchsorted(moves.round, rounds).tolist()

    def run(self, k: int) -> None:
        """Copy the runs of round `k`."""
        if k + 1 < len(self._begins):
            for row in self._rows[self._begins[k] : self._begins[k + 1]]:
                self._copy(*row)


def _engine(device: torch.device) -> Callable[[int, int, int], object]:
    """Return the function that copies: target, source, bytes."""
    if device.type != "cuda":
        return ctypes.memmove
    return lambda target, source, size: copy_to_host(target, source, size, torch.cuda.current_stream(device).cuda_stream)
