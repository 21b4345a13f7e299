"""Llama 2 and 3, with or without biases."""

from resharder.converters.architectures.blocks import Layer, Sizes, attention, decoder, dense_mlp, integer, joined, whole
from resharder.converters.architectures.recipe import Recipe, decoder_recipe
from resharder.converters.architectures.table import HFConfig, Table
from resharder.converters.errors import UnsupportedModel


def table(config: HFConfig) -> Table:
    """Return grouped-query attention and a gated MLP in every layer, with biases on all linears or none."""
    size, ffn = Sizes.of(config), integer(config, "intermediate_size")
    layer = attention(size, qkv_bias=biased(config)) | dense_mlp(size, ffn)
    if biased(config):
        layer |= biases(size, ffn)
    return decoder(size, lambda n: layer)


def biases(size: Sizes, ffn: int) -> Layer:
    """Return the biases of all linears except queries, keys and values."""
    return {
        "self_attention.linear_proj.bias": (whole("self_attn.o_proj.bias", size.hidden),),
        "mlp.linear_fc1.bias": (joined(("mlp.gate_proj.bias", "mlp.up_proj.bias"), ffn),),
        "mlp.linear_fc2.bias": (whole("mlp.down_proj.bias", size.hidden),),
    }


def recipe(config: HFConfig) -> Recipe:
    """Return a decoder's recipe, with biases on all linears or none."""
    return decoder_recipe(config, add_bias_linear=biased(config))


def biased(config: HFConfig) -> bool:
    """Return whether linears have biases. Raises UnsupportedModel if only attention or only the MLP has them."""
    in_attention, in_mlp = bool(config.get("attention_bias")), bool(config.get("mlp_bias"))
    if in_attention != in_mlp:
        both = f"attention_bias={in_attention}, mlp_bias={in_mlp}"
        raise UnsupportedModel(f"config: {both}: Megatron adds biases to all linears of attention and MLP, or to none")
    return in_attention
