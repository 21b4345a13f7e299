"""Pieces of many processes as arrays: as Python objects, a million pieces of hundreds of ranks take gigabytes."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from resharder.converters.errors import LayoutError
from resharder.converters.geometry.layout import Box, Layout, Piece, Range, TensorSpec, intersect_ranges

Ints = npt.NDArray[np.int64]
Process = TypeVar("Process", bound=Hashable)


class Ranges(NamedTuple):
    """Boxes as int64 arrays of shape (boxes, dimensions). Boxes with fewer dimensions are padded at
    the end with dimensions of count 1.
    """

    start: Ints
    count: Ints  # type: ignore[assignment]  # hides tuple.count, which is not needed
    step: Ints

    def take(self, which: Any) -> "Ranges":
        """Return the boxes selected by `which`: an index array, a mask or a slice."""
        return Ranges(self.start[which], self.count[which], self.step[which])

    @property
    def volume(self) -> Ints:
        """Number of elements of each box."""
        found: Ints = self.count.prod(axis=1)
        return found

    def box(self, i: int, dimensions: int) -> Box:
        """Return box `i` as an object; `dimensions` is the number of dimensions without padding."""
        rows = zip(self.start[i].tolist(), self.count[i].tolist(), self.step[i].tolist(), strict=True)
        return tuple(Range(*row) for row in rows)[:dimensions]

    def widened(self, width: int) -> "Ranges":
        """Return the same boxes, padded to at least `width` dimensions."""
        more = ((0, 0), (0, max(0, width - self.start.shape[1])))
        return Ranges(*(np.pad(part, more, constant_values=filler) for part, filler in zip(self, (0, 1, 1), strict=True)))


@dataclass(frozen=True)
class Pieces(Generic[Process]):
    """Pieces of several processes as arrays, one entry per piece.

    Piece `i` is `boxes[i]` of tensor `specs[tensor[i]]`, in local tensor `locals[local[i]]` of process
    `processes[process[i]]`, at `offset[i]` with `strides[i]`, in elements.
    """

    specs: tuple[TensorSpec, ...]
    processes: tuple[Process, ...]
    locals: tuple[str, ...]
    tensor: Ints
    process: Ints
    local: Ints
    boxes: Ranges
    offset: Ints
    strides: Ints
    plus: npt.NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.tensor)

    def dimensions(self, i: int) -> int:
        """Return the number of dimensions of the HF tensor of piece `i`."""
        return len(self.specs[self.tensor[i]].shape)

    def widened(self, width: int) -> "Pieces[Process]":
        """Return the same pieces, their boxes and strides padded to at least `width` dimensions."""
        more = ((0, 0), (0, max(0, width - self.strides.shape[1])))
        return replace(self, boxes=self.boxes.widened(width), strides=np.pad(self.strides, more))


def pack_boxes(boxes: Sequence[Box], width: int = 1) -> Ranges:
    """Return boxes as arrays, padded to at least `width` dimensions."""
    width = max([width, *map(len, boxes)])
    ranges = _columns(boxes, width, Range(0, 1)).reshape(-1, width, 3)
    return Ranges(*(np.ascontiguousarray(ranges[..., i]) for i in range(3)))


def join_boxes(parts: Sequence[Ranges]) -> Ranges:
    """Concatenate boxes, padded to the dimensions of the widest."""
    if not parts:
        return pack_boxes([])
    width = max(part.start.shape[1] for part in parts)
    wide = [part.widened(width) for part in parts]
    return Ranges(*(np.concatenate([part[i] for part in wide]) for i in range(3)))


def pack(layouts: Mapping[Process, Layout]) -> Pieces[Process]:
    """Return the pieces of every process, replicas included.

    Raises LayoutError if two processes give a tensor different shapes or dtypes.
    """
    numbers: dict[str, int] = {}
    specs: list[TensorSpec] = []
    first_process: list[Process] = []
    pieces: list[Piece] = []
    counts = []
    for process, layout in layouts.items():
        for name, spec in layout.tensors.items():
            number = numbers.setdefault(name, len(specs))
            if number == len(specs):
                specs.append(spec)
                first_process.append(process)
            elif specs[number] != spec:
                one, other = (f"{s.dtype} {list(s.shape)}" for s in (specs[number], spec))
                raise LayoutError(f"{name}: {first_process[number]} holds it as {one}, {process} as {other}")
        pieces += layout.pieces
        counts.append(len(layout.pieces))
    width = max([1, *(len(spec.shape) for spec in specs)])
    locals_ = {name: i for i, name in enumerate(dict.fromkeys(p.local for p in pieces))}
    return Pieces(
        tuple(specs),
        tuple(layouts),
        tuple(locals_),
        np.array([numbers[p.tensor] for p in pieces], np.int64),
        np.repeat(np.arange(len(counts)), counts),
        np.array([locals_[p.local] for p in pieces], np.int64),
        pack_boxes([p.box for p in pieces], width),
        np.array([p.offset for p in pieces], np.int64),
        _columns([tuple((stride,) for stride in p.strides) for p in pieces], width, (0,)).reshape(-1, width),
        np.array([p.plus for p in pieces], np.float64),
    )


def join(parts: Sequence[Pieces[Process]]) -> Pieces[Process]:
    """Concatenate the pieces of one or more groups of processes; the processes are numbered anew, in order.

    Raises LayoutError if two of them give a tensor different shapes or dtypes.
    """
    width = max(part.strides.shape[1] for part in parts)
    specs: dict[str, TensorSpec] = {}
    locals_: dict[str, int] = {}
    tensors, names, processes, first = [], [], [], 0
    for part in parts:
        for spec in part.specs:
            if specs.setdefault(spec.name, spec) != spec:
                one, other = (f"{s.dtype} {list(s.shape)}" for s in (specs[spec.name], spec))
                raise LayoutError(f"{spec.name}: held as {one}, but as {other} by {part.processes[0]}")
        numbers = {name: i for i, name in enumerate(specs)}
        tensors.append(np.array([numbers[spec.name] for spec in part.specs], np.int64)[part.tensor])
        names.append(np.array([locals_.setdefault(name, len(locals_)) for name in part.locals], np.int64)[part.local])
        processes.append(part.process + first)
        first += len(part.processes)
    wide = [part.widened(width) for part in parts]
    return Pieces(
        tuple(specs.values()),
        tuple(process for part in parts for process in part.processes),
        tuple(locals_),
        np.concatenate(tensors),
        np.concatenate(processes),
        np.concatenate(names),
        join_boxes([part.boxes for part in wide]),
        np.concatenate([part.offset for part in wide]),
        np.concatenate([part.strides for part in wide]),
        np.concatenate([part.plus for part in wide]),
    )


def _columns(rows: Sequence[tuple[tuple[int, ...], ...]], width: int, filler: tuple[int, ...]) -> Ints:
    """Return each row flattened, padded at its end to `width`."""
    flat = chain.from_iterable(chain.from_iterable(row + (filler,) * (width - len(row)) for row in rows))
    return np.fromiter(flat, np.int64)


def intersect_all(a: Ranges, b: Ranges) -> tuple[Ranges, npt.NDArray[np.bool_]]:
    """Return the common elements of `a[i]` and `b[i]`, and a mask of the pairs that have any; other
    boxes are undefined.
    """
    start = np.maximum(a.start, b.start)
    count = np.minimum(a.start + a.count, b.start + b.count) - start
    step = np.ones_like(start)
    for i, d in np.argwhere((a.step != 1) | (b.step != 1)):
        found = _intersect(
            (int(a.start[i, d]), int(a.count[i, d]), int(a.step[i, d])),
            (int(b.start[i, d]), int(b.count[i, d]), int(b.step[i, d])),
        )
        start[i, d], count[i, d], step[i, d] = found or (0, 0, 1)
    return Ranges(start, count, step), (count > 0).all(axis=1)


@lru_cache(maxsize=4096)
def _intersect(a: tuple[int, int, int], b: tuple[int, int, int]) -> Range | None:
    return intersect_ranges(Range(*a), Range(*b))


_MULTIPLIERS = np.random.default_rng(7).integers(1, 2**63, 1 + 3 * 64, dtype=np.uint64) * np.uint64(2) + np.uint64(1)


class Distinct(NamedTuple):
    """Distinct boxes of a set of pieces, sorted by tensor. Piece `i` has box `of[i]`."""

    tensor: Ints
    boxes: Ranges
    of: Ints


def distinct(tensor: Ints, boxes: Ranges) -> Distinct:
    """Return the distinct boxes of pieces, given the tensor's number and the box of each piece."""
    columns = np.column_stack([tensor, boxes.start, boxes.count, boxes.step])
    hashed = (columns.astype(np.uint64) * _MULTIPLIERS[: columns.shape[1]]).sum(axis=1)
    found = _grouped(tensor, boxes, np.lexsort((hashed, tensor)), np.column_stack([tensor, hashed.view(np.int64)]))
    if (columns == columns[_first(found)[found.of]]).all():
        return found
    return _grouped(tensor, boxes, np.lexsort(columns.T[::-1]), columns)


def _grouped(tensor: Ints, boxes: Ranges, order: Ints, keys: Ints) -> Distinct:
    """Return the distinct boxes, given the `order` that sorts the rows of `keys`. The first column
    of `keys` is `tensor`; pieces with equal rows have the same box.
    """
    ordered = keys[order]
    new = np.ones(len(order), dtype=bool)
    new[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    of = np.empty(len(order), np.int64)
    of[order] = np.cumsum(new) - 1
    return Distinct(tensor[order[new]], boxes.take(order[new]), of)


def _first(found: Distinct) -> Ints:
    """Return the index of one piece of each distinct box."""
    first = np.empty(len(found.tensor), np.int64)
    first[found.of] = np.arange(len(found.of))
    return first


def pairs(left: Ints, right: Ints, groups: int) -> tuple[Ints, Ints]:
    """Return all (i, j) with `left[i] == right[j]`, sorted by i, then j. Values are below `groups`;
    `right` must be sorted.
    """
    sizes = np.bincount(right, minlength=groups)
    begins = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    many = sizes[left]
    i = np.repeat(np.arange(len(left)), many)
    within = np.arange(len(i)) - np.repeat(np.cumsum(many) - many, many)
    return i, begins[left[i]] + within
