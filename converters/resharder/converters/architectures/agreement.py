"""Comparison of a trainer's model with config.json, for the values that determine how Megatron's tensors are divided.

Shapes do not suffice: 8 heads of 16 channels and 4 heads of 32 have the same shape and different rows for each head.
"""

from collections.abc import Mapping
from math import gcd

from resharder.converters.architectures.recipe import Recipe

FIELDS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "kv_channels": "head_dim",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_head_dim": "qk_nope_head_dim",
    "qk_pos_emb_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
    "linear_num_key_heads": "linear_num_key_heads",
    "linear_num_value_heads": "linear_num_value_heads",
    "linear_key_head_dim": "linear_key_head_dim",
    "linear_value_head_dim": "linear_value_head_dim",
    "linear_conv_kernel_dim": "linear_conv_kernel_dim",
    "moe_shared_expert_intermediate_size": "width of the shared experts",
    "moe_ffn_hidden_size": "width of an expert",
}
"""Field of config.json for each attribute of Megatron's config; compared if the family's recipe sets the attribute."""

SWITCHES = {
    "multi_latent_attention": "latent attention",
    "attention_output_gate": "gated attention",
    "gated_linear_unit": "a gated MLP",
    "rotary_interleaved": "rotation of neighbouring channels",
    "num_moe_experts": "number of experts",
    "mtp_num_layers": "number of layers that predict further tokens",
    "share_embeddings_and_output_weights": "tie_word_embeddings",
}
"""Meaning in config.json of each attribute of Megatron's config or model; off if the recipe does not set the attribute."""

NOT_OF_LATENT_ATTENTION = frozenset({"num_query_groups", "kv_channels"})
"""Attributes that do not affect Megatron's latent attention."""

PADDING = 128
"""Megatron's default of `make_vocab_size_divisible_by`. Padding is to a multiple of a divisor of it."""


def compared(recipe: Recipe) -> dict[str, tuple[str, object]]:
    """Return, for each attribute of Megatron's config or model, its name in config.json and the expected value."""
    given = recipe.transformer | recipe.model
    skipped = NOT_OF_LATENT_ATTENTION if given.get("multi_latent_attention") else frozenset[str]()
    fields = {key: (name, given[key]) for key, name in FIELDS.items() if key in given and key not in skipped}
    return fields | {key: (name, given.get(key)) for key, name in SWITCHES.items()}


def disagreements(recipe: Recipe, built: Mapping[str, object]) -> list[str]:
    """Return a sentence for each value of a model that differs from the config's.

    Args:
        recipe: Recipe of the config.
        built: Attributes of the trainer's model and of its config; absent ones are not compared.
    """
    return [
        f"{name} is {expected!r} in the config, the model has {key}={built[key]!r}"
        for key, (name, expected) in compared(recipe).items()
        if key in built and (built[key] or None) != (expected or None)
    ]


def is_padding(rows: int, vocabulary: int, ranks: int) -> bool:
    """Return whether the rows beyond a vocabulary are Megatron's padding alone.

    Megatron pads to a multiple of a unit times the number of tensor-parallel ranks, where the unit divides PADDING. More rows
    than that belong to the model.
    """
    return 0 <= rows - vocabulary < gcd(rows, PADDING * ranks)
