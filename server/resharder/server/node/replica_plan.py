"""The choice of the nodes that hold replicas: a pure function of what live nodes hold and of their free memory.

Pieces that nodes hold already count first, so little moves. Pieces that too few nodes hold are then placed on further nodes,
those with the most free memory first. Newer versions are placed before older ones.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from resharder.converters.wire.pieces import Bitmap, PieceNumbering

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ReplicaNeed:
    """Pieces of a version that nodes have to hold.

    Attributes:
        version: Resource name.
        numbering: Numbers of its pieces.
        holders: Holders that each piece needs among the nodes.
        held: Pieces of the nodes that hold any.
        former: Nodes on which the last plan has placed pieces.
        barred: Nodes on which no further piece may be placed.
        readers: Nodes that have read a version of the model, and so may.
    """

    version: str
    numbering: PieceNumbering
    holders: Counts
    held: Mapping[str, Bitmap]
    former: Collection[str] = ()
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

    def rank(id: str) -> tuple[bool, int, bool, int, str]:
        return id not in need.former, -len(need.held.get(id, ())), id not in need.readers, -left[id], id

    order = sorted(left, key=rank)
    for id in order:
        if (held := need.held.get(id)) is not None:
            take(id, held.flags() & (lacking > 0))
    short, missing = int((lacking > 0).sum()), int(lacking[lacking > 0].sum())
    for id in order if short else ():
        if id not in need.barred:
            take(id, (lacking > 0) & ~placed[id])
    found = {id: Bitmap(count, np.packbits(flags, bitorder="little")) for id, flags in placed.items() if flags.any()}
    return ReplicaPlacement(found, short, missing, int((lacking > 0).sum()))
