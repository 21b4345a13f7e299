"""Qwen3-MoE: Qwen3 with routed experts in all or some layers."""

from resharder.converters.architectures.blocks import (
    Layer,
    Sizes,
    attention,
    decoder,
    dense_mlp,
    expert_mlp,
    integer,
    refuse,
    refuse_others,
)
from resharder.converters.architectures.recipe import Recipe, decoder_recipe, optional_window, routed
from resharder.converters.architectures.table import HFConfig, Table


def table(config: HFConfig) -> Table:
    """Return Qwen3's attention, with routed experts or a dense MLP as `sparse_layers` has it."""
    return with_experts(config, mixture(config))


def mixture(config: HFConfig) -> Layer:
    """Return routed experts, with a tensor for each expert and projection."""
    return expert_mlp(Sizes.of(config), integer(config, "moe_intermediate_size"), experts(config))


def with_experts(config: HFConfig, mixture: Layer) -> Table:
    """Return Qwen3's attention in every layer, with `mixture` or a dense MLP as `sparse_layers` has it."""
    refuse(config, "attention_bias")
    refuse_others(config, "hidden_act", "silu")
    size, sparse = Sizes.of(config), sparse_layers(config)
    attend = attention(size, head_norms=True)
    dense_layer = attend | dense_mlp(size, integer(config, "intermediate_size"))
    return decoder(size, lambda n: attend | mixture if sparse[n] else dense_layer)


def recipe(config: HFConfig) -> Recipe:
    """Return Qwen3's recipe with routed experts. Softmax precedes the choice of experts unless `norm_topk_prob` is set."""
    ffn, sparse, before = integer(config, "moe_intermediate_size"), sparse_layers(config), not config.get("norm_topk_prob", False)
    mixture = routed(config, experts(config), ffn, sparse=sparse, moe_router_pre_softmax=before)
    return decoder_recipe(config, qk_layernorm=True, **optional_window(config, lambda n, most: True), **mixture)


def experts(config: HFConfig) -> int:
    """Return the number of routed experts, under either of the names that transformers writes."""
    return integer(config, "num_experts", "num_local_experts")  # transformers 5 writes `num_local_experts`


def sparse_layers(config: HFConfig) -> list[bool]:
    """Return whether each layer has routed experts: every `decoder_sparse_step`-th one, except `mlp_only_layers`."""
    period, without = integer(config, "decoder_sparse_step", default=1), set(config.get("mlp_only_layers") or ())
    return [(n + 1) % period == 0 and n not in without for n in range(integer(config, "num_hidden_layers"))]
