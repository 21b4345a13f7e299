"""Names and shapes of checkpoints, from config.json alone."""

import subprocess
import sys
from pathlib import Path

import pytest
from resharder.converters.architectures import table_of
from resharder.converters.architectures.checkpoint import config_dict, expected_shapes
from resharder.converters.errors import UnsupportedModel
from transformers import Qwen3Config

from tests.support import tiny_hf

QWEN3_8B = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}
QWEN3_30B_A3B = QWEN3_8B | {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


@pytest.mark.parametrize(
    ("family", "changes"),
    [(family, {}) for family in tiny_hf.ALL]
    + [("llama", {"num_key_value_heads": 1}), ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [1]})],
)
def test_expected_shapes_are_those_that_transformers_saves(family: str, changes: dict[str, object], tmp_path: Path) -> None:
    config = tiny_hf.tiny_config(family, **changes)
    saved = tiny_hf.load_checkpoint(tiny_hf.save_checkpoint(tmp_path, config))
    assert expected_shapes(config) == {name: tuple(tensor.shape) for name, tensor in saved.items()}


@pytest.mark.parametrize(
    ("config", "count"), [(QWEN3_8B, 399), (QWEN3_8B | {"tie_word_embeddings": True}, 398), (QWEN3_30B_A3B, 18867)]
)
def test_published_models_have_as_many_tensors_as_their_checkpoints(config: dict[str, object], count: int) -> None:
    assert len(expected_shapes(config)) == count


def test_a_transformers_config_says_the_same_as_its_dict() -> None:
    config = Qwen3Config(num_hidden_layers=2, hidden_size=64, intermediate_size=96)
    assert config_dict(config) == config.to_dict()
    assert expected_shapes(config) == expected_shapes(config.to_dict())


def test_a_config_may_hold_what_json_does_not() -> None:
    assert expected_shapes(QWEN3_8B | {"dtype": object()}) == expected_shapes(QWEN3_8B)


def test_a_table_is_made_once_for_equal_configs() -> None:
    reordered = dict(reversed(QWEN3_8B.items()))
    assert table_of(reordered)[0] is table_of(QWEN3_8B)[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, "Qwen3ForSequenceClassification"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"hidden_size": None}, "hidden_size should be a positive integer, is None"),
        ({"num_hidden_layers": -1}, "num_hidden_layers should be a positive integer, is -1"),
        ({"vocab_size": "many"}, "vocab_size should be a positive integer, is 'many'"),
        ({"vocab_size": 0}, "vocab_size should be a positive integer, is 0"),
        ({"num_hidden_layers": True}, "num_hidden_layers should be a positive integer, is True"),
        ({"num_key_value_heads": 5}, "32 attention heads do not divide into 5"),
    ],
)
def test_a_config_without_a_table_is_refused_by_what_is_wrong_with_it(change: dict[str, object], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        expected_shapes(QWEN3_8B | change)


def test_shapes_are_known_without_torch() -> None:
    check = (
        "import sys, resharder.converters.architectures.checkpoint; sys.exit('torch' in sys.modules or 'megatron' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
