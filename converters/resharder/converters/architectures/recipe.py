"""Recipes: the arguments with which megatron-core builds a family, as plain data from config.json, without Megatron or torch.

`models/megatron/build.py` builds models from them, for `resharder check` and for tests that compare Megatron's logits with
those of transformers. A trainer builds its own model. Before a layout is computed, the values that `agreement.py` lists are
compared with those of the trainer's model, and a model that differs is refused. Other values of a recipe do not affect layouts.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from resharder.converters.architectures.blocks import Sizes, integer
from resharder.converters.architectures.table import HFConfig


@dataclass(frozen=True)
class Extras:
    """Features for which megatron-core has no argument. `models/megatron/extras.py` adds them.

    Attributes:
        post_norms: Norms of the outputs of attention and MLP, before they are added to the hidden states.
        whole_norms: Query and key norms over all heads at once.
        embedding_scale: Factor of the embeddings.
        attention_softcap: Bound of the scores: x becomes cap * tanh(x / cap).
        logit_softcap: Bound of the logits, applied in the same way.
        local_rotary_base: Rotary base of layers whose attention has a window.
        clip_qkv: Bound of queries, keys and values. No model is built with it.
    """

    post_norms: bool = False
    whole_norms: bool = False
    embedding_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    local_rotary_base: float | None = None
    clip_qkv: float | None = None


@dataclass(frozen=True)
class Recipe:
    """Arguments with which megatron-core builds a model.

    Attributes:
        transformer: Arguments of TransformerConfig (of MLATransformerConfig with `multi_latent_attention`). An activation is a
            name in torch.nn.functional or megatron.core.activations.
        model: Arguments of GPTModel.
        attributes: Attributes that GPTModel reads from its config although no argument sets them (those of YaRN).
        extras: Features for which megatron-core has no argument.
    """

    transformer: dict[str, Any]
    model: dict[str, Any]
    attributes: dict[str, Any] = field(default_factory=dict)
    extras: Extras = Extras()

    def but(self, model: dict[str, Any] | None = None, **transformer: Any) -> "Recipe":
        """Return the same recipe with some arguments changed or added."""
        return replace(self, transformer=self.transformer | transformer, model=self.model | (model or {}))


def decoder_recipe(config: HFConfig, **transformer: Any) -> Recipe:
    """Return the recipe of a pre-norm decoder with RMSNorm, rotary embeddings, grouped-query attention and a gated SiLU MLP.

    Linears have no biases. `transformer` adds or replaces arguments of TransformerConfig.
    """
    size = Sizes.of(config)
    rope = config.get("rope_parameters") or {}
    common = {
        "num_layers": size.layers,
        "hidden_size": size.hidden,
        "num_attention_heads": size.heads,
        "num_query_groups": size.groups,
        "kv_channels": size.head_dim,
        "ffn_hidden_size": integer(config, "intermediate_size", "moe_intermediate_size"),
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.get("rms_norm_eps", 1e-6),
        "gated_linear_unit": True,
        "activation_func": "silu",
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    model = {
        "vocab_size": size.vocab,
        "max_sequence_length": integer(config, "max_position_embeddings", default=4096),
        "share_embeddings_and_output_weights": size.tied,
        "position_embedding_type": "rope",
        "rotary_base": rope.get("rope_theta") or config.get("rope_theta") or 10000.0,
    }
    return Recipe(common | transformer, model)


def partial_rotary(config: HFConfig, default: float) -> dict[str, Any]:
    """Return GPTModel's argument for the rotated fraction of a head; `default` if the config has none."""
    rope = config.get("rope_parameters") or {}
    return {"rotary_percent": rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or default}


def window(config: HFConfig) -> dict[str, Any]:
    """Return TransformerConfig's arguments for attention over the last `sliding_window` tokens.

    The window applies to the layers that `layer_types` names, or to all. Megatron counts earlier tokens only, HF also the token
    itself.
    """
    if not config.get("sliding_window"):
        return {}
    layers = [kind == "sliding_attention" for kind in config.get("layer_types") or ()]
    arguments: dict[str, Any] = {"window_size": (integer(config, "sliding_window") - 1, 0)}
    return arguments | ({"window_attn_skip_freq": [int(layer) for layer in layers]} if layers else {})


def routed(config: HFConfig, experts: int, ffn: int, *, sparse: list[bool], **transformer: Any) -> dict[str, Any]:
    """Return TransformerConfig's arguments for routed experts.

    Args:
        config: Content of config.json.
        experts: Number of experts.
        ffn: Width of an expert.
        sparse: Whether each layer has experts.
        **transformer: Further arguments.
    """
    return {
        "num_moe_experts": experts,
        "moe_layer_freq": [int(layer) for layer in sparse],
        "moe_router_topk": integer(config, "num_experts_per_tok"),
        "moe_ffn_hidden_size": ffn,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
    } | transformer
