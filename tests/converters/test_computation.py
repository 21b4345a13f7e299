"""A model that computes otherwise than its config.json says is refused with both values; one that computes the same, however it
was built, is not."""

import dataclasses
import inspect
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support import fakepg, tiny_hf
from tests.support.megatron_logits import difference
from tests.support.megatron_models import VERSION, build_model

# isort: split
import torch
import torch.nn.functional as F
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import MLATransformerConfig
from resharder.converters.allowances import collecting
from resharder.converters.architectures import architecture_of
from resharder.converters.architectures.agreement import FIELDS, SWITCHES
from resharder.converters.architectures.computation import (
    NOT_COMPARED,
    PARALLELISM,
    ROTARY,
    UNSUPPORTED,
    aspects,
    known_arguments,
)
from resharder.converters.architectures.rotary import rotary_of
from resharder.converters.errors import LayoutError, UnsupportedModel
from resharder.converters.models.megatron.layout import local_layout
from resharder.converters.models.megatron.release import TESTED
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

pytestmark = pytest.mark.compat("refusals")

Config = dict[str, Any]
RELEASES: dict[str, dict[str, list[str]]] = json.loads(Path(__file__).with_name("megatron_arguments.json").read_text())
PAGE = Path(__file__).parents[2] / "docs" / "agreement.md"
EXPERTS = [family for family in tiny_hf.FAMILIES if "num_experts_per_tok" in tiny_hf.tiny_config(family)]


def build(config: Config, **arguments: Any) -> Any:
    fakepg.enter(0, 1)
    return build_model(config, spec="te" if "linear_num_key_heads" in config else "local", **arguments)


@pytest.fixture
def chunks(family: str) -> Any:
    return build(tiny_hf.tiny_config(family))


# Values of the model


def other(value: Any) -> Any:
    """Another value of the same kind."""
    if callable(value):
        return F.relu
    if value is None:
        return 2
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return {"softmax": "sigmoid", "sigmoid": "softmax", "RMSNorm": "LayerNorm", "LayerNorm": "RMSNorm"}.get(value, "another")
    if isinstance(value, tuple):
        return (value[0] + 2, value[1])
    if isinstance(value, list):
        return [not each for each in value]
    return 2 * value + 0.5 if isinstance(value, float) else value + 1


INERT = [
    ("moe_router_pre_softmax", "sigmoid"),
    ("moe_router_load_balancing_type", "none"),
    ("window_attn_skip_freq", None),
    ("moe_router_num_groups", None),
    ("moe_router_group_topk", None),
    ("use_mup", False),
    ("mup_embedding_mult", 1.0),
    ("mup_output_mult", 1.0),
]
"""Arguments that have no effect beside another one."""


@pytest.mark.parametrize("family", tiny_hf.ALL)
def test_a_model_that_computes_otherwise_is_refused_by_both_values(family: str, chunks: Any) -> None:
    config = tiny_hf.tiny_config(family)
    recipe = architecture_of(config).recipe(config)
    expected = local_layout(chunks, config)[0]
    transformer, compared = chunks[0].config, set()
    for attribute in (name for aspect in aspects(recipe) for name in aspect.attributes if name in vars(transformer)):
        right = getattr(transformer, attribute)
        if (attribute, right) in INERT or (attribute, transformer.moe_router_score_function) in INERT:
            continue
        wrong = other(right)
        setattr(transformer, attribute, wrong)
        shown = re.escape(getattr(wrong, "__name__", repr(wrong)))
        with pytest.raises(
            LayoutError, match=rf" in the config, the model has .*{attribute}={shown}.*servers compute as the config"
        ):
            local_layout(chunks, config)
        setattr(transformer, attribute, right)
        compared.add(attribute)
    assert {"layernorm_epsilon", "activation_func", "normalization", "softmax_type"} <= compared
    assert local_layout(chunks, config)[0] == expected


@pytest.mark.parametrize(
    ("family", "attributes"),
    [
        ("llama", {"layernorm_epsilon": float(torch.tensor(1e-6))}),
        ("llama", {"activation_func": torch.nn.SiLU()}),
        ("llama", {"fp32_residual_connection": True, "attention_softmax_in_fp32": False, "bias_activation_fusion": True}),
        ("llama", {"hidden_dropout": 0.1, "attention_dropout": 0.1, "apply_rope_fusion": True, "no_rope_freq": [0, 0, 0, 0]}),
        ("gemma2", {"activation_func": partial(F.gelu, approximate="tanh")}),
        ("mixtral", {"moe_router_topk_scaling_factor": 1.0, "moe_router_dtype": "fp32", "moe_aux_loss_coeff": 1e-3}),
        ("mixtral", {"moe_router_load_balancing_type": "aux_loss", "moe_router_num_groups": 1, "moe_router_group_topk": 1}),
        ("mistral", {"window_size": [9, 0]}),
        ("gpt_oss", {"window_size": (7, 0), "window_attn_skip_freq": 2}),
        ("deepseek_v2_lite", {"moe_router_num_groups": 4, "moe_router_group_topk": 4}),
        ("deepseek_v3", {"moe_router_pre_softmax": True, "apply_query_key_layer_scaling": True}),
        (
            "gemma2",
            {
                "softmax_scale": None,
                "query_pre_attn_scalar": 200,
                "attn_logit_softcapping": 5.0,
                "final_logit_softcapping": 2.0,
                "window_size": (7, 0),
                "window_attn_skip_freq": None,
            },
        ),
        ("gemma3", {"window_size": 7, "window_attn_skip_freq": None, "rotary_base": (1e4, 1e6)}),
        ("qwen3_next", {"linear_attention_freq": 4}),
        ("glm4_moe", {"moe_router_bias_update_rate": 0.0, "moe_shared_expert_overlap": True}),
    ],
)
def test_a_model_as_others_build_it_is_taken(family: str, attributes: Config) -> None:
    """As Megatron-Bridge 0.3.1, verl and slime set the values of the same computation."""
    config = tiny_hf.tiny_config(family)
    if "window_size" in attributes and family == "gemma3":
        config["layer_types"] = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
        attributes = attributes | {"interleaved_attn_pattern": (2, 1)}
    chunks = build(config)
    expected = local_layout(chunks, config)[0]
    vars(chunks[0].config).update(attributes)
    assert local_layout(chunks, config)[0] == expected


def test_bridges_softcaps_are_compared() -> None:
    config = tiny_hf.tiny_config("gemma2")
    chunks = build(config)
    chunks[0].config.final_logit_softcapping = 30.0
    with pytest.raises(LayoutError, match=r"is 2.0 in the config, the model has final_logit_softcapping=30.0"):
        local_layout(chunks, config)


def test_a_window_as_long_as_every_sequence_may_be_left_out() -> None:
    config = tiny_hf.tiny_config("mistral", sliding_window=2048)
    chunks = build(config)
    chunks[0].config.window_size = None
    local_layout(chunks, config)
    chunks[0].max_sequence_length = 2049
    with pytest.raises(LayoutError, match="sliding_window is 2047 in the config, the model has window_size=None"):
        local_layout(chunks, config)


# Rotary embeddings

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 512}
ROTATIONS = (
    {"rope_type": "default", "rope_theta": 7e4},
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
    LLAMA3,
    LLAMA3 | {"factor": 32.0},
    YARN,
    YARN | {"truncate": False, "beta_fast": 16.0, "beta_slow": 2.0},
    YARN | {"mscale": 0.9, "mscale_all_dim": 0.6},
    YARN | {"mscale": 0.9},
)


@pytest.mark.parametrize("rope", ROTATIONS)
def test_rotary_embeddings_are_those_of_transformers(rope: Config) -> None:
    config = tiny_hf.tiny_config("llama", rope_parameters=rope, head_dim=64)
    found = rotary_of(architecture_of(config).recipe(config))
    theirs = tiny_hf._transformers_config(config)
    if rope["rope_type"] == "default":
        frequencies, factor = [rope["rope_theta"] ** (-n / 64) for n in range(0, 64, 2)], 1.0
    else:
        tensor, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](theirs, "cpu")
        frequencies = tensor.tolist()
    assert found.frequencies == pytest.approx(frequencies, rel=1e-5)
    assert found.factor == pytest.approx(factor)


@pytest.mark.parametrize("rope", ROTATIONS)
def test_a_model_with_the_configs_rotary_embeddings_is_taken_and_no_other(rope: Config) -> None:
    config = tiny_hf.tiny_config("llama", rope_parameters=rope)
    chunks = build(config)
    local_layout(chunks, config)
    old = {key: value for key, value in config.items() if key != "rope_parameters"}
    local_layout(chunks, old | {"rope_theta": rope["rope_theta"], "rope_scaling": None if len(rope) == 2 else rope})
    for changed in (rope | {"rope_theta": 2 * rope["rope_theta"]}, {"rope_type": "linear", "factor": 1.5, "rope_theta": 1e4}):
        with pytest.raises(LayoutError, match=r"rotary embeddings differ: .*in the config.* in the model"):
            local_layout(chunks, config | {"rope_parameters": changed})


@pytest.mark.parametrize(
    ("family", "arguments", "message"),
    [
        ("qwen3", {"rotary_base": 5e5}, r"rope_theta is 10000.0 in the config, the model has rotary_base=500000.0"),
        ("glm", {"rotary_percent": 0.25}, r"partial_rotary_factor is 0.5 in the config, the model has rotary_percent=0.25"),
        (
            "llama",
            {"seq_len_interpolation_factor": 2.0},
            r"pair 0 of channels turns by 1 per token in the config, by 0.5 in",
        ),
        ("llama", {"position_embedding_type": "none"}, r"the model has position_embedding_type='none'"),
    ],
)
def test_other_rotary_arguments_of_the_model_are_refused_by_both_values(family: str, arguments: Config, message: str) -> None:
    config = tiny_hf.tiny_config(family)
    chunks = build(config)
    gpt = chunks[0]
    given = architecture_of(config).recipe(config).model | arguments
    other = GPTModel(gpt.config, gpt.transformer_layer_spec, **given)
    with pytest.raises(LayoutError, match=message):
        local_layout([other], config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rotary_base": 5e5}, r"rope_theta is 10000.0 in the config, the model has rotary_base=500000.0"),
        ({"rotary_scaling_factor": 8.0}, r"factor is 4.0 in the config, the model has rotary_scaling_factor=8.0"),
        ({"beta_fast": 16.0}, r"beta_fast is 32.0 in the config, the model has beta_fast=16.0"),
        (
            {"mscale_all_dim": 0.3},
            r"mscale_all_dim is 0.7 in the config.*scores \(mscale_all_dim\) is 0.19029 in the config, 0.171539",
        ),
        ({"rope_type": "rope"}, r"rotary embeddings differ: rope_type is 'yarn' in the config, the model has rope_type='rope'"),
    ],
)
def test_other_rotary_arguments_of_latent_attention_are_refused_by_both_values(changes: Config, message: str) -> None:
    config = tiny_hf.tiny_config("deepseek_v3")
    with pytest.raises(LayoutError, match=message):
        local_layout(build(config, **changes), config)


def test_yarn_by_a_factor_of_one_is_no_scaling() -> None:
    """As Megatron-Bridge builds latent attention for a config without `rope_scaling`."""
    config = tiny_hf.tiny_config("deepseek_v2_lite")
    local_layout(build(config, rope_type="yarn", rotary_scaling_factor=1.0, mscale=1.0, mscale_all_dim=1.0), config)


def test_rotary_embeddings_of_windows_are_compared_where_a_module_has_them() -> None:
    """As Megatron-Bridge's Gemma 3 does."""
    config = tiny_hf.tiny_config("gemma3")
    chunks = build(config)
    rotary = chunks[0].rotary_pos_emb
    for base, fails in ((1e4, False), (7e3, True)):
        rotary.rope_local = RotaryEmbedding(32, 1.0, rotary_base=base, use_cpu_initialization=True)
        if not fails:
            local_layout(chunks, config)
            continue
        with pytest.raises(LayoutError, match=r"rope_local_base_freq, or rope_theta of windows, is 10000.0 in .* 7000"):
            local_layout(chunks, config)


# Values of the config


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"rope_parameters": LLAMA3 | {"rope_theta": 1e9}}),
        ("qwen3", {"rope_parameters": YARN}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4}, "hidden_act": "gelu"}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2, "layer_types": None}),
    ],
)
def test_a_model_of_the_recipe_computes_what_transformers_does(family: str, changes: Config, tmp_path: Path) -> None:
    config = tiny_hf.tiny_config(family, **changes)
    folder = tiny_hf.save_checkpoint(tmp_path, config)
    assert difference((config, tiny_hf.load_checkpoint(folder)), folder, "local") < tiny_hf.tolerance(family)


@pytest.mark.parametrize(
    ("family", "changes", "value"),
    [
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv=8.0"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        ("llama", {"hidden_act": "laplace"}, "hidden_act='laplace'"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "rope_type='dynamic'"),
        ("llama", {"rope_parameters": LLAMA3 | {"low_freq_factor": 2.0}}, "low_freq_factor=2.0"),
        ("deepseek_v3", {"rope_parameters": YARN | {"attention_factor": 1.5}}, "attention_factor=1.5"),
    ],
)
def test_a_value_that_megatron_cannot_compute_with_is_refused_by_name(family: str, changes: Config, value: str) -> None:
    config = tiny_hf.tiny_config(family)
    with pytest.raises(LayoutError, match=rf"{re.escape(value)} is in the config, megatron-core cannot compute with it"):
        local_layout(build(config), config | changes)
    with pytest.raises(UnsupportedModel, match=rf"config: {re.escape(value)}: megatron-core cannot compute with it"):
        build(config | changes)


def test_the_environment_allows_another_computation_and_the_text_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_hf.tiny_config("llama")
    chunks = build(config)
    monkeypatch.setenv("RESHARDER_ALLOW", "config-mismatch")
    with collecting() as texts:
        layout, _ = local_layout(chunks, config | {"rms_norm_eps": 1e-3})
    assert layout == local_layout(chunks, config)[0]
    (text,) = texts
    assert "rms_norm_eps is 0.001 in the config, the model has layernorm_epsilon=1e-06" in text


# The page


def arguments_of_megatron() -> set[str]:
    inherited = {field.name for field in dataclasses.fields(ModelParallelConfig)}
    own = {field.name for field in dataclasses.fields(MLATransformerConfig)} - inherited
    return own | set(inspect.signature(GPTModel.__init__).parameters) - {"self", "config"}


def test_every_argument_is_on_one_list() -> None:
    recipes = [architecture_of(config).recipe(config) for config in map(tiny_hf.tiny_config, tiny_hf.ALL)]
    compared = {name for recipe in recipes for aspect in aspects(recipe) for name in aspect.attributes}
    compared |= {*FIELDS, *SWITCHES, *ROTARY}
    listed = [*(name for names in NOT_COMPARED.values() for name in names), *PARALLELISM, *UNSUPPORTED]
    assert len(listed) == len(set(listed))
    assert not compared & set(listed)
    assert known_arguments() == compared | set(listed)


@pytest.mark.parametrize("release", RELEASES)
def test_every_argument_of_a_release_is_compared_refused_or_listed_with_a_reason(release: str) -> None:
    """A release that adds one fails here, after `python -m tools.megatron_arguments` has read its wheel."""
    of_release = {*RELEASES[release]["models"], *RELEASES[release]["parallelism"]}
    assert of_release - known_arguments() == set()
    assert set(RELEASES[release]["parallelism"]) <= {*PARALLELISM, *UNSUPPORTED}


def test_no_list_names_an_argument_that_no_release_has() -> None:
    of_some = {name for each in RELEASES.values() for names in each.values() for name in names}
    assert {*(name for names in NOT_COMPARED.values() for name in names), *PARALLELISM, *UNSUPPORTED} <= of_some


def test_the_data_have_every_tested_release_and_agree_with_the_installed_one() -> None:
    assert {".".join(release.split(".")[:2]) for release in RELEASES} == set(TESTED)
    installed = RELEASES[VERSION]
    assert set(installed["models"]) == arguments_of_megatron()
    assert set(installed["parallelism"]) == {each.name for each in dataclasses.fields(ModelParallelConfig)}


def test_the_page_lists_every_option_that_is_refused() -> None:
    rows = [line.split("|")[1:3] for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    listed = {name: reason.strip() for reason, names in rows for name in re.findall("`([^`]+)`", names)}
    assert {name: listed.get(name) for name in UNSUPPORTED} == dict(UNSUPPORTED)
