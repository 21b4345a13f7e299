"""Which node takes which piece that one node alone holds, so that each piece leaves its origin about once.

An origin is a node that a version's ranks write into; at first it alone holds its pieces. The daemon grants each of them to one
node; all others take it from that node, and so on. Few nodes have grants at a time: with `streams` of them an origin's link is
full, and the first pieces are passed on early. A node that uses up its grants gets twice as many the next time. Once all pieces
are granted, those of slow nodes are granted again to faster ones.
"""

import random
from collections import Counter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from resharder.server.node.pieces import Bitmap

STREAMS = 4
LEAST, MOST = 4, 64
"""Bounds on the grants of a node."""


class _Grant(NamedTuple):
    node: str
    since: float


class OriginGrants:
    """Grants of one version.

    Args:
        streams: Nodes that have grants at a time, for each origin.
        late: Seconds after which an unused grant passes to another node that has used its own.
        seed: Seed of the order of the pieces.
    """

    def __init__(self, streams: int = STREAMS, late: float = 5.0, seed: int = 0) -> None:
        self._streams, self._late = streams, late
        self._chance = random.Random(seed)
        self._granted: dict[int, _Grant] = {}
        self._windows: dict[str, int] = {}

    def give(
        self, node: str, now: float, held: Bitmap, wanted: Bitmap, copies: npt.NDArray[np.int32], origins: int = 1
    ) -> list[int]:
        """Return the pieces with one holder that a node may take now, earlier grants included.

        Args:
            node: The node.
            now: Seconds of a monotonic clock.
            held: Pieces that the node holds.
            wanted: Pieces that the node needs.
            copies: Nodes that hold each piece.
            origins: Number of origins, each of which has `streams`.
        """
        mine = self._settle(node, held, copies)
        window = self._windows.get(node, LEAST)
        others = len({grant.node for grant in self._granted.values()} - {node})
        if (others < self._streams * origins or mine) and len(mine) <= window // 2:
            scarce = np.flatnonzero((wanted - held).flags() & (copies == 1)).tolist()
            free = [piece for piece in scarce if piece not in self._granted]
            if not free:
                free = [piece for piece in scarce if piece not in mine and now - self._granted[piece].since > self._late]
            for piece in self._chance.sample(free, min(window - len(mine), len(free))):
                self._granted[piece] = _Grant(node, now)
                mine.append(piece)
        return mine

    def forget(self, node: str) -> None:
        """Free the grants of a node that is gone."""
        self._windows.pop(node, None)
        self._granted = {piece: grant for piece, grant in self._granted.items() if grant.node != node}

    def outstanding(self) -> dict[str, int]:
        """Return the number of unused grants of each node that has some."""
        return dict(Counter(grant.node for grant in self._granted.values()))

    def _settle(self, node: str, held: Bitmap, copies: npt.NDArray[np.int32]) -> list[int]:
        """Remove used grants, adapt the node's window, and return the pieces that it still may take."""
        mine = [piece for piece, grant in self._granted.items() if grant.node == node]
        used = [piece for piece in mine if piece in held]
        for piece in [piece for piece in self._granted if copies[piece] > 1]:
            del self._granted[piece]
        if mine and len(used) == len(mine):
            self._windows[node] = min(MOST, 2 * self._windows.get(node, LEAST))
        return [piece for piece in mine if piece in self._granted and piece not in held]
