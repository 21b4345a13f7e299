"""Qwen3-Next: layers of gated delta nets and of gated attention, with routed experts and a gated shared one."""

from resharder.converters.architectures.blocks import (
    Layer,
    Sizes,
    decoder,
    dense_mlp,
    expert_mlp,
    integer,
    placed,
    refuse,
    shared_expert,
)
from resharder.converters.architectures.gated_delta_net import (
    DeltaSizes,
    delta_net,
    gated_attention,
    hybrid_recipe,
    interleaved,
    linear_layers,
    shared_prediction,
)
from resharder.converters.architectures.mtp import further_tokens
from resharder.converters.architectures.qwen3_moe import experts, sparse_layers
from resharder.converters.architectures.recipe import Recipe, routed
from resharder.converters.architectures.table import HFConfig, Table


def table(config: HFConfig) -> Table:
    """Return the table. The MTP layer, `mtp.*`, is included if `num_nextn_predict_layers` is set.

    Published config.json files lack that field.
    """
    refuse(config, "attention_bias")
    size, linear, sparse = Sizes.of(config, gain=0.0), linear_layers(config), sparse_layers(config)
    mixers = (gated_attention(size), delta_net(size, DeltaSizes.of(config), projections(DeltaSizes.of(config))))
    mlps = (dense_mlp(size, integer(config, "intermediate_size")), gated_mixture(size, config))
    layers = decoder(size, lambda n: mixers[linear[n]] | mlps[sparse[n]])
    return {**layers, **shared_prediction(size, mixers[False] | mlps[True], further_tokens(config))}


def projections(delta: DeltaSizes) -> Layer:
    """Return the input projections `in_proj_qkvz` and `in_proj_ba`, both interleaved by key head."""
    both = list(delta.sections.items())
    qkvz = interleaved("linear_attn.in_proj_qkvz.weight", dict(both[:4]), delta.keys, delta.hidden)
    ba = interleaved("linear_attn.in_proj_ba.weight", dict(both[4:]), delta.keys, delta.hidden)
    return placed(qkvz | ba, "in_proj.weight.", "")


def gated_mixture(size: Sizes, config: HFConfig) -> Layer:
    """Return routed experts and a gated shared one."""
    routed_ffn, shared_ffn = integer(config, "moe_intermediate_size"), integer(config, "shared_expert_intermediate_size")
    shared = shared_expert("mlp.shared_expert", size.hidden, shared_ffn, gate="mlp.shared_expert_gate")
    return expert_mlp(size, routed_ffn, experts(config)) | shared


def recipe(config: HFConfig) -> Recipe:
    """Return `mixture_recipe` with the layers, MTP layers and normalisation of the config."""
    return mixture_recipe(config, further_tokens(config), sparse_layers(config), bool(config.get("norm_topk_prob", True)))


def mixture_recipe(config: HFConfig, predictions: int, sparse: list[bool], normalised: bool) -> Recipe:
    """Return `hybrid_recipe` with routed experts and a gated shared one.

    Args:
        config: Content of config.json.
        predictions: Number of MTP layers.
        sparse: Whether each layer has routed experts.
        normalised: Whether the weights of a token's experts add up to one.
    """
    mixture = routed(
        config,
        experts(config),
        integer(config, "moe_intermediate_size"),
        sparse=sparse,
        moe_router_pre_softmax=not normalised,
        moe_shared_expert_intermediate_size=integer(config, "shared_expert_intermediate_size"),
        moe_shared_expert_gate=True,
    )
    return hybrid_recipe(config, mtp_num_layers=predictions or None, **mixture)
