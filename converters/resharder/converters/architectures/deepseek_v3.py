"""DeepSeek-V3 and Kimi-K2: DeepSeek-V2 with a bias that balances the load of experts, and layers that predict further tokens."""

from typing import Any

from resharder.converters.architectures.blocks import Layer, Sizes, decoder, dense_mlp, integer, refuse, whole
from resharder.converters.architectures.deepseek_v2 import latent_attention, latent_recipe, mixture, router_groups, sparse_layers
from resharder.converters.architectures.mtp import further_tokens, with_predictions
from resharder.converters.architectures.recipe import Recipe
from resharder.converters.architectures.table import HFConfig, Table
from resharder.converters.errors import LayoutError


def table(config: HFConfig) -> Table:
    """Return the table of `balanced_decoder`. Raises LayoutError for a router of which vLLM would compute other scores."""
    scores = config.get("scoring_func")
    if config.get("topk_method") == "noaux_tc" and scores != "sigmoid":
        raise LayoutError(
            f"config: scoring_func={scores!r}: vLLM takes the softmax of experts' scores, but the model is trained with their "
            "sigmoid. Write scoring_func='sigmoid', as in the released config"
        )
    return balanced_decoder(config)


def balanced_decoder(config: HFConfig) -> Table:
    """Return DeepSeek-V2's layers, with `expert_bias` in those with experts, and the MTP layers."""
    refuse(config, "attention_bias", "mlp_bias")
    size, sparse = Sizes.of(config), sparse_layers(config)
    dense_layer = latent_attention(size, config) | dense_mlp(size, integer(config, "intermediate_size"))
    sparse_layer = latent_attention(size, config) | balanced_mixture(size, config)
    layers = decoder(size, lambda n: sparse_layer if sparse[n] else dense_layer)
    return with_predictions(layers, size, config, sparse_layer)


def recipe(config: HFConfig) -> Recipe:
    """Return DeepSeek-V2's recipe with the router of `balanced_router`, and the number of MTP layers."""
    made = latent_recipe(config, **balanced_router(config), mtp_num_layers=further_tokens(config) or None)
    return made.unless(config, norm_topk_prob=True, rope_interleave=True)


def balanced_mixture(size: Sizes, config: HFConfig) -> Layer:
    """Return experts with the bias by which they are chosen, float32 in Megatron and in HF. It does not weight their outputs."""
    bias = whole("mlp.gate.e_score_correction_bias", integer(config, "n_routed_experts"))
    return mixture(size, config) | {"mlp.router.expert_bias": (bias,)}


def balanced_router(config: HFConfig) -> dict[str, Any]:
    """Return TransformerConfig's arguments for sigmoid scores in float32, that bias, and groups of experts."""
    scores = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "moe_router_dtype": "fp32"}
    return scores | router_groups(config)
