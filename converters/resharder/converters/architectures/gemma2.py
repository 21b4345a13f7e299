"""Gemma 2: norms before and after attention and MLP, gains stored around zero, capped scores and
logits, windows in every other layer.
"""

import math
from dataclasses import replace
from typing import Any

from resharder.converters.architectures.blocks import Layer, Sizes, attention, decoder, dense_mlp, integer, post_norms, refuse
from resharder.converters.architectures.recipe import Extras, Recipe, decoder_recipe, window
from resharder.converters.architectures.table import HFConfig, Table


def table(config: HFConfig) -> Table:
    """Return attention and `sandwiched_mlp` in every layer, with gains stored around zero."""
    size = Sizes.of(completed(config), gain=0.0)
    layer = attention(size) | sandwiched_mlp(config, size)
    return decoder(size, lambda n: layer)


def sandwiched_mlp(config: HFConfig, size: Sizes) -> Layer:
    """Return a gated MLP, the norms before and after it, and the norm after attention."""
    refuse(config, "attention_bias")
    after = post_norms(size, "post_attention_layernorm", "post_feedforward_layernorm")
    return after | dense_mlp(size, integer(config, "intermediate_size"), before="pre_feedforward_layernorm")


def recipe(config: HFConfig, period: int = 2, **transformer: Any) -> Recipe:
    """Return the recipe. Every `period`-th layer attends to all tokens, the others to a window."""
    config = completed(config, period)
    built = decoder_recipe(
        config | {"hidden_act": config.get("hidden_activation") or "gelu_pytorch_tanh"},
        layernorm_zero_centered_gamma=True,
        softmax_scale=integer(config, "query_pre_attn_scalar", default=256) ** -0.5,
        **window(config) | transformer,
    )
    extras = Extras(
        post_norms=True,
        embedding_scale=math.sqrt(integer(config, "hidden_size")),
        attention_softcap=config.get("attn_logit_softcapping"),
        logit_softcap=config.get("final_logit_softcapping"),
    )
    return replace(built, extras=extras).unless(config, use_bidirectional_attention=False)


def completed(config: HFConfig, period: int = 2) -> dict[str, Any]:
    """Return the config with the values that published files leave to transformers' defaults."""
    layers = range(1, integer(config, "num_hidden_layers") + 1)
    kinds = ["sliding_attention" if n % period else "full_attention" for n in layers]
    given = {key: value for key, value in config.items() if value is not None}
    return {"tie_word_embeddings": True, "head_dim": 256, "layer_types": kinds, **given}
