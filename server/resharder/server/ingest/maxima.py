"""Maxima of blocks that ranks share, as pure functions of what ranks contribute.

A rank casts the elements of a block with a scale made of the largest absolute value in the block. If no rank owns all of the
block, its owners contribute the maxima of their parts, and every rank that needs the block receives the largest.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from resharder.converters.errors import LayoutError
from resharder.converters.geometry.layout import TensorSpec
from resharder.converters.geometry.piece_arrays import Ints, pairs
from resharder.v1 import publisher_pb2

Floats = npt.NDArray[np.float32]
_BITS = 32  # of a key for the block; those above are the tensor's number


class RankBlocks(NamedTuple):
    """Shared blocks of a rank as keys, of a tensor's number and a block's."""

    contributed: Ints
    received: Ints

    def renumber(self, numbers: Sequence[int]) -> "RankBlocks":
        """Return the same blocks with `numbers[i]` for tensor `i`."""
        return RankBlocks(*(_renumbered(keys, numbers) for keys in self))


def _renumbered(keys: Ints, numbers: Sequence[int]) -> Ints:
    found: Ints = np.asarray(numbers, np.int64)[keys >> _BITS] << _BITS | keys & (1 << _BITS) - 1
    return found


def read_shared(messages: Sequence[publisher_pb2.SharedBlocks], specs: Sequence[TensorSpec]) -> Ints:
    """Return the keys of blocks. Raises LayoutError for a block outside of its tensor, or a tensor that has no scales."""
    found = [np.zeros(0, np.int64)]
    for message in messages:
        if message.tensor >= len(specs) or specs[message.tensor].dtype != "F32":
            raise LayoutError(f"shared blocks name tensor {message.tensor} of {len(specs)}, which is not an F32 tensor")
        spec, blocks = specs[message.tensor], np.array(message.blocks, np.int64)
        if len(blocks) and int(blocks.max()) >= int(np.prod(spec.shape)):
            raise LayoutError(f"{spec.name}: shared block {blocks.max()} lies outside of {list(spec.shape)}")
        found.append(message.tensor << _BITS | blocks)
    return np.concatenate(found)


class SharedPlan(NamedTuple):
    """Exchange of a publisher. Blocks are numbered; each rank has the numbers of its blocks, in the order of its keys.

    Attributes:
        blocks: Number of shared blocks.
        contributed: By rank.
        received: By rank.
        needed: For each rank, the ranks that contribute to the blocks that it receives.
    """

    blocks: int
    contributed: dict[int, Ints]
    received: dict[int, Ints]
    needed: dict[int, frozenset[int]]


def plan_shared(by_rank: Mapping[int, RankBlocks]) -> SharedPlan:
    """Return the exchange of ranks. Raises LayoutError if no rank contributes to a block that one receives."""
    ranks = sorted(by_rank)
    sizes = [len(by_rank[rank].contributed) for rank in ranks]
    keys, blocks = np.unique(
        np.concatenate([np.zeros(0, np.int64), *(by_rank[r].contributed for r in ranks)]), return_inverse=True
    )
    owners, order = np.repeat(np.array(ranks, np.int64), sizes), np.argsort(blocks, kind="stable")
    received, needed = dict[int, Ints](), dict[int, frozenset[int]]()
    for rank in ranks:
        wanted = by_rank[rank].received
        found = np.searchsorted(keys, wanted)
        if len(wanted) and not (len(keys) and np.array_equal(keys[np.minimum(found, len(keys) - 1)], wanted)):
            raise LayoutError(f"rank {rank} shares blocks to which no rank contributes")
        received[rank] = found
        _, at = pairs(found, blocks[order], len(keys))
        needed[rank] = frozenset(owners[order][at].tolist())
    parts = np.split(blocks, np.cumsum(sizes)[:-1]) if ranks else []
    return SharedPlan(len(keys), dict(zip(ranks, parts, strict=True)), received, needed)


class VersionMaxima:
    """Contributions to one version. Callers serialise the calls."""

    def __init__(self, plan: SharedPlan) -> None:
        self._plan = plan
        self._given: dict[int, Floats] = {}

    def contribute(self, rank: int, values: Floats) -> bool:
        """Keep a rank's maxima and return True. Return False if it has contributed other ones.

        Raises ValueError for a number of values other than that of its blocks, and for values that are no maxima.
        """
        expected = len(self._plan.contributed.get(rank, ()))
        if len(values) != expected:
            raise ValueError(f"expected {expected} maxima of rank {rank}, got {len(values)}")
        if not bool((np.isfinite(values) & (values >= 0)).all()):
            raise ValueError(f"expected maxima of finite absolute values of rank {rank}, got others")
        return bool(np.array_equal(self._given.setdefault(rank, values), values))

    def missing(self, rank: int) -> list[int]:
        """Return the ranks whose contributions a rank lacks."""
        return sorted(self._plan.needed.get(rank, frozenset()) - self._given.keys())

    def of(self, rank: int) -> Floats:
        """Return the maxima of the blocks that a rank receives, for which none may be missing."""
        largest = np.zeros(self._plan.blocks, np.float32)
        for other in self._plan.needed.get(rank, ()):
            np.maximum.at(largest, self._plan.contributed[other], self._given[other])
        found: Floats = largest[self._plan.received.get(rank, np.zeros(0, np.int64))]
        return found
