"""What is special to some families: where the gains of norms are stored, where norms after attention are, published configs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import fakepg, tiny_hf
from tests.support.megatron_logits import difference
from tests.support.megatron_models import Spec, build_model
from tests.support.megatron_rebuild import Model, assert_rebuilt, rebuild

# isort: split
from resharder.converters.architectures import architecture_of
from resharder.converters.architectures.checkpoint import expected_shapes
from resharder.converters.errors import UnsupportedModel
from resharder.converters.models.megatron.extras import PostNormed, TEPostNormed
from resharder.converters.models.megatron.layout import local_layout

pytestmark = pytest.mark.compat("layouts")

Chunks = list[torch.nn.Module]


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., tuple[Path, Model]]:
    def save(family: str, **changes: Any) -> tuple[Path, Model]:
        config = tiny_hf.tiny_config(family, **changes)
        return tmp_path, (config, tiny_hf.load_checkpoint(tiny_hf.save_checkpoint(tmp_path, config)))

    return save


# Gains


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_trainer_may_store_gains_around_zero_where_the_checkpoint_has_them_around_one(
    saved: Callable[..., tuple[Path, Model]], family: str
) -> None:
    folder, model = saved(family)
    assert difference(model, folder, "te", layernorm_zero_centered_gamma=True) < 2e-5
    assert_rebuilt(model, rebuild(model, 2, spec="te", tp=2, layernorm_zero_centered_gamma=True))


@pytest.mark.parametrize(("zero_centered", "plus"), [(True, 0.0), (False, -1.0)])
def test_gains_that_the_checkpoint_has_around_zero_are_as_the_model_says(zero_centered: bool, plus: float) -> None:
    config = tiny_hf.tiny_config("gemma3")
    fakepg.enter(0, 1)
    layout, _ = local_layout(build_model(config, spec="te", layernorm_zero_centered_gamma=zero_centered), config)
    assert {piece.plus for piece in layout.pieces if "norm" in piece.tensor} == {plus}
    assert {piece.plus for piece in layout.pieces if "norm" not in piece.tensor} == {0.0}


# Norms after attention and MLP


def move_into_layers(chunks: Chunks) -> Chunks:
    """As Megatron-LM has them after 0.16, and slime."""
    for layer in (layer for chunk in chunks for layer in chunk.decoder.layers):  # type: ignore[union-attr]
        for name, linear in (
            ("post_self_attn_layernorm", layer.self_attention.linear_proj),
            ("post_mlp_layernorm", layer.mlp.linear_fc2),
        ):
            layer.add_module(name, linear.post_layernorm)
            del linear.post_layernorm
    return chunks


@pytest.mark.parametrize("family", ["gemma2", "glm4"])
def test_norms_after_attention_and_mlp_may_be_parts_of_the_layer(saved: Callable[..., tuple[Path, Model]], family: str) -> None:
    _, model = saved(family)
    assert_rebuilt(model, rebuild(model, 4, move_into_layers, spec="te", tp=2, pp=2))


def keep_names(chunks: Chunks) -> Chunks:
    """As specs without fused modules have them that do not rename their norms."""
    for layer in (layer for chunk in chunks for layer in chunk.decoder.layers):  # type: ignore[union-attr]
        layer.submodules_config.sharded_state_dict_keys_map = {}
    return chunks


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_norms_before_attention_and_mlp_may_have_names_of_their_own(
    saved: Callable[..., tuple[Path, Model]], family: str
) -> None:
    _, model = saved(family)
    assert_rebuilt(model, rebuild(model, 2, keep_names, tp=2))


@pytest.mark.parametrize("family", ["olmoe", "minimax_m2"])
def test_norms_over_all_heads_are_cut_with_the_heads(saved: Callable[..., tuple[Path, Model]], family: str) -> None:
    _, model = saved(family)
    assert_rebuilt(model, rebuild(model, 2, tp=2))


@pytest.mark.parametrize(("spec", "linear"), [("local", PostNormed), ("te", TEPostNormed)])
def test_a_model_has_the_modules_of_its_spec(spec: Spec, linear: type[torch.nn.Module]) -> None:
    fakepg.enter(0, 1)
    chunks: Any = build_model(tiny_hf.tiny_config("glm4"), spec=spec)
    layers = chunks[0].decoder.layers
    assert {type(module) for layer in layers for module in (layer.self_attention.linear_proj, layer.mlp.linear_fc2)} == {linear}


# Options

BASES = {"sliding_attention": 3e3, "full_attention": 5e5}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen2_moe", {"norm_topk_prob": True, "decoder_sparse_step": 2, "mlp_only_layers": [1]}),
        ("mistral", {"sliding_window": None}),
        ("glm", {"attention_bias": False}),
        ("qwen2_moe", {"qkv_bias": False}),
        ("deepseek_v2", {"num_experts_per_tok": 3}),  # more than the best of each group
        ("deepseek_v2_lite", {"num_experts_per_tok": 3}),
        ("mixtral", {"sliding_window": 9}),
        (
            "gemma3",
            {"rope_parameters": {name: {"rope_type": "default", "rope_theta": base} for name, base in BASES.items()}},
        ),
    ],
)
def test_options_of_a_family_are_those_of_the_checkpoint(
    saved: Callable[..., tuple[Path, Model]], family: str, changes: dict[str, Any]
) -> None:
    folder, (config, checkpoint) = saved(family, **changes)
    assert expected_shapes(config) == {name: tuple(tensor.shape) for name, tensor in checkpoint.items()}
    assert difference((config, checkpoint), folder, "local") < 2e-5


@pytest.mark.parametrize("changes", [{"attention_bias": True, "mlp_bias": False}, {"attention_bias": False, "mlp_bias": True}])
def test_biases_in_attention_or_mlp_alone_are_refused(changes: dict[str, Any]) -> None:
    given = ", ".join(f"{name}={value}" for name, value in changes.items())
    with pytest.raises(UnsupportedModel, match=f"{given}: Megatron adds biases to all linears of attention and MLP, or to none"):
        expected_shapes(tiny_hf.tiny_config("llama", **changes))


def test_clipped_queries_are_refused_where_a_model_is_built() -> None:
    config = tiny_hf.tiny_config("olmoe", clip_qkv=8.0)
    with pytest.raises(UnsupportedModel, match=r"clip_qkv=8\.0"):
        build_model(config)


# Published configs say less than those that transformers writes

GEMMA_2_9B = {
    "model_type": "gemma2",
    "architectures": ["Gemma2ForCausalLM"],
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_size": 3584,
    "intermediate_size": 14336,
    "num_attention_heads": 16,
    "num_hidden_layers": 42,
    "num_key_value_heads": 8,
    "query_pre_attn_scalar": 256,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "vocab_size": 256000,
}
GEMMA_3_1B = {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "head_dim": 256,
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size": 262144,
}


@pytest.mark.parametrize(("config", "count"), [(GEMMA_2_9B, 464), (GEMMA_3_1B, 340)])
def test_published_gemmas_have_tied_embeddings_without_saying_so(config: dict[str, Any], count: int) -> None:
    shapes = expected_shapes(config)
    assert len(shapes) == count
    assert "lm_head.weight" not in shapes
    assert architecture_of(config).recipe(config).model["share_embeddings_and_output_weights"]


def test_a_published_gemma_3_has_a_window_and_its_own_rotation_in_five_layers_of_six() -> None:
    recipe = architecture_of(GEMMA_3_1B).recipe(GEMMA_3_1B)
    assert recipe.transformer["window_size"] == (511, 0)
    assert recipe.transformer["window_attn_skip_freq"] == ([1] * 5 + [0]) * 4 + [1] * 2
    assert (recipe.model["rotary_base"], recipe.extras.local_rotary_base) == (1000000, 10000)
