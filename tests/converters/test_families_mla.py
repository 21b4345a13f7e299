"""DeepSeek, Kimi, GLM-4.5 and MiMo: names of published checkpoints, layers that predict further tokens, biases kept in fp32."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import fakepg, reference, tiny_hf
from tests.support.megatron_models import build_model, fill_from_hf, wrap_float16
from tests.support.variants import sampled

# isort: split
from resharder.converters import architectures
from resharder.converters.architectures.checkpoint import expected_shapes
from resharder.converters.architectures.table import Rows, Weight
from resharder.converters.errors import LayoutError, UnsupportedModel
from resharder.converters.geometry.layout import Layout, box_index
from resharder.converters.models.megatron.layout import local_layout, local_pieces
from resharder.converters.models.tensor_io import read_piece

from benchmarks.shapes import DEEPSEEK_V3, GLM_4_5, KIMI_K2, KIMI_K2_5

pytestmark = pytest.mark.compat("layouts")


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """A checkpoint of a family with so many layers that predict."""
    made: dict[tuple[str, int], Path] = {}

    def make(family: str, count: int) -> Path:
        if (family, count) not in made:
            config = tiny_hf.tiny_config(family, num_nextn_predict_layers=count)
            made[family, count] = tiny_hf.save_checkpoint(tmp_path_factory.mktemp(family), config)
        return made[family, count]

    return make


# Names on disk


PREDICTING = {
    "deepseek_v3": ("model.layers.4.", ["enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head", "embed_tokens"]),
    "glm4_moe": ("model.layers.4.", ["enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head", "embed_tokens"]),
    "mimo": ("model.mtp_layers.0.", ["token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"]),
}
"""After four layers, besides those of a decoder layer. DeepSeek-V3's README_WEIGHTS.md; GLM-4.5 as vLLM PR 27597 describes it;
MiMo as vLLM's mimo_mtp.py reads it."""


@pytest.mark.parametrize("family", PREDICTING)
def test_a_layer_that_predicts_is_stored_as_published_checkpoints_store_it(family: str) -> None:
    prefix, own = PREDICTING[family]
    shapes = expected_shapes(tiny_hf.tiny_config(family))
    of_a_layer = {name.removeprefix("model.layers.3.") for name in shapes if name.startswith("model.layers.3.")}
    found = {name.removeprefix(prefix) for name in shapes if name.startswith(prefix)}
    assert found - of_a_layer == {f"{name}.weight" for name in own}
    assert of_a_layer <= found
    assert {name for name in shapes if "layers." in name and not name.startswith((prefix, *DECODER))} == set()


DECODER = tuple(f"model.layers.{n}." for n in range(4))


@pytest.mark.parametrize(
    ("config", "count"),
    [  # an expert layer of DeepSeek-V3 is 9 + 2 + 3 + 3 x 256 tensors, and the one that predicts has 6 more
        (DEEPSEEK_V3, 3 + 3 * 12 + 58 * 782 + 782 + 6),
        (DEEPSEEK_V3 | {"num_nextn_predict_layers": 0}, 45395),
        (KIMI_K2, 69975),
        (KIMI_K2_5, 69975 + 3 + 27 * 12 + 2 + 6),
        (GLM_4_5 | {"num_nextn_predict_layers": 0}, 44189),
        (GLM_4_5, 44189 + 496 + 6),
    ],
    ids=["DeepSeek-V3", "DeepSeek-V3 without MTP", "Kimi-K2", "Kimi-K2.5", "GLM-4.5 without MTP", "GLM-4.5"],
)
def test_published_models_have_as_many_tensors_as_their_checkpoints(config: dict[str, Any], count: int) -> None:
    assert len(expected_shapes(config)) == count


def test_a_vision_config_of_the_release_and_one_of_transformers_say_the_same() -> None:
    config = tiny_hf.tiny_config("kimi_k25")
    vision = config["vision_config"]
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
    released = {f"vt_{name}": vision[name] for name in sizes} | {
        f"init_{name}": vision[name] for name in vision if "pos_emb" in name
    }
    kept = {name: vision[name] for name in ("patch_size", "merge_kernel_size")}
    assert expected_shapes(config | {"vision_config": released | kept}) == expected_shapes(config)


def test_the_projector_joins_four_patches_unless_the_config_says_otherwise() -> None:
    config = tiny_hf.tiny_config("kimi_k25")
    square = config["vision_config"] | {"merge_kernel_size": [2, 2]}
    silent = {name: value for name, value in square.items() if name != "merge_kernel_size"}
    shapes = [expected_shapes(config | {"vision_config": vision}) for vision in (silent, square, config["vision_config"])]
    assert shapes[0] == shapes[1]
    assert [each["mm_projector.proj.0.weight"] for each in shapes[1:]] == [(256, 256), (128, 128)]
    assert [each["mm_projector.proj.2.weight"] for each in shapes[1:]] == [(128, 256), (128, 128)]


@pytest.mark.parametrize("field", ["projection_hidden_size", "projection_layer_norm_eps", "projector_ln_eps"])
def test_a_projector_that_vllm_does_not_compute_is_refused(field: str) -> None:
    vision = KIMI_K2_5["vision_config"] | ({field: 2e-5} if field == "projector_ln_eps" else {})
    config = KIMI_K2_5 | {"projection_hidden_size": 1152, "projection_layer_norm_eps": 1e-5, "vision_config": vision}
    assert architectures.architecture_of(KIMI_K2_5).recipe(KIMI_K2_5).beyond == ()
    config = config if field == "projector_ln_eps" else config | {field: 2}
    assert [field in beyond for beyond in architectures.architecture_of(config).recipe(config).beyond] == [True]


def test_another_projector_is_refused() -> None:
    config = KIMI_K2_5 | {"vision_config": KIMI_K2_5["vision_config"] | {"mm_projector_type": "patchmergerv2"}}
    with pytest.raises(UnsupportedModel, match="mm_projector_type 'patchmergerv2' has no table"):
        expected_shapes(config)


@pytest.mark.parametrize(("options", "tensors"), [({"use_qk_norm": False}, 2), ({"attention_bias": False}, 3)])
def test_glm_without_head_norms_or_biases_has_none(options: dict[str, Any], tensors: int) -> None:
    every, fewer = expected_shapes(GLM_4_5), expected_shapes(GLM_4_5 | options)
    assert len(every) - len(fewer) == 93 * tensors


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v2_lite", "deepseek_v3"])
def test_latent_attention_has_as_many_keys_as_queries_whatever_the_config_says(family: str) -> None:
    config = tiny_hf.tiny_config(family)
    assert expected_shapes(config | {"num_key_value_heads": 2}) == expected_shapes(config)


# What layers that predict compute


def difference(folder: Path, family: str, count: int, spec: Any) -> float:
    config = tiny_hf.tiny_config(family, num_nextn_predict_layers=count)
    fakepg.enter(0, 1)
    chunks = build_model(config, spec=spec)
    fill_from_hf(chunks, config, tiny_hf.load_checkpoint(folder), padding=float("nan"))
    tokens = torch.randint(0, config["vocab_size"], (2, 24), generator=torch.Generator().manual_seed(3))
    return reference.difference(chunks, config, folder, tokens)


@pytest.mark.parametrize("spec", sampled(["local", "te"], ["te"]))
@pytest.mark.parametrize("family", sampled(PREDICTING, ["glm4_moe", "mimo"]))
def test_two_layers_that_predict_compute_what_transformers_does(
    folder_of: Callable[[str, int], Path], family: str, spec: str
) -> None:
    assert difference(folder_of(family, 2), family, 2, spec) < 2e-5


def test_the_reference_has_logits_at_every_depth(folder_of: Callable[[str, int], Path]) -> None:
    first, second, third = reference.logits(folder_of("deepseek_v3", 2), torch.arange(12)[None] + 5)
    assert min(float((a - b).abs().max()) for a, b in ((first, second), (second, third), (first, third))) > 0.1


def renamed(old: str, new: str) -> Callable[[Weight], Weight]:
    def swap(name: str) -> str:
        return name.replace(old, "\0").replace(new, old).replace("\0", new)

    return lambda weight: replace(weight, runs=tuple(replace(run, tensor=swap(run.tensor)) for run in weight.runs))


def turned(by: int) -> Callable[[Weight], Weight]:
    """HF rows (or, for a projection of two halves, columns) turned round."""

    def change(weight: Weight) -> Weight:
        size, tensor = weight.shape[weight.axis], weight.runs[0].tensor
        return replace(weight, runs=(Rows(0, size - by, tensor, by), Rows(size - by, by, tensor)))

    return change


WRONG: dict[str, tuple[str, str, Callable[[Weight], Weight]]] = {
    "keys and values of a latent swapped": ("deepseek_v2", "linear_kv_up_proj.weight", turned(24)),
    "latent and rotary rows swapped": ("deepseek_v2_lite", "linear_kv_down_proj.weight", turned(40)),
    "queries off by a row": ("deepseek_v2_lite", "linear_q_proj.weight", turned(1)),
    "low rank of queries off by a row": ("deepseek_v2", "linear_q_down_proj.weight", turned(1)),
    "norm of a latent off by a channel": ("deepseek_v2", "kv_layernorm.weight", turned(1)),
    "gate and up of shared experts swapped": ("kimi_k2", "shared_experts.linear_fc1.weight", renamed("gate_proj", "up_proj")),
    "biases of experts off by one": ("kimi_k2", "router.expert_bias", turned(1)),
    "the same in a layer that predicts": ("deepseek_v3", "mtp.layers.0.transformer_layer.mlp.router.expert_bias", turned(1)),
    "norms of embedding and hidden state swapped": ("deepseek_v3", "mtp.layers.0.enorm.weight", renamed("enorm", "hnorm")),
    "the head's norm taken for the hidden state's": (
        "glm4_moe",
        "mtp.layers.0.final_layernorm.weight",
        renamed("shared_head.norm", "hnorm"),
    ),
    "columns of embedding and hidden state swapped": (
        "glm4_moe",
        "mtp.layers.0.eh_proj.weight",
        lambda weight: turned(128)(replace(weight, axis=1)),
    ),
    "columns as DeepSeek has them": (
        "mimo",
        "mtp.layers.0.eh_proj.weight",
        lambda weight: replace(weight, runs=(Rows(0, 256, weight.runs[0].tensor),)),
    ),
    "a layer that predicts taken for the decoder's last": (
        "mimo",
        "mtp.layers.0.transformer_layer.mlp.linear_fc2.weight",
        renamed("mtp_layers.0", "layers.3"),
    ),
}


@pytest.mark.parametrize(
    "mistake",
    sampled(WRONG, ["latent and rotary rows swapped", "biases of experts off by one", "columns as DeepSeek has them"]),
)
def test_a_wrong_line_moves_the_logits(
    folder_of: Callable[[str, int], Path], mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, key, change = WRONG[mistake]
    count = 1 if family in PREDICTING else 0
    right = architectures.architecture_of(tiny_hf.tiny_config(family))
    changed: list[str] = []

    def table(config: Any) -> dict[str, tuple[Weight, ...]]:
        found = dict(right.table(config))
        changed.extend(name for name in found if name.endswith(key))
        return found | {name: tuple(map(change, found[name])) for name in changed}

    folder = folder_of(family, count)
    monkeypatch.setattr(architectures, "ARCHITECTURES", (replace(right, table=table),))
    assert difference(folder, family, count, "local") > 0.01
    assert changed


# Where layers that predict lie


PLACES: list[tuple[str, int, int, dict[str, Any]]] = [
    ("deepseek_v3", 1, 2, {"pp": 2}),
    ("deepseek_v3", 2, 4, {"pp": 2, "tp": 2, "ep": 2, "vocab_multiple": 64}),
    ("deepseek_v3", 2, 8, {"pp": 4, "tp": 2, "pipeline_model_parallel_layout": "Ett|tt|mm|L"}),
    ("glm4_moe", 1, 4, {"pp": 4, "pipeline_model_parallel_layout": "Ett|tt|m|L"}),
    ("mimo", 1, 8, {"pp": 2, "vpp": 2, "tp": 4, "pipeline_model_parallel_layout": "Et|tt|t|mL"}),
    ("mimo", 2, 4, {"pp": 4, "pipeline_model_parallel_layout": "E|tttt|mm|L"}),
]


@pytest.mark.parametrize(
    ("spec", "family", "count", "world", "layout"),
    [
        pytest.param(spec, *place, marks=[pytest.mark.full] * ((number + second) % 2), id=repr((spec, *place)))
        for number, place in enumerate(PLACES)
        for second, spec in enumerate(("local", "te"))
    ],
)
def test_wherever_layers_that_predict_lie_every_element_is_given_once(
    folder_of: Callable[[str, int], Path], family: str, count: int, world: int, layout: dict[str, Any], spec: Any
) -> None:
    config = tiny_hf.tiny_config(family, num_nextn_predict_layers=count)
    checkpoint = tiny_hf.load_checkpoint(folder_of(family, count))
    full = {name: torch.full_like(tensor, float("nan")) for name, tensor in checkpoint.items()}
    times = {name: torch.zeros(tensor.shape, dtype=torch.int32) for name, tensor in checkpoint.items()}
    for rank in range(world):
        fakepg.enter(rank, world)
        chunks = build_model(config, spec=spec, **layout)
        fill_from_hf(chunks, config, checkpoint, padding=float("nan"))
        for name, index, tensor in local_pieces(chunks, config):
            full[name][index] = tensor
            times[name][index] += 1
    assert [name for name, count in times.items() if not bool((count == 1).all())] == []
    assert [name for name, tensor in checkpoint.items() if not torch.equal(full[name], tensor)] == []


def layout_on(rank: int, world: int, count: int, **layout: Any) -> Layout:
    config = tiny_hf.tiny_config("deepseek_v3", num_nextn_predict_layers=count)
    fakepg.enter(rank, world)
    return local_layout(build_model(config, **layout), config)[0]


@pytest.mark.parametrize(
    ("rank", "world", "layout"),
    [(1, 2, {"pp": 2}), (2, 4, {"pp": 4, "pipeline_model_parallel_layout": "Ett|tt|mm|L"})],
    ids=["last stage", "stage of their own"],
)
def test_the_embedding_beside_them_is_a_replica_of_the_first_stages(rank: int, world: int, layout: dict[str, Any]) -> None:
    layout_there = layout_on(rank, world, 2, **layout)
    embedding = [piece for piece in layout_there.pieces if piece.local == "0.embedding.word_embeddings.weight"]
    names = {"model.embed_tokens.weight", "model.layers.4.embed_tokens.weight", "model.layers.5.embed_tokens.weight"}
    assert {piece.tensor for piece in embedding} == names
    assert all(piece.replica for piece in embedding)
    assert names <= {piece.tensor for piece in layout_on(0, world, 2, **layout).owned()}


# Biases of experts


def test_biases_of_experts_stay_fp32_in_a_bf16_model_before_its_first_forward(folder_of: Callable[[str, int], Path]) -> None:
    config = tiny_hf.tiny_config("deepseek_v3")
    checkpoint = tiny_hf.load_checkpoint(folder_of("deepseek_v3", 1))
    fakepg.enter(0, 1)
    chunks = wrap_float16(build_model(config, spec="te", dtype=torch.bfloat16))
    fill_from_hf(chunks, config, checkpoint)
    layout, tensors = local_layout(chunks, config)
    biases = [piece for piece in layout.pieces if piece.tensor.endswith("e_score_correction_bias")]
    assert len(biases) == 4
    for piece in biases:
        expected = checkpoint[piece.tensor][box_index(piece.box)]
        assert layout.tensors[piece.tensor].dtype == "F32"
        assert torch.equal(read_piece(tensors, piece), expected)
        assert not torch.equal(expected.bfloat16().float(), expected)
    assert {spec.dtype for name, spec in layout.tensors.items() if not name.endswith("e_score_correction_bias")} == {"BF16"}


# Real sizes


UNEVEN = {"num_layers_in_first_pipeline_stage": 7, "num_layers_in_last_pipeline_stage": 6}


@pytest.mark.parametrize(
    ("config", "layout", "held"),
    [
        (DEEPSEEK_V3, {"tp": 8, "pp": 8, "ep": 32, **UNEVEN}, 6 + 1),
        (KIMI_K2, {"tp": 8, "pp": 8, "ep": 32, **UNEVEN}, 6),
        (GLM_4_5, {"tp": 8, "pp": 4, "ep": 16}, 23 + 1),
    ],
    ids=["DeepSeek-V3", "Kimi-K2", "GLM-4.5"],
)
def test_a_rank_of_the_last_stage_of_a_real_model_is_laid_out_without_memory(
    config: dict[str, Any], layout: dict[str, Any], held: int
) -> None:
    world = 32 * layout["pp"]
    fakepg.enter(world - 1, world)
    found, tensors = local_layout(build_model(config, device="meta", dtype=torch.bfloat16, **layout), config)
    assert all(tensor.is_meta for tensor in tensors.values())
    experts = config["n_routed_experts"] // layout["ep"]
    assert len({piece.tensor for piece in found.pieces if ".mlp.experts." in piece.tensor}) == 3 * experts * held


@pytest.mark.parametrize("family", ["deepseek_v3", "kimi_k2", "kimi_k25"])
@pytest.mark.parametrize("stated", [{}, {"scoring_func": "softmax"}])
def test_routers_of_which_vllm_would_compute_other_scores_are_refused(family: str, stated: dict[str, str]) -> None:
    """vLLM's takes the softmax unless the config says otherwise, transformers' and Megatron's the sigmoid whatever it says."""
    released = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    architectures.table_of(tiny_hf.tiny_config(family, **released))
    with pytest.raises(LayoutError, match=r"config: scoring_func=(None|'softmax'): vLLM takes"):
        architectures.table_of(tiny_hf.tiny_config(family, topk_method="noaux_tc", **stated))


def test_glm_4_7_flash_needs_no_scoring_func() -> None:
    plain, stated = (tiny_hf.tiny_config("glm4_moe_lite", **changes) for changes in ({}, {"topk_method": "noaux_tc"}))
    assert architectures.table_of(plain) == architectures.table_of(stated)
