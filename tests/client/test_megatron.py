"""Four real Megatron ranks publish and go on from what was published."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support import megatron_shim  # noqa: F401

# isort: split
import torch
from resharder.client.operator import Operator
from transformer_engine.pytorch.tensor import quantized
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.client.models import equal, exported
from tests.support.daemon import Daemon
from tests.support.fp8_reference import FP8, cast
from tests.support.ranks import forked, torchrun
from tests.support.tiny_hf import load_checkpoint, save_checkpoint, tiny_config

pytestmark = pytest.mark.compat("publish")

FAMILIES = {
    "tied-padded-pipeline": "qwen3_tied", "experts-bf16-ddp": "qwen3_moe", "dense": "qwen3_tied", "experts": "qwen3_moe",
    "trained": "qwen3_tied",
}  # fmt: skip
PUBLISHED = {
    "tied-padded-pipeline": {"layout": {"tp": 2, "pp": 2, "vocab_multiple": 128}, "wrapped": False},
    "experts-bf16-ddp": {"layout": {"tp": 2, "ep": 2}, "wrapped": True},
}
GONE_ON = {
    "dense": {"published": {"tp": 2, "pp": 2, "vocab_multiple": 128}, "filled": {"tp": 4}},
    "experts": {"published": {"tp": 2, "pp": 2}, "filled": {"tp": 2, "ep": 2}},
}
TRAINED = {"trained": {"layout": {"tp": 2, "vocab_multiple": 128}}}
IN_BF16 = {"experts-bf16-ddp", "trained"}

CAST = {"cast": ("qwen3_moe", {"moe_intermediate_size": 160}, {"tp": 4, "etp": 4})}  # every expert's blocks are of two ranks
DIVIDED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # two ranks of data parallelism; blocks of two ranks each
    "divided": (
        "qwen3",
        {"hidden_size": 256, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 320},
        {"tp": 2},
    )
}


class World(NamedTuple):
    """What the ranks said of each model; its checkpoint is in `folder`/MODEL."""

    endpoint: str
    folder: Path
    found: dict[str, Any]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("world")
    for model, family in FAMILIES.items():
        seed, dtype = 3 if model in PUBLISHED else 5, torch.bfloat16 if model in IN_BF16 else torch.float32
        save_checkpoint(folder / model, tiny_config(family), seed=seed, dtype=dtype)
    for model, (family, changes, _) in (CAST | DIVIDED).items():
        save_checkpoint(folder / model, tiny_config(family, **changes), seed=7, dtype=torch.bfloat16)
    options = {"quantization_config": FP8}
    cast, divided = (
        {model: {"layout": layout, "options": options} for model, (_, _, layout) in cases.items()} for cases in (CAST, DIVIDED)
    )
    acts = {"publish": PUBLISHED, "train": TRAINED, "go_on": GONE_ON, "cast": cast, "divided": divided}
    (folder / "cases.json").write_text(json.dumps(acts))
    with Daemon() as daemon:
        forked("tests.client.megatron_ranks", daemon.endpoint, folder)
        yield World(daemon.endpoint, folder, json.loads((folder / "found.json").read_text()))


@pytest.mark.parametrize("model", PUBLISHED)
def test_the_exported_checkpoint_is_the_source_bit_for_bit(world: World, model: str, tmp_path: Path) -> None:
    source = world.folder / model
    found = exported(world.endpoint, f"models/{model}/versions/1", tmp_path / "out")
    assert equal(found, load_checkpoint(source))
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) == tiny_config(FAMILIES[model])["vocab_size"]
    exported_model, reference = (AutoModelForCausalLM.from_pretrained(folder) for folder in (tmp_path / "out", source))
    assert equal(exported_model.state_dict(), reference.state_dict())


@pytest.mark.full
def test_ranks_of_torchrun_that_do_not_share_the_order_of_their_sets_publish_the_same(world: World, tmp_path: Path) -> None:
    for model in PUBLISHED:
        (tmp_path / model).symlink_to(world.folder / model)
    (tmp_path / "cases.json").write_text(json.dumps({"publish": PUBLISHED}))
    with Daemon() as daemon:
        torchrun("tests.client.megatron_ranks", daemon.endpoint, tmp_path)
        for model in PUBLISHED:
            found = exported(daemon.endpoint, f"models/{model}/versions/1", tmp_path / f"{model}-out")
            assert equal(found, load_checkpoint(world.folder / model))


@pytest.mark.parametrize("model", TRAINED)
def test_twenty_steps_change_all_that_is_trained_and_a_job_that_resumes_publishes_what_was_saved(
    world: World, model: str, tmp_path: Path
) -> None:
    names = [f"models/{model}/versions/{number}" for number in (1, 2, 3)]
    before, after, resumed = (exported(world.endpoint, name, tmp_path / name.rpartition("/")[2]) for name in names)
    assert equal(before, load_checkpoint(world.folder / model))
    assert [name for name in before if torch.equal(before[name], after[name])] == ["model.embed_tokens.weight"]
    assert equal(resumed, after)


def test_no_version_of_a_healthy_job_has_a_warning(world: World) -> None:
    with Operator(world.endpoint) as operator:
        found = {version.name: version.warnings for version in operator.versions()}
    assert len(found) > len(FAMILIES)
    assert set(found.values()) == {()}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("model", CAST)
def test_ranks_that_cast_deliver_one_cast_of_the_whole_tensors(world: World, model: str, version: int, tmp_path: Path) -> None:
    plain = exported(world.endpoint, f"models/{model}/versions/{version}", tmp_path / "plain")
    found = exported(world.endpoint, f"models/{model}-fp8/versions/{version}", tmp_path / "cast")
    config = json.loads((tmp_path / "cast" / "config.json").read_text())
    assert equal(found, cast(plain, config))
    assert sum(tensor.dtype == torch.float8_e4m3fn for tensor in found.values()) > 20
    assert FP8.items() <= config["quantization_config"].items()


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("model", DIVIDED)
def test_fp8_weights_are_cast_from_the_master_weights_that_an_optimizer_divides_before_and_after_its_step(
    world: World, model: str, version: int, tmp_path: Path
) -> None:
    source = load_checkpoint(world.folder / model)
    masters = exported(world.endpoint, f"models/{model}-masters/versions/{version}", tmp_path / "masters")
    found = exported(world.endpoint, f"models/{model}/versions/{version}", tmp_path / "cast")
    trained = {name: tensor.bfloat16() for name, tensor in masters.items()}
    assert [name for name in source if torch.equal(trained[name], source[name])] == (list(source) if version == 1 else [])
    config = json.loads((tmp_path / "cast" / "config.json").read_text())
    given = {name: masters[name] if f"{name}_scale_inv" in found else tensor for name, tensor in trained.items()}
    expected = cast(given, config)
    for name in (name for name in source if name.endswith(("q_proj.weight", "o_proj.weight"))):  # their blocks agree
        elements, factors = quantized(trained[name])
        expected |= {name: elements, f"{name}_scale_inv": factors}
    assert equal(found, expected)


@pytest.mark.parametrize("model", GONE_ON)
def test_four_ranks_go_on_under_another_layout_with_the_logits_of_the_checkpoint(world: World, model: str) -> None:
    found = world.found[model]
    assert found["difference"] < 1e-5
    assert found["proven"] == found["boxes"]
