"""Qwen2 and Qwen2.5: Llama with a bias on queries, keys and values."""

from resharder.converters.architectures.blocks import Sizes, attention, decoder, dense_mlp, integer
from resharder.converters.architectures.recipe import Recipe, decoder_recipe, optional_window
from resharder.converters.architectures.table import HFConfig, Table


def table(config: HFConfig) -> Table:
    """Return Llama's layers with a bias on queries, keys and values."""
    size = Sizes.of(config)
    layer = attention(size, qkv_bias=True) | dense_mlp(size, integer(config, "intermediate_size"))
    return decoder(size, lambda n: layer)


def recipe(config: HFConfig) -> Recipe:
    """Return a decoder's recipe with `add_qkv_bias`, and a window in the last layers if the config turns it on."""
    return decoder_recipe(config, add_qkv_bias=True, **optional_window(config, lambda n, most: n >= most))
