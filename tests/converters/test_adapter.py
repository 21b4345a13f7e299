"""What a PEFT folder may say: configs and tensors that servers would load as something else are refused."""

from typing import Any

import pytest
from resharder.converters.adapter import check_config, check_tensors
from resharder.converters.errors import ConversionError, LayoutError, UnknownTensor, UnsupportedModel
from resharder.converters.geometry.layout import TensorSpec
from resharder.converters.storage.files import lay_out

CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none"}
Q = "base_model.model.model.layers.0.self_attn.q_proj"
EMBEDDING = "base_model.model.model.embed_tokens.lora_embedding"
SHAPES = {f"{Q}.lora_A.weight": (4, 32), f"{Q}.lora_B.weight": (48, 4)}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"use_rslora": True},
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": False},
        {"lora_alpha": 0.5},
        {"rank_pattern": {"q_proj": 2}},
        {"peft_type": "PeftType.LORA"},
        {"use_dora": False, "modules_to_save": None, "target_parameters": []},
    ],
)
def test_lora_as_peft_and_servers_compute_it_is_accepted(more: dict[str, Any]) -> None:
    check_config(CONFIG | more)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"peft_type": "IA3"}, "the adapter is of type IA3, and servers load LoRA alone"),
        ({"peft_type": None}, "the adapter is of type None"),
        ({"use_dora": True}, "train with use_dora=False"),
        ({"bias": "lora_only"}, "train with bias='none'"),
        ({"modules_to_save": ["lm_head"]}, "train with modules_to_save=None, or merge the adapter"),
        ({"trainable_token_indices": {"embed_tokens": [1]}}, "train without trainable_token_indices"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "train with target_modules only"),
        ({"layer_replication": [[0, 4]]}, "train without layer_replication"),
        ({"alora_invocation_tokens": [5]}, "train without alora_invocation_tokens"),
        ({"use_qalora": True}, "train with use_qalora=False"),
        ({"lora_bias": True}, "train with lora_bias=False"),
        ({"init_lora_weights": "pissa_niter_4"}, r"save_pretrained\(path_initial_model_for_weight_conversion=…\)"),
        ({"init_lora_weights": "olora"}, "which changes the base's weights"),
        ({"r": 0}, "expected a rank above 0 as r and a number as lora_alpha, found 0 and 8"),
        ({"r": True}, "found True and 8"),
        ({"r": "4"}, "found 4 and 8"),
        ({"lora_alpha": None}, "found 4 and None"),
        ({"lora_alpha": float("nan")}, "found 4 and nan"),
    ],
)
def test_other_configs_are_refused_with_what_to_do(more: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedModel, match=says):
        check_config(CONFIG | more)


def test_a_config_of_a_model_is_none_of_an_adapter() -> None:
    with pytest.raises(UnsupportedModel, match=r"found no peft_type among \['hidden_size', 'model_type'\]: pass PEFT's"):
        check_config({"model_type": "qwen3", "hidden_size": 8})


@pytest.mark.parametrize(
    ("config", "shapes"),
    [
        (CONFIG, SHAPES),
        (CONFIG, {f"{EMBEDDING}_A": (4, 1000), f"{EMBEDDING}_B": (64, 4)}),
        (CONFIG | {"rank_pattern": {"q_proj": 2}}, {f"{Q}.lora_A.weight": (2, 32), f"{Q}.lora_B.weight": (48, 2)}),
    ],
)
def test_tensors_of_linear_layers_and_embeddings_are_accepted(config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> None:
    check_tensors(config, shapes)


@pytest.mark.parametrize(
    ("kind", "shapes", "says"),
    [
        (UnknownTensor, {}, "the adapter has no tensor"),
        (UnknownTensor, SHAPES | {"model.norm.weight": (4,)}, "^model.norm.weight: expected the names of a LoRA adapter"),
        (UnknownTensor, SHAPES | {f"{Q}.lora_magnitude_vector": (4,)}, "lora_magnitude_vector: expected the names"),
        (UnknownTensor, {f"{Q}.lora_A.default.weight": (4, 32)}, "lora_A.default.weight: expected the names"),
        (UnknownTensor, {f"{Q}.lora_embedding_A.weight": (4, 32)}, "expected the names"),
        (UnknownTensor, {f"{Q}.lora_A.weight": (4, 32)}, "expected lora_A and lora_B of each module, found one of them"),
        (LayoutError, SHAPES | {f"{Q}.lora_A.weight": (4, 32, 1, 1)}, "expected matrices as lora_A and lora_B"),
        (LayoutError, SHAPES | {f"{Q}.lora_A.weight": (8, 32)}, "expected lora_A of 4 rows and lora_B of as many columns"),
        (
            LayoutError,
            {f"{Q}.lora_A.weight": (8, 32), f"{Q}.lora_B.weight": (48, 8)},
            "the adapter's r, found .8, 32",
        ),
    ],
)
def test_other_tensors_are_refused(kind: type[ConversionError], shapes: dict[str, tuple[int, ...]], says: str) -> None:
    with pytest.raises(kind, match=says):
        check_tensors(CONFIG, shapes)


def test_all_tensors_of_an_adapter_are_in_one_file_whatever_their_bytes_and_homes() -> None:
    specs = [TensorSpec(name, "F32", shape) for name, shape in SHAPES.items()]
    homes = {spec.name: str(number) for number, spec in enumerate(specs)}
    (file,) = lay_out(specs, 1, homes, "adapter_model.safetensors")
    assert file.path == "adapter_model.safetensors"
    assert file.by_name.keys() == SHAPES.keys()
    assert len(lay_out(specs, 1)) == 2
