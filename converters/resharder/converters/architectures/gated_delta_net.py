"""Decoders with layers of gated delta nets (linear attention) and of gated attention: Qwen3-Next and Qwen3.5.

Norms store a gain of one as zero, except that of the delta net, which stores one. megatron-core builds these models with
TransformerEngine's layers and flash-linear-attention only; `sharded_state_dict` names the sections of fused tensors.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from resharder.converters.architectures.blocks import Layer, Sizes, attention, integer, norm, placed, whole
from resharder.converters.architectures.mtp import prediction
from resharder.converters.architectures.recipe import Recipe, decoder_recipe
from resharder.converters.architectures.table import HFConfig, Rows, Weight
from resharder.converters.errors import UnsupportedModel


@dataclass(frozen=True)
class DeltaSizes:
    """Sizes of a gated delta net: numbers of key and value heads, channels of each, and the width of the convolution."""

    hidden: int
    keys: int
    values: int
    key_dim: int
    value_dim: int
    kernel: int

    @classmethod
    def of(cls, config: HFConfig) -> "DeltaSizes":
        """Read the sizes from a config.json. Raises UnsupportedModel if one is missing or value
        heads do not divide into key heads.
        """
        names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
        sizes = cls(integer(config, "hidden_size"), *(integer(config, f"linear_{name}") for name in names))
        if sizes.values % sizes.keys:
            raise UnsupportedModel(f"config: {sizes.values} linear value heads do not divide into {sizes.keys} key heads")
        return sizes

    @property
    def sections(self) -> dict[str, int]:
        """Number of rows of each section of Megatron's input projection, in its order."""
        key, value = self.keys * self.key_dim, self.values * self.value_dim
        return {"query": key, "key": key, "value": value, "z": value, "beta": self.values, "alpha": self.values}


def gated_attention(size: Sizes) -> Layer:
    """Return attention with a gate for each channel.

    Megatron's `linear_qkv` has, for each key-value head, its queries, their gates, its key and its value. HF's `q_proj` has, for
    each query head, the query and then its gate.
    """
    d, queries = size.head_dim, size.heads // size.groups
    runs: list[Rows] = []
    for group in range(size.groups):
        heads = range(group * queries, (group + 1) * queries)
        parts = [("q_proj", (2 * head + gate) * d) for gate in (0, 1) for head in heads]
        parts += [("k_proj", group * d), ("v_proj", group * d)]
        runs += [
            Rows((group * len(parts) + n) * d, d, f"self_attn.{name}.weight", first) for n, (name, first) in enumerate(parts)
        ]
    qkv = Weight((len(runs) * d, size.hidden), tuple(runs))
    return attention(size, head_norms=True) | {"self_attention.linear_qkv.weight": (qkv,)}


def delta_net(size: Sizes, delta: DeltaSizes, projections: Layer) -> Layer:
    """Return a gated delta net with the given input projections, which differ between families, and the norm before it."""
    inner, channels = delta.values * delta.value_dim, ("query", "key", "value")
    norms = {
        "in_proj.layer_norm_weight": (norm("input_layernorm.weight", size),),
        "out_norm.weight": (replace(whole("linear_attn.norm.weight", delta.value_dim), gain=1.0),),
    }
    heads = {name: (whole(f"linear_attn.{name}", delta.values),) for name in ("A_log", "dt_bias")}
    filters = flat("linear_attn.conv1d.weight", {name: delta.sections[name] for name in channels}, 1, delta.kernel)
    out = {"out_proj.weight": (whole("linear_attn.out_proj.weight", size.hidden, inner),)}
    return placed(norms | heads | placed(filters, "conv1d.weight.", "") | out | projections, "self_attention.", "")


def flat(tensor: str, sections: dict[str, int], *rest: int) -> Layer:
    """Return the sections of an HF tensor that stores them one after the other; `sections` has the rows of each."""
    layer: Layer = {}
    first = 0
    for name, rows in sections.items():
        layer[name] = (Weight((rows, *rest), (Rows(0, rows, tensor, first),)),)
        first += rows
    return layer


def interleaved(tensor: str, sections: dict[str, int], heads: int, *rest: int) -> Layer:
    """Return the sections of an HF tensor that stores, for each head in turn, the head's rows of every section."""
    layer: Layer = {}
    first, block = 0, sum(sections.values()) // heads
    for name, rows in sections.items():
        each = rows // heads
        runs = tuple(Rows(head * each, each, tensor, head * block + first) for head in range(heads))
        layer[name] = (Weight((rows, *rest), runs),)
        first += each
    return layer


def linear_layers(config: HFConfig) -> list[bool]:
    """Return whether each layer is a gated delta net rather than attention.

    Raises UnsupportedModel if `layer_types` has another length than the model.
    """
    layers, every = integer(config, "num_hidden_layers"), integer(config, "full_attention_interval", default=4)
    kinds: Iterable[str] = config.get("layer_types") or ()
    known = [kind == "linear_attention" for kind in kinds] or [bool((n + 1) % every) for n in range(layers)]
    if len(known) != layers:
        raise UnsupportedModel(f"config: expected {layers} layer_types, one for each layer, got {len(known)}")
    return known


def shared_prediction(size: Sizes, layer: Layer, count: int) -> Layer:
    """Return the MTP layer, `mtp.*` in HF, around a decoder layer; nothing for `count` 0.

    The names are those of the published checkpoints, as vLLM loads them (model_executor/models/qwen3_next_mtp.py); transformers
    drops these tensors when it saves. Raises UnsupportedModel for more than one.
    """
    if count > 1:
        raise UnsupportedModel(f"config: expected at most one MTP layer, got {count}: several with one mtp.fc have no table")
    if not count:
        return {}
    projection = whole("mtp.fc.weight", size.hidden, 2 * size.hidden)
    names = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm")
    return placed(prediction(*names, projection, size, placed(layer, "", "mtp.layers.0.")), "mtp.layers.0.", "")


def hybrid_recipe(config: HFConfig, **transformer: Any) -> Recipe:
    """Return the recipe of both kinds of layers, with gains stored around zero and a part of each head rotated."""
    delta, rope = DeltaSizes.of(config), config.get("rope_parameters") or {}
    recipe = decoder_recipe(
        config,
        qk_layernorm=True,
        layernorm_zero_centered_gamma=True,
        attention_output_gate=True,
        experimental_attention_variant="gated_delta_net",
        linear_attention_freq=[int(linear) for linear in linear_layers(config)],
        linear_conv_kernel_dim=delta.kernel,
        linear_key_head_dim=delta.key_dim,
        linear_value_head_dim=delta.value_dim,
        linear_num_key_heads=delta.keys,
        linear_num_value_heads=delta.values,
        **transformer,
    )
    part = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 0.25
    return recipe.but(model={"rotary_percent": part})
