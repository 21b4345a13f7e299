"""What is refused of models with a tower, by name, and the forms of their configs."""

from pathlib import Path
from typing import Any

import pytest

from tests.support import fakepg, tiny_hf
from tests.support.megatron_models import build_model

# isort: split
import torch
from resharder.converters.architectures import architecture_of
from resharder.converters.architectures.checkpoint import expected_shapes, tower_shapes
from resharder.converters.architectures.wrapped import language_config
from resharder.converters.errors import LayoutError, UnsupportedModel
from resharder.converters.models.megatron.adapters import find_adapter
from resharder.converters.models.megatron.layout import local_layout
from resharder.converters.models.megatron.torch_dist import open_torch_dist
from transformers import AutoConfig

GEMMA_3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "mm_tokens_per_image": 256,
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {
        "hidden_size": 1152,
        "image_size": 896,
        "intermediate_size": 4304,
        "model_type": "siglip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "patch_size": 14,
        "vision_use_head": False,
    },
}
"""The released config, which leaves most sizes to transformers' defaults."""


def test_a_released_config_of_gemma_3_means_what_transformers_takes_it_for() -> None:
    given: Any = AutoConfig.for_model(**{name: value for name, value in GEMMA_3_4B.items() if name != "architectures"})
    whole = given.to_dict() | {"architectures": GEMMA_3_4B["architectures"]}
    assert expected_shapes(GEMMA_3_4B) == expected_shapes(whole)
    ours, theirs = (architecture_of(config).recipe(config) for config in (GEMMA_3_4B, whole))
    assert (ours.transformer, ours.model, ours.extras) == (theirs.transformer, theirs.model, theirs.extras)


def test_qwen2_5_vl_was_released_without_a_text_config() -> None:
    config = tiny_hf.tiny_config("qwen2_5_vl")
    flat = {**config, **config["text_config"], "model_type": "qwen2_5_vl", "tie_word_embeddings": False}
    del flat["text_config"]
    assert expected_shapes(flat) == expected_shapes(config)
    assert architecture_of(flat).recipe(flat).transformer == architecture_of(config).recipe(config).transformer


@pytest.mark.parametrize("family", tiny_hf.WRAPPED)
def test_the_wrapper_decides_whether_embeddings_are_tied(family: str) -> None:
    config = tiny_hf.tiny_config(family)
    for tied in (True, False):
        changed = config | {"tie_word_embeddings": tied, "text_config": config["text_config"] | {"tie_word_embeddings": not tied}}
        assert language_config(changed)["tie_word_embeddings"] is tied
        assert any("lm_head" in name for name in expected_shapes(changed)) is not tied


def test_a_language_model_alone_has_no_tower() -> None:
    assert tower_shapes(tiny_hf.tiny_config("qwen3")) == {}
    assert all("visual" in name for name in tower_shapes(tiny_hf.tiny_config("qwen3_vl")))


@pytest.mark.parametrize("field", ["text_config", "vision_config"])
def test_a_config_without_a_part_is_refused_by_its_name(field: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"config: {field} should be a mapping, is 'none'"):
        expected_shapes(tiny_hf.tiny_config("qwen3_vl") | {field: "none"})


def test_another_rotary_base_of_the_tower_is_refused() -> None:
    config = tiny_hf.tiny_config("qwen3_vl")
    fakepg.enter(0, 1)
    chunks = build_model(config)
    other = config | {"vision_config": config["vision_config"] | {"rope_parameters": {"rope_theta": 500.0}}}
    with pytest.raises(LayoutError, match=r"rope_theta=500\.0 of vision_config is in the config, megatron-core cannot compute"):
        local_layout(chunks, other)


def test_a_transformers_tower_with_another_config_is_refused_by_both_values() -> None:
    config = tiny_hf.tiny_config("qwen2_5_vl")
    fakepg.enter(0, 1)
    chunks: Any = build_model(config)
    chunks[0].visual.config = AutoConfig.for_model(**config).vision_config
    local_layout(chunks, config)
    other = config | {"vision_config": config["vision_config"] | {"num_heads": 4}}
    with pytest.raises(LayoutError, match="num_heads is 4 in vision_config, the tower has 8"):
        local_layout(chunks, other)


def test_a_tower_with_fewer_tensors_than_the_configs_is_refused() -> None:
    config = tiny_hf.tiny_config("qwen2_5_vl")
    fakepg.enter(0, 1)
    chunks: Any = build_model(config)
    other = config | {"vision_config": config["vision_config"] | {"depth": 4}}
    with pytest.raises(LayoutError, match=r"the model's lacks 12 of them, such as visual\.blocks\.3\."):
        local_layout(chunks, other)


def test_positions_of_images_are_compared_where_there_is_a_tower() -> None:
    config = tiny_hf.tiny_config("qwen3_vl")
    fakepg.enter(0, 1)
    chunks: Any = build_model(config)
    chunks[0].config.mrope_section = [4, 6, 6]
    with pytest.raises(LayoutError, match=r"mrope_section is \[6, 5, 5\] in the config, the model has mrope_section=\[4, 6, 6\]"):
        local_layout(chunks, config)
    local_layout([chunks[0].language_model], config)


def test_what_models_with_a_tower_do_not_have_is_refused_by_name(tmp_path: Path) -> None:
    config = tiny_hf.tiny_config("qwen3_vl")
    with (
        pytest.raises(
            UnsupportedModel, match="checkpoints of models with a tower are not imported: convert it with Megatron-Bri"
        ),
        open_torch_dist(tmp_path, config),
    ):
        pass
    with pytest.raises(
        UnsupportedModel, match=r"adapters of models with a tower \('qwen3_vl'\) are not supported: merge the ada"
    ):
        find_adapter([torch.nn.Linear(1, 1)], config)
