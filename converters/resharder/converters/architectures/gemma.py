"""Gemma: Llama with gains stored around zero, scaled embeddings, tied, and a GELU that is approximated by tanh."""

import math
from dataclasses import replace
from typing import Any

from resharder.converters.architectures.blocks import Sizes, attention, decoder, dense_mlp, integer, refuse, refuse_others
from resharder.converters.architectures.recipe import Extras, Recipe, decoder_recipe
from resharder.converters.architectures.table import HFConfig, Table


def table(config: HFConfig) -> Table:
    """Return attention and a gated MLP in every layer, with gains stored around zero."""
    refuse(config, "attention_bias")
    refuse_others(config, "hidden_act", "gelu_pytorch_tanh", "gelu")
    refuse_others(config, "hidden_activation", "gelu_pytorch_tanh")
    size = Sizes.of(completed(config), gain=0.0)
    layer = attention(size) | dense_mlp(size, integer(config, "intermediate_size"))
    return decoder(size, lambda n: layer)


def recipe(config: HFConfig) -> Recipe:
    """Return a decoder's recipe with gains around zero and scaled embeddings."""
    built = decoder_recipe(completed(config), layernorm_zero_centered_gamma=True)
    scaled = replace(built, extras=Extras(embedding_scale=math.sqrt(integer(config, "hidden_size"))))
    return scaled.unless(config, use_bidirectional_attention=False)


def completed(config: HFConfig) -> dict[str, Any]:
    """Return the config with transformers' defaults. `gelu`, in the released files, means the approximated one."""
    given = {key: value for key, value in config.items() if value is not None}
    return {"tie_word_embeddings": True, "head_dim": 256, **given, "hidden_act": "gelu_pytorch_tanh"}
