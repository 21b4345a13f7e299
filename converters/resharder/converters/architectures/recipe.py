"""How megatron-core is told to build a family: plain data that follows from config.json, no Megatron and no torch.

`models/megatron/build.py` makes models of it, for `resharder check` and for the tests that compare Megatron's logits with
transformers'. A trainer builds its model as it likes, but not of other sizes: before a layout is made, the values that
`agreement.py` names are compared with those of the trainer's model, and a model that differs is refused. The other values of a
recipe have no effect on layouts.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from resharder.converters.architectures.blocks import Sizes, integer
from resharder.converters.architectures.table import HFConfig


@dataclass(frozen=True)
class Extras:
    """What megatron-core has no argument for and `extras.py` adds. `post_norms`: norms of what attention and MLP give, before it
    is added to the hidden states. `whole_norms`: query and key norms that run over all heads at once. `embedding_scale`: a
    factor of the embeddings. `attention_softcap`, `logit_softcap`: x becomes cap * tanh(x / cap). `local_rotary_base`: that of
    layers whose attention has a window. `clip_qkv`: the limit of queries, keys and values, which is refused."""

    post_norms: bool = False
    whole_norms: bool = False
    embedding_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    local_rotary_base: float | None = None
    clip_qkv: float | None = None


@dataclass(frozen=True)
class Recipe:
    """`transformer`: arguments of megatron-core's TransformerConfig (of MLATransformerConfig where they say
    `multi_latent_attention`), an activation by its name in torch.nn.functional or megatron.core.activations. `model`:
    arguments of GPTModel. `attributes`: what GPTModel reads off its config though no argument sets it (YaRN's). `extras`: what
    it knows nothing of."""

    transformer: dict[str, Any]
    model: dict[str, Any]
    attributes: dict[str, Any] = field(default_factory=dict)
    extras: Extras = Extras()

    def but(self, model: dict[str, Any] | None = None, **transformer: Any) -> "Recipe":
        """The same with some arguments changed or added."""
        return replace(self, transformer=self.transformer | transformer, model=self.model | (model or {}))


def decoder_recipe(config: HFConfig, **transformer: Any) -> Recipe:
    """A pre-norm decoder with RMSNorm, rotary embeddings, grouped-query attention and a gated SiLU MLP, without biases."""
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
    """GPTModel's argument of how much of a head is rotated."""
    rope = config.get("rope_parameters") or {}
    return {"rotary_percent": rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or default}


def window(config: HFConfig) -> dict[str, Any]:
    """TransformerConfig's arguments of attention over the last `sliding_window` tokens, in the layers that `layer_types` says, or
    in all. Megatron's window is how many it looks back besides the token itself."""
    if not config.get("sliding_window"):
        return {}
    layers = [kind == "sliding_attention" for kind in config.get("layer_types") or ()]
    arguments: dict[str, Any] = {"window_size": (integer(config, "sliding_window") - 1, 0)}
    return arguments | ({"window_attn_skip_freq": [int(layer) for layer in layers]} if layers else {})


def routed(config: HFConfig, experts: int, ffn: int, *, sparse: list[bool], **transformer: Any) -> dict[str, Any]:
    """TransformerConfig's arguments of routed experts; `sparse` says which layers have them."""
    return {
        "num_moe_experts": experts,
        "moe_layer_freq": [int(layer) for layer in sparse],
        "moe_router_topk": integer(config, "num_experts_per_tok"),
        "moe_ffn_hidden_size": ffn,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
    } | transformer
