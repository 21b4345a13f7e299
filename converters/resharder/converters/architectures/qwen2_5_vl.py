"""Qwen2.5-VL: Qwen2 with a tower of transformers. The released names are those from before it was nested."""

from resharder.converters.architectures import qwen2
from resharder.converters.architectures.blocks import Layer, integer
from resharder.converters.architectures.recipe import Recipe
from resharder.converters.architectures.table import HFConfig, Table
from resharder.converters.architectures.wrapped import (
    Shapes,
    copied,
    language_config,
    linear,
    patch,
    vision_config,
    wrapped_recipe,
    wrapped_table,
)


def table(config: HFConfig) -> Table:
    """Return Qwen2's table and the tower's."""
    return wrapped_table(qwen2.table(language_config(config)), {}, tower(vision_config(config)))


def recipe(config: HFConfig) -> Recipe:
    """Return Qwen2's recipe in a wrapper with a tower of transformers."""
    return wrapped_recipe(config, qwen2.recipe(language_config(config)))


def tower(vision: HFConfig) -> Layer:
    """Return the tensors of `visual`: layers with RMS norms and a gated MLP, and one merger."""
    hidden, ffn, out = (integer(vision, name) for name in ("hidden_size", "intermediate_size", "out_hidden_size"))
    joined = hidden * integer(vision, "spatial_merge_size") ** 2
    block: Shapes = {"norm1.weight": (hidden,), "norm2.weight": (hidden,)}
    block |= linear("attn.qkv", 3 * hidden, hidden) | linear("attn.proj", hidden, hidden)
    block |= linear("mlp.gate_proj", ffn, hidden) | linear("mlp.up_proj", ffn, hidden) | linear("mlp.down_proj", hidden, ffn)
    tensors: Shapes = {"patch_embed.proj.weight": (hidden, *patch(vision))}
    tensors |= {f"blocks.{n}.{name}": shape for n in range(integer(vision, "depth")) for name, shape in block.items()}
    tensors |= {"merger.ln_q.weight": (hidden,)} | linear("merger.mlp.0", joined, joined) | linear("merger.mlp.2", out, joined)
    return copied("visual.", tensors)
