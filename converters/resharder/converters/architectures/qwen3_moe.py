"""Qwen3-MoE: Qwen3 with routed experts in every layer, or in some."""

from resharder.converters.architectures.blocks import Sizes, attention, decoder, dense_mlp, expert_mlp, integer, refuse
from resharder.converters.architectures.recipe import Recipe, decoder_recipe, routed
from resharder.converters.architectures.table import HFConfig, Table


def table(config: HFConfig) -> Table:
    refuse(config, "attention_bias")
    size, sparse = Sizes.of(config), sparse_layers(config)
    dense_layer = attention(size, head_norms=True) | dense_mlp(size, integer(config, "intermediate_size"))
    sparse_layer = attention(size, head_norms=True) | expert_mlp(size, integer(config, "moe_intermediate_size"), experts(config))
    return decoder(size, lambda n: sparse_layer if sparse[n] else dense_layer)


def recipe(config: HFConfig) -> Recipe:
    ffn, sparse, before = integer(config, "moe_intermediate_size"), sparse_layers(config), not config.get("norm_topk_prob", False)
    return decoder_recipe(
        config, qk_layernorm=True, **routed(config, experts(config), ffn, sparse=sparse, moe_router_pre_softmax=before)
    )


def experts(config: HFConfig) -> int:
    return integer(config, "num_experts", "num_local_experts")  # transformers 5 writes the second


def sparse_layers(config: HFConfig) -> list[bool]:
    """Which layers have routed experts."""
    period, without = integer(config, "decoder_sparse_step", default=1), set(config.get("mlp_only_layers") or ())
    return [(n + 1) % period == 0 and n not in without for n in range(integer(config, "num_hidden_layers"))]
