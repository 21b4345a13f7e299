"""Peers of a node: few of all nodes, each the peer of as many, and changing over time.

Nodes stand in a ring. The peers of a node are at some distances from it, the same distances for all nodes. They are random, so
a piece reaches all nodes in few steps, and a part of them is drawn again each period, so no node is cut off for long.
"""

import random

PEERS = 24
"""Upper bound on the peers of a node."""
_GROUPS = 4  # one of them is drawn again each period


def distances(nodes: int, limit: int, period: int) -> list[int]:
    """Return the distinct distances from 1 to `nodes - 1` of a period, at most `limit`."""
    if nodes - 1 <= limit:
        return list(range(1, nodes))
    chosen: dict[int, None] = {}
    for group in range(_GROUPS):
        drawn = random.Random(hash((nodes, group, (period + group) // _GROUPS)))
        size = (limit + group) // _GROUPS
        while size > 0:
            distance = drawn.randrange(1, nodes)
            if distance not in chosen:
                chosen[distance] = None
                size -= 1
    return list(chosen)


def neighbours(row: int, nodes: int, period: int, limit: int = PEERS) -> list[int]:
    """Return the rows of the peers of a node.

    Args:
        row: Row of the node.
        nodes: Number of rows.
        period: Number of the period; a quarter of the result changes with it.
        limit: Upper bound on the result.
    """
    return [(row + distance) % nodes for distance in distances(nodes, limit, period)]
