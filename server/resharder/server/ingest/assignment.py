"""Choice of the rank that sends each box, and of the node, if any, on which each tensor is whole in the end."""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from resharder.converters.geometry.layout import ITEM_SIZES, TensorSpec
from resharder.converters.geometry.piece_arrays import Ints, join_boxes
from resharder.converters.geometry.senders import senders, senders_by_host
from resharder.server.ingest.homes import DAEMON_HOST
from resharder.server.ingest.packed_boxes import PackedBoxes


class Assigned(NamedTuple):
    """Positions and boxes that each rank sends.

    `homes` has the node of each tensor that ranks on nodes' hosts send, by its number. `gathered` has the tensors of which ranks
    of several hosts send parts.
    """

    positions: dict[int, list[int]]
    boxes: dict[int, PackedBoxes]
    homes: dict[int, str]
    gathered: frozenset[int]


def assign(
    specs: Sequence[TensorSpec], held: Sequence[PackedBoxes], hosts: Mapping[int, str], gatherers: Collection[int]
) -> Assigned:
    """Return what each rank sends.

    Args:
        specs: The tensors.
        held: The boxes of each rank, replicas included; together they tile the tensors.
        hosts: Host of each rank whose host is known: `DAEMON_HOST` or the id of a node.
        gatherers: Ranks that can write boxes which other nodes gather.
    """
    counts = [len(boxes) for boxes in held]
    sent, homes, gathered = _senders(specs, held, np.repeat(np.arange(len(held)), counts), hosts, gatherers)
    ends = np.cumsum(counts)
    mine = [each - begin for each, begin in zip(np.split(sent, np.searchsorted(sent, ends[:-1])), ends - counts, strict=True)]
    boxes = {rank: part.take(positions) for rank, (part, positions) in enumerate(zip(held, mine, strict=True))}
    return Assigned({rank: positions.tolist() for rank, positions in enumerate(mine)}, boxes, homes, gathered)


def _senders(
    specs: Sequence[TensorSpec],
    held: Sequence[PackedBoxes],
    rank: Ints,
    known: Mapping[int, str],
    gatherers: Collection[int],
) -> tuple[Ints, dict[int, str], frozenset[int]]:
    """Return the boxes that are sent, as indices into those of all ranks, and `homes` and `gathered` of `Assigned`."""
    tensors, boxes = np.concatenate([part.tensors for part in held]).astype(np.int64), join_boxes([p.boxes for p in held])
    items = np.array([ITEM_SIZES[spec.dtype] for spec in specs], np.int64)
    names = sorted({*known.values()})
    if not any(names):  # no rank is on a node's host
        return senders(tensors, boxes, rank, len(held), items), {}, frozenset()
    hosts = np.array([names.index(known[r]) if r in known else -1 for r in range(len(held))], np.int64)
    sizes = np.array([spec.size for spec in specs], np.int64)
    nodes = {number for number, name in enumerate(names) if name != DAEMON_HOST}
    older = {int(hosts[r]) for r in known.keys() - set(gatherers)}
    found = senders_by_host(tensors, boxes, rank, len(held), sizes, items, hosts, nodes - older)
    homes = {number: names[host] for number, host in enumerate(found.hosts.tolist()) if host in nodes}
    return found.pieces, homes, frozenset(np.flatnonzero(found.gathered).tolist())
