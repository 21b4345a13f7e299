"""Qwen3.5, the text model: Qwen3-Next with separate input projections for gates and decays, and a dense MLP.

The released checkpoints have it in a wrapper with a tower (`Qwen3_5ForConditionalGeneration`).
"""

from resharder.converters.architectures.blocks import Layer, Sizes, decoder, dense_mlp, integer, placed, refuse, whole
from resharder.converters.architectures.gated_delta_net import (
    DeltaSizes,
    delta_net,
    flat,
    gated_attention,
    hybrid_recipe,
    linear_layers,
    shared_prediction,
)
from resharder.converters.architectures.recipe import Recipe
from resharder.converters.architectures.table import HFConfig, Table
from resharder.converters.architectures.wrapped import (
    NESTED,
    language_config,
    qwen3_tower,
    qwen3_tower_recipe,
    vision_config,
    wrapped_recipe,
    wrapped_table,
)


def table(config: HFConfig) -> Table:
    """Return `hybrid` layers with a dense MLP."""
    size = Sizes.of(config, gain=0.0)
    return hybrid(config, dense_mlp(size, integer(config, "intermediate_size")))


def hybrid(config: HFConfig, mlp: Layer, predicting: Layer | None = None) -> Table:
    """Return layers of gated delta nets and gated attention, all with `mlp`, and the MTP layer with `predicting` or the same."""
    refuse(config, "attention_bias", "mtp_use_dedicated_embeddings")
    size, linear, delta = Sizes.of(config, gain=0.0), linear_layers(config), DeltaSizes.of(config)
    mixers = (gated_attention(size), delta_net(size, delta, projections(delta)))
    layers = decoder(size, lambda n: mixers[linear[n]] | mlp)
    return {**layers, **shared_prediction(size, mixers[False] | (predicting or mlp), predictions(config))}


def projections(delta: DeltaSizes) -> Layer:
    """Return the input projections: `in_proj_qkv` in sections, `in_proj_z`, `in_proj_b` and `in_proj_a`."""
    rows = delta.sections
    fused = flat("linear_attn.in_proj_qkv.weight", {name: rows[name] for name in ("query", "key", "value")}, delta.hidden)
    single = {
        section: (whole(f"linear_attn.in_proj_{name}.weight", rows[section], delta.hidden),)
        for section, name in (("z", "z"), ("beta", "b"), ("alpha", "a"))
    }
    return placed(fused | single, "in_proj.weight.", "")


def predictions(config: HFConfig) -> int:
    """Return the number of MTP layers in the checkpoint."""
    return config.get("mtp_num_hidden_layers") or 0


def recipe(config: HFConfig) -> Recipe:
    """Return `hybrid_recipe` with the number of MTP layers."""
    return hybrid_recipe(config, mtp_num_layers=predictions(config) or None)


def released_table(config: HFConfig) -> Table:
    """Return the table of the released form, with Qwen3-VL's tower."""
    return wrapped_table(table(language_config(config)), NESTED, qwen3_tower(vision_config(config)))


def released_recipe(config: HFConfig) -> Recipe:
    """Return the recipe of the released form."""
    return wrapped_recipe(config, recipe(language_config(config)), qwen3_tower_recipe(vision_config(config)))
