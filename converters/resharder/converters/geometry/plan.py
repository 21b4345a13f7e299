"""Plans of copies between layouts, computed on arrays: hundreds of ranks with tens of thousands of
tensors take seconds.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from resharder.converters.errors import LayoutError
from resharder.converters.geometry.layout import ITEM_SIZES, Box, Layout, StridedView, TensorSpec, box_shape, format_box
from resharder.converters.geometry.piece_arrays import Distinct, Ints, Pieces, Ranges, distinct, intersect_all, pack, pairs
from resharder.converters.geometry.senders import choose

Array = npt.NDArray[Any]
Source = TypeVar("Source", bound=Hashable)
Target = TypeVar("Target", bound=Hashable)
_BUSY = 1.01  # most bytes of a source, relative to the busiest target's, if only a part of the replicas sends


class Copy(NamedTuple, Generic[Source, Target]):
    """Copy of `box` of `tensor` from a view of a local tensor of process `source` to a view of one
    of process `target`. `plus` is added to the values.
    """

    tensor: str
    box: Box
    source: Source
    source_local: str
    source_view: StridedView
    target: Target
    target_local: str
    target_view: StridedView
    plus: float


@dataclass(frozen=True)
class Plan(Generic[Source, Target]):
    """Copies between two sets of pieces, as arrays. Copy `i` takes `boxes[i]` from piece `have[i]`
    of the sources to piece `want[i]` of the targets.
    """

    sources: Pieces[Source]
    targets: Pieces[Target]
    have: Ints
    want: Ints
    boxes: Ranges
    parts: int  # into which the sources' replicas are divided; the plan reads from one part

    def __len__(self) -> int:
        return len(self.have)

    @property
    def sizes(self) -> Ints:
        """Bytes of each copy."""
        found: Ints = self.boxes.volume * self.item_sizes
        return found

    @property
    def item_sizes(self) -> Ints:
        """Bytes of an element of each copy."""
        found: Ints = _item_sizes(self.targets)[self.targets.tensor[self.want]]
        return found

    @property
    def sent(self) -> Ints:
        """Bytes that each source sends."""
        return _total(self.sources.process[self.have], self.sizes, len(self.sources.processes))

    @property
    def received(self) -> Ints:
        """Bytes that each target receives."""
        return _total(self.targets.process[self.want], self.sizes, len(self.targets.processes))

    @property
    def source_views(self) -> tuple[Ints, Ints]:
        """Offset and strides, in elements, of each copy's box in its source's local tensor."""
        return _views(self.sources, self.have, self.boxes)

    @property
    def target_views(self) -> tuple[Ints, Ints]:
        """Offset and strides, in elements, of each copy's box in its target's local tensor."""
        return _views(self.targets, self.want, self.boxes)

    def copies(self) -> Iterator[Copy[Source, Target]]:
        """Yield each copy as an object with views of its local tensors. Large plans are read from
        the arrays instead.
        """
        (source_offsets, source_strides), (target_offsets, target_strides) = self.source_views, self.target_views
        for i, (have, want) in enumerate(zip(self.have.tolist(), self.want.tolist(), strict=True)):
            n = self.targets.dimensions(want)
            box = self.boxes.box(i, n)
            shape = box_shape(box)
            yield Copy(
                self.targets.specs[self.targets.tensor[want]].name,
                box,
                self.sources.processes[self.sources.process[have]],
                self.sources.locals[self.sources.local[have]],
                StridedView(shape, tuple(source_strides[i, :n].tolist()), int(source_offsets[i])),
                self.targets.processes[self.targets.process[want]],
                self.targets.locals[self.targets.local[want]],
                StridedView(shape, tuple(target_strides[i, :n].tolist()), int(target_offsets[i])),
                float(self.sources.plus[have] - self.targets.plus[want]),
            )


def plan(sources: Mapping[Source, Layout], targets: Mapping[Target, Layout]) -> Plan[Source, Target]:
    """Return the copies that fill each element of the targets' pieces once.

    Any source that has an element may send it; bytes per source are as even as the layouts permit.

    Raises:
        LayoutError: The sources lack an element, two of their boxes overlap without being equal, or two
            processes give a tensor different shapes or dtypes. The message names the tensor.
    """
    return plan_pieces(pack(sources), pack(targets))


def plan_pieces(sources: Pieces[Source], targets: Pieces[Target], number: int | None = None) -> Plan[Source, Target]:
    """Return `plan` for pieces in arrays.

    Args:
        number: Number of this set of targets, if the sources serve several sets at once: set `number`
            reads from a part of the replicas, in turn, so that sets have different senders. The part is
            the smallest with which no source sends more than the busiest target receives. None uses
            all replicas.
    """
    known = _same_tensors(sources, targets)
    width = max(sources.boxes.start.shape[1], targets.boxes.start.shape[1])
    sources, targets = sources.widened(width), targets.widened(width)
    held = distinct(sources.tensor, sources.boxes)
    _refuse_overlaps(sources.specs, held)
    want, box = pairs(known[targets.tensor], held.tensor, len(sources.specs))
    boxes, some = intersect_all(held.boxes.take(box), targets.boxes.take(want))
    want, box, boxes = want[some], box[some], boxes.take(some)
    _refuse_holes(targets, want, boxes)
    sizes = boxes.volume * _item_sizes(targets)[targets.tensor[want]]
    replica, parts = _replicas(held, sources.process, box) if number is not None else (np.zeros(len(sources), np.int64), 1)
    count = parts
    while True:
        part = _part(held, replica * parts // count == (number or 0) % parts)
        have = choose(held, part, sources.process, len(sources.processes), box, sizes)
        found = Plan(sources, targets, have, want, boxes, parts)
        if parts == 1 or found.sent.max() <= _BUSY * found.received.max():
            return found
        parts //= 2


def _item_sizes(pieces: Pieces[Any]) -> Ints:
    """Return the bytes of an element of each tensor."""
    return np.array([ITEM_SIZES[spec.dtype] for spec in pieces.specs], np.int64)


def _same_tensors(sources: Pieces[Source], targets: Pieces[Target]) -> Ints:
    """Return the sources' number of each of the targets' tensors."""
    numbers = {spec.name: number for number, spec in enumerate(sources.specs)}
    for spec in targets.specs:
        if spec.name not in numbers:
            raise LayoutError(f"{spec.name} is missing: no source has it")
        if (have := sources.specs[numbers[spec.name]]) != spec:
            wanted, found = f"{spec.dtype} {list(spec.shape)}", f"{have.dtype} {list(have.shape)}"
            raise LayoutError(f"{spec.name}: the targets expect {wanted}, the sources have {found}")
    return np.array([numbers[spec.name] for spec in targets.specs], np.int64)


def _refuse_overlaps(specs: Sequence[TensorSpec], held: Distinct) -> None:
    one, other = pairs(held.tensor, held.tensor, len(specs))
    one, other = one[one < other], other[one < other]
    _, some = intersect_all(held.boxes.take(one), held.boxes.take(other))
    for i in np.flatnonzero(some)[:1]:
        spec = specs[held.tensor[one[i]]]
        boxes = [format_box(held.boxes.box(int(j[i]), len(spec.shape))) for j in (one, other)]
        raise LayoutError(f"{spec.name}: ranks have the same element in different boxes, {boxes[0]} and {boxes[1]}")


def _refuse_holes(targets: Pieces[Target], want: Ints, boxes: Ranges) -> None:
    filled = _total(want, boxes.volume, len(targets))
    for i in np.flatnonzero(filled != targets.boxes.volume)[:1]:
        name = targets.specs[targets.tensor[i]].name
        where = f"{name}{format_box(targets.boxes.box(i, targets.dimensions(i)))} for {targets.locals[targets.local[i]]}"
        raise LayoutError(f"{where}: expected {targets.boxes.volume[i]} elements, the sources give {filled[i]}")


def _replicas(held: Distinct, process: Ints, box: Ints) -> tuple[Ints, int]:
    """Return the replica of each piece's process, and the number of replicas.

    The number of replicas is the least number of processes that have one of the boxes copied. A
    process's replica is its position among the processes with the same box, scaled to that number;
    boxes with the fewest processes decide.
    """
    order = np.lexsort((process, held.of))  # pieces, box by box
    holders = np.bincount(held.of, minlength=len(held.tensor))
    place = np.arange(len(order)) - (np.cumsum(holders) - holders)[held.of[order]]
    count = int(holders[box].min(initial=len(order)))
    share = place * count // holders[held.of[order]]
    last = np.argsort(holders[held.of[order]] == count, kind="stable")
    replica = np.zeros(process.max(initial=0) + 1, np.int64)
    replica[process[order[last]]] = share[last]  # a process's last assignment remains
    return replica[process], max(1, count)


def _part(held: Distinct, wanted: npt.NDArray[np.bool_]) -> Ints:
    """Return the pieces where `wanted` is set, and all pieces of boxes for which it is set nowhere."""
    found = np.bincount(held.of, wanted, len(held.tensor)) > 0
    return np.flatnonzero(wanted | ~found[held.of])


def _views(pieces: Pieces[Any], which: Ints, boxes: Ranges) -> tuple[Ints, Ints]:
    """Return the offset and strides, in elements, of each box in its piece's local tensor: `Piece.view` for arrays."""
    whole, strides = pieces.boxes.take(which), pieces.strides[which]
    offsets: Ints = pieces.offset[which] + ((boxes.start - whole.start) // whole.step * strides).sum(axis=1)
    strides_in_box: Ints = np.where(boxes.count > 1, boxes.step // whole.step, 1) * strides
    return offsets, strides_in_box


def _total(groups: Ints, amounts: Ints, length: int) -> Ints:
    """Return the exact sum of the amounts of each group."""
    total = np.zeros(length, np.int64)
    np.add.at(total, groups, amounts)
    return total
