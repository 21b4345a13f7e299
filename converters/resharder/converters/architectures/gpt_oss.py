"""GPT-OSS: attention with sinks, biases in all linears, and experts that HF stacks, transposes and, for gate and up, interleaves.

Published checkpoints are quantised (MXFP4) and therefore refused. The table is that of the bf16 form, which trainers use.
"""

from typing import Any

from resharder.converters.architectures.blocks import Layer, Sizes, attention, before_mlp, decoder, integer, refuse_others, whole
from resharder.converters.architectures.recipe import Recipe, decoder_recipe, routed, window
from resharder.converters.architectures.table import HFConfig, Rows, Table, Weight
from resharder.converters.errors import LayoutError, UnsupportedModel


def table(config: HFConfig) -> Table:
    """Return attention with sinks and stacked experts in every layer.

    Raises UnsupportedModel for attention without biases, LayoutError for a clamp or windows that vLLM would not compute.
    """
    if not config.get("attention_bias", True):
        raise UnsupportedModel("config: attention_bias=False: Megatron adds biases to experts and attention, or to neither")
    refuse_others(config, "swiglu_limit", 7.0)
    if list(config.get("layer_types") or kinds(config)) != kinds(config):
        raise LayoutError(
            "config: layer_types: vLLM computes windows in the first layer and every other one whatever the config says. "
            "Train the model with these"
        )
    size = Sizes.of(config)
    layer = sink_attention(size) | stacked_experts(size, integer(config, "intermediate_size"), experts(config))
    return decoder(size, lambda n: layer)


def kinds(config: HFConfig) -> list[str]:
    """Return the kind of attention of each layer, transformers' default: a window in every other one."""
    return ["full_attention" if n % 2 else "sliding_attention" for n in range(integer(config, "num_hidden_layers"))]


def sink_attention(size: Sizes) -> Layer:
    """Return attention with biases and one sink per query head."""
    return attention(size, qkv_bias=True) | {
        "self_attention.linear_proj.bias": (whole("self_attn.o_proj.bias", size.hidden),),
        "self_attention.core_attention.softmax_offset": (whole("self_attn.sinks", size.heads),),
    }


def stacked_experts(size: Sizes, ffn: int, experts: int) -> Layer:
    """Return routed experts with biases, and the norm before them.

    HF has gate_up_proj [experts, hidden, 2 ffn], with gate and up channels in turn, and down_proj [experts, ffn, hidden]; their
    biases have the same order.
    """

    def up(expert: int, suffix: str, *rest: int) -> Weight:
        gate, up = (Rows(half * ffn, ffn, f"mlp.experts.gate_up_proj{suffix}", half, 2, expert) for half in (0, 1))
        return Weight((2 * ffn, *rest), (gate, up), transpose=True)

    def down(expert: int, suffix: str, *rest: int) -> Weight:
        rows = Rows(0, size.hidden, f"mlp.experts.down_proj{suffix}", index=expert)
        return Weight((size.hidden, *rest), (rows,), transpose=True)

    return before_mlp(size) | {
        "mlp.router.weight": (whole("mlp.router.weight", experts, size.hidden),),
        "mlp.router.bias": (whole("mlp.router.bias", experts),),
        "mlp.experts.experts.linear_fc1.weight": tuple(up(e, "", size.hidden) for e in range(experts)),
        "mlp.experts.experts.linear_fc1.bias": tuple(up(e, "_bias") for e in range(experts)),
        "mlp.experts.experts.linear_fc2.weight": tuple(down(e, "", ffn) for e in range(experts)),
        "mlp.experts.experts.linear_fc2.bias": tuple(down(e, "_bias") for e in range(experts)),
    }


def recipe(config: HFConfig) -> Recipe:
    """Return the recipe with learnable sinks, clamped quick GELU, experts in every layer, and YaRN."""
    sparse = [True] * integer(config, "num_hidden_layers")
    built = decoder_recipe(
        completed(config),
        add_bias_linear=True,
        softmax_type="learnable",
        activation_func="quick_gelu",
        activation_func_clamp_value=7.0,
        glu_linear_offset=1.0,
        bias_activation_fusion=False,
        **window({**config, "layer_types": kinds(config)}),
        **routed(config, experts(config), integer(config, "intermediate_size"), sparse=sparse),
    )
    return built.unless(config, swiglu_alpha=1.702)


def completed(config: HFConfig) -> dict[str, Any]:
    """Return the config with transformers' defaults of rotary embeddings: YaRN."""
    if config.get("rope_parameters") or config.get("rope_scaling"):
        return dict(config)
    yarn = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
    return {**config, "rope_parameters": yarn | {"rope_theta": config.get("rope_theta") or 150000.0}}


def experts(config: HFConfig) -> int:
    """Return the number of routed experts, under either of the names that transformers writes."""
    return integer(config, "num_local_experts", "num_experts")
