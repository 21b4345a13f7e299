"""The proof on a GPU: digests of all that a process holds of a version, in a few kernels however many tensors there are."""

from collections.abc import Mapping
from contextlib import nullcontext

import numpy as np
import torch
from resharder.client.direct.tiles import expand
from resharder.converters.digest import MASK, column_weights
from resharder.converters.layout import ITEM_SIZES, Layout
from resharder.converters.packed import Ints, Pieces, pack

_VECTOR, _FIELDS = 8, 8  # units of 16 bits in 16 bytes; columns of an item
_ROWS = 64  # of an item: enough of them to be many, enough in each to be worth a program


class Proof:
    """For the pieces of one layout where they are now: to be made anew where a tensor has moved."""

    def __init__(self, layout: Layout | Pieces[int], tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
        pieces = pack({0: layout}) if isinstance(layout, Layout) else layout
        dimensions = np.array([max(1, len(spec.shape)) for spec in pieces.specs], np.int64)[pieces.tensor]
        sizes = np.array([ITEM_SIZES[spec.dtype] for spec in pieces.specs], np.int64)
        used = set(pieces.local.tolist())
        begins = np.array([tensors[name].data_ptr() if i in used else 0 for i, name in enumerate(pieces.locals)], np.int64)
        units = max([1, *((spec.shape or (1,))[-1] * max(1, ITEM_SIZES[spec.dtype] // 2) for spec in pieces.specs)])
        weights = torch.from_numpy(column_weights(-(-units // _VECTOR) * _VECTOR).astype(np.int32))
        self._weights = weights.to(device)
        self._of_words = weights.view(-1, 2).T.contiguous().to(device)
        self._found = torch.zeros(len(pieces), dtype=torch.int64, device=device)
        self._launches: list[tuple[torch.Tensor, int, int]] = []
        words = []
        for d in np.unique(dimensions).tolist():
            for size in np.unique(sizes[pieces.tensor[dimensions == d]]).tolist():
                which = np.flatnonzero((dimensions == d) & (sizes[pieces.tensor] == size))
                rows, aligned = _items(pieces, which, d, size, begins)
                words.append(_in_words(rows[aligned]))
                if not aligned.all():
                    self._launches.append((_on(device, rows[~aligned]), max(1, size // 2), min(16, 8 * size)))
        self._words = _on(device, np.concatenate([*words, np.zeros((0, _FIELDS), np.int64)]))
        if device.type == "cuda":
            self.digests()  # has the kernels made, which takes a second

    def digests(self) -> list[int]:
        """As `resharder.converters.digest` has them, in the order of the layout's pieces. After what the current stream has yet
        to do."""
        from resharder.client.direct import proof_kernel

        self._found.zero_()
        with torch.cuda.device(self._found.device) if self._found.is_cuda else nullcontext():
            if len(self._words):
                proof_kernel.add_digests_of_words(self._words, self._of_words, self._found)
            for items, lanes, bits in self._launches:
                proof_kernel.add_digests(items, self._weights, self._found, lanes, bits)
        return [found & MASK for found in self._found.tolist()]


def _on(device: torch.device, items: Ints) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(items)).to(device)


def _items(
    pieces: Pieces[int], which: Ints, d: int, size: int, begins: Ints
) -> tuple[Ints, "np.ndarray[tuple[int], np.dtype[np.bool_]]"]:
    """Rows for the kernel, strides of rows in units, and which of them can go in words: they count their columns in units."""
    lanes = max(1, size // 2)
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
    height, width = np.minimum(_ROWS, rows[piece] - first), count[piece, -1] * lanes
    row_stride, column_stride = strides[piece, -2] * lanes, strides[piece, -1] * lanes
    gapless = (count[piece, -1] == 1) | ((strides[piece, -1] == 1) & (step[piece, -1] == 1))
    aligned = gapless & (address % 16 == 0) & (width % _VECTOR == 0) & ((row_stride % _VECTOR == 0) | (height == 1)) & (size > 1)
    aligned &= start[piece, -1] * lanes % _VECTOR == 0
    column = start[piece, -1] * np.where(aligned, lanes, 1)
    steps = step[piece, -2] << 32 | step[piece, -1]
    return np.column_stack([address, height, width, row_stride, column_stride, row, steps, which[piece] << 32 | column]), aligned


def _in_words(items: Ints) -> Ints:
    """With widths and columns in words of two units, and strides of rows in 16 bytes."""
    items = items.copy()
    items[:, 2] //= 2
    items[:, 3] //= _VECTOR
    items[:, 7] = items[:, 7] >> 32 << 32 | (items[:, 7] & 0x7FFFFFFF) // 2
    return items
