"""Names of tensors in a model's memory, and in its checkpoint on disk.

A module with HF names has the names of `save_pretrained`. The exceptions are wrappers, tied embeddings, and experts, which
transformers 5 stacks in memory (transformers/conversion_mapping.py).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias, TypeVar

import torch
from resharder.converters.allowances import refuse
from resharder.converters.architectures import architecture_of
from resharder.converters.architectures.checkpoint import expected_shapes, tower_shapes
from resharder.converters.architectures.table import HFConfig
from resharder.converters.architectures.wrapped import refuse_tower
from resharder.converters.errors import LayoutError, UnknownTensor, UnsupportedModel
from resharder.converters.geometry.layout import Box, Range, box_shape, full_box
from resharder.converters.models.live import local_of, memory_of

Model: TypeAlias = torch.nn.Module | Sequence[torch.nn.Module] | Mapping[str, torch.Tensor]
"""A module, its parts (pipeline stages of this rank), or a state dict."""

T = TypeVar("T")

Rename: TypeAlias = Callable[[str], str | None]
"""Function from a name in memory to the name on disk, or to None for a tensor outside of the checkpoint."""

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")  # torch.compile, activation checkpoints, FSDP
_HEADS = ("lm_head.weight", "embed_out.weight")
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight", "embeddings.weight")
_FURTHER_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
_STACKED = (".experts.gate_up_proj", ".experts.down_proj")
_EXPERTS = (("mlp", "gate_proj", "up_proj", "down_proj"), ("block_sparse_moe", "w1", "w3", "w2"))


class Stored(NamedTuple):
    """HF tensor `name` that is `box` of a tensor in memory.

    With `stacked`, the box has a leading dimension that the HF tensor lacks; with `transposed`, the HF tensor has the last two
    dimensions in reverse order.
    """

    name: str
    box: Box
    stacked: bool = False
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the HF tensor."""
        return self.in_hf_order(box_shape(self.box)[int(self.stacked) :])

    def in_hf_order(self, dimensions: tuple[T, ...]) -> tuple[T, ...]:
        """Return one item per dimension of the HF tensor, from one per dimension in memory that it has."""
        return (*dimensions[:-2], dimensions[-1], dimensions[-2]) if self.transposed else dimensions


def named_tensors(model: Model, rename: Rename | None = None) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers by their names, without the prefixes of wrappers and after `rename`.

    Raises UnknownTensor for an entry that is no tensor, and for two tensors of one name.
    """
    found: dict[str, torch.Tensor] = {}
    for key, value in _entries(model):
        name: str | None = _unwrapped(key)
        if rename is not None:
            name = rename(_unwrapped(key))
        if name is None:
            continue
        if not isinstance(value, torch.Tensor):
            if key.endswith("_extra_state"):
                continue
            raise UnknownTensor(f"{key}: expected a tensor, found {type(value).__name__}")
        if name in found and memory_of(found[name]) != memory_of(value):
            raise UnknownTensor(f"{name}: two tensors have this name, the second is {key}")
        found[name] = value
    return found


def stored_tensors(
    found: Mapping[str, torch.Tensor], config: HFConfig, *, whole: bool, tower: bool | None = None
) -> dict[str, list[Stored]]:
    """Return the HF tensors of each tensor in memory, by the name in memory. A second name of tied embeddings is omitted.

    For a family without a table, names in memory are those on disk.

    Args:
        found: Tensors in memory by name.
        config: Content of config.json.
        whole: Whether `found` is the whole model, so that missing names are an error.
        tower: Whether it has to have the config's tower, or must not have it; None for either.

    Raises:
        UnsupportedModel: A quantised checkpoint.
        UnknownTensor: Names differ from the table's.
        LayoutError: Shapes differ from the table's.
    """
    if _is_tied(config):
        found = _without_second_head(found)
    try:
        expected = expected_shapes(config)
    except UnsupportedModel:
        if config.get("quantization_config"):
            raise
        kept = _without_ties(found) if _is_tied(config) else found
        return {name: [Stored(name, full_box(tuple(tensor.shape)))] for name, tensor in kept.items()}
    family = architecture_of(config)
    named = {name: _on_disk(name, family.modules) for name in found}
    in_tower = tower_shapes(config)
    if in_tower and tower is not True and in_tower.keys().isdisjoint(named.values()):
        named = {name: disk if disk in expected else _on_disk(name, family.language) for name, disk in named.items()}
        expected = {name: shape for name, shape in expected.items() if name not in in_tower}
    elif in_tower and tower is False:
        refuse_tower(wanted=False, found=True)
    stored = {name: _stored(named[name], tuple(tensor.shape), expected, family.turned) for name, tensor in found.items()}
    held = {memory_of(found[name]) for name, parts in stored.items() if parts}
    unknown = [name for name in stored if memory_of(found[name]) not in held]
    given = {part.name: part for parts in stored.values() for part in parts}
    missing = [name for name in expected if name not in given] if whole else []
    if missing and not unknown and (count := _counts_further_layers(config, missing)):
        raise UnknownTensor(
            f"the config counts MTP layers that the model does not have: attach a config in which {count} is 0 ({missing[0]} and "
            f"{len(missing) - 1} more are missing)"
        )
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


def roots_of(model: Model) -> list[torch.nn.Module]:
    """Return the modules of a model; an empty list for a state dict."""
    if isinstance(model, Mapping):
        return []
    return [model] if isinstance(model, torch.nn.Module) else list(model)


def _entries(model: Model) -> Iterator[tuple[str, object]]:
    """Yield the entries of a state dict. Its FSDP2 hook reshards parameters that a forward pass has left whole."""
    if isinstance(model, Mapping):
        yield from model.items()
        return
    for part in roots_of(model):
        if not isinstance(part, torch.nn.Module):
            raise UnsupportedModel(f"expected a module, a list of them or a state dict, found {type(part).__name__}")
        yield from part.state_dict(keep_vars=True).items()


def _unwrapped(key: str) -> str:
    name = key.removeprefix("module.")  # DistributedDataParallel
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _on_disk(name: str, modules: Sequence[tuple[str, str]]) -> str:
    """Return a name with its first part as on disk."""
    return next((disk + name.removeprefix(memory) for memory, disk in modules if name.startswith(memory)), name)


def _stored(name: str, shape: tuple[int, ...], expected: Mapping[str, tuple[int, ...]], turned: bool) -> list[Stored]:
    """Return the HF tensors of a tensor in memory; none if its name has no counterpart on disk.

    Raises UnsupportedModel for stacked experts of which the shape does not say whether they are `turned`.
    """
    if name in expected:
        stacked = turned and name.endswith(_STACKED)
        if stacked and shape[-1] == shape[-2]:
            raise UnsupportedModel(
                f"{name} is {list(shape)}, which does not say whether it is transposed in memory: publish with publish_tensors"
            )
        return [Stored(name, full_box(shape), transposed=stacked and expected[name] == (*shape[:-2], shape[-1], shape[-2]))]
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


def _counts_further_layers(config: HFConfig, missing: Sequence[str]) -> str:
    """Return the field of the config without which nothing would be missing: transformers builds no MTP layers. "" for none."""
    text = config.get("text_config")
    for field in _FURTHER_LAYERS:
        without: HFConfig = {**config, field: 0}
        if isinstance(text, Mapping):
            without = {**config, "text_config": {**text, field: 0}}
        if (text or config).get(field) and expected_shapes(without).keys().isdisjoint(missing):
            return field
    return ""


def _is_tied(config: HFConfig) -> bool:
    return bool(config.get("tie_word_embeddings", True))  # transformers' default


def _without_second_head(found: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Return the tensors without an output layer that has memory of its own. Raises UnknownTensor unless that is allowed."""
    heads = [name for name in found if _is_called(name, _HEADS) and local_of(found[name]).numel()]
    second = {}
    for head in heads:
        alike = [name for name in found if _is_called(name, _EMBEDDINGS) and found[name].shape == found[head].shape]
        if alike and all(memory_of(found[name]) != memory_of(found[head]) for name in alike):
            second[head] = alike[0]
    for head, embeddings in second.items():
        refuse(
            "second-head",
            UnknownTensor(
                f"{head} has memory of its own, and the config ties it to {embeddings}: servers would compute with the latter. "
                "Call model.tie_weights() before attach, and after to_empty(); if the output layer is trained by itself, attach "
                "a config with tie_word_embeddings=False"
            ),
        )
    return {name: tensor for name, tensor in found.items() if name not in second}


def _is_called(name: str, endings: tuple[str, ...]) -> bool:
    return any(name == ending or name.endswith(f".{ending}") for ending in endings)


def _without_ties(found: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    first: dict[tuple[object, ...], str] = {}
    return {name: tensor for name, tensor in found.items() if first.setdefault(memory_of(tensor), name) == name}
