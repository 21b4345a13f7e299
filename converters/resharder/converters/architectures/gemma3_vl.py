"""Gemma 3 as released: the text model with SigLIP's tower of transformers and a projector.

Names are those of the released checkpoints. transformers 5 saves the tower without `vision_model`, and vLLM loads both.
"""

from dataclasses import replace
from typing import Any

from resharder.converters.architectures import gemma3
from resharder.converters.architectures.blocks import Layer, integer, whole
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

DEFAULTS = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
"""What released files leave to transformers' defaults."""


def text(config: HFConfig) -> dict[str, Any]:
    """Return the config of the language model with `DEFAULTS`."""
    return DEFAULTS | {name: value for name, value in language_config(config).items() if value is not None}


def table(config: HFConfig) -> Table:
    """Return Gemma 3's table, the tower's and the projector's."""
    language, vision = text(config), vision_config(config)
    names = {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."}
    return wrapped_table(gemma3.table(language), names, tower(vision) | projector(integer(language, "hidden_size"), vision))


def recipe(config: HFConfig) -> Recipe:
    """Return Gemma 3's recipe in a wrapper with a tower of transformers."""
    return wrapped_recipe(config, gemma3.recipe(text(config)))


def tower(vision: HFConfig) -> Layer:
    """Return the tensors of `vision_tower`: SigLIP's layers, without the head that pools them."""
    hidden, ffn, size = (integer(vision, name) for name in ("hidden_size", "intermediate_size", "patch_size"))
    block = layer_norm("layer_norm1", hidden) | layer_norm("layer_norm2", hidden)
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        block |= linear(f"self_attn.{name}", hidden, hidden)
    block |= linear("mlp.fc1", ffn, hidden) | linear("mlp.fc2", hidden, ffn)
    tensors: Shapes = {
        "embeddings.patch_embedding.weight": (hidden, integer(vision, "num_channels", default=3), size, size),
        "embeddings.patch_embedding.bias": (hidden,),
        "embeddings.position_embedding.weight": ((integer(vision, "image_size") // size) ** 2, hidden),
    }
    layers = range(integer(vision, "num_hidden_layers"))
    tensors |= {f"encoder.layers.{n}.{name}": shape for n in layers for name, shape in block.items()}
    return copied("vision_tower.vision_model.", tensors | layer_norm("post_layernorm", hidden), "vision_tower.")


def projector(hidden: int, vision: HFConfig) -> Layer:
    """Return the projection to `hidden` channels, transposed in HF, and the norm before it, with gains around zero in both."""
    there = integer(vision, "hidden_size")
    weight = replace(whole("mm_input_projection_weight", hidden, there), transpose=True)
    parts: Layer = {
        "proj.weight": (weight.under("multi_modal_projector."),),
        "mm_soft_embed_norm.weight": (whole("multi_modal_projector.mm_soft_emb_norm.weight", there),),
    }
    return {f"multi_modal_projector.{key}": weights for key, weights in parts.items()}
