"""Which nodes hold which pieces, so that each piece has its holders: a pure function of what nodes hold and of their free memory.

A piece needs `replicas` holders: the daemon, the node into whose files ranks wrote it, and further nodes. What the daemon fetches
needs no further node. Pieces that nodes hold already count first, so little moves. Pieces that too few nodes hold are then placed
on further nodes, those with the most free memory first. Newer versions are placed before older ones.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from resharder.converters.wire.pieces import Bitmap, PieceNumbering

Counts = npt.NDArray[np.int64]


class ReplicasShort(Exception):
    """Too few nodes hold a version. The message has the reason."""


@dataclass(frozen=True)
class ReplicaNeed:
    """Pieces of a version that nodes have to hold.

    Attributes:
        version: Resource name.
        numbering: Numbers of its pieces.
        holders: Holders that each piece lacks apart from live nodes.
        coming: Pieces that the daemon will hold, which it fetches.
        held: Pieces of the nodes that hold any.
        written: Pieces that ranks have written on nodes, which count in `holders`.
        former: Nodes on which the last plan has placed pieces.
        failing: Nodes that could not hold the version shortly before, and get further pieces last.
        barred: Nodes on which no further piece may be placed.
        readers: Nodes that have read a version of the model, and so may.
    """

    version: str
    numbering: PieceNumbering
    holders: Counts
    coming: Bitmap
    held: Mapping[str, Bitmap]
    written: Mapping[str, Bitmap] = field(default_factory=dict)
    former: Collection[str] = ()
    failing: Collection[str] = ()
    barred: Collection[str] = ()
    readers: Collection[str] = ()


@dataclass(frozen=True)
class ReplicaPlacement:
    """Nodes that should hold pieces of a version.

    Attributes:
        pieces: Pieces of each node, held ones included.
        short: Pieces that too few nodes hold now.
        lacking: Holders that these pieces lack, in all.
        unplaced: Pieces that too few nodes would hold: there is no further node for them.
    """

    pieces: Mapping[str, Bitmap] = field(default_factory=dict)
    short: int = 0
    lacking: int = 0
    unplaced: int = 0


def place(needs: Sequence[ReplicaNeed], free: Mapping[str, int]) -> dict[str, ReplicaPlacement]:
    """Return the placement of each version.

    Args:
        needs: The versions; memory goes to earlier ones first.
        free: Bytes that versions may take on each node.
    """
    left = dict(free)
    return {need.version: _place(need, left) for need in needs}


def _place(need: ReplicaNeed, left: dict[str, int]) -> ReplicaPlacement:
    lacking, sizes, count = need.holders.copy(), need.numbering.sizes, need.numbering.count
    placed = {id: np.zeros(count, np.bool_) for id in left}

    def take(id: str, pieces: npt.NDArray[np.bool_]) -> None:
        fits = pieces & (np.cumsum(np.where(pieces, sizes, 0)) <= left[id])
        left[id] -= int(sizes[fits].sum())
        lacking[fits] -= 1
        placed[id] |= fits

    def rank(id: str) -> tuple[bool, bool, int, bool, int, str]:
        return id in need.failing, id not in need.former, -len(need.held.get(id, ())), id not in need.readers, -left[id], id

    order = sorted(left, key=rank)
    for id in order:
        if (held := need.held.get(id)) is not None:
            take(id, held.flags() & (lacking > 0))
    short, missing = int((lacking > 0).sum()), int(lacking[lacking > 0].sum())
    lacking -= need.coming.flags()
    for id in order if short else ():
        if id not in need.barred:
            own = need.written[id].flags() if id in need.written else False
            take(id, (lacking > 0) & ~placed[id] & ~np.asarray(own))
    found = {id: Bitmap(count, np.packbits(flags, bitorder="little")) for id, flags in placed.items() if flags.any()}
    return ReplicaPlacement(found, short, missing, int((lacking > 0).sum()))
