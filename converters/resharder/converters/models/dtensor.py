"""Layouts of models with torch DTensors: FSDP2's `fully_shard`, tensor parallelism by `parallelize_module`, and both together.

Each DTensor describes its placement by mesh, placements and shape. Names are those of the checkpoint on disk (`hf_names.py`); if
the model's family has a table, names and shapes are compared with it. Plain tensors are replicas on all ranks.
"""

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

import torch
import torch.distributed as dist
from resharder.converters.architectures.checkpoint import HFConfig, PretrainedConfig, config_dict
from resharder.converters.errors import LayoutError, UnsupportedModel
from resharder.converters.geometry.layout import Box, Layout, Piece, Range, TensorSpec, format_box, intersect
from resharder.converters.models.hf_names import Model, Rename, Stored, named_tensors, roots_of, stored_tensors
from resharder.converters.models.live import LocalTensors, local_of
from resharder.converters.models.tensor_io import DTYPES
from torch.distributed.tensor import DTensor

_PLAIN = {dtype: name for dtype, name in DTYPES.items() if not name.startswith("F8_")}
"""Dtypes of parameters. Those in FP8 have scales beside them, which no table describes."""


def local_layout(
    model: Model,
    hf_config: HFConfig | PretrainedConfig,
    *,
    rename: Rename | None = None,
    ranks: Sequence[int] | None = None,
    tower: bool | None = None,
) -> tuple[Layout, LocalTensors]:
    """Return this rank's layout, and its local tensors by their names in memory, live rather than copied.

    Args:
        model: Module, parts of one, or state dict. FSDP's modules keep their sharded parameters.
        hf_config: Content of config.json, or transformers' config.
        rename: Function from names in memory to names on disk, or None to leave a tensor out.
        ranks: Global ranks that together have the whole of `model`, if these are not all ranks, as in a
            pipeline stage. The lowest of them owns plain tensors. If several equal meshes have copies of
            a DTensor, the mesh with that rank owns it.
        tower: Whether the model has to have the config's tower, or must not have it; None for either.

    Raises:
        UnknownTensor: Names that are not those on disk.
        LayoutError: Another shape than the config's, `Partial`, or an unsupported placement.
        UnsupportedModel: Quantised tensors, or tensors without a memory layout.
    """
    tensors = named_tensors(model, rename)
    first = min(ranks) if ranks else 0
    specs: dict[str, TensorSpec] = {}
    pieces: list[Piece] = []
    for name, parts in stored_tensors(tensors, config_dict(hf_config), whole=ranks is None, tower=tower).items():
        tensor, local = tensors[name], local_of(tensors[name])
        dtype, box = _dtype(name, local), _box(name, tensor)
        whole = None if box is None else Piece(name, box, name, 0, local.stride(), not _owns(tensor, first))
        for part in parts:
            common = None if whole is None else intersect(whole.box, part.box)
            if whole is not None and common is not None:
                specs[part.name] = TensorSpec(part.name, dtype, part.shape)
                pieces.append(_moved(whole.part(common), part))
    names = dict.fromkeys(piece.local for piece in pieces)
    return Layout(specs, tuple(pieces)), LocalTensors(lambda: named_tensors(model, rename), tensors, names, roots_of(model))


def _moved(piece: Piece, part: Stored) -> Piece:
    """Return the piece of an HF tensor, given the piece of the tensor in memory that contains it."""
    box = tuple(have._replace(start=have.start - all_.start) for have, all_ in zip(piece.box, part.box, strict=True))
    skip = int(part.stacked)
    return piece._replace(
        tensor=part.name, box=part.in_hf_order(box[skip:]), strides=part.in_hf_order(tuple(piece.strides[skip:]))
    )


def shard_order(split_factors: Sequence[tuple[int, int]]) -> list[int]:
    """Return the order in which mesh dimensions divide one tensor dimension, as indices into `split_factors`.

    Args:
        split_factors: (size, split factor) of each mesh dimension that divides the tensor dimension,
            outermost first. The split factor is 1 for `Shard`. For `_StridedShard` it is the number of
            parts into which later mesh dimensions have divided before
            (torch/distributed/tensor/placement_types.py), as tensor parallelism does before FSDP.

    Raises ValueError for factors without such an order.
    """
    order: list[int] = []
    for index in reversed(range(len(split_factors))):
        parts = list(accumulate((split_factors[i][0] for i in order), mul, initial=1))
        factor = split_factors[index][1]
        if factor not in parts:
            raise ValueError(f"expected a split factor among {parts}, found {factor}")
        order.insert(parts.index(factor), index)
    return order


def _dtype(name: str, local: torch.Tensor) -> str:
    if type(local) not in (torch.Tensor, torch.nn.Parameter):
        raise UnsupportedModel(f"{name} is a {type(local).__name__}: pass a plain tensor, or a DTensor of plain ones")
    if local.dtype not in _PLAIN:
        raise UnsupportedModel(f"{name}: expected one of {', '.join(_PLAIN.values())}, found {local.dtype}")
    return _PLAIN[local.dtype]


def _box(name: str, tensor: torch.Tensor) -> Box | None:
    """Return this rank's box of a tensor.

    None if the rank has no elements: it is not in the mesh, or there are fewer rows than ranks.
    """
    box = tuple(Range(0, n) for n in tensor.shape)
    if isinstance(tensor, DTensor):
        coordinate = tensor.device_mesh.get_coordinate()
        if coordinate is None:
            return None
        box = tuple(_range(name, tensor, dimension, size, coordinate) for dimension, size in enumerate(tuple(tensor.shape)))
        found = tuple(local_of(tensor).shape)
        if found != tuple(r.count for r in box):
            raise LayoutError(
                f"{name}: {tensor.placements} over mesh {tuple(tensor.device_mesh.shape)} at {coordinate} should hold "
                f"{format_box(box)} of {list(tensor.shape)}, its local tensor has shape {list(found)}"
            )
    return box if all(r.count for r in box) else None


def _range(name: str, tensor: DTensor, dimension: int, size: int, coordinate: Sequence[int]) -> Range:
    """Return this rank's indices of one dimension, which each mesh dimension in turn divides as `torch.chunk` does."""
    cuts: list[tuple[int, int, int]] = []  # size of the mesh dimension, split factor, this rank's coordinate
    for mesh_dimension, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            continue
        kind = type(placement).__name__
        if kind not in ("Shard", "_StridedShard"):
            raise LayoutError(f"{name} has the placement {placement}: redistribute it to Shard or Replicate first")
        if placement.dim % tensor.ndim == dimension:  # type: ignore[attr-defined]
            factor = getattr(placement, "split_factor", 1)
            cuts.append((tensor.device_mesh.size(mesh_dimension), factor, coordinate[mesh_dimension]))
    try:
        order = shard_order([(parts, factor) for parts, factor, _ in cuts])
    except ValueError as error:
        raise LayoutError(f"{name}: {tensor.placements} over mesh {tuple(tensor.device_mesh.shape)}: {error}") from error
    start, count = 0, size
    for parts, _, place in (cuts[i] for i in order):
        each = -(-count // parts)
        first = min(place * each, count)
        start, count = start + first, min(each, count - first)
    return Range(start, count)


def _owns(tensor: torch.Tensor, first: int) -> bool:
    """Return whether this rank's copy is the owner; copies on other ranks are replicas of it."""
    if not isinstance(tensor, DTensor):
        return (dist.get_rank() if dist.is_initialized() else 0) == first
    coordinate = tensor.device_mesh.get_coordinate() or ()
    replicated = (place for place, placement in zip(coordinate, tensor.placements, strict=True) if placement.is_replicate())
    return not any(replicated) and first in tensor.device_mesh.mesh.flatten().tolist()
