"""OLMoE: routed experts in every layer, and norms over all query or key heads at once."""

from dataclasses import replace

from resharder.converters.architectures.blocks import (
    Sizes,
    attention,
    decoder,
    expert_mlp,
    integer,
    refuse,
    refuse_others,
    whole_norms,
)
from resharder.converters.architectures.recipe import Extras, Recipe, decoder_recipe, routed
from resharder.converters.architectures.table import HFConfig, Table


def table(config: HFConfig) -> Table:
    """Return attention, norms over all heads, and routed experts in every layer."""
    refuse(config, "attention_bias")
    refuse_others(config, "hidden_act", "silu")
    refuse_others(config, "norm_topk_prob", False)
    refuse_others(config, "rms_norm_eps", 1e-5)
    size, ffn, experts = Sizes.of(config), integer(config, "intermediate_size"), integer(config, "num_experts")
    layer = attention(size) | whole_norms(size) | expert_mlp(size, ffn, experts)
    return decoder(size, lambda n: layer)


def recipe(config: HFConfig) -> Recipe:
    """Return a decoder's recipe with routed experts and norms over all heads. megatron-core cannot clip with `clip_qkv`."""
    ffn, experts = integer(config, "intermediate_size"), integer(config, "num_experts")
    every = [True] * integer(config, "num_hidden_layers")
    mixture = routed(config, experts, ffn, sparse=every, moe_router_pre_softmax=True)
    built = replace(decoder_recipe(config, qk_layernorm=True, layernorm_epsilon=1e-5, **mixture), extras=Extras(whole_norms=True))
    return built.unless(config, clip_qkv=None)
