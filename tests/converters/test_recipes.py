"""Recipes follow from config.json, in each form that it is published in: what a config leaves out is what transformers takes,
and options of rotary embeddings stand in `rope_parameters` (transformers 5) or beside the sizes (before)."""

from dataclasses import asdict
from typing import Any

import pytest

from tests.support import fakepg, tiny_hf
from tests.support.megatron_models import build_model

# isort: split
from resharder.converters.architectures import architecture_of, table_of
from resharder.converters.architectures.checkpoint import expected_shapes
from resharder.converters.models.megatron.layout import local_layout

pytestmark = pytest.mark.compat("layouts")

Settings = dict[str, Any]
YARN = {
    "factor": 40.0,
    "original_max_position_embeddings": 1024,
    "beta_fast": 16.0,
    "beta_slow": 2.0,
    "mscale": 0.9,
    "mscale_all_dim": 0.6,
}
LATENT_YARN = {
    "rope_type": "yarn",
    "rotary_scaling_factor": 40.0,
    "original_max_position_embeddings": 1024,
    "beta_fast": 16.0,
    "beta_slow": 2.0,
    "mscale": 0.9,
    "mscale_all_dim": 0.6,
}
NO_ROTATION: Settings = {"rope_parameters": None, "partial_rotary_factor": None}

CASES: tuple[tuple[str, Settings, Settings], ...] = (
    # Rotary embeddings: the new form, the old one, neither
    ("llama", {"rope_parameters": {"rope_theta": 7e5}, "rope_theta": 5e5}, {"rotary_base": 7e5}),
    ("llama", {"rope_parameters": None, "rope_theta": 5e5}, {"rotary_base": 5e5}),
    ("llama", {"rope_parameters": None, "rope_theta": None}, {"rotary_base": 10000.0}),
    ("deepseek_v3", {"rope_parameters": YARN | {"rope_type": "yarn", "rope_theta": 7e5}}, LATENT_YARN | {"rotary_base": 7e5}),
    (
        "deepseek_v3",
        {"rope_parameters": None, "rope_theta": 5e5, "rope_scaling": YARN | {"type": "yarn"}},
        LATENT_YARN | {"rotary_base": 5e5},
    ),
    (
        "deepseek_v3",
        {"rope_parameters": {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 1024}},
        LATENT_YARN | {"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.0},
    ),
    ("deepseek_v2", {"rope_parameters": None, "rope_scaling": None}, {"rope_type": "rope", "rotary_base": 10000.0}),
    ("deepseek_v2", {"rope_parameters": None, "rope_theta": 5e5}, {"rope_type": "rope", "rotary_base": 5e5}),
    ("gemma3", {"rope_parameters": None}, {"rotary_base": 1e6, "local_rotary_base": 1e4, "seq_len_interpolation_factor": None}),
    (
        "gemma3",
        {"rope_parameters": None, "rope_theta": 5e5, "rope_local_base_freq": 7e3, "rope_scaling": {"factor": 4.0}},
        {"rotary_base": 5e5, "local_rotary_base": 7e3, "seq_len_interpolation_factor": 4.0},
    ),
    (
        "gemma3",
        {"rope_parameters": {"full_attention": {"rope_theta": 5e5, "factor": 2.0}, "sliding_attention": {"rope_theta": 7e3}}},
        {"rotary_base": 5e5, "local_rotary_base": 7e3, "seq_len_interpolation_factor": 2.0},
    ),
    *(
        (family, changes, {"rotary_percent": part})
        for family, default in (("glm", 0.5), ("glm4", 0.5), ("glm4_moe", 0.5), ("nemotron", 0.5), ("qwen3_next", 0.25))
        for changes, part in (
            (NO_ROTATION, default),
            (NO_ROTATION | {"partial_rotary_factor": 0.75}, 0.75),
            ({"rope_parameters": {"partial_rotary_factor": 0.125}, "partial_rotary_factor": 0.75}, 0.125),
        )
    ),
    ("minimax_m2", NO_ROTATION | {"rotary_dim": 8}, {"rotary_percent": 0.25}),
    ("minimax_m2", NO_ROTATION | {"rotary_dim": None, "head_dim": 256}, {"rotary_percent": 0.25}),
    ("minimax_m2", NO_ROTATION | {"rotary_dim": 32, "head_dim": None}, {"rotary_percent": 0.25}),
    ("minimax_m2", {}, {"qk_layernorm": True, "whole_norms": True}),
    ("olmoe", {"clip_qkv": 8.0}, {"qk_layernorm": True, "whole_norms": True, "beyond": ("clip_qkv=8.0",)}),
    (
        "gpt_oss",
        {"rope_parameters": None, "rope_scaling": YARN | {"type": "yarn", "truncate": True}},
        {
            "yarn_rotary_scaling_factor": 40.0,
            "yarn_original_max_position_embeddings": 1024,
            "yarn_beta_fast": 16.0,
            "yarn_beta_slow": 2.0,
            "yarn_correction_range_round_to_int": True,
            "yarn_mscale": 0.9,
            "yarn_mscale_all_dim": 0.6,
        },
    ),
    (
        "gpt_oss",
        {"rope_parameters": None},
        {
            "yarn_rotary_scaling_factor": 32.0,
            "yarn_original_max_position_embeddings": 4096,
            "yarn_beta_fast": 32.0,
            "yarn_beta_slow": 1.0,
            "yarn_correction_range_round_to_int": False,
        },
    ),
    # Windows
    (
        "gemma2",
        {"layer_types": None, "sliding_window": 7, "num_hidden_layers": 5},
        {"window_size": (6, 0), "window_attn_skip_freq": [1, 0, 1, 0, 1]},
    ),
    ("gemma3", {"layer_types": None, "num_hidden_layers": 7}, {"window_attn_skip_freq": [1] * 5 + [0, 1]}),
    (
        "gemma3",
        {"layer_types": None, "num_hidden_layers": 5, "sliding_window_pattern": 3},
        {"window_attn_skip_freq": [1, 1, 0, 1, 1]},
    ),
    ("mixtral", {"sliding_window": 9}, {"window_size": (8, 0), "window_attn_skip_freq": None}),
    ("mistral", {"sliding_window": None}, {"window_size": None}),
    ("gpt_oss", {"layer_types": None}, {"window_size": (6, 0), "window_attn_skip_freq": [1, 0, 1, 0]}),
    ("olmoe", {"rms_norm_eps": None}, {"layernorm_epsilon": 1e-5}),
    *(
        (family, {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 3, "layer_types": None}, expected)
        for family, layers in (
            ("qwen2", [0, 0, 0, 1]),
            ("qwen3", [0, 0, 0, 1]),
            ("qwen2_moe", [1, 0, 1, 0]),
            ("qwen3_moe", [1] * 4),
        )
        for expected in ({"window_size": (4, 0), "window_attn_skip_freq": layers},)
    ),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "layer_types": None}, {"window_size": None}),
    ("qwen3", {"use_sliding_window": False, "sliding_window": 5}, {"window_size": None}),
    ("qwen3_moe", {"use_sliding_window": None, "sliding_window": 5}, {"window_size": None}),
    # What megatron-core cannot compute with
    (
        "deepseek_v3",
        {"norm_topk_prob": False, "rope_interleave": False},
        {"beyond": ("norm_topk_prob=False", "rope_interleave=False")},
    ),
    ("glm4_moe", {"norm_topk_prob": False}, {"beyond": ("norm_topk_prob=False",)}),
    ("gpt_oss", {"swiglu_alpha": 1.5}, {"beyond": ("swiglu_alpha=1.5",)}),
    *(
        (family, {"use_bidirectional_attention": True}, {"beyond": ("use_bidirectional_attention=True",)})
        for family in ("gemma", "gemma2")
    ),
    *(
        ("hy_v3", {name: False}, {"beyond": (f"{name}=False",)})
        for name in ("qk_norm", "route_norm", "moe_router_use_sigmoid", "moe_router_enable_expert_bias")
    ),
    ("gemma3", {"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 2.0}}}, {"beyond": ("rope_type='yarn'",)}),
    # What configs leave out
    ("gemma2", {"query_pre_attn_scalar": None}, {"softmax_scale": 256**-0.5}),
    ("gemma", {"hidden_act": None}, {"activation_func": "fast_gelu"}),
    ("gemma", {"hidden_act": "gelu"}, {"activation_func": "fast_gelu"}),
    ("hy_v3", {"rms_norm_eps": None}, {"layernorm_epsilon": 1e-5}),
    ("hy_v3", {"rope_parameters": None}, {"rotary_base": 11158840.0}),
    ("hy_v3", {"router_scaling_factor": None}, {"moe_router_topk_scaling_factor": 2.826}),
    ("hy_v3", {"mlp_layer_types": None}, {"moe_layer_freq": [0, 1, 1, 1]}),
    ("gpt_oss", {"swiglu_limit": None}, {"activation_func_clamp_value": 7.0}),
    ("llama", {"rms_norm_eps": None}, {"layernorm_epsilon": 1e-6}),
    ("llama", {"rms_norm_eps": 1e-4}, {"layernorm_epsilon": 1e-4}),
    ("nemotron", {"norm_eps": None}, {"layernorm_epsilon": 1e-5}),
    ("nemotron", {"norm_eps": 1e-4}, {"layernorm_epsilon": 1e-4}),
    ("llama", {"max_position_embeddings": None}, {"max_sequence_length": 4096}),
    ("llama", {"max_position_embeddings": 512}, {"max_sequence_length": 512}),
    ("deepseek_v2", {"routed_scaling_factor": None}, {"moe_router_topk_scaling_factor": 1.0}),
    ("qwen3_next", {"layer_types": None, "full_attention_interval": None}, {"linear_attention_freq": [1, 1, 1, 0]}),
    ("qwen3_next", {"layer_types": None, "full_attention_interval": 2}, {"linear_attention_freq": [1, 0, 1, 0]}),
    # Biases, norms and experts
    ("glm", {"attention_bias": None}, {"add_qkv_bias": True}),
    ("glm", {"attention_bias": False}, {"add_qkv_bias": False}),
    ("glm4_moe", {"attention_bias": False}, {"add_qkv_bias": False, "qk_layernorm": True}),
    ("glm4_moe", {"use_qk_norm": False}, {"add_qkv_bias": True, "qk_layernorm": False}),
    ("qwen2_moe", {"qkv_bias": None}, {"add_qkv_bias": True}),
    ("qwen2_moe", {"qkv_bias": False}, {"add_qkv_bias": False}),
    *(
        (family, {"norm_topk_prob": given}, {"moe_router_pre_softmax": not given})
        for family in ("qwen2_moe", "qwen3_moe")
        for given in (None, False, True)
    ),
    ("olmoe", {}, {"moe_router_pre_softmax": True}),
    ("qwen3_next", {"norm_topk_prob": None}, {"moe_router_pre_softmax": False}),
    ("qwen3_next", {"norm_topk_prob": False}, {"moe_router_pre_softmax": True}),
    ("qwen3_5_moe", {}, {"moe_router_pre_softmax": False}),
    ("qwen3_moe", {"decoder_sparse_step": 3, "mlp_only_layers": None}, {"moe_layer_freq": [0, 0, 1, 0]}),
    ("qwen3_moe", {"decoder_sparse_step": None, "mlp_only_layers": [1]}, {"moe_layer_freq": [1, 0, 1, 1]}),
    ("deepseek_v3", {}, {"moe_router_dtype": "fp32"}),
    ("llama", {}, {"hidden_dropout": 0.0, "attention_dropout": 0.0, "add_bias_linear": False}),
    ("qwen3_moe", {}, {"moe_router_load_balancing_type": "none", "moe_token_dispatcher_type": "alltoall"}),
    ("qwen3_5_moe", {"intermediate_size": None}, {"ffn_hidden_size": 64}),
    ("deepseek_v2", {"n_group": None}, {"moe_router_num_groups": None}),
)


def recipe_of(config: Settings) -> Settings:
    """All settings of a recipe, by name; latent attention reads its rotation from the transformer's alone."""
    recipe = architecture_of(config).recipe(config)
    model = {key: value for key, value in recipe.model.items() if "q_lora_rank" not in recipe.transformer or key != "rotary_base"}
    return model | recipe.transformer | recipe.attributes | asdict(recipe.extras) | {"beyond": recipe.beyond}


def changed(family: str, changes: Settings) -> Settings:
    """A tiny config with changes; None leaves a field out."""
    return {key: value for key, value in (tiny_hf.tiny_config(family) | changes).items() if value is not None}


@pytest.mark.parametrize(("family", "changes", "expected"), CASES)
def test_a_recipe_follows_from_the_config(family: str, changes: Settings, expected: Settings) -> None:
    found = recipe_of(changed(family, changes))
    assert {key: found.get(key) for key in expected} == expected


@pytest.mark.parametrize("family", ["mixtral", "minimax_m2", "gpt_oss", "qwen3_moe", "hy_v3"])
def test_experts_are_counted_under_either_name(family: str) -> None:
    config = tiny_hf.tiny_config(family)
    counts = {config.pop(name) for name in ("num_experts", "num_local_experts") if name in config}
    (count,) = counts
    here, there = config | {"num_experts": count}, config | {"num_local_experts": count}
    assert expected_shapes(here) == expected_shapes(there)
    assert recipe_of(here) == recipe_of(there)
    assert recipe_of(here)["num_moe_experts"] == count


@pytest.mark.parametrize("family", ["gemma", "gemma2", "gemma3", "nemotron", "qwen3_next", "qwen3_5", "qwen3_5_moe"])
def test_a_model_of_a_family_with_gains_around_zero_stores_them_so(family: str) -> None:
    """Only the norm of a delta net has gains around one."""
    config = tiny_hf.tiny_config(family)
    fakepg.enter(0, 1)
    layout, _ = local_layout(build_model(config, spec="te", device="meta", init_model_with_meta_device=True), config)
    assert {piece.tensor for piece in layout.pieces if piece.plus} == {
        piece.tensor for piece in layout.pieces if piece.tensor.endswith("linear_attn.norm.weight")
    }


def test_tied_embeddings_have_the_copies_of_the_head_that_predicts() -> None:
    table, shapes = table_of(tiny_hf.tiny_config("deepseek_v3", tie_word_embeddings=True))
    (weight,) = table["embedding.word_embeddings.weight"]
    names = {run.tensor for run in weight.runs}
    assert names == {"model.embed_tokens.weight", "model.layers.4.embed_tokens.weight", "model.layers.4.shared_head.head.weight"}
    assert names <= shapes.keys()
    assert "output_layer.weight" not in table
