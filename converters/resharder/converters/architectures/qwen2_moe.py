"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 with routed experts and a gated shared expert."""

from resharder.converters.architectures.blocks import Sizes, attention, decoder, dense_mlp, expert_mlp, integer, shared_expert
from resharder.converters.architectures.qwen3_moe import experts, sparse_layers
from resharder.converters.architectures.recipe import Recipe, decoder_recipe, optional_window, routed
from resharder.converters.architectures.table import HFConfig, Table


def table(config: HFConfig) -> Table:
    """Return Qwen2's attention, a dense MLP in some layers, and routed experts with a gated shared one in the others."""
    size, sparse, ffn = Sizes.of(config), sparse_layers(config), integer(config, "moe_intermediate_size")
    attend = attention(size, qkv_bias=bool(config.get("qkv_bias", True)))
    shared = shared_expert("mlp.shared_expert", size.hidden, shared_ffn(config), gate="mlp.shared_expert_gate")
    dense_layer = attend | dense_mlp(size, integer(config, "intermediate_size"))
    sparse_layer = attend | expert_mlp(size, ffn, experts(config)) | shared
    return decoder(size, lambda n: sparse_layer if sparse[n] else dense_layer)


def recipe(config: HFConfig) -> Recipe:
    """Return Qwen2's recipe with routed experts and a gated shared one."""
    ffn, sparse, before = integer(config, "moe_intermediate_size"), sparse_layers(config), not config.get("norm_topk_prob", False)
    return decoder_recipe(
        config,
        add_qkv_bias=bool(config.get("qkv_bias", True)),
        moe_shared_expert_intermediate_size=shared_ffn(config),
        moe_shared_expert_gate=True,
        **optional_window(config, lambda n, most: n % 2 == 0 and n < most),
        **routed(config, experts(config), ffn, sparse=sparse, moe_router_pre_softmax=before),
    )


def shared_ffn(config: HFConfig) -> int:
    """Return the width of the shared expert."""
    return integer(config, "shared_expert_intermediate_size")
