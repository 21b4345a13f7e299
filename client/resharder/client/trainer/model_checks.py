"""Checks of an attached model across its ranks, for replicas that differ and parameters that are stale."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from resharder.client.errors import StaleParameters, UsageError

if TYPE_CHECKING:
    import torch
    from resharder.converters.geometry.layout import Layout


def compare_replicas(layout: "Layout", tensors: "Mapping[str, torch.Tensor]", world_size: int) -> None:
    """Compare the replicas of all ranks, a collective of torch's default process group.

    Raises ReplicasDiffer, and UsageError if that group does not span `world_size` ranks.
    """
    import torch.distributed as dist
    from resharder.converters.models.replicas import check_replicas

    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if ranks != world_size:
        raise UsageError(f"expected torch.distributed over all {world_size} ranks to compare them, found {ranks}")
    check_replicas(layout, tensors)


def refuse_stale(chunks: "Sequence[torch.nn.Module]", *, sync: bool) -> None:
    """Raise StaleParameters for parameters that `overlap_param_gather` left stale.

    With `sync`, gather them instead, a collective of the data-parallel ranks.
    """
    if not chunks:
        return
    from resharder.converters.models.megatron.layout import gather_parameters, stale_parameters

    stale = stale_parameters(chunks)
    if stale and sync:
        gather_parameters(chunks)
    elif stale:
        raise StaleParameters(
            f"{len(stale)} parameters are older than other ranks' ({', '.join(stale[:4])}{', …' if len(stale) > 4 else ''}): "
            "overlap_param_gather gathers them in the next forward pass; call start_param_sync(force_sync=True) on every "
            "model chunk of every rank before publish, or publish(step, sync=True)"
        )
