"""The daemon's decisions about nodes, as pure functions: what each should hold, what is late and why, and what a node is told.

A piece needs `replicas` holders: the daemon, the node into whose files ranks wrote it, and further nodes. What the daemon fetches
needs no further node. Pieces that nodes hold already count first, so little moves. Pieces that too few nodes hold are then placed
on further nodes, those with the most free memory first. Versions that wait for READY come first, then newer before older ones.

Besides these replicas a node holds what the daemon's store lacks, and as much as fits of what workers on its host need.

Nothing here changes what it is given, waits, or reads a clock. `NodeRegistry` calls it under its lock. Which piece a node fetches
next of whom is the tracker's decision (`tracker.py`), and which versions are lost the table's (`pieces.py`).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import numpy.typing as npt
import xxhash
from resharder.converters.wire.pieces import Bitmap, PieceNumbering
from resharder.server.nodes.known_node import KnownNode, bitmap_of
from resharder.server.state.version import DAEMON
from resharder.v1 import node_pb2

Counts = npt.NDArray[np.int64]
_MOST_REASONS = 8


class ReplicasShort(Exception):
    """Too few nodes hold a version. The message has the reason."""


@dataclass(frozen=True)
class HeldVersion:
    """A version of which nodes hold pieces, or should.

    Attributes:
        name: Resource name.
        numbering: Numbers of its pieces.
        waits: Whether it waits for its holders, and is not READY yet.
        rows: Pieces of each holder, the daemon among them.
        written: Pieces that ranks have written on nodes, by node.
        readers: Identities that may read the model.
    """

    name: str
    numbering: PieceNumbering
    waits: bool = False
    rows: Mapping[str, Bitmap] = field(default_factory=dict)
    written: Mapping[str, Bitmap] = field(default_factory=dict)
    readers: Collection[str] = ()

    def row(self, holder: str) -> Bitmap:
        """Return the pieces of a holder."""
        return self.rows.get(holder) or Bitmap(self.numbering.count)


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


@dataclass(frozen=True)
class ReplicaRules:
    """Settings and state of the daemon that a placement of replicas follows.

    Attributes:
        replicas: Holders that each piece needs, the daemon among them.
        hold: Whether the daemon's host holds versions.
        settled: Whether nodes have had the time to report what they hold. Before, a READY version gets no further holder.
        failing: Why a node could not hold a version shortly before, by version and node. It gets further pieces of it last.
    """

    replicas: int
    hold: bool = True
    settled: bool = True
    failing: Mapping[tuple[str, str], str] = field(default_factory=dict)


def place(
    versions: Iterable[HeldVersion], nodes: Mapping[str, KnownNode], reserved: Mapping[str, int], rules: ReplicaRules
) -> dict[str, ReplicaPlacement]:
    """Return the placement of each version.

    Args:
        versions: The versions.
        nodes: All nodes by id. Those that are lost, or leave, or serve no pieces count for nothing.
        reserved: Bytes of each node's capacity that are kept for versions that ranks write.
        rules: What else decides.
    """
    live = {id: node for id, node in nodes.items() if not (node.lost or node.departs) and node.report.data_address}
    left = {id: node.report.capacity_bytes - reserved.get(id, 0) for id, node in live.items()}
    order = sorted(versions, key=lambda each: (not each.waits, -int(each.name.rpartition("/")[2]), each.name))
    return {each.name: _place(each, live, left, rules) for each in order}


def _place(version: HeldVersion, nodes: Mapping[str, KnownNode], left: dict[str, int], rules: ReplicaRules) -> ReplicaPlacement:
    """Place one version, and take what it needs from the bytes that are left on each node."""
    sizes, count, own = version.numbering.sizes, version.numbering.count, version.row(DAEMON)
    written = version.written if version.waits else {}
    lacking: Counts = rules.replicas - own.flags().astype(np.int64)
    for pieces in written.values():
        lacking -= pieces.flags()
    held = {id: version.row(id) - written.get(id, Bitmap(count)) for id in nodes}
    placed = {id: np.zeros(count, np.bool_) for id in nodes}

    def take(id: str, pieces: npt.NDArray[np.bool_]) -> None:
        fits = pieces & (np.cumsum(np.where(pieces, sizes, 0)) <= left[id])
        left[id] -= int(sizes[fits].sum())
        lacking[fits] -= 1
        placed[id] |= fits

    def rank(id: str) -> tuple[bool, bool, int, bool, int, str]:
        failing, reads = (version.name, id) in rules.failing, nodes[id].caller.rpartition("@")[0] in version.readers
        return failing, version.name not in nodes[id].replicas, -len(held[id]), not reads, -left[id], id

    order = sorted(nodes, key=rank)
    for id in order:
        take(id, held[id].flags() & (lacking > 0))
    short, missing = int((lacking > 0).sum()), int(lacking[lacking > 0].sum())
    if rules.hold:
        lacking -= ~own.flags()
    for id in order if short and (rules.settled or version.waits) else ():
        here = written[id].flags() if id in written else False
        take(id, (lacking > 0) & ~placed[id] & ~np.asarray(here))
    found = {id: Bitmap(count, np.packbits(flags, bitorder="little")) for id, flags in placed.items() if flags.any()}
    return ReplicaPlacement(found, short, missing, int((lacking > 0).sum()))


def shortage(version: HeldVersion, found: ReplicaPlacement, nodes: Mapping[str, KnownNode], rules: ReplicaRules) -> str:
    """Return why a version lacks holders."""
    text = f"{found.short} of {version.numbering.count} pieces have fewer than {rules.replicas} holders"
    if not found.unplaced:
        return text
    live = sorted(id for id, node in nodes.items() if not node.lost)
    why = {id: "drained" for id in live if nodes[id].drained}
    why |= {id: reason for (name, id), reason in rules.failing.items() if name == version.name and id in live}
    reasons = "".join(f"; nodes/{id}: {reason}" for id, reason in sorted(why.items())[:_MOST_REASONS])
    return f"{text}, and no node is left for {found.unplaced} of them among {len(live)} live ones{reasons}"


def late(
    versions: Sequence[HeldVersion],
    placements: Mapping[str, ReplicaPlacement],
    nodes: Mapping[str, KnownNode],
    rules: ReplicaRules,
) -> tuple[int, str]:
    """Return how many holders versions lack, and the reason for one; 0 and an empty text if each piece has its holders.

    A home counts once it has reported that it holds what ranks have written there.
    """
    short = [(each, found) for each in versions if (found := placements.get(each.name)) is not None and found.short]
    silent = [
        id for each in versions for id, pieces in each.written.items() if not _has_reported(nodes.get(id), each.name, pieces)
    ]
    reasons = chain(
        (shortage(each, found, nodes, rules) for each, found in short),
        (f"nodes/{id} does not hold what ranks have written there" for id in silent),
    )
    return sum(found.lacking for _, found in short) + len(silent), next(reasons, "")


def _has_reported(node: KnownNode | None, version: str, pieces: Bitmap) -> bool:
    copies = node.report.versions if node is not None else ()
    return any(copy.version == version and not len(pieces - bitmap_of(pieces.count, copy)) for copy in copies)


def chosen(node: KnownNode, numberings: Mapping[str, PieceNumbering], sources: Collection[str], reserved: int) -> list[str]:
    """Return the versions that a node should hold.

    These are the ones of which it is a source, planned replicas, and unless the node is drained the last requested ones that fit.

    Args:
        node: The node.
        numberings: Numbering of the pieces of each version.
        sources: Versions of which the node has pieces that the daemon's store lacks, or that ranks have written there of one that
            is soon READY.
        reserved: Bytes of the node's capacity that are kept for versions that ranks write.
    """
    found = [version for version in node.wants if version in sources or version in node.replicas]
    left = node.report.capacity_bytes - reserved - sum(numberings[version].size_of(node.pieces[version]) for version in found)
    others = [version for version in node.wants if version in numberings and version not in found]
    for version in reversed(others) if not node.drained else ():
        size = numberings[version].size_of(node.pieces[version])
        if not found or size <= left:
            found.append(version)
            left -= size
    return found


def has_room(node: KnownNode, numberings: Mapping[str, PieceNumbering], version: str, reserved: int) -> bool:
    """Return whether a node can come to hold a requested version beside the replicas that it has to keep."""
    kept = sum(numberings[name].size_of(node.pieces[name]) for name in node.replicas if name in numberings)
    needed = numberings[version].size_of(node.pieces[version])
    return version in node.replicas or not kept or kept + needed <= node.report.capacity_bytes - reserved


def revision_of(orders: node_pb2.NodeOrders, doubts: Iterable[tuple[str, float]]) -> int:
    """Return a number, not 0, that changes with what a node is told, but not with what it fetches next of whom.

    Args:
        orders: The orders, whose own revision does not count.
        doubts: Versions that may have lost pieces, and since when: all nodes report anew.
    """
    needs = sorted((order.version, order.wanted.hex()) for order in orders.versions)
    readers = sorted({name for order in orders.versions for name in order.readers})
    told = [each.SerializeToString(deterministic=True) for each in (*orders.reservations, *orders.snapshots)]
    parts = [orders.drained, *needs, *readers, *told, *doubts]
    return xxhash.xxh3_64_intdigest("\n".join(map(str, parts)).encode()) or 1
