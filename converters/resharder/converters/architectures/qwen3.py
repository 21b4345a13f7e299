"""Qwen3: norms of each query head and key head; `head_dim` is independent of the hidden size."""

from resharder.converters.architectures.blocks import Sizes, attention, decoder, dense_mlp, integer, refuse
from resharder.converters.architectures.recipe import Recipe, decoder_recipe, optional_window
from resharder.converters.architectures.table import HFConfig, Table


def table(config: HFConfig) -> Table:
    """Return attention with norms of each head, and a gated MLP, in every layer."""
    refuse(config, "attention_bias")
    size = Sizes.of(config)
    layer = attention(size, head_norms=True) | dense_mlp(size, integer(config, "intermediate_size"))
    return decoder(size, lambda n: layer)


def recipe(config: HFConfig) -> Recipe:
    """Return a decoder's recipe with `qk_layernorm`, and a window in the last layers if the config turns it on."""
    return decoder_recipe(config, qk_layernorm=True, **optional_window(config, lambda n, most: n >= most))
