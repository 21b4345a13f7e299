"""MiniMax-M2: norms over all query or key heads at once, partly rotated heads, and Mixtral's
experts with a bias for their choice.
"""

from dataclasses import replace

from resharder.converters.architectures.blocks import (
    Sizes,
    attention,
    decoder,
    expert_mlp,
    integer,
    refuse_others,
    whole,
    whole_norms,
)
from resharder.converters.architectures.deepseek_v3 import balanced_router
from resharder.converters.architectures.mixtral import PROJECTIONS
from resharder.converters.architectures.recipe import Extras, Recipe, decoder_recipe, partial_rotary, routed
from resharder.converters.architectures.table import HFConfig, Table


def table(config: HFConfig) -> Table:
    """Return attention with norms over all heads, and experts with `expert_bias`, in every layer."""
    refuse_others(config, "hidden_act", "silu")
    size, experts = Sizes.of(config), integer(config, "num_local_experts", "num_experts")
    mixture = expert_mlp(size, integer(config, "intermediate_size"), experts, "block_sparse_moe", PROJECTIONS)
    bias = whole("block_sparse_moe.e_score_correction_bias", experts)
    layer = attention(size) | whole_norms(size) | mixture | {"mlp.router.expert_bias": (bias,)}
    return decoder(size, lambda n: layer)


def recipe(config: HFConfig) -> Recipe:
    """Return a decoder's recipe with DeepSeek-V3's router in every layer, and norms over all heads, which `extras.py` adds."""
    ffn, experts = integer(config, "intermediate_size"), integer(config, "num_local_experts", "num_experts")
    every = [True] * integer(config, "num_hidden_layers")
    mixture = routed(config, experts, ffn, sparse=every, **balanced_router(config))
    part = integer(config, "rotary_dim", default=64) / integer(config, "head_dim", default=128)
    built = decoder_recipe(config, qk_layernorm=True, **mixture).but(partial_rotary(config, part))
    return replace(built, extras=Extras(whole_norms=True))
