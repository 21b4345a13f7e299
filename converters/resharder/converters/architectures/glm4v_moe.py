"""GLM-4.5V: GLM-4.5 without its layer that predicts a further token, with a tower of transformers."""

from resharder.converters.architectures import glm4_moe
from resharder.converters.architectures.blocks import Layer, integer
from resharder.converters.architectures.recipe import Recipe
from resharder.converters.architectures.table import HFConfig, Table
from resharder.converters.architectures.wrapped import (
    NESTED,
    Shapes,
    copied,
    language_config,
    layer_norm,
    linear,
    patch,
    vision_config,
    wrapped_recipe,
    wrapped_table,
)


def text(config: HFConfig) -> HFConfig:
    """Return the config of the language model. Neither the released checkpoints nor Megatron-Bridge have its further layer."""
    return {**language_config(config), "num_nextn_predict_layers": 0}


def table(config: HFConfig) -> Table:
    """Return GLM-4.5's table and the tower's."""
    return wrapped_table(glm4_moe.table(text(config)), NESTED, tower(vision_config(config)))


def recipe(config: HFConfig) -> Recipe:
    """Return GLM-4.5's recipe in a wrapper with a tower of transformers."""
    return wrapped_recipe(config, glm4_moe.recipe(text(config)))


def tower(vision: HFConfig) -> Layer:
    """Return the tensors of `visual`: layers with RMS norms and a gated MLP, a convolution that joins patches, and a merger."""
    hidden, ffn, out = (integer(vision, name) for name in ("hidden_size", "intermediate_size", "out_hidden_size"))
    bias, merge = bool(vision.get("attention_bias")), integer(vision, "spatial_merge_size")
    patches = integer(vision, "image_size") // integer(vision, "patch_size")
    block: Shapes = {"norm1.weight": (hidden,), "norm2.weight": (hidden,)}
    block |= linear("attn.qkv", 3 * hidden, hidden, bias=bias) | linear("attn.proj", hidden, hidden, bias=False)
    block |= gated("mlp", hidden, out)
    tensors: Shapes = {
        "embeddings.position_embedding.weight": (patches**2, hidden),
        "patch_embed.proj.weight": (hidden, *patch(vision)),
        "patch_embed.proj.bias": (hidden,),
        "post_conv_layernorm.weight": (hidden,),
        "post_layernorm.weight": (hidden,),
        "downsample.weight": (out, hidden, merge, merge),
        "downsample.bias": (out,),
    }
    tensors |= {f"blocks.{n}.{name}": shape for n in range(integer(vision, "depth")) for name, shape in block.items()}
    tensors |= linear("merger.proj", out, out, bias=False) | layer_norm("merger.post_projection_norm", out)
    return copied("model.visual.", tensors | gated("merger", out, ffn), "visual.")


def gated(name: str, hidden: int, ffn: int) -> Shapes:
    """Return the shapes of a gated MLP without biases."""
    ups = linear(f"{name}.gate_proj", ffn, hidden, bias=False) | linear(f"{name}.up_proj", ffn, hidden, bias=False)
    return ups | linear(f"{name}.down_proj", hidden, ffn, bias=False)
