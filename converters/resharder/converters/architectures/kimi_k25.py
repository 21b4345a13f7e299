"""Kimi-K2.5: Kimi-K2 with a tower of MoonViT and a projector, both the released checkpoint's own modules.

vLLM and transformers read the fields of `vision_config` by other names than released files have; both are known.
"""

from collections.abc import Sequence

from resharder.converters.architectures import deepseek_v3
from resharder.converters.architectures.blocks import Layer, integer
from resharder.converters.architectures.recipe import Recipe
from resharder.converters.architectures.table import HFConfig, Table
from resharder.converters.architectures.wrapped import (
    Shapes,
    copied,
    language_config,
    layer_norm,
    linear,
    vision_config,
    wrapped_recipe,
    wrapped_table,
)
from resharder.converters.errors import UnsupportedModel

NAMES = {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."}
"""Names of the language model in the wrapper."""


def table(config: HFConfig) -> Table:
    """Return Kimi-K2's table, the tower's and the projector's. Raises UnsupportedModel for another projector."""
    language, vision = language_config(config), vision_config(config)
    kind = vision.get("mm_projector_type", "patchmerger")
    if kind != "patchmerger":
        raise UnsupportedModel(f"vision_config: mm_projector_type {kind!r} has no table; known: 'patchmerger'")
    return wrapped_table(deepseek_v3.table(language), NAMES, tower(vision) | projector(integer(language, "hidden_size"), vision))


def recipe(config: HFConfig) -> Recipe:
    """Return Kimi-K2's recipe in a wrapper with a tower of the checkpoint's own code, and the projector that vLLM computes."""
    vision = vision_config(config)
    made = wrapped_recipe(config, deepseek_v3.recipe(language_config(config))).unless(vision, projector_ln_eps=1e-5)
    return made.unless(config, projection_hidden_size=width(vision), projection_layer_norm_eps=1e-5)


def tower(vision: HFConfig) -> Layer:
    """Return the tensors of `vision_tower`: patches with learned places, and layers with a fused projection and biases."""
    hidden, ffn = width(vision), integer(vision, "vt_intermediate_size", "intermediate_size")
    size = integer(vision, "patch_size")
    rows, columns = (integer(vision, f"init_pos_emb_{side}", f"pos_emb_{side}") for side in ("height", "width"))
    block = layer_norm("norm0", hidden) | layer_norm("norm1", hidden)
    block |= linear("wqkv", 3 * hidden, hidden) | linear("wo", hidden, hidden)
    block |= linear("mlp.fc0", ffn, hidden) | linear("mlp.fc1", hidden, ffn)
    tensors: Shapes = {
        "patch_embed.proj.weight": (hidden, 3, size, size),
        "patch_embed.proj.bias": (hidden,),
        "patch_embed.pos_emb.weight": (rows, columns, hidden),
    }
    layers = range(integer(vision, "vt_num_hidden_layers", "num_hidden_layers"))
    tensors |= {f"encoder.blocks.{n}.{name}": shape for n in layers for name, shape in block.items()}
    return copied("vision_tower.", tensors | layer_norm("encoder.final_layernorm", hidden))


def projector(out: int, vision: HFConfig) -> Layer:
    """Return the norm, and the MLP that projects the patches of a rectangle together to `out` channels."""
    hidden = width(vision)
    merged: Sequence[int] = vision.get("merge_kernel_size") or (2, 2)
    joined = hidden * merged[0] * merged[1]
    mlp = linear("proj.0", joined, joined) | linear("proj.2", out, joined)
    return copied("mm_projector.", layer_norm("pre_norm", hidden) | mlp)


def width(vision: HFConfig) -> int:
    """Return the number of channels of the tower."""
    return integer(vision, "vt_hidden_size", "hidden_size")
