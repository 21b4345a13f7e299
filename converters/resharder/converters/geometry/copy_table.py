"""Copies of a plan with offsets and strides in bytes, as the daemon sends them to each process of the direct path."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from resharder.converters.geometry.piece_arrays import Ints, distinct
from resharder.converters.geometry.plan import Plan

ALIGN = 256  # bytes; alignment in buffers
_LITTLE = 64  # a connection is worth at least 1/64 of the bytes from a target's main source


@dataclass(frozen=True)
class Copies:
    """Copies between ranks, one entry per copy.

    Copy `i` takes `counts[i]` elements of `item[i]` bytes from local tensor
    `source_locals[source_local[i]]` of rank `source[i]` to local tensor
    `target_locals[target_local[i]]` of rank `target[i]`, and adds `plus[i]`. Offsets and strides are
    in bytes. Copies that are `frozen` come after all others, and may be left out together.
    """

    source_locals: tuple[str, ...]
    target_locals: tuple[str, ...]
    source: Ints
    target: Ints
    source_local: Ints
    target_local: Ints
    source_offset: Ints
    target_offset: Ints
    counts: Ints  # (copies, dimensions)
    source_strides: Ints
    target_strides: Ints
    item: Ints
    plus: npt.NDArray[np.float64]
    frozen: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.source)

    def take(self, which: Any) -> "Copies":
        """Return the copies selected by `which`: an index array, a mask or a slice."""
        arrays = {f.name: getattr(self, f.name)[which] for f in fields(self) if f.name not in ("source_locals", "target_locals")}
        return replace(self, **arrays)

    def of(self, rank: int) -> "Copies":
        """Return the copies that `rank` sends or receives. The rank derives its schedule from them."""
        return self.take((self.source == rank) | (self.target == rank))

    @property
    def sizes(self) -> Ints:
        """Bytes of each copy."""
        found: Ints = self.counts.prod(axis=1) * self.item
        return found

    @property
    def made(self) -> Ints:
        """Bytes of send buffer that each copy takes, aligned to `ALIGN`: 0 unless a constant is
        added before sending.
        """
        return np.where(self.plus != 0, -(-self.sizes // ALIGN) * ALIGN, 0)

    @property
    def most_made(self) -> int:
        """Bytes of the largest send buffer that a rank needs."""
        return int(np.bincount(self.source, self.made).max(initial=0))

    @property
    def most_peers(self) -> int:
        """Largest number of peers of any rank; a peer in both directions counts twice."""
        pairs = np.unique(np.column_stack([self.source, self.target]), axis=0)
        pairs = pairs[pairs[:, 0] != pairs[:, 1]]
        return int(np.bincount(pairs.reshape(-1)).max()) if len(pairs) else 0


def copies_of(
    plan: Plan[Any, Any],
    source_ranks: Sequence[int] | None = None,
    target_ranks: Sequence[int] | None = None,
    frozen: npt.NDArray[np.bool_] | None = None,
) -> Copies:
    """Return all copies of a plan, after `with_fewer_pairs`.

    Args:
        plan: Plan whose sources and targets are processes of one group.
        source_ranks: Rank of each source in the group; by default the first ranks.
        target_ranks: Rank of each target; by default the ranks after the sources. A process that is
            both has the same rank in both lists.
        frozen: Flag of each copy that may be left out; by default of none.
    """
    plan = with_fewer_pairs(plan)
    sources, targets, item = plan.sources, plan.targets, plan.item_sizes
    senders = np.asarray(range(len(sources.processes)) if source_ranks is None else source_ranks, np.int64)
    first = len(sources.processes)
    receivers = np.asarray(range(first, first + len(targets.processes)) if target_ranks is None else target_ranks, np.int64)
    (source_offset, source_strides), (target_offset, target_strides) = plan.source_views, plan.target_views
    return Copies(
        sources.locals,
        targets.locals,
        senders[sources.process[plan.have]],
        receivers[targets.process[plan.want]],
        sources.local[plan.have],
        targets.local[plan.want],
        source_offset * item,
        target_offset * item,
        plan.boxes.count,
        source_strides * item[:, None],
        target_strides * item[:, None],
        item,
        sources.plus[plan.have] - targets.plus[plan.want],
        np.zeros(len(plan), np.bool_) if frozen is None else frozen,
    )


def with_fewer_pairs(plan: Plan[Any, Any]) -> Plan[Any, Any]:
    """Return an equivalent plan with fewer pairs of communicating processes.

    If a source sends little to a target, the target's main source takes over, provided that it has the
    box. Each connection costs time and memory, and a process divides its buffers among its
    connections.
    """
    process, target = plan.sources.process, plan.targets.process[plan.want]
    between = np.zeros((len(plan.sources.processes), len(plan.targets.processes)), np.int64)
    np.add.at(between, (process[plan.have], target), plan.sizes)
    which = np.flatnonzero(between[process[plan.have], target] * _LITTLE < between.max(axis=0, initial=0)[target])
    held = distinct(plan.sources.tensor, plan.sources.boxes)
    order, holders = np.argsort(held.of, kind="stable"), np.bincount(held.of, minlength=len(held.tensor))
    begins, box = np.cumsum(holders) - holders, held.of[plan.have[which]]
    copy = np.repeat(np.arange(len(which)), holders[box])
    piece = order[np.arange(len(copy)) + np.repeat(begins[box] - (np.cumsum(holders[box]) - holders[box]), holders[box])]
    best = np.lexsort((-between[process[piece], target[which][copy]], copy))
    first = np.flatnonzero(np.diff(copy, prepend=-1))  # the best piece of each copy comes first in its group
    have = plan.have.copy()
    have[which] = piece[best[first]]
    return replace(plan, have=have)
