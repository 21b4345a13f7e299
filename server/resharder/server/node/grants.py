"""Which node takes which piece that one node alone holds, so that each piece leaves its origin about once.

An origin is a node that a version's ranks write into; at first it alone holds its pieces. The daemon grants each of them to one
node; all others take it from that node, and so on. Few nodes have grants at a time: with `streams` of them an origin's link is
full, and they take turns, so that the pieces to pass on are spread over all nodes. Nodes that use up their grants get more.
Once all pieces are granted, unused grants pass to other nodes.
"""

import math
import random
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from resharder.converters.wire.pieces import Bitmap

STREAMS = 16
LEAST = 2  # grants of a node
LATE = 5.0  # seconds; lower bound on the time after which an unused grant passes to another node
_WEIGHT = 0.2  # of the newest value in a moving average


class _Grant(NamedTuple):
    node: str
    since: float


class OriginGrants:
    """Grants of one version.

    Args:
        streams: Nodes that have grants at a time, for each origin.
        seed: Seed of the order of the pieces.
    """

    def __init__(self, streams: int = STREAMS, seed: int = 0) -> None:
        self._streams = streams
        self._chance = random.Random(seed)
        self._granted: dict[int, _Grant] = {}
        self._used = self._usual = 0.0  # moving averages: grants used between two reports of a node, seconds until one is used

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
        mine = self._settle(node, now, held, copies)
        window = max(LEAST, math.ceil(2 * self._used))
        others = len({grant.node for grant in self._granted.values()} - {node})
        streams = self._streams * origins
        if others < streams and (not mine or (others < streams // 2 and len(mine) <= window // 2)):
            scarce = np.flatnonzero((wanted - held).flags() & (copies == 1)).tolist()
            free = [piece for piece in scarce if piece not in self._granted]
            if not free:
                late = max(LATE, 3 * self._usual)
                free = [piece for piece in scarce if piece not in mine and now - self._granted[piece].since > late]
            for piece in self._chance.sample(free, min(window - len(mine), len(free))):
                self._granted[piece] = _Grant(node, now)
                mine.append(piece)
        return mine

    def forget(self, node: str) -> None:
        """Free the grants of a node that is gone."""
        self._granted = {piece: grant for piece, grant in self._granted.items() if grant.node != node}

    def _settle(self, node: str, now: float, held: Bitmap, copies: npt.NDArray[np.int32]) -> list[int]:
        """Remove used grants, note how many and how soon, and return the pieces that the node still may take."""
        mine = [piece for piece, grant in self._granted.items() if grant.node == node]
        used = [piece for piece in mine if piece in held]
        if mine:
            self._used += _WEIGHT * (len(used) - self._used)
        for piece in used:
            self._usual += _WEIGHT * (now - self._granted[piece].since - self._usual)
        for piece in [piece for piece in self._granted if copies[piece] != 1 or piece in used]:
            del self._granted[piece]
        return [piece for piece in mine if piece in self._granted]
