"""Digests of all boxes of a process, on a GPU in a few kernels for any number of tensors."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from resharder.client.gpu.tiles import expand
from resharder.converters.geometry.layout import ITEM_SIZES, Layout
from resharder.converters.geometry.piece_arrays import Ints, Pieces, pack
from resharder.converters.storage.digest import column_weights

_VECTOR = 16  # bytes
_IN_WORDS = (2, 4)  # sizes, in bytes, of elements that can be read in words of 4 bytes
_NEVER = 1 << 62  # number of no arrival
_ROWS = 64  # rows of an item: small enough for many items, large enough for one program of the kernel


class _Items(NamedTuple):
    """Items for the kernel, on the device, sorted by the arrival of their data.

    `parts` has, for each number of an arrival, the first and end of its items.
    """

    rows: torch.Tensor
    parts: dict[int, tuple[int, int]]
    add: Callable[[torch.Tensor], None]


class Digester:
    """Digests of the pieces of one layout at their current addresses. If a tensor moves, a new one is needed."""

    def __init__(
        self,
        layout: Layout | Pieces[int],
        tensors: Mapping[str, torch.Tensor],
        device: torch.device,
        complete: Mapping[str, int] | None = None,
    ) -> None:
        """Prepare the digests; compiles kernels, which takes a second.

        Args:
            layout: Boxes in the local tensors.
            tensors: Local tensors by name, on `device`.
            device: Device that computes.
            complete: Number of the last arrival into each local tensor, if the caller will call `arrived`. Otherwise all work
                is done by `digests`.
        """
        pieces = pack({0: layout}) if isinstance(layout, Layout) else layout
        dimensions = np.array([max(1, len(spec.shape)) for spec in pieces.specs], np.int64)[pieces.tensor]
        sizes = np.array([ITEM_SIZES[spec.dtype] for spec in pieces.specs], np.int64)
        used = set(pieces.local.tolist())
        begins = np.array([tensors[name].data_ptr() if i in used else 0 for i, name in enumerate(pieces.locals)], np.int64)
        last = np.array([(complete or {}).get(name, _NEVER) for name in pieces.locals], np.int64)
        columns = max([1, *((spec.shape or (1,))[-1] for spec in pieces.specs)])
        weights = torch.from_numpy(column_weights(-(-columns // _VECTOR) * _VECTOR).astype(np.int32))
        of_elements, of_halves = weights.to(device), weights.view(-1, 2).T.contiguous().to(device)
        self._found = torch.zeros(len(pieces), dtype=torch.int64, device=device)
        self._left: set[int] | None = None  # arrivals whose digests have not begun; None between versions
        self._items: list[_Items] = []
        words: dict[int, list[Ints]] = {}
        for d in np.unique(dimensions).tolist():
            for size in np.unique(sizes[pieces.tensor[dimensions == d]]).tolist():
                which = np.flatnonzero((dimensions == d) & (sizes[pieces.tensor] == size))
                rows, aligned = _items(pieces, which, d, size, begins)
                if aligned.any():
                    words.setdefault(size, []).append(_in_words(rows[aligned], size))
                if not aligned.all():
                    add = partial(_add_elements, of_elements, self._found, size)
                    self._items.append(_sorted(rows[~aligned], last[pieces.local], device, add))
        for size, some in words.items():
            add = partial(_add_words, of_halves if size == 2 else of_elements[None], self._found)
            self._items.append(_sorted(np.concatenate(some), last[pieces.local], device, add))
        if device.type == "cuda":
            self.digests()  # compiles kernels, which takes a second

    def begin(self) -> None:
        """Begin a version, on the current stream."""
        self._found.zero_()
        self._left = {number for items in self._items for number in items.parts}

    def arrived(self, number: int) -> None:
        """Begin the digests of boxes that are complete with arrival `number`, after the current stream's pending work."""
        if self._left is not None and number in self._left:
            self._left.remove(number)
            with torch.cuda.device(self._found.device) if self._found.is_cuda else nullcontext():
                for items in self._items:
                    first, end = items.parts.get(number, (0, 0))
                    if first < end:
                        items.add(items.rows[first:end])

    def begin_all(self) -> None:
        """Begin the digests of all boxes of a version that have not begun, after the current stream's pending work."""
        if self._left is None:
            self.begin()
        for number in sorted(self._left or ()):
            self.arrived(number)

    def digests(self) -> list[int]:
        """Return the digests, in the order of the layout's pieces, after the current stream's pending work.

        They equal those of `converters.storage.digest`.
        """
        self.begin_all()
        self._left = None
        found: list[int] = self._found.cpu().numpy().view(np.uint64).tolist()
        return found


class CachedDigester:
    """`Digester` of one layout, reused from version to version and replaced when a tensor has moved."""

    def __init__(self, layout: Layout | Pieces[int], device: torch.device, complete: Mapping[str, int] | None = None) -> None:
        """Take the arguments of `Digester`, except for the tensors."""
        self._pieces = pack({0: layout}) if isinstance(layout, Layout) else layout
        self._device, self._complete = device, complete
        self._names = [self._pieces.locals[i] for i in np.unique(self._pieces.local).tolist()]
        self._made: tuple[list[int], Digester] | None = None

    def at(self, tensors: Mapping[str, torch.Tensor]) -> Digester:
        """Return the digester for the tensors' current addresses. Raises KeyError if a tensor is missing."""
        where = [tensors[name].data_ptr() for name in self._names]
        if self._made is None or self._made[0] != where:
            self._made = where, Digester(self._pieces, tensors, self._device, self._complete)
        return self._made[1]


def _sorted(rows: Ints, last: Ints, device: torch.device, add: Callable[[torch.Tensor], None]) -> _Items:
    """Return items sorted by the last arrival of their piece, `last`."""
    numbers = last[rows[:, 7] >> 32]
    order = np.argsort(numbers, kind="stable")
    found, begins = np.unique(numbers[order], return_index=True)
    ends = np.append(begins[1:], len(order))
    parts = {n: (b, e) for n, b, e in zip(found.tolist(), begins.tolist(), ends.tolist(), strict=True)}
    return _Items(torch.from_numpy(np.ascontiguousarray(rows[order])).to(device), parts, add)


def _add_words(weights: torch.Tensor, found: torch.Tensor, rows: torch.Tensor) -> None:
    from resharder.client.gpu import digest_kernel

    digest_kernel.add_digests_of_words(rows, weights, found)


def _add_elements(weights: torch.Tensor, found: torch.Tensor, size: int, rows: torch.Tensor) -> None:
    from resharder.client.gpu import digest_kernel

    digest_kernel.add_digests(rows, weights, found, size)


def _items(
    pieces: Pieces[int], which: Ints, d: int, size: int, begins: Ints
) -> tuple[Ints, "np.ndarray[tuple[int], np.dtype[np.bool_]]"]:
    """Return items for the kernel, with sizes in elements, and which of them can be read in words."""
    start, count, step = (part[which, :d] for part in pieces.boxes)
    strides = pieces.strides[which, :d]
    shape = np.array([(pieces.specs[t].shape or (1,)) for t in pieces.tensor[which].tolist()], np.int64).reshape(-1, d)
    if d == 1:  # one row
        start, count, step, strides, shape = (
            np.column_stack([np.full(len(which), filler), part])
            for part, filler in ((start, 0), (count, 1), (step, 1), (strides, 0), (shape, 1))
        )
    rows = count[:, -2]
    parts = -(-rows // _ROWS)
    piece, number = expand(count[:, :-2].prod(axis=1) * parts)
    outer, part = np.divmod(number, parts[piece])
    first = part * _ROWS
    at = pieces.offset[which][piece] + first * strides[piece, -2]
    row, below = start[piece, -2] + first * step[piece, -2], shape[piece, -2]
    for k in range(count.shape[1] - 3, -1, -1):
        outer, index = np.divmod(outer, count[piece, k])
        at = at + index * strides[piece, k]
        row = row + (start[piece, k] + index * step[piece, k]) * below
        below = below * shape[piece, k]
    address = begins[pieces.local[which]][piece] + at * size
    height, width = np.minimum(_ROWS, rows[piece] - first), count[piece, -1]
    row_stride, column_stride, column = strides[piece, -2], strides[piece, -1], start[piece, -1]
    aligned = (column_stride == 1) & (step[piece, -1] == 1)
    for at_vector in (address, width * size, np.where(height > 1, row_stride * size, 0), column * size):
        aligned &= at_vector % _VECTOR == 0
    aligned &= size in _IN_WORDS
    steps = step[piece, -2] << 32 | step[piece, -1]
    return np.column_stack([address, height, width, row_stride, column_stride, row, steps, which[piece] << 32 | column]), aligned


def _in_words(items: Ints, size: int) -> Ints:
    """Return items with widths and columns in words of 4 bytes and row strides in units of 16 bytes."""
    items = items.copy()
    items[:, 2] = items[:, 2] * size // 4
    items[:, 3] = items[:, 3] * size // _VECTOR
    items[:, 7] = items[:, 7] >> 32 << 32 | (items[:, 7] & 0x7FFFFFFF) * size // 4
    return items
