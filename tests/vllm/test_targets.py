"""What each worker of a vLLM server takes of a version, for every family: recorded without a server, and held against what the
model's own `load_weights` does with random weights in the same worker."""

import random
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from resharder.client.inference.recording.recorder import Recording, record
from resharder.client.inference.vllm.blueprint import ServerSizes, worker_model, worker_recording
from resharder.client.inference.vllm.reload import defaults, original_loader
from resharder.converters.architectures import architecture_of, table_of
from resharder.converters.errors import LayoutError
from resharder.converters.geometry.layout import ITEM_SIZES, Layout, Piece, TensorSpec, box_index, box_size, full_box
from resharder.converters.geometry.piece_arrays import pack
from resharder.converters.geometry.plan import plan_pieces

from tests.support.tiny_hf import ALL, text_of, tiny_config
from tests.support.variants import sampled
from tests.support.weights import random_weights

DENSE = (ServerSizes(), ServerSizes(tp=2), ServerSizes(tp=2, pp=2), ServerSizes(dp=2))
EXPERTS = (ServerSizes(), ServerSizes(tp=2), ServerSizes(tp=2, pp=2), ServerSizes(dp=2, ep=True), ServerSizes(tp=2, ep=True))

CHANGES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "kimi_k2": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "kimi_k25": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "glm4_moe_lite": {"first_k_dense_replace": 1},
    "glm4v_moe": {"use_qk_norm": False},
    "hy_v3": {"first_k_dense_replace": 1, "expert_hidden_dim": 48, "route_norm": True, "qk_norm": True},
    "minimax_m2": {"scoring_func": "sigmoid", "use_routing_bias": True},
    "mimo": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "qwen2_moe": {"num_attention_heads": 4, "num_key_value_heads": 2},
}
"""What published configs have and transformers' classes do not know; and heads as wide as vLLM takes them to be in families whose
configs do not say it."""

DRAFTERS = {
    "deepseek_v3": "model.layers.4.",
    "glm4_moe": "model.layers.4.",
    "mimo": "model.mtp_layers.",
}
"""Tensors that only a drafter loads: layers that predict further tokens."""

IMPURE = {
    "glm4_moe": {"mlp.gate.weight": "the loader stores it as torch.float32"},  # published in bf16
    "glm4_moe_lite": {"mlp.gate.weight": "the loader stores it as torch.float32"},
    "glm4v_moe": {"mlp.gate.weight": "the loader stores it as torch.float32"},
    "hy_v3": {"mlp.router.gate.weight": "the loader stores it as torch.float32"},
    "minimax_m2": {"block_sparse_moe.gate.weight": "the loader stores it as torch.float32"},
    # Zero on all ranks but the first.
    "gpt_oss": {"mlp.experts.down_proj_bias": "the loader computes with it before it stores it"},
}
"""Tensors that some worker takes whole, because the loader does more than copy, and why. All others are taken by boxes."""

KINDS = (
    "qwen3_tied",
    "qwen2_moe",
    "deepseek_v2_lite",
    "deepseek_v3",
    "gpt_oss",
    "gemma3",
    "qwen3_next",
    "glm4_moe",
    "minimax_m2",
    "qwen3_vl_moe",
    "gemma3_vl",
)
"""One family of each kind: dense and tied, experts, latent attention, delta nets, drafters, and those of `IMPURE`."""

PADDED = ("embed_tokens.weight", "embedding.weight", "lm_head.weight")
"""Parameters with rows beyond the vocabulary."""

_ABSENT = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2", "torchvision.transforms.v2.functional")


@pytest.fixture(scope="module", autouse=True)
def _vision_models() -> None:
    """vLLM's vision models import torchvision, and do not use it here."""
    if find_spec("torchvision") is not None:
        return
    with pytest.MonkeyPatch.context() as patch:
        for name in _ABSENT:
            module = ModuleType(name)
            module.__spec__, module.__path__ = ModuleSpec(name, None, is_package=True), []
            patch.setitem(sys.modules, name, module)
        for name in ("qwen3_5", "qwen2_5_vl", "qwen3_vl_moe", "gemma3_mm", "glm4_1v"):
            import_module(f"vllm.model_executor.models.{name}")


def published_config(family: str) -> dict[str, Any]:
    return tiny_config(family, **CHANGES.get(family, {}))


def readable_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Without `--trust-remote-code` MiMo is read as the Qwen2 that its code says it is."""
    return {**config, "model_type": "qwen2"} if config["model_type"] == "mimo" else dict(config)


def published_weights(config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """In bf16, but what trainers keep in fp32."""
    weights = random_weights(config, 1, torch.bfloat16)
    return {n: w.float() if n.endswith(("correction_bias", "expert_bias", "A_log")) else w for n, w in weights.items()}


def specs_of(weights: Mapping[str, torch.Tensor]) -> dict[str, TensorSpec]:
    kinds = {torch.bfloat16: "BF16", torch.float32: "F32"}
    return {name: TensorSpec(name, kinds[w.dtype], tuple(w.shape)) for name, w in weights.items()}


def whole(specs: Mapping[str, TensorSpec], names: Any) -> tuple[Piece, ...]:
    return tuple(
        Piece(n, full_box(specs[n].shape), n, 0, torch.empty(specs[n].shape, device="meta").stride()) for n in names if n in specs
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", sampled(ALL, KINDS))
def test_workers_load_what_was_recorded_and_together_all_of_the_checkpoint(family: str) -> None:
    config = published_config(family)
    weights = published_weights(config)
    specs = specs_of(weights)
    store = pack({"store": Layout(specs, whole(specs, specs))})
    impure: dict[str, str] = {}
    for server in EXPERTS if any(".experts." in name for name in specs) else DENSE:
        recordings = [proven_recording(config, weights, specs, server, worker) for worker in range(server.workers)]
        for recording in recordings:
            impure |= {re.sub(r".*layers\.\d+\.", "", name): why for name, why in recording.impure.items()}
        replica = server.workers if server.ep else server.tp * server.pp
        for first in range(0, server.workers, replica):
            left = not_needed(specs, recordings[first : first + replica])
            assert all(family in DRAFTERS and name.startswith(DRAFTERS[family]) for name in left), (server, left)
            assert left or family not in DRAFTERS
        targets = {i: Layout(specs, r.layout.pieces + whole(specs, r.impure)) for i, r in enumerate(recordings)}
        received = plan_pieces(store, pack(targets)).received.tolist()
        assert received == [sum(_bytes(specs, piece) for piece in layout.pieces) for layout in targets.values()]
    assert impure == IMPURE.get(family, {})


def _bytes(specs: Mapping[str, TensorSpec], piece: Piece) -> int:
    return box_size(piece.box) * ITEM_SIZES[specs[piece.tensor].dtype]


def not_needed(specs: Mapping[str, TensorSpec], recordings: list[Recording]) -> list[str]:
    """Tensors of which some element is read by none of these workers."""
    seen = {name: np.zeros(spec.shape, bool) for name, spec in specs.items()}
    for recording in recordings:
        for name, boxes in recording.needs.items():
            for box in boxes:
                seen[name][box_index(box)] = True
    return [name for name, elements in seen.items() if not elements.all()]


def proven_recording(
    config: Mapping[str, Any],
    weights: Mapping[str, torch.Tensor],
    specs: Mapping[str, TensorSpec],
    server: ServerSizes,
    worker: int,
) -> Recording:
    """What is recorded on the meta device, after it was compared with the memory that the loader fills: each element of each
    parameter is filled by one piece, by an impure tensor, or is padding of the vocabulary."""
    readable = readable_config(config)
    with worker_model(readable, server, worker, memory=True, dtype="bfloat16") as model, torch.no_grad():
        recording = record(model, specs, original_loader, defaults)
        parameters = dict(model.named_parameters())
        for parameter in parameters.values():
            parameter.fill_(torch.nan)
        model.load_weights(iter({n: w.clone() for n, w in weights.items()}.items()))
    assert "" not in recording.impure
    assert recording.unwritten == {}, "a healthy checkpoint is never refused"
    filled = {name: torch.zeros(parameter.shape, dtype=torch.bool) for name, parameter in parameters.items()}
    for piece in recording.layout.pieces:
        view = piece.view(piece.box)
        places = filled[piece.local].as_strided(view.shape, view.strides, view.offset)
        assert not places.any(), f"{piece} goes where another went"
        places.fill_(True)
        there = parameters[piece.local].as_strided(view.shape, view.strides, view.offset)
        assert torch.equal(there, weights[piece.tensor][box_index(piece.box)]), piece
    computed = {local for name in recording.impure for local in recording.reads[name]}
    for name, elements in filled.items():
        if not elements.all() and name not in computed:
            rows = elements.all(1)
            assert name.endswith(PADDED), f"{name} is not filled"
            assert torch.equal(rows, elements.any(1))
            assert bool(rows[: int(rows.sum())].all()), "padding comes last"
    assert worker_recording(readable, specs, server, worker, dtype="bfloat16") == recording
    return recording


def one_of_each_kind(names: Iterable[str]) -> list[str]:
    """A tensor of each kind, of any layer and expert."""
    kinds: dict[str, list[str]] = defaultdict(list)
    for name in names:
        kinds[re.sub(r"\d+", "*", name)].append(name)
    chance = random.Random(0)
    return [chance.choice(of_kind) for of_kind in kinds.values()]


@pytest.mark.parametrize("family", sampled(ALL, ["qwen2_moe"]))
def test_whatever_a_version_lacks_is_written_down_by_the_names_of_the_parameters_that_it_would_fill(family: str) -> None:
    """One tensor, the half of one, an expert, or all experts of one of two workers."""
    config = published_config(family)
    specs = specs_of(published_weights(config))
    server = ServerSizes(tp=2, ep=any(".experts." in name for name in specs))
    pads_sinks = hasattr(import_module("vllm.model_executor.model_loader.weight_utils"), "load_attention_sink")  # since 0.33
    with worker_model(readable_config(config), server, 1, dtype="bfloat16") as model:
        whole = record(model, specs, original_loader, defaults)

        def unwritten(*left_out: str) -> set[str]:
            left = {name: spec for name, spec in specs.items() if name not in left_out}
            return set(record(model, left, original_loader, defaults).unwritten)

        for name in one_of_each_kind(whole.reads):
            assert unwritten(name) == whole.reads[name], f"without {name}"
            shape = specs[name].shape
            try:
                half = specs | {name: specs[name]._replace(shape=(shape[0] // 2, *shape[1:]))}
                recording = record(model, half, original_loader, defaults)
            except (AssertionError, RuntimeError, ValueError, IndexError):
                continue  # vLLM's own loader refuses it
            if name.endswith(".sinks") and pads_sinks:
                continue  # vLLM's own loader writes minus infinity to the others
            assert recording.unwritten, f"half of {name}"
        experts = defaultdict[str, list[str]](list)
        for name in whole.reads:
            if found := re.search(r"\.experts\.(\d+)\.", name):
                experts[found[1]].append(name)
        for names in (*list(experts.values())[:1], [name for one in experts.values() for name in one]):
            assert unwritten(*names) == {local for name in names for local in whole.reads[name]}


def activations(config: Mapping[str, Any]) -> set[str]:
    """Return the modules without parameters and the activations of experts in vLLM's model; empty if vLLM refuses the config."""
    try:
        with worker_model(readable_config(config), ServerSizes(), 0, dtype="bfloat16") as model:
            modules = [module for module in model.modules() if not list(module.parameters())]
            experts = [module for module in model.modules() if hasattr(module, "activation")]
            return {f"{module}" for module in modules} | {f"{module.activation}" for module in experts}
    except ValueError:
        return set()


@pytest.mark.parametrize("family", sampled([family for family in ALL if family != "gpt_oss"], ["gemma", "mixtral"]))
def test_another_activation_is_what_vllm_computes_or_it_is_refused(family: str) -> None:
    """transformers and vLLM have one of their own for gpt-oss."""
    config = published_config(family)
    name = "hidden_activation" if "hidden_activation" in text_of(config) else "hidden_act"
    value = "silu" if text_of(config)[name].startswith("gelu") else "gelu"
    other = tiny_config(family, **CHANGES.get(family, {}) | {name: value})
    if activations(other) == activations(config):
        with pytest.raises(LayoutError, match=f"config: {name}={value!r}: vLLM computes"):
            table_of(other)


def scores(config: Mapping[str, Any]) -> set[tuple[str, bool]]:
    """Return by what vLLM's routers score experts, and whether a token's scores are made to add up to one; none if vLLM fails."""
    try:
        with worker_model(readable_config(config), ServerSizes(), 0, dtype="bfloat16") as model:
            routers = [module for module in model.modules() if hasattr(module, "scoring_func")]
            return {(module.scoring_func, module.renormalize) for module in routers}
    except AttributeError:
        return set()


def without(config: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a config, in whose language model a setting is left out."""
    text = {key: value for key, value in text_of(config).items() if key != name}
    return config | {"text_config": text} if "text_config" in config else text


@pytest.mark.parametrize(
    "family", sampled([each for each in ALL if "num_experts_per_tok" in text_of(tiny_config(each))], ["kimi_k2"])
)
def test_experts_are_scored_as_the_recipe_says_or_the_config_is_refused(family: str) -> None:
    config = published_config(family)
    others = [without(config, name) for name in ("scoring_func", "norm_topk_prob")]
    if "norm_topk_prob" in text_of(config):
        others += [tiny_config(family, **CHANGES.get(family, {}) | {"norm_topk_prob": value}) for value in (False, True)]
    for each in (config, *others):
        try:
            table_of(each)
        except LayoutError:
            assert each is not config
            continue
        recipe = architecture_of(each).recipe(each)
        softmax = recipe.transformer.get("moe_router_score_function", "softmax") == "softmax"
        wanted = ("softmax" if softmax else "sigmoid", not recipe.transformer.get("moe_router_pre_softmax", False))
        assert recipe.beyond or scores(each) == {wanted} or (each is not config and not scores(each)), each
