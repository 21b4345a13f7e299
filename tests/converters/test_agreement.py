"""A model and a config.json that were not made for each other are refused, where shapes alone do not tell."""

import re
from collections.abc import Mapping
from typing import Any

import pytest

from tests.support import fakepg, tiny_hf
from tests.support.megatron_models import build_model

# isort: split
import torch
from megatron.core import parallel_state
from resharder.converters.architectures import architecture_of
from resharder.converters.architectures.agreement import compared, disagreements, is_padding
from resharder.converters.architectures.checkpoint import expected_shapes
from resharder.converters.errors import LayoutError, UnsupportedModel
from resharder.converters.models.megatron.layout import language_of, local_layout, local_pieces

pytestmark = [pytest.mark.slow, pytest.mark.compat("refusals")]

HYBRID = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
LATENT = ("deepseek_v2", "deepseek_v2_lite", "deepseek_v3", "glm4_moe_lite", "kimi_k2")


def build(config: Mapping[str, Any], world: int = 1, **layout: Any) -> list[torch.nn.Module]:
    fakepg.enter(0, world)
    layout.setdefault("spec", "te" if "linear_num_key_heads" in config else "local")
    return build_model(config, device="meta", init_model_with_meta_device=True, **layout)


def wider_heads(family: str) -> dict[str, Any]:
    """Half of the heads, each of twice the width."""
    config = tiny_hf.tiny_config(family)
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    return {"num_attention_heads": heads // 2, "num_key_value_heads": groups // 2, "head_dim": 2 * width}


@pytest.mark.parametrize("family", [family for family in tiny_hf.FAMILIES if family not in LATENT])
def test_heads_of_another_width_are_refused_with_both_values(family: str) -> None:
    config = tiny_hf.tiny_config(family)
    changed = config | wider_heads(family)
    given = changed["num_attention_heads"]
    message = rf"num_attention_heads is {given} in the config, the model has num_attention_heads={2 * given}.*head_dim is "
    with pytest.raises(LayoutError, match=message):
        local_layout(build(config), changed)


def test_shapes_do_not_tell_of_heads_of_another_width() -> None:
    config = tiny_hf.tiny_config("llama")
    assert expected_shapes(config | wider_heads("llama")) == expected_shapes(config)


@pytest.mark.parametrize("family", LATENT)
def test_other_parts_of_latent_heads_are_refused_with_both_values(family: str) -> None:
    config = tiny_hf.tiny_config(family)
    changed = config | {"num_attention_heads": 4, "num_key_value_heads": 4, "qk_nope_head_dim": 64, "v_head_dim": 40}
    message = "qk_nope_head_dim is 64 in the config, the model has qk_head_dim=24; .*v_head_dim is 40 in the config"
    with pytest.raises(LayoutError, match=message):
        local_layout(build(config), changed)


@pytest.mark.parametrize("family", HYBRID)
def test_heads_of_delta_nets_of_another_width_are_refused_with_both_values(family: str) -> None:
    config = tiny_hf.tiny_config(family)
    changed = config | {"linear_num_key_heads": 2, "linear_key_head_dim": 32}
    assert expected_shapes(changed) == expected_shapes(config)
    message = "linear_num_key_heads is 2 in the config, the model has linear_num_key_heads=4.*linear_key_head_dim is 32 .*=16"
    with pytest.raises(LayoutError, match=message):
        local_layout(build(config), changed)


@pytest.mark.parametrize("family", tiny_hf.ALL)
def test_every_value_that_decides_a_cut_is_compared(family: str) -> None:
    """The names in the message are those of the differences, one by one."""
    config = tiny_hf.tiny_config(family)
    chunks = build(config)
    local_layout(chunks, config)
    for attribute, (name, expected) in compared(architecture_of(config).recipe(config)).items():
        language = language_of(chunks[0])
        holder: Any = language if attribute in vars(language) else language.config
        if attribute not in vars(holder):
            continue
        right = getattr(holder, attribute)
        wrong = (not right) if isinstance(right, bool) else (right or 0) + 1
        setattr(holder, attribute, wrong)
        with pytest.raises(
            LayoutError, match=re.escape(f"{name} is {expected!r} in the config, the model has {attribute}={wrong!r}")
        ):
            local_layout(chunks, config)
        setattr(holder, attribute, right)


COMPARED = {
    "llama": {
        "num_layers": "num_hidden_layers",
        "hidden_size": "hidden_size",
        "num_attention_heads": "num_attention_heads",
        "num_query_groups": "num_key_value_heads",
        "kv_channels": "head_dim",
        "multi_latent_attention": "latent attention",
        "attention_output_gate": "gated attention",
        "gated_linear_unit": "a gated MLP",
        "rotary_interleaved": "rotation of neighbouring channels",
        "num_moe_experts": "number of experts",
        "mtp_num_layers": "number of layers that predict further tokens",
    },
    "deepseek_v3": {
        "q_lora_rank": "q_lora_rank",
        "kv_lora_rank": "kv_lora_rank",
        "qk_head_dim": "qk_nope_head_dim",
        "qk_pos_emb_head_dim": "qk_rope_head_dim",
        "v_head_dim": "v_head_dim",
        "moe_shared_expert_intermediate_size": "width of the shared experts",
        "moe_ffn_hidden_size": "width of an expert",
        "multi_latent_attention": "latent attention",
        "num_moe_experts": "number of experts",
        "mtp_num_layers": "number of layers that predict further tokens",
    },
    "qwen3_next": {
        "linear_num_key_heads": "linear_num_key_heads",
        "linear_num_value_heads": "linear_num_value_heads",
        "linear_key_head_dim": "linear_key_head_dim",
        "linear_value_head_dim": "linear_value_head_dim",
        "linear_conv_kernel_dim": "linear_conv_kernel_dim",
        "attention_output_gate": "gated attention",
    },
    "glm": {"rotary_interleaved": "rotation of neighbouring channels"},
    "nemotron": {"gated_linear_unit": "a gated MLP"},
}
"""By attribute of Megatron's config, the name in the message, in families with and without the option."""


@pytest.mark.parametrize(("family", "attribute"), [(family, key) for family, names in COMPARED.items() for key in names])
def test_a_model_with_another_value_is_refused_by_the_name_in_the_config(family: str, attribute: str) -> None:
    config = tiny_hf.tiny_config(family)
    chunks: Any = build(config)
    right = getattr(chunks[0].config, attribute)
    wrong = not right if right in (None, True, False) else right + 1
    setattr(chunks[0].config, attribute, wrong)
    given = rf"({right!r}|None)" if not right else repr(right)
    message = rf"{COMPARED[family][attribute]} is {given} in the config, the model has {attribute}={wrong!r}"
    with pytest.raises(LayoutError, match=message):
        local_layout(chunks, config)


def test_a_value_that_a_model_does_not_have_is_not_compared() -> None:
    config = tiny_hf.tiny_config("llama")
    assert disagreements(architecture_of(config).recipe(config), {}) == []


@pytest.mark.parametrize("attribute", ["num_query_groups", "kv_channels"])
def test_latent_attention_is_not_cut_by_groups(attribute: str) -> None:
    config = tiny_hf.tiny_config("deepseek_v3")
    chunks: Any = build(config)
    expected = local_layout(chunks, config)[0]
    setattr(chunks[0].config, attribute, 2 * getattr(chunks[0].config, attribute))
    assert local_layout(chunks, config)[0] == expected


@pytest.mark.parametrize("layers", [2, 3])
def test_a_config_with_more_layers_than_the_model_is_refused(layers: int) -> None:
    config = tiny_hf.tiny_config("llama", num_hidden_layers=layers)
    with pytest.raises(LayoutError, match=f"num_hidden_layers is 4 in the config, the model has num_layers={layers}"):
        local_layout(build(config), tiny_hf.tiny_config("llama"))


# The vocabulary


@pytest.mark.parametrize("family", tiny_hf.ALL)
def test_rows_of_the_vocabulary_that_are_no_padding_are_refused(family: str) -> None:
    config = tiny_hf.tiny_config(family)
    chunks = build(config)
    with pytest.raises(LayoutError, match=r"expected 1000 rows \(vocab_size\).* found 1003: the config leaves out 3 rows"):
        local_layout(chunks, tiny_hf.tiny_config(family, vocab_size=1000))


@pytest.mark.parametrize(
    ("rows", "vocabulary", "ranks", "padded"),
    [
        (1003, 1003, 1, True),
        (1024, 1003, 1, True),
        (1024, 1003, 8, True),
        (151936, 151665, 1, False),  # Qwen2.5's tokenizer has fewer words than its embeddings have rows
        (151936, 151665, 8, False),
        (151936, 151643, 2, False),
        (152064, 151936, 2, True),
        (152064, 151936, 1, False),
        (256, 128, 1, False),
        (256, 129, 1, True),
        (129408, 129280, 3, True),
        (1002, 1003, 1, False),
    ],
)
def test_padding_is_less_than_a_unit_that_the_rows_are_a_multiple_of(
    rows: int, vocabulary: int, ranks: int, padded: bool
) -> None:
    assert is_padding(rows, vocabulary, ranks) == padded


@pytest.mark.parametrize("multiple", [1, 8, 64, 128])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_padding_as_megatron_adds_it_is_taken(multiple: int, tp: int) -> None:
    config = tiny_hf.tiny_config("llama")
    layout, _ = local_layout(build(config, tp, tp=tp, vocab_multiple=multiple), config)
    assert layout.tensors["lm_head.weight"].shape[0] == 1003


def test_a_rank_of_padding_alone_has_no_rows_of_the_vocabulary() -> None:
    config = tiny_hf.tiny_config("llama", vocab_size=100)
    fakepg.enter(3, 4)
    chunks = build_model(config, tp=4, vocab_multiple=64, device="meta", init_model_with_meta_device=True)
    layout, tensors = local_layout(chunks, config)
    assert tensors["0.output_layer.weight"].shape == (64, 128)
    assert layout.tensors.keys().isdisjoint({"lm_head.weight", "model.embed_tokens.weight"})


# What else a model cannot be laid out by


def test_pieces_of_a_model_without_memory_are_refused() -> None:
    config = tiny_hf.tiny_config("llama")
    with pytest.raises(
        UnsupportedModel, match=r"embedding\.word_embeddings\.weight: .* tensors of the model are on the meta device"
    ):
        list(local_pieces(build(config), config))


def test_process_groups_without_parallel_state_are_refused_by_what_is_missing() -> None:
    config = tiny_hf.tiny_config("llama")
    chunks = build(config)
    parallel_state.destroy_model_parallel()
    with pytest.raises(UnsupportedModel, match="parallel_state is not initialised, and a ProcessGroupCollection alone"):
        local_layout(chunks, config)


@pytest.mark.parametrize(
    ("inner", "advice"),
    [("qwen3_5_text", "attach its language model alone, with its text_config"), ("qwen2_vl_text", "nor has that of its")],
)
def test_a_multimodal_model_is_told_of_its_text_config_only_where_that_has_a_table(inner: str, advice: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"multimodal and has no table; {advice}.*{inner}"):
        expected_shapes({"model_type": "any_vl", "text_config": {"model_type": inner}})


def test_a_multimodal_config_without_a_text_config_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="multimodal and has no table; nor has that of its language model"):
        expected_shapes({"model_type": "any_vl", "text_config": None})
