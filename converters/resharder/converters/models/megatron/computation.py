"""Comparison of what a Megatron model computes with its config.json (architectures/computation.py)."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import activations
from megatron.core.models.common.embeddings.rotary_pos_embedding import MultimodalRotaryEmbedding, RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.transformer.module import MegatronModule
from resharder.converters.architectures.agreement import disagreements
from resharder.converters.architectures.computation import differences
from resharder.converters.architectures.recipe import Recipe
from resharder.converters.architectures.rotary import Rotary, plain, rotary_of, softmax_scale, yarn
from resharder.converters.hf_config import differences as config_differences

GPT_ATTRIBUTES = ("position_embedding_type", "rotary_base", "rotary_percent", "max_sequence_length")
"""Attributes of GPTModel, from its arguments."""

ROTATED = ("rope", "mrope", "yarn")
"""Values of `position_embedding_type` with rotary embeddings."""


def other_computation(module: MegatronModule, recipe: Recipe) -> list[str]:
    """Return a sentence with both values for each thing that a chunk computes otherwise than its config says."""
    model = {name: value for name, value in vars(module).items() if name in GPT_ATTRIBUTES}
    built = vars(module.config) | model
    return [*differences(recipe, built, same_activation), *_rotations(module, recipe), *_latent_scales(module, recipe)]


def other_tower(module: MegatronModule, recipe: Recipe) -> list[str]:
    """Return a sentence with both values for each thing in which a wrapper's tower differs from `vision_config`.

    Compared are the config of Megatron's own layers, and those of modules of transformers.
    """
    tower = recipe.tower
    if tower is None:
        return []
    if tower.module:
        own = getattr(module, tower.module, None)
        expected, built = Recipe(tower.transformer, {}), {} if own is None else vars(own.config)
        sentences = [*disagreements(expected, built), *differences(expected, built, same_activation)] if built else []
        return [f"the tower's {sentence}" for sentence in sentences]
    found = list[str]()
    for child in module.children():
        given: Mapping[str, Any] = getattr(getattr(child, "config", None), "to_dict", dict)()
        for name, ours, theirs in config_differences(tower.config, given):
            if name in tower.config and name in given and given.get("model_type") == tower.config.get("model_type"):
                found.append(f"{name} is {ours!r} in vision_config, the tower has {theirs!r}")
    return found


def other_than_default(config: Any) -> dict[str, str]:
    """Return `NAME=VALUE (default VALUE)` for each option of megatron-core that has another value than its default.

    Options of classes that inherit from megatron-core's, as Megatron-Bridge's do, are left out.
    """
    kind = next(each for each in type(config).__mro__ if each.__module__.startswith("megatron.core."))
    found = {}
    for field in dataclasses.fields(kind):
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        value = getattr(config, field.name, default)
        if value is not default and value != default:
            found[field.name] = f"{field.name}={value!r} (default {default!r})"
    return found


def activation(function: Any) -> Any:
    """Return an activation, given by itself or by its name in megatron.core.activations or torch.nn.functional."""
    if isinstance(function, str):
        function = getattr(activations, function, None) or getattr(F, function)
    return getattr(function, "_torchdynamo_orig_callable", function)  # as written, not compiled for these few values


def same_activation(ours: Any, theirs: Any) -> bool:
    """Return whether two activations give the same values. One that fails on a few values in host memory counts as the same."""
    ours, theirs = activation(ours), activation(theirs)
    values = torch.linspace(-4, 4, 33)
    try:
        return ours is theirs or torch.allclose(ours(values), theirs(values), atol=1e-4)
    except (RuntimeError, TypeError, ValueError):
        return True


def _rotations(module: MegatronModule, recipe: Recipe) -> Iterator[str]:
    """Yield a sentence if the chunk's rotary embeddings differ from the config's."""
    expected = rotary_of(recipe)
    kind = getattr(module, "position_embedding_type", ROTATED[0])
    if not recipe.transformer.get("multi_latent_attention") and kind not in ROTATED:
        yield f"rotary embeddings are in the config, the model has position_embedding_type={kind!r}"
    for holder in module.modules():
        rotary = getattr(holder, "rotary_pos_emb", None)
        if isinstance(rotary, MultimodalRotaryEmbedding) and recipe.tower is not None and recipe.tower.interleaved:
            yield ("mrope_interleaved is True in the config, the model rotates channels in blocks (MultimodalRotaryEmbedding)")
            return
        found = _measured(rotary)
        if found is not None and not expected.same_as(found):
            yield _sentence(expected, found, recipe, vars(module.config) | vars(holder) | vars(rotary))
            return
        local, base = _measured(getattr(rotary, "rope_local", None)), recipe.extras.local_rotary_base
        if local is not None and base is not None and not Rotary(plain(2 * len(local.frequencies), base)).same_as(local):
            theirs = _base(local)
            yield f"rope_local_base_freq, or rope_theta of windows, is {base!r} in the config, the model has {theirs:.6g}"
            return


def _measured(rotary: Any) -> Rotary | None:
    """Return what a module of megatron-core computes; None for other modules and for frequencies without values."""
    if isinstance(rotary, YarnRotaryEmbedding):
        arguments = vars(rotary) | {"rotary_scaling_factor": rotary.scaling_factor}
        return yarn(rotary.dim, rotary.rotary_base, arguments)
    frequencies = getattr(rotary, "inv_freq", None)
    known = isinstance(rotary, RotaryEmbedding | MultimodalRotaryEmbedding) or hasattr(rotary, "mrope_section")  # Bridge's own
    if not known or not isinstance(frequencies, torch.Tensor) or frequencies.is_meta:
        return None
    linear = rotary.seq_len_interpolation_factor or 1.0
    return Rotary(tuple(frequency / linear for frequency in frequencies.float().tolist()))


def _base(rotary: Rotary) -> float:
    """Return the rotary base of frequencies without scaling."""
    return float(rotary.frequencies[1] ** -len(rotary.frequencies)) if len(rotary.frequencies) > 1 else math.nan


NAMES = {
    "rotary_base": "rope_theta",
    "rotary_percent": "partial_rotary_factor",
    "seq_len_interpolation_factor": "factor of linear scaling",
    "rope_scaling": "rope_type llama3",
    "rope_scaling_factor": "factor of llama3 scaling",
    "rope_type": "rope_type",
    "rotary_scaling_factor": "factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
    "correction_range_round_to_int": "truncate",
    "position_embedding_type": "rope_type",
}
"""Name in config.json of each argument that determines rotary embeddings."""


def _sentence(expected: Rotary, found: Rotary, recipe: Recipe, built: Mapping[str, Any]) -> str:
    """Return a sentence with the arguments that differ, or else the first frequency that does."""
    given = {name.removeprefix("yarn_"): value for name, value in recipe.attributes.items()} | recipe.model | recipe.transformer
    held = {**built, "rotary_scaling_factor": built.get("scaling_factor", built.get("rotary_scaling_factor"))}
    other = [
        f"{theirs} is {given[name]!r} in the config, the model has {name}={held[name]!r}"
        for name, theirs in NAMES.items()
        if name in given and name in held and given[name] != held[name]
    ]
    pairs = zip(expected.frequencies, found.frequencies, strict=False)
    turned = next(((n, a, b) for n, (a, b) in enumerate(pairs) if not math.isclose(a, b, rel_tol=1e-4)), None)
    if turned is not None:
        angle = f"pair {turned[0]} of channels turns by {turned[1]:.6g} per token in the config, by {turned[2]:.6g} in the model"
    else:
        angle = (
            f"{len(expected.frequencies)} pairs of channels, by {expected.factor:.6g}, in the config, "
            f"{len(found.frequencies)}, by {found.factor:.6g}, in the model"
        )
    return f"rotary embeddings differ: {'; '.join([*other, angle])}"


def _latent_scales(module: MegatronModule, recipe: Recipe) -> Iterator[str]:
    """Yield a sentence if latent attention scales its scores otherwise than the config says."""
    if not recipe.transformer.get("multi_latent_attention"):
        return
    expected = softmax_scale(recipe)
    found = {
        getattr(each, "softmax_scale", None)
        for each in module.modules()
        if isinstance(getattr(each, "rotary_pos_emb", None), RotaryEmbedding)
    }
    for scale in sorted(scale for scale in found if isinstance(scale, float)):
        if not math.isclose(scale, expected, rel_tol=1e-4):
            yield f"the scale of attention scores (mscale_all_dim) is {expected:.6g} in the config, {scale:.6g} in the model"
