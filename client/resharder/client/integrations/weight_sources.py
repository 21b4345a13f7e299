"""Division of a stream of whole HF tensors over the ranks of a job that all iterate it.

Materialising a tensor is usually a collective (an all-gather of shards, an export), so every rank iterates
the whole stream and publishes a part of it. A tensor is published by one of the ranks that have it.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from resharder.client.errors import UsageError
from resharder.client.trainer.rank_layout import DeclaredTensor

if TYPE_CHECKING:
    import torch

Holders = Sequence[Collection[str] | None]
"""For each rank the names of the tensors that it has; None for all."""


def owned_names(names: Sequence[str], holders: Holders, rank: int) -> frozenset[str]:
    """Return the names that a rank publishes: those of each group of holders in turn.

    Args:
        names: Names of all tensors, equal on all ranks.
        holders: The tensors of each rank.
        rank: The rank.

    Raises:
        UsageError: No rank has one of the tensors.
    """
    held = [None if found is None else frozenset(found) for found in holders]
    owned = set()
    for number, name in enumerate(names):
        ranks = [at for at, found in enumerate(held) if found is None or name in found]
        if not ranks:
            raise UsageError(f"{name}: none of the {len(held)} ranks holds it")
        if ranks[number % len(ranks)] == rank:
            owned.add(name)
    return frozenset(owned)


def gathered_holders(held: Collection[str] | None, world_size: int) -> Holders:
    """Return the holders of all ranks, a collective of torch's default group if it has `world_size` ranks.

    Raises:
        UsageError: This rank has a part of the model only, and there is no such group.
    """
    if world_size == 1:
        return [held]
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized() and dist.get_world_size() == world_size:
        found: list[Any] = [None] * world_size
        dist.all_gather_object(found, None if held is None else sorted(held))
        return found
    if held is not None:
        raise UsageError(
            f"exchanging held_names needs torch's default process group of {world_size} ranks: call init_process_group first"
        )
    return [None] * world_size


class DividedStream:
    """A rank's part of one pass over a source.

    Args:
        pairs: (name, tensor) of all tensors, in the order of all ranks; the tensor may be None if the rank does not have it.
        owned: Names of the tensors to publish.
    """

    def __init__(self, pairs: "Iterable[tuple[str, torch.Tensor | None]]", owned: Collection[str]) -> None:
        self._pairs, self._owned = iter(pairs), owned

    def __iter__(self) -> "Iterator[tuple[str, torch.Tensor]]":
        for name, tensor in self._pairs:
            if name in self._owned:
                if tensor is None:
                    raise UsageError(f"{name}: this rank holds it, but its tensor is None")
                yield name, tensor.detach()

    def drain(self) -> None:
        """Iterate what is left, so that the collectives of other ranks complete."""
        for _ in self._pairs:
            pass


def declared(metadata: Iterable[Any], owned: Collection[str]) -> list[DeclaredTensor]:
    """Return the declarations of a rank's tensors from a source's `metadata()` (name, dtype, whole shape)."""
    return [DeclaredTensor(meta.name, meta.dtype, tuple(meta.shape)) for meta in metadata if meta.name in owned]
