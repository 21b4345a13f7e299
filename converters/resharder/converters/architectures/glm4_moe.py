"""GLM-4.5: grouped-query attention, DeepSeek-V3's experts, and a layer that predicts a further token."""

from resharder.converters.architectures.blocks import Sizes, attention, decoder, dense_mlp, integer
from resharder.converters.architectures.deepseek_v2 import mixture_recipe, sparse_layers
from resharder.converters.architectures.deepseek_v3 import balanced_mixture, balanced_router
from resharder.converters.architectures.mtp import further_tokens, with_predictions
from resharder.converters.architectures.recipe import Recipe, decoder_recipe
from resharder.converters.architectures.table import HFConfig, Table


def table(config: HFConfig) -> Table:
    """Return grouped-query attention, a dense MLP in the first layers, DeepSeek-V3's experts in the
    others, and the MTP layers.
    """
    size, sparse = Sizes.of(config), sparse_layers(config)
    attend = attention(size, qkv_bias=bool(config.get("attention_bias")), head_norms=bool(config.get("use_qk_norm")))
    dense_layer = attend | dense_mlp(size, integer(config, "intermediate_size"))
    sparse_layer = attend | balanced_mixture(size, config)
    layers = decoder(size, lambda n: sparse_layer if sparse[n] else dense_layer)
    return with_predictions(layers, size, config, sparse_layer)


def recipe(config: HFConfig) -> Recipe:
    """Return a decoder's recipe with DeepSeek-V3's router, partly rotated heads, and the number of MTP layers."""
    rope = config.get("rope_parameters") or {}
    part = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 0.5
    bias, norms = bool(config.get("attention_bias")), bool(config.get("use_qk_norm"))
    made = decoder_recipe(config, add_qkv_bias=bias, qk_layernorm=norms, mtp_num_layers=further_tokens(config) or None)
    made = made.but({"rotary_percent": part}, **mixture_recipe(config, **balanced_router(config)))
    return made.unless(config, norm_topk_prob=True)
