"""Options that no table describes are refused, and defaults are those of transformers: for every family."""

from typing import Any

import pytest
from resharder.converters.architectures import table_of
from resharder.converters.architectures.checkpoint import expected_shapes
from resharder.converters.errors import LayoutError, UnsupportedModel

from tests.support import tiny_hf

REFUSED = {
    "attention_bias": (
        *("deepseek_v2", "deepseek_v3", "kimi_k2", "gemma2", "gemma3", "nemotron", "olmoe", "qwen3", "qwen3_moe"),
        *("qwen3_next", "qwen3_5", "qwen3_5_moe", "gemma", "hy_v3"),
    ),
    "mlp_bias": ("hy_v3", "deepseek_v2", "deepseek_v3", "kimi_k2", "glm", "glm4", "nemotron"),
    "num_nextn_predict_layers": ("hy_v3",),
    "mtp_use_dedicated_embeddings": ("qwen3_5", "qwen3_5_moe"),
}
OTHERS = (
    ("gemma", "hidden_act", "silu", "gelu_pytorch_tanh"),
    ("gemma", "hidden_activation", "gelu", "gelu_pytorch_tanh"),
    *((family, "hidden_act", "gelu", "silu") for family in ("minimax_m2", "mixtral", "olmoe", "qwen3_moe", "qwen3_vl_moe")),
    ("olmoe", "norm_topk_prob", True, False),
    ("olmoe", "rms_norm_eps", 1e-6, 1e-5),
    ("gpt_oss", "swiglu_limit", 5.0, 7.0),
)
DEFAULTS: tuple[tuple[str, str, Any], ...] = (
    ("gemma", "head_dim", 256),
    ("gemma2", "head_dim", 256),
    ("gemma3", "head_dim", 256),
    ("gemma", "tie_word_embeddings", True),
    ("gemma2", "tie_word_embeddings", True),
    ("gemma3", "tie_word_embeddings", True),
    *((family, "attention_bias", True) for family in ("glm", "glm4", "gpt_oss")),
    *((family, "tie_word_embeddings", False) for family in ("llama", "qwen3", "mixtral", "nemotron", "glm")),
    ("llama", "num_key_value_heads", 8),
    ("llama", "head_dim", 16),
    ("qwen2_moe", "qkv_bias", True),
    ("qwen2_moe", "decoder_sparse_step", 1),
    ("qwen3_moe", "mlp_only_layers", []),
    ("deepseek_v2", "first_k_dense_replace", 0),
    ("qwen3_next", "num_nextn_predict_layers", 0),
    ("qwen3_5", "mtp_num_hidden_layers", 0),
    ("deepseek_v3", "num_nextn_predict_layers", 0),
    ("hy_v3", "num_shared_experts", 1),
    ("hy_v3", "head_dim", 128),
    ("glm4_moe", "use_qk_norm", False),
    ("glm4_moe", "attention_bias", False),
)


@pytest.mark.parametrize(("option", "family"), [(option, family) for option, some in REFUSED.items() for family in some])
def test_an_option_whose_weights_are_in_no_table_is_refused(option: str, family: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"config: {option}=True has weights that no table describes"):
        expected_shapes(tiny_hf.tiny_config(family) | {option: True})


@pytest.mark.parametrize(("family", "option", "value", "computed"), OTHERS)
def test_a_value_that_vllm_does_not_compute_with_is_refused(family: str, option: str, value: Any, computed: Any) -> None:
    with pytest.raises(LayoutError, match=f"config: {option}={value!r}: vLLM computes with {computed!r}"):
        expected_shapes(tiny_hf.tiny_config(family, **{option: value}))


def test_windows_that_vllm_does_not_compute_are_refused() -> None:
    config = tiny_hf.tiny_config("gpt_oss")
    expected_shapes(config | {"layer_types": None})
    with pytest.raises(LayoutError, match="config: layer_types: vLLM computes windows in the first layer and every other one"):
        expected_shapes(config | {"layer_types": config["layer_types"][::-1]})


@pytest.mark.parametrize("changes", [{"hidden_act": "gelu"}, {"hidden_activation": "gelu_pytorch_tanh"}, {"hidden_act": None}])
def test_gemmas_gelu_has_two_names(changes: dict[str, Any]) -> None:
    config = tiny_hf.tiny_config("gemma")
    assert expected_shapes(config | changes) == expected_shapes(config)


@pytest.mark.parametrize(("family", "field", "default"), DEFAULTS)
def test_what_a_config_leaves_out_is_what_transformers_takes(family: str, field: str, default: Any) -> None:
    config = tiny_hf.tiny_config(family)
    left_out = {key: value for key, value in config.items() if key != field}
    assert expected_shapes(left_out) == expected_shapes(config | {field: default})


@pytest.mark.parametrize("family", tiny_hf.ALL)
def test_the_vocabulary_alone_may_have_rows_of_padding(family: str) -> None:
    table, _ = table_of(tiny_hf.tiny_config(family))
    padded = {key for key, weights in table.items() if any(weight.padded for weight in weights)}
    of_words = {"embedding.word_embeddings.weight", "output_layer.weight"}
    assert padded == {key for key in table if key.removeprefix("language_model.") in of_words}
