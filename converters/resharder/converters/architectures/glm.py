"""GLM-4-9B: half of each head is rotated, in pairs of neighbouring channels; HF has gate and up projections in one tensor."""

from resharder.converters.architectures.blocks import Layer, Sizes, attention, before_mlp, decoder, integer, refuse, whole
from resharder.converters.architectures.recipe import Recipe, decoder_recipe, partial_rotary
from resharder.converters.architectures.table import HFConfig, Table


def table(config: HFConfig) -> Table:
    """Return `fused_layer` in every layer."""
    size = Sizes.of(config)
    layer = fused_layer(config, size)
    return decoder(size, lambda n: layer)


def fused_layer(config: HFConfig, size: Sizes) -> Layer:
    """Return attention, with biases by default, and a gated MLP that HF stores as Megatron does: gate and up fused."""
    refuse(config, "mlp_bias")
    ffn, biased = integer(config, "intermediate_size"), bool(config.get("attention_bias", True))
    return (
        attention(size, qkv_bias=biased)
        | before_mlp(size)
        | {
            "mlp.linear_fc1.weight": (whole("mlp.gate_up_proj.weight", 2 * ffn, size.hidden),),
            "mlp.linear_fc2.weight": (whole("mlp.down_proj.weight", size.hidden, ffn),),
        }
    )


def recipe(config: HFConfig) -> Recipe:
    """Return the recipe with interleaved rotary embeddings of half of each head."""
    biased = bool(config.get("attention_bias", True))
    return decoder_recipe(config, add_qkv_bias=biased, rotary_interleaved=True).but(partial_rotary(config, 0.5))
