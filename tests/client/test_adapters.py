"""Adapters as versions: PEFT folders, from trainers on one rank and on four, and from folders; into the archive and back."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from resharder.client.errors import Conflict, LayoutRejected, Refused, ResharderError, UsageError
from resharder.client.operator import Operator
from resharder.client.operator.answers import PauseMode, Version
from resharder.client.rpc.channel import Channel
from resharder.client.tools.import_checkpoint import import_checkpoint
from resharder.client.trainer.connect import Handle, connect
from resharder.client.versions.manifest import get_manifest
from resharder.converters.errors import UnknownTensor, UnsupportedModel
from safetensors.torch import load_file

from tests.client.models import CONFIG as OTHER_CONFIG
from tests.client.models import equal
from tests.support.command import resharder
from tests.support.daemon import Daemon
from tests.support.ranks import forked
from tests.support.tiny_hf import load_model, save_checkpoint, tiny_config

CONFIG = tiny_config("qwen3")
ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LORA = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
QUERY = "base_model.model.model.layers.0.self_attn.q_proj"
ITEMS = [(f"{QUERY}.lora_A.weight", torch.ones(4, 8)), (f"{QUERY}.lora_B.weight", torch.ones(6, 4))]
TOKENS = torch.tensor([[5, 17, 300, 41, 8]])


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon() as running:
        yield running


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("base"), CONFIG)


def adapted(base: Path, seed: int = 1, **settings: Any) -> PeftModel:
    model = get_peft_model(load_model(base), LoraConfig(**{"r": 4, "lora_alpha": 12, "target_modules": ALL_LINEAR} | settings))
    shake(model, seed)
    return model


def shake(model: torch.nn.Module, seed: int) -> None:
    """Other values in every parameter of an adapter; lora_B begins as zeros."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    return model.eval()(TOKENS).logits


def exported(daemon: Daemon, handle: Handle, folder: Path) -> Path:
    model = handle.name.split("/")[1]
    with Operator(daemon.endpoint) as operator:
        operator.export(handle.version, folder, model=model)
    return folder


def test_fleets_of_adapters_begin_with_wait_and_those_of_models_as_the_daemon_says(daemon: Daemon, base: Path) -> None:
    import_checkpoint(daemon.endpoint, base, model="own", step=0)
    with connect(daemon.endpoint, model="own-lora", base="own") as publisher:
        publisher.attach(adapted(base), CONFIG)
        publisher.publish(1).wait_ready(60)
    with Operator(daemon.endpoint) as operator:
        operator.set_fleet("night", model="own-lora", max_skew=3)
        modes = {name: operator.fleet(name).pause_mode for name in ("own", "own-lora", "night")}
    assert modes == {"own": PauseMode.KEEP, "own-lora": PauseMode.WAIT, "night": PauseMode.WAIT}


def refused(kind: type[ResharderError], says: str, call: Callable[..., Any], *arguments: Any) -> ResharderError:
    with pytest.raises(kind, match=says) as error:
        call(*arguments)
    return error.value


def opened(base: Path, folder: Path) -> torch.nn.Module:
    return PeftModel.from_pretrained(load_model(base), folder)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_rslora": True, "target_modules": "all-linear"},
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 7}},
    ],
    ids=["linear", "rslora", "embeddings", "patterns"],
)
def test_a_version_is_a_folder_that_peft_opens_with_the_logits_of_the_trainer(
    daemon: Daemon, base: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    model = adapted(base, **settings)
    with connect(daemon.endpoint, model="policy-lora", base="policy") as publisher:
        publisher.attach(model, CONFIG)
        publisher.publish(1).wait_ready(60)
        shake(model, 2)
        handle = publisher.publish(2)
        handle.wait_ready(60)
    folder = exported(daemon, handle, tmp_path / "out")
    assert {file.name for file in folder.iterdir()} == {"adapter_config.json", "adapter_model.safetensors", "resharder.json"}
    assert torch.allclose(logits(opened(base, folder)), logits(model), atol=1e-5, rtol=0)
    assert not torch.allclose(logits(load_model(base)), logits(model), atol=1e-2)
    with Channel(daemon.endpoint) as channel:
        assert get_manifest(channel, handle.name).config == (folder / "adapter_config.json").read_bytes()
    manifest = json.loads((folder / "resharder.json").read_text())
    assert (manifest["version"]["base"], manifest["version"]["base_version"]) == ("policy", 0)


def test_tensors_with_the_names_of_peft_are_published_one_by_one(daemon: Daemon, base: Path, tmp_path: Path) -> None:
    model = adapted(base)
    config = model.peft_config["default"]
    with connect(daemon.endpoint, model="items-lora", base="policy", config=config) as publisher:
        handle = publisher.publish_tensors(3, lambda: iter(get_peft_model_state_dict(model).items()))
        handle.wait_ready(60)
    folder = exported(daemon, handle, tmp_path / "out")
    assert torch.allclose(logits(opened(base, folder)), logits(model), atol=1e-5, rtol=0)


def test_a_state_dict_of_an_adapter_is_attached_with_its_config(daemon: Daemon, base: Path, tmp_path: Path) -> None:
    model = adapted(base)
    with connect(daemon.endpoint, model="state-lora", base="policy") as publisher:
        publisher.attach(get_peft_model_state_dict(model), model.peft_config["default"].to_dict())
        handle = publisher.publish(1)
        handle.wait_ready(60)
    folder = exported(daemon, handle, tmp_path / "out")
    assert torch.allclose(logits(opened(base, folder)), logits(model), atol=1e-5, rtol=0)


def test_of_several_adapters_the_named_one_is_published(daemon: Daemon, base: Path, tmp_path: Path) -> None:
    model = adapted(base)
    model.add_adapter("second", LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"]))
    shake(model, 5)
    with connect(daemon.endpoint, model="one-of-lora", base="policy") as publisher:
        with pytest.raises(UnsupportedModel, match="the adapters 'default', 'second': name one"):
            publisher.attach(model, CONFIG)
        with pytest.raises(UnsupportedModel, match="no adapter 'third', but 'default', 'second'"):
            publisher.attach(model, CONFIG, adapter="third")
        publisher.attach(model, CONFIG, adapter="second")
        handle = publisher.publish(1)
        handle.wait_ready(60)
    folder = exported(daemon, handle, tmp_path / "out")
    model.set_adapter("second")
    assert torch.allclose(logits(opened(base, folder)), logits(model), atol=1e-5, rtol=0)


def test_an_adapter_that_transformers_added_is_published(daemon: Daemon, base: Path, tmp_path: Path) -> None:
    model = load_model(base)
    model.add_adapter(LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"]))
    shake(model, 3)
    with connect(daemon.endpoint, model="native-lora", base="policy") as publisher:
        publisher.attach(model, CONFIG)
        handle = publisher.publish(1)
        handle.wait_ready(60)
    folder = exported(daemon, handle, tmp_path / "out")
    assert torch.allclose(logits(opened(base, folder)), logits(model), atol=1e-5, rtol=0)


def test_a_version_names_the_version_of_the_base_that_it_was_trained_on(daemon: Daemon, base: Path) -> None:
    with connect(daemon.endpoint, model="bound", config=OTHER_CONFIG) as own:
        handle = own.publish_tensors(1, [("w", torch.ones(2))])
        handle.wait_ready(60)
        number = handle.version
    with connect(daemon.endpoint, model="bound-lora", base="bound") as publisher:
        publisher.attach(adapted(base), CONFIG)
        publisher.publish(1, base_version=number).wait_ready(60)
        publisher.publish(2).wait_ready(60)
        with pytest.raises(Refused, match=f"expected a version of 'bound' up to {number}, its newest one"):
            publisher.publish(3, base_version=number + 1)
        with pytest.raises(UsageError, match="expected the number of a version of 'bound' as base_version, got '1'"):
            publisher.publish(3, base_version="1")  # type: ignore[arg-type]
    with Operator(daemon.endpoint) as operator:
        shown = {version.step: (version.base, version.base_version) for version in operator.versions("bound-lora")}
        assert {publisher.model: publisher.base for publisher in operator.daemon().publishers}["bound-lora"] == "bound"
    assert shown == {1: ("bound", number), 2: ("bound", 0)}


def test_versions_of_sharded_and_of_replicated_adapters_are_what_peft_itself_gathers(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "source", CONFIG, seed=3)
    with Daemon() as daemon, Operator(daemon.endpoint) as operator:
        forked("tests.client.adapter_ranks", daemon.endpoint, tmp_path)
        for kind in ("fsdp", "ddp"):
            for version in operator.versions(f"{kind}-lora"):
                assert (version.base, version.base_version, version.warnings) == ("policy", version.step, ())
                operator.export(version.number, tmp_path / f"{kind}-{version.step}", model=version.model)
    for kind in ("fsdp", "ddp"):
        found = [load_file(tmp_path / f"{kind}-{step}" / "adapter_model.safetensors") for step in (1, 2)]
        assert equal(found[0], torch.load(tmp_path / f"{kind}-1.pt"))
        assert equal(found[1], torch.load(tmp_path / f"{kind}-2.pt"))
        assert not [name for name in found[0] if torch.equal(found[0][name], found[1][name])]


@pytest.fixture
def saved(base: Path, tmp_path: Path) -> tuple[PeftModel, Path]:
    """An adapter, and the folder that PEFT saves of it."""
    model = adapted(base)
    model.save_pretrained(tmp_path / "checkpoint-120")
    return model, tmp_path / "checkpoint-120"


def test_a_folder_of_peft_is_imported_and_comes_out_with_its_tensors(
    daemon: Daemon, base: Path, saved: tuple[PeftModel, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, folder = saved
    monkeypatch.setenv("RESHARDER_ENDPOINT", daemon.endpoint)
    done = resharder("import", folder, "--model", "imported-lora", "--base", "policy", "--base-version", 3)
    assert done.code == 0, done.err
    with Operator(daemon.endpoint) as operator:
        (version,) = operator.versions("imported-lora")
        assert (version.step, version.base, version.base_version) == (120, "policy", 3)
        operator.export(version.number, tmp_path / "out", model="imported-lora")
        assert operator.fetch_config(tmp_path / "config", model="imported-lora") == ["adapter_config.json"]
    assert resharder("fetch-config", "imported-lora", tmp_path / "again").err == "", "an adapter lacks no tokenizer"
    assert equal(*(load_file(place / "adapter_model.safetensors") for place in (folder, tmp_path / "out")))
    assert torch.allclose(logits(opened(base, tmp_path / "out")), logits(model), atol=1e-5, rtol=0)


def test_folders_that_do_not_fit_the_base_are_not_imported(
    daemon: Daemon, base: Path, saved: tuple[PeftModel, Path], tmp_path: Path
) -> None:
    def refusal(folder: Path, **options: Any) -> str:
        return str(refused(UsageError, ".", partial(import_checkpoint, daemon.endpoint, folder, "x-lora", **options)))

    _, folder = saved
    assert "has an adapter, which servers load beside its base: name the base" in refusal(folder)
    assert "has no adapter_config.json" in refusal(base, base="policy")
    assert "leave config out" in refusal(folder, base="policy", config=base)
    (folder / "adapter_model.safetensors").rename(tmp_path / "elsewhere.safetensors")
    assert "has no safetensors file named adapter_model.safetensors" in refusal(folder, base="policy")
    with Operator(daemon.endpoint) as operator:
        assert "x-lora" not in operator.daemon().models


def test_an_archived_adapter_comes_back_on_an_empty_host_as_an_adapter_of_its_base(base: Path, tmp_path: Path) -> None:
    model = adapted(base)
    with Daemon(archive_url=tmp_path / "archive") as first:
        with connect(first.endpoint, model="policy-lora", base="policy") as publisher:
            publisher.attach(model, CONFIG)
            publisher.publish(1, base_version=5).wait_ready(60)
        with Operator(first.endpoint) as operator:
            operator.archive(1, model="policy-lora")
    with Daemon(archive_url=tmp_path / "archive") as second, Operator(second.endpoint) as operator:
        operator.restore(1, model="policy-lora")
        (version,) = operator.versions("policy-lora")
        operator.export(1, tmp_path / "out", model="policy-lora")
        with connect(second.endpoint, model="policy-lora", config=OTHER_CONFIG) as own:
            refused(Refused, "are those of an adapter of 'policy'", own.publish_tensors, 1, [("w", torch.ones(2))])
    assert (version.base, version.base_version, version.state) == ("policy", 5, Version.State.READY)
    assert torch.allclose(logits(opened(base, tmp_path / "out")), logits(model), atol=1e-5, rtol=0)


def test_an_archived_version_does_not_come_back_into_a_model_that_has_become_an_adapter(tmp_path: Path) -> None:
    with Daemon(archive_url=tmp_path / "archive") as first, Operator(first.endpoint) as operator:
        with connect(first.endpoint, model="x", config=OTHER_CONFIG) as own:
            own.publish_tensors(1, [("w", torch.ones(2))]).wait_ready(60)
        operator.archive(1, model="x")
    with Daemon(archive_url=tmp_path / "archive", archive_restore=False) as second, Operator(second.endpoint) as operator:
        with connect(second.endpoint, model="x", base="policy", config=LORA) as publisher:
            publisher.publish_tensors(1, ITEMS).wait_ready(60)
        error = refused(Refused, "models/x/versions/1 is a model of its own", partial(operator.restore, 1, model="x"))
        assert error.reason == "BASE"
        assert [version.number for version in operator.versions("x") if version.state == Version.State.READY] == [2]


def test_an_adapter_keeps_to_retention_and_to_one_file_over_many_versions(base: Path, tmp_path: Path) -> None:
    with Daemon(keep_count=2) as daemon, Operator(daemon.endpoint) as operator:
        with connect(daemon.endpoint, model="policy-lora", base="policy", config=LORA) as publisher:
            for step in range(6):
                items = [(name, tensor * step) for name, tensor in ITEMS]
                publisher.publish_tensors(step, items).wait_ready(60)
        ready = [version.number for version in operator.versions("policy-lora") if version.state == Version.State.READY]
        assert sorted(ready) == [5, 6]
        operator.export(6, tmp_path / "out", model="policy-lora")
    assert equal(load_file(tmp_path / "out" / "adapter_model.safetensors"), {name: tensor * 5 for name, tensor in ITEMS})


def test_ranks_that_name_different_versions_of_the_base_are_refused(daemon: Daemon) -> None:
    ranks = [
        connect(daemon.endpoint, model="two-lora", base="policy", job="two", rank=rank, world_size=2, config=LORA)
        for rank in (0, 1)
    ]
    for rank, (name, tensor) in zip(ranks, ITEMS, strict=True):
        rank.attach_tensors([(name, tensor.dtype, tensor.shape)], wait=False)
    ranks[0].publish_tensors(1, ITEMS[:1], base_version=3)
    error = refused(Conflict, "rank 1 names 4 of 'policy', another rank 3: pass the same base_version on all ranks",
                    lambda: ranks[1].publish_tensors(1, ITEMS[1:], base_version=4))  # fmt: skip
    assert error.reason == "BASE"
    ranks[1].publish_tensors(1, ITEMS[1:], base_version=3).wait_ready(60)
    for rank in ranks:
        rank.close()


def test_a_restarted_daemon_knows_the_base_of_its_versions(base: Path) -> None:
    with Daemon() as daemon, connect(daemon.endpoint, model="policy-lora", base="policy") as publisher:
        publisher.attach(adapted(base), CONFIG)
        publisher.publish(1, base_version=7).wait_ready(60)
        daemon.kill()
        daemon.start()
        publisher.publish(2, base_version=8).wait_ready(60)
        with Operator(daemon.endpoint) as operator:
            shown = {version.step: (version.base, version.base_version) for version in operator.versions("policy-lora")}
    assert shown == {1: ("policy", 7), 2: ("policy", 8)}


@pytest.mark.parametrize(
    ("model", "of", "says"),
    [
        ("own", "other", "the versions of 'own' are those of a model of its own, and a job would publish an adapter of 'other'"),
        ("lora", None, "the versions of 'lora' are those of an adapter of 'own', and a job would publish a model of its own"),
        ("lora", "other", "are those of an adapter of 'own', and a job would publish an adapter of 'other'"),
        ("lora-2", "lora", "the base 'lora' is an adapter of 'own': name the model that both are loaded beside as base"),
        ("base-only", "own", "'base-only' is the base of 'early', and cannot be an adapter itself"),
    ],
)
def test_a_base_that_contradicts_what_the_daemon_knows_is_refused(kinds: Daemon, model: str, of: str | None, says: str) -> None:
    with connect(kinds.endpoint, model=model, base=of, config=LORA if of else OTHER_CONFIG) as publisher:
        error = refused(Refused, says, publisher.publish_tensors, 1, ITEMS)
    assert error.reason == "BASE"


@pytest.fixture(scope="module")
def kinds() -> Iterator[Daemon]:
    """A daemon with a model of its own, its adapter, and an adapter of a base that nobody has published."""
    with Daemon() as running:
        with connect(running.endpoint, model="own", config=OTHER_CONFIG) as own:
            own.publish_tensors(1, [("w", torch.ones(2))]).wait_ready(60)
        for name, of in (("lora", "own"), ("early", "base-only")):
            with connect(running.endpoint, model=name, base=of, config=LORA) as publisher:
                publisher.publish_tensors(1, ITEMS).wait_ready(60)
        yield running


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"use_dora": True}, "use_dora of the adapter is True: DoRA scales"),
        ({"bias": "all"}, "bias of the adapter is 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save of the adapter is .'lm_head'.: it trains whole modules"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices of the adapter"),
        ({"lora_bias": True}, "lora_bias of the adapter is True"),
    ],
)
def test_an_adapter_that_servers_would_load_as_another_is_refused_before_anything_is_sent(
    daemon: Daemon, base: Path, settings: dict[str, Any], says: str
) -> None:
    model = adapted(base, target_modules=["q_proj"], **settings)
    with connect(daemon.endpoint, model="refused-lora", base="policy") as publisher:
        refused(UnsupportedModel, says, publisher.attach, model, CONFIG)
    with Operator(daemon.endpoint) as operator:
        assert "refused-lora" not in {publisher.model for publisher in operator.daemon().publishers}


def test_a_model_without_an_adapter_is_refused(daemon: Daemon, base: Path) -> None:
    with connect(daemon.endpoint, model="refused-lora", base="policy") as publisher:
        with pytest.raises(UnsupportedModel, match="the model has no adapter: attach the model that PEFT's"):
            publisher.attach(load_model(base), CONFIG)
        with pytest.raises(UnknownTensor, match="the adapter has no tensor"):
            publisher.attach({}, {"peft_type": "LORA", "r": 4, "lora_alpha": 4})


def test_the_daemon_refuses_tensors_that_are_not_those_of_the_config(daemon: Daemon) -> None:
    with connect(daemon.endpoint, model="wrong-lora", base="policy", config=LORA) as publisher:
        says = "expected the names of a LoRA adapter as PEFT writes them"
        refused(
            LayoutRejected, says, publisher.publish_tensors, 1, [("model.layers.0.self_attn.q_proj.weight", torch.ones(4, 8))]
        )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"base": "policy-lora"}, "expected the name of another model as base of adapter 'policy-lora', got 'policy-lora'"),
        ({"base": ""}, "expected the name of another model as base"),
        ({"base": "policy", "direct_wait": 5.0}, "direct_wait is for models of their own"),
        ({"base": "policy", "also": {"fp8": None}}, "also is for models of their own"),
        ({"base": "policy", "config": {"model_type": "qwen3"}}, "expected the content of an adapter_config.json"),
        ({"config": {"peft_type": "LORA"}}, "name the adapter's base, connect"),
        ({"config": LoraConfig()}, "name the adapter's base, connect"),
    ],
)
def test_options_that_do_not_fit_an_adapter_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ResharderError, match=says):
        connect("localhost:1", model="policy-lora", **options)
