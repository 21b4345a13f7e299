"""What Megatron computes, filled through its layout, against transformers on the checkpoint that it wrote: for every family."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import tiny_hf
from tests.support.megatron_models import Spec, legacy_experts

# isort: split
from resharder.converters import architectures
from resharder.converters.architectures.table import Rows, Weight

from tests.support.megatron_logits import difference
from tests.support.wrong_tables import exchanged, renamed, rewritten

pytestmark = [pytest.mark.slow, pytest.mark.compat("logits")]

Checkpoint = dict[str, torch.Tensor]
Model = tuple[dict[str, Any], Checkpoint]
SPECS = [
    pytest.param(family, spec, marks=[pytest.mark.full] * ((number + second) % 2))
    for number, family in enumerate(tiny_hf.ALL)
    for second, spec in enumerate(("local", "te"))
]
"""Each family with each of Megatron's layer specs, in turns with one of them in `make test`."""


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    made: dict[str, Path] = {}

    def make(family: str, **changes: Any) -> Path:
        key = repr((family, changes))
        if key not in made:
            made[key] = tiny_hf.save_checkpoint(tmp_path_factory.mktemp(family), tiny_hf.tiny_config(family, **changes))
        return made[key]

    return make


@pytest.fixture
def model_of(folder_of: Callable[..., Path]) -> Callable[..., Model]:
    return lambda family, **changes: (
        tiny_hf.tiny_config(family, **changes),
        tiny_hf.load_checkpoint(folder_of(family, **changes)),
    )


@pytest.mark.parametrize(("family", "spec"), SPECS)
def test_megatron_computes_the_logits_of_the_checkpoint(
    model_of: Callable[..., Model], folder_of: Callable[..., Path], family: str, spec: Spec
) -> None:
    assert difference(model_of(family), folder_of(family), spec) < tiny_hf.tolerance(family)


@legacy_experts
def test_legacy_grouped_experts_compute_the_logits_of_the_checkpoint(
    model_of: Callable[..., Model], folder_of: Callable[..., Path]
) -> None:
    family = "qwen3_moe"
    flags = {"moe_use_legacy_grouped_gemm": True, "bf16": True}  # they refuse to run without the flag, whatever their dtype
    assert difference(model_of(family), folder_of(family), "te", **flags) < tiny_hf.tolerance(family)


def first_after(rows: int) -> Callable[[Weight], Weight]:
    return lambda weight: replace(weight, runs=tuple(replace(run, first=run.first + rows) for run in weight.runs))


def halves_swapped(weight: Weight) -> Weight:
    half, tensor = weight.shape[0] // 2, weight.runs[0].tensor
    return replace(weight, runs=(Rows(0, half, tensor, half), Rows(half, half, tensor)))


WRONG: dict[str, tuple[str, str, Callable[[Weight], Weight]]] = {
    "gate and up swapped": ("llama", "mlp.linear_fc1.weight", renamed("gate_proj", "up_proj")),
    "biases of gate and up swapped": ("llama_biased", "mlp.linear_fc1.bias", renamed("gate_proj", "up_proj")),
    "key and value swapped": ("llama", "linear_qkv.weight", renamed("k_proj", "v_proj")),
    "key and value swapped under a window": ("mistral", "linear_qkv.weight", renamed("k_proj", "v_proj")),
    "biases of key and value swapped": ("qwen2", "linear_qkv.bias", renamed("k_proj", "v_proj")),
    "head norms swapped": ("qwen3", "q_layernorm.weight", renamed("q_norm", "k_norm")),
    "layer norms swapped": ("qwen3", "mlp.linear_fc1.layer_norm_weight", renamed("post_attention_layernorm", "input_layernorm")),
    "a norm taken for the one after it": (
        "gemma2",
        "mlp.linear_fc1.layer_norm_weight",
        renamed("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ),
    "a gain around zero taken for one around one": ("gemma3", "layernorm.weight", lambda weight: replace(weight, gain=1.0)),
    "a norm's bias taken for another's": (
        "nemotron",
        "mlp.linear_fc1.layer_norm_bias",
        renamed("post_attention_layernorm", "input_layernorm"),
    ),
    "gate and up swapped in one tensor": ("glm", "mlp.linear_fc1.weight", halves_swapped),
    "norms after attention and MLP swapped": (
        "glm4",
        "linear_proj.post_layernorm.weight",
        renamed("post_self_attn_layernorm", "post_mlp_layernorm"),
    ),
    "halves of a norm over all heads swapped": ("olmoe", "q_layernorm.weight", halves_swapped),
    "halves of the biases that choose experts swapped": ("minimax_m2", "router.expert_bias", halves_swapped),
    "gate and up of the shared expert swapped": (
        "qwen2_moe",
        "shared_experts.linear_fc1.weight",
        renamed("gate_proj", "up_proj"),
    ),
    "gate and up of experts swapped": ("mixtral", "experts.linear_fc1.weight", renamed("w1", "w3")),
    "gate and up swapped where they alternate": (
        "gpt_oss",
        "experts.linear_fc1.weight",
        lambda weight: replace(weight, runs=tuple(replace(run, first=1 - run.first) for run in weight.runs)),
    ),
    "biases of experts off by one": (
        "gpt_oss",
        "experts.linear_fc2.bias",
        lambda weight: replace(weight, runs=tuple(replace(run, index=((run.index or 0) + 1) % 12) for run in weight.runs)),
    ),
    "key heads of a delta net swapped": ("qwen3_next", "in_proj.weight.key", exchanged(0, 1)),
    "values and gates of a delta net swapped": ("qwen3_5", "in_proj.weight.z", renamed("in_proj_z", "in_proj_qkv")),
    "beta and alpha swapped": ("qwen3_5_moe", "in_proj.weight.beta", renamed("in_proj_b", "in_proj_a")),
    "filters of query and key swapped": ("qwen3_next", "conv1d.weight.query", first_after(64)),
    "time step and decay swapped": ("qwen3_5", "A_log", renamed("A_log", "dt_bias")),
    "the delta net's norm around zero": ("qwen3_5", "out_norm.weight", lambda weight: replace(weight, gain=0.0)),
    "other norms around one": ("qwen3_next", "q_layernorm.weight", lambda weight: replace(weight, gain=1.0)),
    "a query and its gate swapped": ("qwen3_next", "linear_qkv.weight", exchanged(0, 2)),
    "a gain around zero taken for one around one, in Gemma": (
        "gemma",
        "layernorm.weight",
        lambda weight: replace(weight, gain=1.0),
    ),
    "halves of the biases that choose Hy3's experts swapped": ("hy_v3", "router.expert_bias", halves_swapped),
    "gate and up of Hy3's shared experts swapped": (
        "hy_v3",
        "shared_experts.linear_fc1.weight",
        renamed("gate_proj", "up_proj"),
    ),
    "experts swapped": ("qwen3_moe", "experts.linear_fc2.weight", renamed("experts.0.", "experts.1.")),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_line_in_a_table_moves_the_logits(
    model_of: Callable[..., Model], folder_of: Callable[..., Path], mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, key, change = WRONG[mistake]
    model = model_of(family)
    right = architectures.architecture_of(model[0])
    wrong = replace(right, table=lambda config: rewritten(right.table(config), key, change))
    monkeypatch.setattr(architectures, "ARCHITECTURES", (wrong,))
    assert difference(model, folder_of(family), "local") > 0.01
