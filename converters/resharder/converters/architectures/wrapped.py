"""Vision-language models: a language model with the table of its family, under the names of its wrapper, and a tower beside it.

Megatron-Bridge has the language model as `language_model`. Its tower is one of Megatron's own layers, divided by tensor
parallelism (`vision_model`, of Qwen3-VL and Qwen3.5), or a module of transformers whose tensors are replicas on all
tensor-parallel ranks (`visual`, `vision_tower`), under the names of the checkpoint. Only the first pipeline stage has a tower.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from resharder.converters.architectures.blocks import BEFORE_ATTENTION, BEFORE_MLP, Layer, integer, placed, whole
from resharder.converters.architectures.recipe import ACTIVATIONS, Recipe, Tower, rope_settings
from resharder.converters.architectures.table import HFConfig, Rows, Table, Weight
from resharder.converters.errors import UnsupportedModel

Shapes = dict[str, tuple[int, ...]]
"""Shape of each tensor by its name."""

LANGUAGE = "language_model."
"""First part of the keys of the language model."""

NESTED = {"model.": "model.language_model."}
"""Names of the language model in most wrappers."""


def language_config(config: HFConfig) -> HFConfig:
    """Return the config of the language model, whose embeddings are tied if the wrapper's are.

    Qwen2.5-VL was released with the fields of its language model beside `vision_config`, without a `text_config`.
    """
    text = config.get("text_config")
    if text is None:
        return {name: value for name, value in config.items() if name != "vision_config"}
    if not isinstance(text, Mapping):
        raise UnsupportedModel(f"config: text_config should be a mapping, is {text!r}")
    return {**text, "tie_word_embeddings": config.get("tie_word_embeddings", text.get("tie_word_embeddings"))}


def vision_config(config: HFConfig) -> HFConfig:
    """Return the config of the tower. Raises UnsupportedModel without one."""
    vision = config.get("vision_config")
    if not isinstance(vision, Mapping):
        raise UnsupportedModel(f"config: vision_config should be a mapping, is {vision!r}")
    return vision


def wrapped_table(language: Table, names: Mapping[str, str], tower: Layer) -> Table:
    """Return the tables of a language model and a tower as one.

    Args:
        language: Table of the language model.
        names: The wrapper's name for each first part of a name in it; other names stay.
        tower: Table of the tower.
    """
    found: Layer = {LANGUAGE + key: tuple(weight.renamed(names) for weight in weights) for key, weights in language.items()}
    return found | tower


def wrapped_recipe(config: HFConfig, language: Recipe, tower: Tower | None = None) -> Recipe:
    """Return the recipe of a language model in a wrapper with a tower of Megatron's layers, or, without one, of transformers'."""
    rope = language_config(config)
    rope = rope.get("rope_parameters") or rope.get("rope_scaling") or {}
    sections: dict[str, Any] = {"mrope_section": list(rope["mrope_section"])} if rope.get("mrope_section") else {}
    vision, interleaved = vision_config(config), bool(rope.get("mrope_interleaved"))
    made = replace(language.but(None, **sections), tower=replace(tower or Tower(), config=vision, interleaved=interleaved))
    turns = rope_settings(vision)
    other = () if turns["rope_theta"] in (None, 10000.0) else (f"rope_theta={turns['rope_theta']!r} of vision_config",)
    return replace(made, beyond=(*made.beyond, *other)) if tower is not None else made


def is_wrapped(table: Table) -> bool:
    """Return whether a table is that of a language model in a wrapper."""
    return any(key.startswith(LANGUAGE) for key in table)


def tower_weights(table: Table) -> list[Weight]:
    """Return the weights of a tower in the table of a wrapper."""
    return [weight for key, weights in table.items() if not key.startswith(LANGUAGE) for weight in weights]


def refuse_tower(wanted: bool, found: bool) -> None:
    """Raise UnsupportedModel for a model without the tower that is `wanted` of it, or with one beside a frozen one."""
    if wanted and not found:
        raise UnsupportedModel(
            "the config has a tower, and the model is its language model alone: pass the base checkpoint, attach(…, "
            "frozen=FOLDER), and the tower is published from there"
        )
    if found and not wanted:
        raise UnsupportedModel("frozen is for a language model alone, and this model has a tower: leave frozen out")


def copied(module: str, tensors: Shapes, key: str | None = None) -> Layer:
    """Return tensors that Megatron has as the checkpoint has them: `module` is their name on disk, `key` in Megatron."""
    return placed({name: (whole(name, *shape),) for name, shape in tensors.items()}, module if key is None else key, module)


def linear(name: str, rows: int, columns: int, *, bias: bool = True) -> Shapes:
    """Return the shapes of a linear layer."""
    return {f"{name}.weight": (rows, columns)} | ({f"{name}.bias": (rows,)} if bias else {})


def layer_norm(name: str, channels: int) -> Shapes:
    """Return the shapes of a norm with a bias."""
    return {f"{name}.weight": (channels,), f"{name}.bias": (channels,)}


def qwen3_tower(vision: HFConfig) -> Layer:
    """Return the tower of Qwen3-VL and Qwen3.5 as Megatron-Bridge has it (models/qwen_vl/modelling_qwen3_vl, 0.6.2).

    A merger joins the patches of a square of `spatial_merge_size`. Deepstack mergers do the same for outputs of inner layers;
    Qwen3.5 has none.
    """
    hidden, depth = integer(vision, "hidden_size"), integer(vision, "depth")
    joined, out = hidden * integer(vision, "spatial_merge_size") ** 2, integer(vision, "out_hidden_size")
    mlp = linear("linear_fc1", joined, joined) | linear("linear_fc2", out, joined)
    first: Shapes = {
        "patch_embed.proj.weight": (hidden, *patch(vision)),
        "patch_embed.proj.bias": (hidden,),
        "pos_embed.weight": (integer(vision, "num_position_embeddings"), hidden),
    }
    found = copied("model.visual.", first, "vision_model.")
    for n in range(depth):
        found |= placed(qwen3_block(vision), f"vision_model.decoder.layers.{n}.", f"model.visual.blocks.{n}.")
    mergers = {"merger": ("merger", hidden)} | {
        f"deepstack_merger_list.{n}": (f"decoder.deepstack_merger_list.{n}", joined) for n in range(len(deepstack(vision)))
    }
    for name, (key, normed) in mergers.items():
        there: Layer = {f"patch_norm.{part}": (whole(f"norm.{part}", normed),) for part in ("weight", "bias")}
        there |= copied("", mlp)
        found |= placed(there, f"vision_model.{key}.", f"model.visual.{name}.")
    return found


def patch(vision: HFConfig) -> tuple[int, int, int, int]:
    """Return the shape of a patch: channels, frames, rows and columns of pixels."""
    size = integer(vision, "patch_size")
    return integer(vision, "in_channels", "in_chans", default=3), integer(vision, "temporal_patch_size", default=2), size, size


def deepstack(vision: HFConfig) -> Sequence[int]:
    """Return the layers whose outputs go into the language model by mergers of their own."""
    found: Sequence[int] = vision.get("deepstack_visual_indexes") or ()
    return found


def qwen3_block(vision: HFConfig) -> Layer:
    """Return a layer of that tower: attention with a fused projection, and an MLP without a gate, all with biases."""
    hidden, ffn = integer(vision, "hidden_size"), integer(vision, "intermediate_size")
    found: Layer = {}
    for number, keys in ((1, BEFORE_ATTENTION), (2, BEFORE_MLP)):
        for part in ("weight", "bias"):
            found |= {key.removesuffix("weight") + part: (whole(f"norm{number}.{part}", hidden),) for key in keys}
    found["self_attention.linear_qkv.weight"] = (headed("attn.qkv.weight", integer(vision, "num_heads"), hidden, hidden),)
    found["self_attention.linear_qkv.bias"] = (headed("attn.qkv.bias", integer(vision, "num_heads"), hidden),)
    found |= placed(copied("", linear("proj", hidden, hidden), "linear_"), "self_attention.", "attn.")
    return found | copied("mlp.", linear("linear_fc1", ffn, hidden) | linear("linear_fc2", hidden, ffn))


def headed(tensor: str, heads: int, hidden: int, *rest: int) -> Weight:
    """Return a fused projection in which Megatron has query, key and value of each head in turn, and HF all queries first."""
    width = hidden // heads
    runs = (
        Rows((3 * head + part) * width, width, tensor, part * hidden + head * width) for head in range(heads) for part in range(3)
    )
    return Weight((3 * hidden, *rest), tuple(runs))


def qwen3_tower_recipe(vision: HFConfig) -> Tower:
    """Return how Megatron-Bridge builds that tower, whatever the config says of its activation."""
    activation = vision.get("hidden_act") or "gelu_pytorch_tanh"
    arguments: dict[str, Any] = {
        "num_layers": integer(vision, "depth"),
        "hidden_size": integer(vision, "hidden_size"),
        "num_attention_heads": integer(vision, "num_heads"),
        "num_query_groups": integer(vision, "num_heads"),
        "kv_channels": integer(vision, "hidden_size") // integer(vision, "num_heads"),
        "ffn_hidden_size": integer(vision, "intermediate_size"),
        "normalization": "LayerNorm",
        "layernorm_epsilon": 1e-6,
        "gated_linear_unit": False,
        "activation_func": ACTIVATIONS.get(activation, activation),
        "add_bias_linear": True,
        "add_qkv_bias": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    return Tower("vision_model", arguments)
