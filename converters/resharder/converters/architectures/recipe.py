"""Recipes: the arguments with which megatron-core builds a family, as plain data from config.json, without Megatron or torch.

`models/megatron/build.py` builds models from them, for `resharder check` and for tests that compare Megatron's logits with
those of transformers. A trainer builds its own model, which `attach` compares with the recipe as `agreement.py` says.
"""

from collections.abc import Callable, Mapping
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
    """

    post_norms: bool = False
    whole_norms: bool = False
    embedding_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    local_rotary_base: float | None = None


@dataclass(frozen=True)
class Tower:
    """Part of a model that sees images, beside its language model.

    Attributes:
        module: Name of the module with Megatron's own layers; empty for modules of transformers.
        transformer: Arguments of TransformerConfig for these layers, in its form in `Recipe`.
        config: The `vision_config`.
        interleaved: Whether the language model rotates channels by the three positions of an image in turn (`mrope_interleaved`).
    """

    module: str = ""
    transformer: dict[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    interleaved: bool = False


@dataclass(frozen=True)
class Recipe:
    """Arguments with which megatron-core builds a model.

    Attributes:
        transformer: Arguments of TransformerConfig (of MLATransformerConfig with `multi_latent_attention`). An activation is a
            name in torch.nn.functional or megatron.core.activations.
        model: Arguments of GPTModel.
        attributes: Attributes that GPTModel reads from its config although no argument sets them (those of YaRN).
        extras: Features for which megatron-core has no argument.
        beyond: Values of the config that megatron-core cannot compute with, such as `clip_qkv=8.0`.
        tower: The tower of a model whose language model is in a wrapper; None for a language model alone.
    """

    transformer: dict[str, Any]
    model: dict[str, Any]
    attributes: dict[str, Any] = field(default_factory=dict)
    extras: Extras = Extras()
    beyond: tuple[str, ...] = ()
    tower: Tower | None = None

    def but(self, model: dict[str, Any] | None = None, **transformer: Any) -> "Recipe":
        """Return the same recipe with some arguments changed or added."""
        return replace(self, transformer=self.transformer | transformer, model=self.model | (model or {}))

    def unless(self, config: HFConfig, **computed: Any) -> "Recipe":
        """Return the recipe with a field of `config` in `beyond` if it has another value than megatron-core computes with."""
        other = tuple(f"{key}={config[key]!r}" for key, value in computed.items() if config.get(key, value) not in (value, None))
        return replace(self, beyond=self.beyond + other)


def decoder_recipe(config: HFConfig, **transformer: Any) -> Recipe:
    """Return the recipe of a pre-norm decoder with RMSNorm, rotary embeddings, grouped-query attention and a gated SiLU MLP.

    Linears have no biases. `transformer` adds or replaces arguments of TransformerConfig.
    """
    size, rope, activation = Sizes.of(config), rope_settings(config), config.get("hidden_act") or "silu"
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
        "activation_func": ACTIVATIONS.get(activation, "silu"),
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    model = {
        "vocab_size": size.vocab,
        "max_sequence_length": integer(config, "max_position_embeddings", default=4096),
        "share_embeddings_and_output_weights": size.tied,
        "position_embedding_type": "rope",
        "rotary_base": rope.get("rope_theta") or 10000.0,
    }
    recipe = Recipe(common | transformer, model)
    if activation not in ACTIVATIONS and "activation_func" not in transformer:
        recipe = replace(recipe, beyond=(f"hidden_act={activation!r}",))
    return recipe if transformer.get("multi_latent_attention") else scaled(recipe, rope)


ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "fast_gelu",
    "gelu_fast": "fast_gelu",
    "gelu_accurate": "fast_gelu",
    "gelu_pytorch_tanh": "fast_gelu",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "squared_relu",
}
"""Name in torch.nn.functional or megatron.core.activations for each of transformers' names."""


def rope_settings(config: HFConfig) -> dict[str, Any]:
    """Return the parameters of rotary embeddings with transformers' names, `rope_type` and `rope_theta` among them.

    Reads `rope_parameters`, or the `rope_scaling` and `rope_theta` of transformers before version 5.
    """
    given = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    given["rope_type"] = given.get("rope_type") or given.get("type") or "default"
    given["rope_theta"] = given.get("rope_theta") or config.get("rope_theta")
    if given["rope_type"] in ("llama3", "yarn") and not given.get("original_max_position_embeddings"):
        given["original_max_position_embeddings"] = config.get("max_position_embeddings")
    return given


def scaled(recipe: Recipe, rope: Mapping[str, Any]) -> Recipe:
    """Return a recipe with rotary embeddings scaled as `rope` has them, for models without latent attention."""
    kind, factor = rope["rope_type"], rope.get("factor")
    if kind in ("default", "mrope"):
        return recipe
    if kind == "linear" and factor:
        return recipe.but({"seq_len_interpolation_factor": factor})
    if kind == "llama3" and factor:
        constants = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
        return recipe.but({"rope_scaling": True, "rope_scaling_factor": factor}).unless(rope, **constants)
    if kind == "yarn" and factor:
        return replace(recipe.but({"position_embedding_type": "yarn"}), attributes=yarn_attributes(rope)).unless(
            rope, attention_factor=None
        )
    return replace(recipe, beyond=(*recipe.beyond, f"rope_type={kind!r}"))


def yarn_attributes(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of Megatron's config that GPTModel reads for YaRN."""
    both = bool(rope.get("mscale") and rope.get("mscale_all_dim"))
    return {
        "yarn_rotary_scaling_factor": rope["factor"],
        "yarn_original_max_position_embeddings": rope["original_max_position_embeddings"],
        "yarn_beta_fast": rope.get("beta_fast") or 32.0,
        "yarn_beta_slow": rope.get("beta_slow") or 1.0,
        "yarn_mscale": rope["mscale"] if both else None,
        "yarn_mscale_all_dim": rope["mscale_all_dim"] if both else None,
        "yarn_correction_range_round_to_int": rope.get("truncate", True),
    }


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
    if layers and not any(layers):
        return {}
    arguments: dict[str, Any] = {"window_size": (integer(config, "sliding_window") - 1, 0)}
    return arguments | ({"window_attn_skip_freq": [int(layer) for layer in layers]} if layers else {})


def optional_window(config: HFConfig, has_window: Callable[[int, int], bool]) -> dict[str, Any]:
    """Return `window` for families in which `use_sliding_window` turns it on.

    Without `layer_types`, `has_window` says whether the layer n has a window, given `max_window_layers`.
    """
    if not config.get("use_sliding_window"):
        return {}
    most, layers = config.get("max_window_layers", 28), range(integer(config, "num_hidden_layers"))
    kinds = ["sliding_attention" if has_window(n, most) else "full_attention" for n in layers]
    return window({**config, "layer_types": config.get("layer_types") or kinds})


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
