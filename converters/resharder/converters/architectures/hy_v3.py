"""Hy3: norms of query and key heads, and DeepSeek-V3's experts in one group, under names of its own."""

from typing import Any

from resharder.converters.architectures.blocks import Layer, Sizes, attention, decoder, dense_mlp, integer, refuse
from resharder.converters.architectures.deepseek_v2 import mixture_recipe, sparse_layers
from resharder.converters.architectures.deepseek_v3 import balanced_mixture, balanced_router
from resharder.converters.architectures.glm4_moe_lite import completed
from resharder.converters.architectures.recipe import Recipe, decoder_recipe
from resharder.converters.architectures.table import HFConfig, Table

NAMES = {
    "mlp.gate.weight": "mlp.router.gate.weight",
    "mlp.gate.e_score_correction_bias": "mlp.expert_bias",
    "mlp.shared_experts.": "mlp.shared_mlp.",
}
"""Names on disk of DeepSeek-V3's tensors."""


def table(config: HFConfig) -> Table:
    """Return attention with norms of heads, a dense MLP in the first layers, and experts in the others."""
    refuse(config, "attention_bias", "mlp_bias", "num_nextn_predict_layers")
    config = renamed(config)
    size, sparse = Sizes.of(config), sparse_layers(config)
    attend = attention(size, head_norms=True)
    dense_layer = attend | dense_mlp(size, integer(config, "intermediate_size"))
    sparse_layer = attend | mixture(size, config)
    return decoder(size, lambda n: sparse_layer if sparse[n] else dense_layer)


def recipe(config: HFConfig) -> Recipe:
    """Return a decoder's recipe with norms of heads and DeepSeek-V3's router."""
    config = renamed(config)
    router = mixture_recipe(config, **balanced_router(config))
    made = decoder_recipe(config, qk_layernorm=True, **router)
    return made.unless(config, qk_norm=True, route_norm=True, moe_router_use_sigmoid=True, moe_router_enable_expert_bias=True)


def mixture(size: Sizes, config: HFConfig) -> Layer:
    """Return DeepSeek-V3's experts under Hy3's names."""
    return {key: tuple(weight.renamed(NAMES) for weight in weights) for key, weights in balanced_mixture(size, config).items()}


def renamed(config: HFConfig) -> dict[str, Any]:
    """Return the config with DeepSeek-V3's names of its fields, and transformers' defaults."""
    given = {key: value for key, value in completed(config).items() if value is not None}
    return {"rms_norm_eps": 1e-5, "rope_theta": 11158840.0, "head_dim": 128, **given} | {
        "n_routed_experts": integer(config, "num_experts", "num_local_experts"),
        "n_shared_experts": integer(config, "num_shared_experts", default=1),
        "routed_scaling_factor": config.get("router_scaling_factor") or 2.826,
    }
