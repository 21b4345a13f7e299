"""Mixtral: Mistral's attention, and routed experts in every layer under HF names of its own."""

from resharder.converters.architectures.blocks import Sizes, attention, decoder, expert_mlp, integer, refuse_others
from resharder.converters.architectures.recipe import Recipe, decoder_recipe, routed, window
from resharder.converters.architectures.table import HFConfig, Table

PROJECTIONS = ("w1", "w3", "w2")


def table(config: HFConfig) -> Table:
    """Return attention and routed experts under `block_sparse_moe.*` in every layer."""
    refuse_others(config, "hidden_act", "silu")
    size, experts = Sizes.of(config), integer(config, "num_local_experts", "num_experts")
    layer = attention(size) | expert_mlp(size, integer(config, "intermediate_size"), experts, "block_sparse_moe", PROJECTIONS)
    return decoder(size, lambda n: layer)


def recipe(config: HFConfig) -> Recipe:
    """Return Mistral's recipe with routed experts in every layer."""
    ffn, experts = integer(config, "intermediate_size"), integer(config, "num_local_experts", "num_experts")
    every = [True] * integer(config, "num_hidden_layers")
    return decoder_recipe(config, **window(config), **routed(config, experts, ffn, sparse=every))
