"""Rotary embeddings of a recipe: the frequencies of pairs of channels, as transformers computes them from config.json.

A model's own frequencies are compared with these: several of Megatron's arguments determine them together.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from resharder.converters.architectures.recipe import Recipe

LLAMA3_CONTEXT, LLAMA3_LOW, LLAMA3_HIGH = 8192, 1.0, 4.0
"""Context and factors of Llama 3's scaling, which megatron-core has as constants (rotary_pos_embedding.py, `_apply_scaling`)."""


class Rotary(NamedTuple):
    """Angle per token of each pair of channels, and the factor of sines and cosines."""

    frequencies: tuple[float, ...]
    factor: float = 1.0

    def same_as(self, other: "Rotary") -> bool:
        """Return whether both are equal, up to float32's rounding."""
        ours, theirs = (*self.frequencies, self.factor), (*other.frequencies, other.factor)
        return len(ours) == len(theirs) and all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(ours, theirs, strict=True))


def rotary_of(recipe: Recipe) -> Rotary:
    """Return the rotary embeddings of a recipe; for Gemma 3, those of layers without a window."""
    given = recipe.transformer
    if given.get("multi_latent_attention"):
        channels = given["qk_pos_emb_head_dim"]
        if given.get("rope_type") == "yarn":
            return yarn(channels, given["rotary_base"], {name: given[name] for name in YARN if name in given})
        return Rotary(plain(channels, given["rotary_base"]))
    arguments, base = recipe.model, recipe.model["rotary_base"]
    channels = int(given["kv_channels"] * arguments.get("rotary_percent", 1.0))
    if arguments["position_embedding_type"] == "yarn":
        return yarn(channels, base, {name.removeprefix("yarn_"): value for name, value in recipe.attributes.items()})
    frequencies = plain(channels, base)
    if arguments.get("rope_scaling"):
        frequencies = tuple(llama3(f, arguments["rope_scaling_factor"]) for f in frequencies)
    linear = arguments.get("seq_len_interpolation_factor") or 1.0
    return Rotary(tuple(f / linear for f in frequencies))


def plain(channels: int, base: float) -> tuple[float, ...]:
    """Return the frequencies without scaling."""
    return tuple(float(base) ** (-i / channels) for i in range(0, channels, 2))


def llama3(frequency: float, factor: float) -> float:
    """Return Llama 3's scaled frequency: low ones are divided by `factor`, high ones stay, those between are interpolated."""
    turns = LLAMA3_CONTEXT * frequency / (2 * math.pi)
    smooth = min(1.0, max(0.0, (turns - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW)))
    return (1 - smooth) * frequency / factor + smooth * frequency


YARN = (
    "rotary_scaling_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "correction_range_round_to_int",
)
"""megatron-core's arguments of YaRN."""


def yarn(channels: int, base: float, arguments: Mapping[str, Any]) -> Rotary:
    """Return YaRN's rotary embeddings. `arguments` are those of YARN."""
    factor, context = arguments["rotary_scaling_factor"], arguments["original_max_position_embeddings"]

    def channel_of(turns: float) -> float:
        return channels * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = channel_of(arguments["beta_fast"]), channel_of(arguments["beta_slow"])
    if arguments.get("correction_range_round_to_int", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, channels - 1)
    high += 0.001 if low == high else 0
    ramps = (min(1.0, max(0.0, (pair - low) / (high - low))) for pair in range(channels // 2))
    mixed = tuple(f * (1 - ramp) + f / factor * ramp for f, ramp in zip(plain(channels, base), ramps, strict=True))
    mscale, all_channels = arguments.get("mscale"), arguments.get("mscale_all_dim")
    if mscale is None or all_channels is None:
        return Rotary(mixed, concentration(factor))
    return Rotary(mixed, concentration(factor, mscale) / concentration(factor, all_channels))


def concentration(factor: float, mscale: float = 1.0) -> float:
    """Return YaRN's factor of attention for a context that is `factor` times as long."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def softmax_scale(recipe: Recipe) -> float:
    """Return the factor of attention scores before the softmax."""
    given = recipe.transformer
    if not given.get("multi_latent_attention"):
        return float(given.get("softmax_scale") or given["kv_channels"] ** -0.5)
    scale = float((given["qk_head_dim"] + given["qk_pos_emb_head_dim"]) ** -0.5)
    if given.get("rope_type") != "yarn":
        return scale
    return scale * concentration(given["rotary_scaling_factor"], given["mscale_all_dim"]) ** 2
