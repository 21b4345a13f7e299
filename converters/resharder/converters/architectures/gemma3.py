"""Gemma 3, the text model: Gemma 2 with norms of query and key heads, and another rotary base in layers with a window."""

from dataclasses import replace

from resharder.converters.architectures import gemma2
from resharder.converters.architectures.blocks import Sizes, attention, decoder, integer
from resharder.converters.architectures.recipe import Recipe
from resharder.converters.architectures.table import HFConfig, Table


def table(config: HFConfig) -> Table:
    """Return Gemma 2's layers with norms of query and key heads."""
    size = Sizes.of(gemma2.completed(config), gain=0.0)
    layer = attention(size, head_norms=True) | gemma2.sandwiched_mlp(config, size)
    return decoder(size, lambda n: layer)


def recipe(config: HFConfig) -> Recipe:
    """Return Gemma 2's recipe with `qk_layernorm`, and the rotary bases of layers with and without a window.

    Neither megatron-core nor Megatron-Bridge has softcaps for this family, which the config may set.
    """
    built = gemma2.recipe(config, integer(config, "sliding_window_pattern", default=6), qk_layernorm=True)
    rope = config.get("rope_parameters") or {}
    everywhere, local = rope.get("full_attention") or {}, rope.get("sliding_attention") or {}
    scaled = everywhere or config.get("rope_scaling") or {}
    kind = scaled.get("rope_type") or scaled.get("type") or ("linear" if "factor" in scaled else "default")
    scaling = scaled.get("factor") if kind == "linear" else None
    model = {"rotary_base": everywhere.get("rope_theta") or config.get("rope_theta") or 1e6}
    extras = replace(built.extras, local_rotary_base=local.get("rope_theta") or config.get("rope_local_base_freq") or 1e4)
    other = () if kind in ("default", "linear") else (f"rope_type={kind!r}",)
    made = built.but(model | {"seq_len_interpolation_factor": scaling})
    made = made.unless(config, attn_logit_softcapping=None, final_logit_softcapping=None)
    return replace(made, extras=extras, beyond=(*made.beyond, *other))
