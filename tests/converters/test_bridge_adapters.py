"""Adapters of Megatron-Bridge: what a version's tensors mean is proven by logits, and any layout gives the same tensors.

Every rank of each world is in one process, except those that publish to a daemon.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.support import bridge_lora, fakepg, tiny_hf
from tests.support.bridge_lora import APPLY, LINEARS, bridge, fill, needs_bridge
from tests.support.megatron_models import build_model, fill_from_hf, logits, wrap_ddp, wrap_float16

# isort: split
import torch
from peft import PeftModel
from resharder.client.operator import Operator
from resharder.client.trainer.model_files import adapter_config
from resharder.converters.adapter import PREFIX, check_config, check_tensors
from resharder.converters.errors import ConversionError, UnsupportedModel
from resharder.converters.geometry.layout import box_index
from resharder.converters.models.adapters import find_adapter
from resharder.converters.models.tensor_io import read_piece
from safetensors.torch import load_file, save_file

from tests.client import bridge_ranks
from tests.support.daemon import Daemon
from tests.support.ranks import forked

DIM, ALPHA = bridge_ranks.DIM, bridge_ranks.ALPHA
TOKENS = torch.tensor([[5, 17, 300, 41, 8, 99, 2, 64]])
NOT_OF_PEFT = ("qwen2_moe", "deepseek_v3")
"""PEFT 0.21 takes the names of a dense or shared MLP's linears for those of the experts that transformers 5 stacks."""
Settings = dict[str, Any]
Tensors = dict[str, torch.Tensor]
Apply = Callable[..., list[torch.nn.Module]]


@pytest.fixture(params=[pytest.param(name, marks=() if name == "stand-in" else needs_bridge) for name in APPLY])
def apply(request: pytest.FixtureRequest) -> Apply:
    return APPLY[request.param]


@pytest.fixture(autouse=True)
def without_ranks() -> Any:
    yield
    fakepg.leave()


def tensors_of(chunks: Sequence[torch.nn.Module], config: Settings) -> tuple[Settings, Tensors]:
    """The config of the adapters, and this rank's parts of their tensors in tensors of the whole shape, of NaN elsewhere."""
    adapter = find_adapter(list(chunks), config)
    content = dict(adapter.config)
    check_config(content)
    layout, local = adapter.layout(content)
    found = {name: torch.full(spec.shape, torch.nan) for name, spec in layout.tensors.items()}
    for piece in layout.pieces:
        found[piece.tensor][box_index(piece.box)] = read_piece(local, piece).float()
    return content, found


def merged(checkpoint: Tensors, adapter: Tensors) -> Tensors:
    """PEFT's merge, by the names of the folder alone."""
    found = dict(checkpoint)
    for name in adapter:
        if name.endswith(".lora_A.weight"):
            stem = name.removesuffix(".lora_A.weight")
            delta = adapter[f"{stem}.lora_B.weight"] @ adapter[name] * (ALPHA / DIM)
            found[f"{stem.removeprefix(PREFIX)}.weight"] = checkpoint[f"{stem.removeprefix(PREFIX)}.weight"] + delta
    return found


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen3", {}),
        ("llama_biased", {}),
        ("glm", {}),
        ("qwen3_moe", {}),
        ("qwen2_moe", {}),
        ("deepseek_v3", {"num_nextn_predict_layers": 0}),
    ],
)
def test_a_base_merged_with_the_tensors_of_a_version_computes_what_the_trainer_computes(
    family: str, settings: Settings, apply: Apply, tmp_path: Any
) -> None:
    config = tiny_hf.tiny_config(family, **settings)
    folder = tiny_hf.save_checkpoint(tmp_path / "base", config)
    checkpoint = tiny_hf.load_checkpoint(folder)
    fakepg.enter(0, 1)
    chunks = build_model(config)
    fill_from_hf(chunks, config, checkpoint)
    plain = logits(chunks, config, TOKENS)
    chunks = apply(chunks, DIM, ALPHA)
    fill(chunks)
    content, found = tensors_of(chunks, config)
    check_tensors(content, {name: tuple(tensor.shape) for name, tensor in found.items()})
    adapted = logits([chunk.eval() for chunk in chunks], config, TOKENS)
    assert (content["r"], content["lora_alpha"]) == (DIM, ALPHA)
    assert adapted is not None
    assert plain is not None
    assert not torch.allclose(adapted, plain, atol=1e-2)
    fill_from_hf(whole := build_model(config), config, merged(checkpoint, found))
    expected = logits(whole, config, TOKENS)
    assert expected is not None
    assert torch.allclose(adapted, expected, atol=2e-4, rtol=1e-4), (adapted - expected).abs().max()
    (tmp_path / "adapter").mkdir()
    save_file(found, tmp_path / "adapter" / "adapter_model.safetensors")
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(adapter_config(content)))
    if family in NOT_OF_PEFT:
        return
    with torch.no_grad():
        opened = PeftModel.from_pretrained(tiny_hf.load_model(folder), tmp_path / "adapter").eval()(TOKENS).logits
    assert torch.allclose(opened, expected, atol=2e-4, rtol=1e-4), (opened - expected).abs().max()


@pytest.mark.parametrize(
    ("family", "world", "settings"),
    [
        ("qwen3", 2, {"tp": 2}),
        ("qwen3", 4, {"tp": 2, "pp": 2}),
        ("llama", 4, {"pp": 2, "vpp": 2}),
        ("llama", 4, {"tp": 4}),
        ("qwen3_moe", 2, {"ep": 2}),
        ("qwen3_moe", 4, {"tp": 2, "ep": 2}),
        ("qwen3_moe", 4, {"ep": 2, "etp": 2, "tp": 2}),
    ],
)
def test_any_layout_gives_the_tensors_of_one_rank(family: str, world: int, settings: Settings, apply: Apply) -> None:
    config = tiny_hf.tiny_config(family)
    content, whole = over_ranks(config, 1, {}, apply)
    other, found = over_ranks(config, world, settings, apply)
    assert found.keys() == whole.keys()
    assert not [name for name in whole if not torch.equal(whole[name], found[name])]
    assert set(other["target_modules"]) >= set(content["target_modules"])


@needs_bridge
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "per-expert"])
@pytest.mark.parametrize(("world", "settings"), [(2, {"ep": 2}), (2, {"tp": 2}), (4, {"ep": 2, "tp": 2, "etp": 2})])
def test_adapters_of_grouped_experts_are_those_of_each_expert(world: int, settings: Settings, shared: bool) -> None:
    config = tiny_hf.tiny_config("qwen3_moe")

    def apply(chunks: list[torch.nn.Module], dim: int, alpha: int) -> list[torch.nn.Module]:
        return bridge_lora.apply_bridge(chunks, dim, alpha, share_expert_adapters=shared)

    _, whole = over_ranks(config, 1, {"spec": "te"}, apply)
    _, found = over_ranks(config, world, settings | {"spec": "te"}, apply)
    assert not [name for name in whole if not torch.equal(whole[name], found[name])]
    first, second = (whole[f"{PREFIX}model.layers.0.mlp.experts.{expert}.up_proj.lora_B.weight"] for expert in (0, 5))
    assert torch.equal(first, second) == shared


def over_ranks(config: Settings, world: int, settings: Settings, apply: Apply) -> tuple[Settings, Tensors]:
    """The config, and the tensors that all ranks of a world have together; no element differs between two of them."""
    content, whole = {}, dict[str, torch.Tensor]()
    for rank in range(world):
        fakepg.enter(rank, world)
        chunks = wrap_ddp(wrap_float16(apply(build_model(config, dtype=torch.bfloat16, **settings), DIM, ALPHA)))
        fill(chunks)
        content, mine = tensors_of(chunks, config)
        for name, tensor in mine.items():
            known = whole.setdefault(name, torch.full_like(tensor, torch.nan))
            both = ~(known.isnan() | tensor.isnan())
            assert torch.equal(known[both], tensor[both])
            known[~tensor.isnan()] = tensor[~tensor.isnan()]
        fakepg.leave()
    check_tensors(content, {name: tuple(tensor.shape) for name, tensor in whole.items()})
    assert not [name for name, tensor in whole.items() if tensor.isnan().any()]
    return content, whole


def test_ranks_publish_a_folder_with_the_tensors_of_one_rank(apply: Apply, request: pytest.FixtureRequest, tmp_path: Any) -> None:
    name = request.node.callspec.params["apply"]
    _, whole = over_ranks(tiny_hf.tiny_config(bridge_ranks.FAMILY), 1, {}, apply)
    with Daemon() as daemon, Operator(daemon.endpoint) as operator:
        forked("tests.client.bridge_ranks", daemon.endpoint, name)
        first, second = sorted(operator.versions(f"{name}-lora"), key=lambda version: version.number)
        assert (first.base, first.base_version, first.warnings) == ("policy", 3, ())
        for version in (first, second):
            operator.export(version.number, tmp_path / str(version.number), model=version.model)
    before, after = (load_file(tmp_path / str(number) / "adapter_model.safetensors") for number in (1, 2))
    assert before.keys() == whole.keys()
    assert not [name for name in whole if not torch.equal(before[name].float(), whole[name])]
    assert all((tensor == 9).all() for tensor in after.values())
    config = json.loads((tmp_path / "1" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["inference_mode"]) == (bridge_ranks.DIM, bridge_ranks.ALPHA, True)


def test_each_element_has_one_owner() -> None:
    config, counts = tiny_hf.tiny_config("qwen3_moe"), dict[str, torch.Tensor]()
    for rank in range(4):
        fakepg.enter(rank, 4)
        adapter = find_adapter(APPLY["stand-in"](build_model(config, tp=2, ep=2), DIM, ALPHA), config)
        layout, _ = adapter.layout(dict(adapter.config))
        for piece in layout.owned():
            shape = layout.tensors[piece.tensor].shape
            counts.setdefault(piece.tensor, torch.zeros(shape))[box_index(piece.box)] += 1
        fakepg.leave()
    assert not [name for name, count in counts.items() if not torch.equal(count, torch.ones_like(count))]


def refusal(chunks: list[torch.nn.Module], config: Settings) -> str:
    with pytest.raises(ConversionError) as error:
        tensors_of(chunks, config)
    return str(error.value)


@needs_bridge
@pytest.mark.parametrize(
    ("module", "kind", "options", "says"),
    [
        ("dora", "DoRA", {}, "DoRA scales the base's weights by a magnitude, which vLLM does not: train with LoRA"),
        ("canonical_lora", "CanonicalLoRA", {"target_modules": ["linear_q", "linear_k", "linear_v"]}, "train with LoRA(target"),
        ("lora", "LoRA", {"target_modules": ["router"]}, "servers adapt no router: leave it out of target_modules"),
        ("lora", "LoRA", {"normalize_moe_lora": True}, "adapters have different sizes, dim=4 and alpha=12"),
    ],
)
def test_other_adapters_of_megatron_bridge_are_refused_by_name(module: str, kind: str, options: Settings, says: str) -> None:
    config = tiny_hf.tiny_config("qwen3_moe")
    fakepg.enter(0, 1)
    settings = {"dim": DIM, "alpha": ALPHA, "target_modules": LINEARS} | options
    found = refusal(getattr(bridge(module), kind)(**settings)(build_model(config)), config)
    assert says in found, found


def test_adapters_that_no_folder_can_name_are_refused() -> None:
    fakepg.enter(0, 1)
    for family, says in (
        ("deepseek_v3", "servers adapt no layers that predict further tokens"),
        ("glm4", "the linear norms its output, and Megatron-Bridge adds the adapter's to it after the norm"),
        ("gpt_oss", "has no name for it: leave its linear out of target_modules"),
    ):
        config = tiny_hf.tiny_config(family)
        assert says in refusal(APPLY["stand-in"](build_model(config), DIM, ALPHA), config)
    config = tiny_hf.tiny_config("qwen3")
    assert "the model has no adapter on this rank" in refusal(build_model(config), config)
    with pytest.raises(UnsupportedModel, match="those of Megatron-Bridge have one adapter"):
        find_adapter(build_model(config), config, "second")
