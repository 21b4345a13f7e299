"""Check that the boxes of all ranks tile a tensor."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from resharder.converters.errors import LayoutError
from resharder.converters.geometry.layout import Box, Range, TensorSpec, format_box, full_box, is_inside

Array = npt.NDArray[Any]


class Held(NamedTuple):
    """Box of a tensor on one rank. `position` is its index in the list of boxes that the rank registered."""

    rank: int
    position: int
    box: Box
    replica: bool


def check_tiling(spec: TensorSpec, held: Sequence[Held]) -> None:
    """Raise LayoutError unless owned boxes cover each element exactly once and each replica's box equals an owner's."""
    for piece in held:
        _check_inside(spec, piece)
    owners = [piece for piece in held if not piece.replica]
    if not (len(owners) == 1 and owners[0].box == full_box(spec.shape)):
        _check_owners(spec, owners)
    owned = {piece.box for piece in owners}
    for piece in held:
        if piece.replica and piece.box not in owned:
            raise LayoutError(f"{spec.name}: rank {piece.rank} holds a replica {format_box(piece.box)} that is no owner's box")


def _check_inside(spec: TensorSpec, piece: Held) -> None:
    if not is_inside(piece.box, spec.shape):
        raise LayoutError(f"{spec.name}: rank {piece.rank} holds {format_box(piece.box)}, outside of shape {list(spec.shape)}")


class _Cells(NamedTuple):
    """Groups of indices of one dimension, such that the indices of a group are in the same boxes."""

    first: Array  # (groups,) first index of each
    size: Array  # (groups,)
    members: Array  # (groups, boxes) bool


def _check_owners(spec: TensorSpec, owners: Sequence[Held]) -> None:
    """Raise LayoutError unless each element has one owner, counted on a grid whose cells no box divides."""
    grid = [_cells([piece.box[d] for piece in owners], n) for d, n in enumerate(spec.shape)]
    times = np.zeros([len(cells.first) for cells in grid], dtype=np.int32)
    for i in range(len(owners)):
        times[np.ix_(*(np.flatnonzero(cells.members[:, i]) for cells in grid))] += 1
    for wrong, verb in ((times == 0, "is held by no rank"), (times > 1, "is held by more than one rank")):
        if wrong.any():
            cell = tuple(int(i) for i in np.argwhere(wrong)[0])
            element = [int(cells.first[i]) for cells, i in zip(grid, cell, strict=True)]
            ranks = [p.rank for k, p in enumerate(owners) if all(c.members[i, k] for c, i in zip(grid, cell, strict=True))]
            total = sum(int(np.prod([c.size[i] for c, i in zip(grid, at, strict=True)])) for at in np.argwhere(wrong))
            raise LayoutError(
                f"{spec.name} {list(spec.shape)}: element {element} {verb}{f': {ranks}' if ranks else ''}; "
                f"so are {total} of its {int(np.prod(spec.shape))} elements; "
                f"held: {', '.join(f'rank {p.rank} {format_box(p.box)}' for p in owners[:8]) or 'nothing'}"
            )


def _cells(ranges: Sequence[Range], n: int) -> _Cells:
    if all(r.step == 1 for r in ranges):
        cuts = np.unique([0, n, *(r.start for r in ranges), *(r.start + r.count for r in ranges)])
        first = cuts[:-1]
        members = [(first >= r.start) & (first <= r.last) for r in ranges]
        return _Cells(first, np.diff(cuts), np.array(members, dtype=bool).reshape(len(ranges), len(first)).T)
    contains = np.zeros((n, len(ranges)), dtype=bool)
    for i, r in enumerate(ranges):
        contains[r.as_slice(), i] = True
    rows, first, size = np.unique(contains, axis=0, return_index=True, return_counts=True)
    return _Cells(first, size, rows)
