"""Digests of workers' boxes, derived from the digests that ranks report.

Digests are additive over boxes (`converters/storage/digest.py`), and a plan fills every element of a worker's box once.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from resharder.converters.geometry.piece_arrays import Pieces
from resharder.converters.geometry.plan import Plan

Digests = npt.NDArray[np.uint64]


def sent_by(plan: Plan[Any, Any], source: int) -> Pieces[Any]:
    """Return the pieces that a process sends, at their places in its memory, in the plan's order."""
    which, sources = _of(plan, source), plan.sources
    have = plan.have[which]
    offsets, strides = plan.source_views
    return Pieces(
        sources.specs,
        (sources.processes[source],),
        sources.locals,
        sources.tensor[have],
        np.zeros(len(which), np.int64),
        sources.local[have],
        plan.boxes.take(which),
        offsets[which],
        strides[which],
        sources.plus[have] - plan.targets.plus[plan.want[which]],
    )


def sent_count(plan: Plan[Any, Any], source: int) -> int:
    """Return the number of pieces that a process sends, which is the number of digests that it reports."""
    return len(_of(plan, source))


def held_by(plan: Plan[Any, Any], target: int, reported: Mapping[int, Digests]) -> list[int]:
    """Return the digest of each piece of one target, from the reported digests of every source."""
    totals = np.zeros(len(plan.targets), np.uint64)
    for source, digests in reported.items():
        np.add.at(totals, plan.want[_of(plan, source)], digests)
    found: list[int] = totals[plan.targets.process == target].tolist()
    return found


def _of(plan: Plan[Any, Any], source: int) -> npt.NDArray[np.int64]:
    return np.flatnonzero(plan.sources.process[plan.have] == source).astype(np.int64)
