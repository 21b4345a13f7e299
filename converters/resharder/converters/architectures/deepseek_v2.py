"""DeepSeek-V2 and V2-Lite: attention with low-rank keys, values and, except in Lite, queries; routed and shared experts."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from resharder.converters.architectures.blocks import (
    Layer,
    Sizes,
    decoder,
    dense_mlp,
    expert_mlp,
    integer,
    norm,
    refuse,
    shared_expert,
    whole,
)
from resharder.converters.architectures.recipe import Recipe, decoder_recipe, rope_settings, routed
from resharder.converters.architectures.table import HFConfig, Table


def table(config: HFConfig) -> Table:
    """Return latent attention in every layer, a dense MLP in the first layers, and routed and shared experts in the others."""
    refuse(config, "attention_bias", "mlp_bias")
    size, sparse = Sizes.of(config), sparse_layers(config)
    dense_layer = latent_attention(size, config) | dense_mlp(size, integer(config, "intermediate_size"))
    sparse_layer = latent_attention(size, config) | mixture(size, config)
    return decoder(size, lambda n: sparse_layer if sparse[n] else dense_layer)


def recipe(config: HFConfig) -> Recipe:
    """Return the recipe with softmax scores before the choice of experts, and groups of experts for `group_limited_greedy`."""
    groups = router_groups(config) if config.get("topk_method") == "group_limited_greedy" else {}
    return latent_recipe(config, moe_router_pre_softmax=True, **groups).unless(config, norm_topk_prob=False)


def latent_attention(size: Sizes, config: HFConfig) -> Layer:
    """Return multi-head latent attention and the norm before it.

    The norms of the latents are modules of their own in Megatron's local spec, and parts of the linears after them in
    TransformerEngine's, so both names are in the table.
    """
    latent, rotary = integer(config, "kv_lora_rank"), integer(config, "qk_rope_head_dim")
    query, value = integer(config, "qk_nope_head_dim"), integer(config, "v_head_dim")
    queries = size.heads * (query + rotary)

    def linear(key: str, name: str, *shape: int) -> Layer:
        return {f"self_attention.{key}.weight": (whole(f"self_attn.{name}.weight", *shape),)}

    def latent_norm(key: str, name: str, rank: int) -> Layer:
        keys = (f"self_attention.{key}_layernorm.weight", f"self_attention.linear_{key}_up_proj.layer_norm_weight")
        return dict.fromkeys(keys, (norm(f"self_attn.{name}.weight", size, rank),))

    layer: Layer = {"input_layernorm.weight": (norm("input_layernorm.weight", size),)}
    layer |= linear("linear_kv_down_proj", "kv_a_proj_with_mqa", latent + rotary, size.hidden)
    layer |= latent_norm("kv", "kv_a_layernorm", latent)
    layer |= linear("linear_kv_up_proj", "kv_b_proj", size.heads * (query + value), latent)
    layer |= linear("linear_proj", "o_proj", size.hidden, size.heads * value)
    if config.get("q_lora_rank") is None:
        return layer | linear("linear_q_proj", "q_proj", queries, size.hidden)
    rank = integer(config, "q_lora_rank")
    layer |= linear("linear_q_down_proj", "q_a_proj", rank, size.hidden)
    layer |= latent_norm("q", "q_a_layernorm", rank)
    return layer | linear("linear_q_up_proj", "q_b_proj", queries, rank)


def mixture(size: Sizes, config: HFConfig) -> Layer:
    """Return routed experts, the norm before them, and the shared experts, which are one wider MLP."""
    ffn, shared = integer(config, "moe_intermediate_size"), integer(config, "n_shared_experts")
    return expert_mlp(size, ffn, integer(config, "n_routed_experts")) | shared_expert(
        "mlp.shared_experts", size.hidden, shared * ffn
    )


def sparse_layers(config: HFConfig) -> list[bool]:
    """Return whether each layer has experts: all but the first `first_k_dense_replace`."""
    return [n >= config.get("first_k_dense_replace", 0) for n in range(integer(config, "num_hidden_layers"))]


def latent_recipe(config: HFConfig, **transformer: Any) -> Recipe:
    """Return the recipe of a decoder with latent attention and experts; `transformer` has further
    arguments of MLATransformerConfig.
    """
    arguments = {
        "multi_latent_attention": True,
        "q_lora_rank": config.get("q_lora_rank"),
        "kv_lora_rank": integer(config, "kv_lora_rank"),
        "qk_head_dim": integer(config, "qk_nope_head_dim"),
        "qk_pos_emb_head_dim": integer(config, "qk_rope_head_dim"),
        "v_head_dim": integer(config, "v_head_dim"),
        "kv_channels": integer(config, "v_head_dim"),
        "qk_layernorm": True,
    }
    rope = rope_settings(config)
    made = decoder_recipe(config, **arguments, **rotary(rope), **mixture_recipe(config), **transformer)
    if rope["rope_type"] not in ("default", "yarn"):
        return replace(made, beyond=(*made.beyond, f"rope_type={rope['rope_type']!r}"))
    return made.unless(rope, attention_factor=None, truncate=True)


def mixture_recipe(config: HFConfig, **transformer: Any) -> dict[str, Any]:
    """Return TransformerConfig's arguments for routed and shared experts; `transformer` has further ones."""
    ffn, experts = integer(config, "moe_intermediate_size"), integer(config, "n_routed_experts")
    shared = {
        "moe_shared_expert_intermediate_size": integer(config, "n_shared_experts") * ffn,
        "moe_router_topk_scaling_factor": config.get("routed_scaling_factor", 1.0),
    }
    return routed(config, experts, ffn, sparse=sparse_layers(config), **shared, **transformer)


def router_groups(config: HFConfig) -> dict[str, Any]:
    """Return TransformerConfig's arguments for a router that chooses groups of experts first; none if there is one group."""
    if (config.get("n_group") or 1) == 1:
        return {}
    return {"moe_router_num_groups": integer(config, "n_group"), "moe_router_group_topk": integer(config, "topk_group")}


def rotary(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return MLATransformerConfig's arguments for rotary embeddings with the parameters `rope`."""
    base = {"rotary_base": rope["rope_theta"] or 10000.0}
    if rope["rope_type"] != "yarn":
        return base | {"rope_type": "rope"}
    return base | {
        "rope_type": "yarn",
        "rotary_scaling_factor": rope["factor"],
        "original_max_position_embeddings": rope["original_max_position_embeddings"],
        "beta_fast": rope.get("beta_fast", 32),
        "beta_slow": rope.get("beta_slow", 1),
        "mscale": rope.get("mscale", 1.0),
        "mscale_all_dim": rope.get("mscale_all_dim", 0.0),
    }
