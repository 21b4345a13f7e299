"""Names of tensors in a model's memory, and in its checkpoint on disk.

A module with HF names has the names of `save_pretrained`. The exceptions are wrappers, tied embeddings, and experts, which
transformers 5 stacks in memory (transformers/conversion_mapping.py).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch
from resharder.converters.architectures.checkpoint import expected_shapes
from resharder.converters.architectures.table import HFConfig
from resharder.converters.errors import LayoutError, UnknownTensor, UnsupportedModel
from resharder.converters.geometry.layout import Box, Range, box_shape, full_box
from torch.distributed.tensor import DTensor

Model: TypeAlias = torch.nn.Module | Sequence[torch.nn.Module] | Mapping[str, torch.Tensor]
"""A module, its parts (pipeline stages of this rank), or a state dict."""

Rename: TypeAlias = Callable[[str], str | None]
"""Function from a name in memory to the name on disk, or to None for a tensor outside of the checkpoint."""

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")  # torch.compile, activation checkpoints, FSDP
_EXPERTS = (("mlp", "gate_proj", "up_proj", "down_proj"), ("block_sparse_moe", "w1", "w3", "w2"))


class Stored(NamedTuple):
    """HF tensor `name` that is `box` of a tensor in memory. With `stacked`, the box has a leading
    dimension that the HF tensor lacks.
    """

    name: str
    box: Box
    stacked: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the HF tensor."""
        return box_shape(self.box)[int(self.stacked) :]


def named_tensors(model: Model, rename: Rename | None = None) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers by their names, without the prefixes of wrappers and after `rename`.

    Raises UnknownTensor for an entry that is no tensor, and for two tensors of one name.
    """
    found: dict[str, torch.Tensor] = {}
    for key, value in _entries(model):
        if not isinstance(value, torch.Tensor):
            if key.endswith("_extra_state"):
                continue
            raise UnknownTensor(f"{key}: expected a tensor, found {type(value).__name__}")
        name: str | None = _unwrapped(key)
        if rename is not None:
            name = rename(_unwrapped(key))
        if name is None:
            continue
        if name in found and _memory(found[name]) != _memory(value):
            raise UnknownTensor(f"{name}: expected one tensor of this name, found two: the second is {key}")
        found[name] = value
    return found


def stored_tensors(found: Mapping[str, torch.Tensor], config: HFConfig, *, whole: bool) -> dict[str, list[Stored]]:
    """Return the HF tensors of each tensor in memory, by the name in memory. A second name of tied embeddings is omitted.

    For a family without a table, names in memory are those on disk.

    Args:
        found: Tensors in memory by name.
        config: Content of config.json.
        whole: Whether `found` is the whole model, so that missing names are an error.

    Raises:
        UnsupportedModel: A quantised checkpoint.
        UnknownTensor: Names differ from the table's.
        LayoutError: Shapes differ from the table's.
    """
    try:
        expected = expected_shapes(config)
    except UnsupportedModel:
        if config.get("quantization_config"):
            raise
        tied = config.get("tie_word_embeddings", True)  # transformers' default
        kept = _without_ties(found) if tied else found
        return {name: [Stored(name, full_box(tuple(tensor.shape)))] for name, tensor in kept.items()}
    stored = {name: _stored(name, tuple(tensor.shape), expected) for name, tensor in found.items()}
    held = {_memory(found[name]) for name, parts in stored.items() if parts}
    unknown = [name for name in stored if _memory(found[name]) not in held]
    given = {part.name: part for parts in stored.values() for part in parts}
    missing = [name for name in expected if name not in given] if whole else []
    if unknown or missing:
        raise UnknownTensor(
            "expected the names of the checkpoint on disk, found "
            + "; ".join(
                f"{len(names)} {what}: {', '.join(names[:4])}{', …' if len(names) > 4 else ''}"
                for names, what in ((unknown, "unexpected"), (missing, "missing"))
                if names
            )
            + "; pass rename=, a function from names in memory to names on disk"
        )
    for name, part in given.items():
        if part.shape != expected[name]:
            raise LayoutError(f"{name}: expected {list(expected[name])} from the config, found {list(part.shape)}")
    return {name: parts for name, parts in stored.items() if parts}


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, or the tensor itself; the memory is shared."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():  # with gradients, each call returns another tensor
        return tensor.to_local()


def _entries(model: Model) -> Iterator[tuple[str, object]]:
    """Yield the entries of a state dict. Its FSDP2 hook reshards parameters that a forward pass has left whole."""
    if isinstance(model, Mapping):
        yield from model.items()
        return
    for part in [model] if isinstance(model, torch.nn.Module) else model:
        if not isinstance(part, torch.nn.Module):
            raise UnsupportedModel(f"expected a module, a list of them or a state dict, found {type(part).__name__}")
        yield from part.state_dict(keep_vars=True).items()


def _unwrapped(key: str) -> str:
    name = key.removeprefix("module.")  # DistributedDataParallel
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _stored(name: str, shape: tuple[int, ...], expected: Mapping[str, tuple[int, ...]]) -> list[Stored]:
    """Return the HF tensors of a tensor in memory; none if its name has no counterpart on disk."""
    if name in expected:
        return [Stored(name, full_box(shape))]
    for module, gate, up, down in _EXPERTS:
        there = name.replace(".mlp.", f".{module}.")
        if there in expected:
            return [Stored(there, full_box(shape))]
        stem, _, kind = there.rpartition(".")
        if len(shape) != 3 or f"{stem}.0.{down}.weight" not in expected:
            continue
        experts, rows, columns = shape
        if kind == "down_proj":
            sections = {down: Range(0, rows)}
        elif kind == "gate_up_proj":
            sections = {gate: Range(0, rows // 2), up: Range(rows // 2, rows - rows // 2)}
        else:
            continue
        return [
            Stored(f"{stem}.{expert}.{part}.weight", (Range(expert, 1), within, Range(0, columns)), stacked=True)
            for expert in range(experts)
            for part, within in sections.items()
        ]
    return []


def _without_ties(found: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    first: dict[tuple[object, ...], str] = {}
    return {name: tensor for name, tensor in found.items() if first.setdefault(_memory(tensor), name) == name}


def _memory(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return a key that is equal for tensors with the same memory."""
    local = local_of(tensor)
    if not local.numel():
        return (id(tensor),)
    return local.untyped_storage()._cdata, local.storage_offset(), tuple(local.shape), local.stride()
