"""Division of a stream of HF tensors over the ranks of a job that all iterate it.

Materialising a tensor is usually a collective (an all-gather of shards, an export), so every rank iterates
the whole stream and publishes a part of it. A tensor, or a shard of one, is published by one of the ranks that have it.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from resharder.client.errors import UsageError
from resharder.client.trainer.rank_layout import DeclaredTensor, Index

if TYPE_CHECKING:
    import torch
    from resharder.client.trainer.rank_layout import TensorItem

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
        indices: For each name of which the tensor is a shard, the index of the shard in the whole tensor.
    """

    def __init__(
        self,
        pairs: "Iterable[tuple[str, torch.Tensor | None]]",
        owned: Collection[str],
        indices: Mapping[str, Index] | None = None,
    ) -> None:
        self._pairs, self._owned, self._indices = iter(pairs), owned, indices or {}

    def __iter__(self) -> "Iterator[TensorItem]":
        for name, tensor in self._pairs:
            if name in self._owned:
                if tensor is None:
                    raise UsageError(f"{name}: this rank holds it, but its tensor is None")
                index = self._indices.get(name)
                yield (name, tensor.detach()) if index is None else (name, index, tensor.detach())

    def drain(self) -> None:
        """Iterate what is left, so that the collectives of other ranks complete."""
        for _ in self._pairs:
            pass


class SourcePart(NamedTuple):
    """The tensors, or shards of them, that a rank publishes from vLLM's `WeightSource`.

    Attributes:
        declared: The rank's tensors and shards.
        pairs: Function that returns a new pass over the source.
    """

    declared: list[DeclaredTensor]
    pairs: "Callable[[], Iterable[tuple[str, torch.Tensor | None]]]"

    def stream(self) -> DividedStream:
        """Return a new pass over the source. Every rank must iterate one."""
        indices = {tensor.name: tensor.part for tensor in self.declared if tensor.part is not None}
        return DividedStream(self.pairs(), {tensor.name for tensor in self.declared}, indices)


def part_of(source: Any, rank: int, world_size: int) -> SourcePart:
    """Return what a rank publishes of a source.

    Since vLLM 0.33, `metadata` is a property that names the owners of each tensor and how it is divided over them. In older
    releases ranks exchange `held_names`, in a collective.

    Raises:
        UsageError: A tensor has no owner among the ranks, or ranks cannot exchange what they hold.
    """
    if callable(source.metadata):
        metadata = source.metadata()
        held = source.held_names() if hasattr(source, "held_names") else None
        owned = owned_names([meta.name for meta in metadata], gathered_holders(held, world_size), rank)
        return SourcePart([_whole(meta) for meta in metadata if meta.name in owned], lambda: source)
    by_shards = source.implements_iter_local()
    found = [_owned_part(meta, number, rank, world_size, by_shards) for number, meta in enumerate(source.metadata)]
    return SourcePart([tensor for tensor in found if tensor is not None], source.iter_local if by_shards else source.iter_full)


def _owned_part(meta: Any, number: int, rank: int, world_size: int, by_shards: bool) -> DeclaredTensor | None:
    """Return what a rank publishes of one tensor; None for nothing. Replicas take turns, by the tensor's number.

    Raises:
        UsageError: An owner is not one of the ranks.
    """
    owners = tuple(range(world_size)) if meta.owners is None else meta.owners
    if wrong := [owner for owner in owners if not 0 <= owner < world_size]:
        raise UsageError(f"{meta.name}: its owner, rank {wrong[0]}, is not one of the {world_size} ranks")
    if rank not in owners:
        return None
    if not by_shards or meta.placements is None:
        return _whole(meta) if owners[number % len(owners)] == rank else None
    place, replicas, replica = owners.index(rank), 1, 0
    starts, sizes = [0] * len(meta.shape), list(meta.shape)
    for axis, (length, placement) in enumerate(zip(meta.mesh_shape, meta.placements, strict=True)):
        coordinate = place // prod(meta.mesh_shape[axis + 1 :]) % length
        dim = getattr(placement, "dim", None)
        if dim is None:
            replicas, replica = replicas * length, replica * length + coordinate
            continue
        chunk = -(-sizes[dim] // length)  # as torch.chunk
        first = min(coordinate * chunk, sizes[dim])
        starts[dim], sizes[dim] = starts[dim] + first, min(chunk, sizes[dim] - first)
    if number % replicas != replica or not all(sizes):
        return None
    index = tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
    return _whole(meta)._replace(part=index)


def _whole(meta: Any) -> DeclaredTensor:
    return DeclaredTensor(meta.name, meta.dtype, tuple(meta.shape))
