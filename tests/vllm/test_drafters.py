"""Speculative decoding with MTP layers of the model's own checkpoint: the drafter is brought to each version with the model."""

from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import pytest
import torch
from resharder.client.inference.engine import InstallError
from resharder.client.inference.recording.recorder import Recording, record
from resharder.client.inference.worker.model_part import DRAFTER, MODEL, ModelPart, needs, shared_modules
from resharder.client.versions.manifest import VersionManifest
from resharder.converters.geometry.layout import TensorSpec

from tests.support.daemon import Daemon
from tests.support.tiny_hf import load_checkpoint
from tests.support.vllm_engine import Engine
from tests.support.vllm_models import DRAFTS, make_pair, publish, without_weights

PROMPT = [5, 6, 7, 8, 9, 10]
MTP = {"method": "mtp", "num_speculative_tokens": 1}


@pytest.mark.compat("other")
@pytest.mark.full
@pytest.mark.skipif(not DRAFTS, reason="this CPU build does not run drafters")
def test_boxes_bring_model_and_drafter_to_what_a_fresh_server_holds(daemon: Daemon, tmp_path: Path) -> None:
    """Two servers, each the other's proof: one loads B itself and takes A, the other boots A from the daemon and takes B."""
    a, b = make_pair(tmp_path, "mimo", num_attention_heads=4, num_key_value_heads=2)
    environment = {"RESHARDER_ENDPOINT": daemon.endpoint}
    options = {"raw": True, "environment": environment, "dtype": "float32", "speculative_config": MTP}
    whole = sum(tensor.nbytes for tensor in load_checkpoint(b).values())
    (version_a,) = publish(daemon, "mimo", a)
    with Engine(b, **options) as loaded:
        fresh_b, answer = tensors(loaded), loaded.logprobs(PROMPT)
        assert loaded.install(version_a, "a")["ok"]
        updated_a = tensors(loaded)
    with Engine(without_weights(a, tmp_path / "bare"), load_format="resharder", **options) as booted:
        assert booted.one("resharder_describe")["version"] == 1
        fresh_a = tensors(booted)
        (version_b,) = publish(daemon, "mimo", b)
        assert booted.install(version_b, "b")["ok"]
        about = booted.one("resharder_describe")
        assert (about["boxed_bytes"], about["loaded"]) == (whole, []), "embedding and head are written once"
        assert tensors(booted) == fresh_b
        assert booted.logprobs(PROMPT) == answer
    assert updated_a == fresh_a
    drafters = [path for path in fresh_a if path.startswith("drafter: model.mtp_layers.")]
    assert len([path for path in drafters if fresh_a[path] != fresh_b[path]]) >= 9


def tensors(engine: Engine) -> dict[str, int]:
    answer = engine.one("resharder_fingerprint")
    assert answer["ok"], answer["error"]
    return answer["tensors"]


class Model(torch.nn.Module):
    """A loader that takes what it has a parameter for."""

    def __init__(self, **parts: torch.nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
        parameters, loaded = dict(self.named_parameters()), set()
        for name, tensor in weights:
            if name.replace("copy", "head") in parameters:
                loaded.add(name.replace("copy", "head"))
                parameters[name.replace("copy", "head")].data.copy_(tensor)
        return loaded


def recorded(
    model: Model, *names: str, defaults: Callable[[torch.nn.Module], Collection[str]] = lambda module: ()
) -> tuple[Recording, VersionManifest]:
    specs = {name: TensorSpec(name, "F32", (4, 4)) for name in names}
    recording = record(model, specs, lambda parameter: lambda p, tensor: p.data.copy_(tensor), defaults)
    return recording, VersionManifest("models/m/versions/1", 1, "", "", specs, {}, ())


def part_of(name: str, quantization: str | None = None) -> ModelPart:
    class Config:
        pass

    Config.quantization = quantization  # type: ignore[attr-defined]
    return ModelPart(name, Config())


def test_what_the_drafter_shares_is_the_models_to_write() -> None:
    """`copy.weight` is the checkpoint's second copy of the head, which vLLM drops when it shares the first."""
    head = torch.nn.Linear(4, 4, bias=False)
    model = Model(head=head, body=torch.nn.Linear(4, 4, bias=False))
    drafter = Model(head=head, layer=torch.nn.Linear(4, 4, bias=False))
    names = ("head.weight", "copy.weight", "body.weight", "layer.weight")
    models, parts = {MODEL: model, DRAFTER: drafter}, (part_of(MODEL), part_of(DRAFTER))
    for part in parts:
        part.share(shared_modules(models, part.name))
        part.record(*recorded(models[part.name], *names))
    assert [part.shared for part in parts] == [frozenset(), {"head"}]
    assert [sorted(part.known.needs) for part in parts] == [["body.weight", "copy.weight", "head.weight"], ["layer.weight"]]
    assert {name: len(boxes) for name, boxes in needs(parts).items()} == dict.fromkeys(names, 1)


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_a_version_without_the_drafters_layers_is_refused_by_their_names(quantization: str | None) -> None:
    model, part = Model(layer=torch.nn.Linear(4, 4, bias=False)), part_of(DRAFTER, quantization)
    with pytest.raises(
        InstallError, match=r"models/m/versions/1 .* the drafter loads: .* layer\.weight \(0 of its 16 elements\)"
    ):
        part.record(*recorded(model, "body.weight"))


def test_scales_of_a_kv_cache_need_not_be_in_a_checkpoint() -> None:
    model, part = Model(attn=torch.nn.Linear(4, 4, bias=False), body=torch.nn.Linear(4, 4, bias=False)), part_of(DRAFTER, "fp8")
    recording, manifest = recorded(model, "body.weight", defaults=lambda module: ["weight"] if module is model.attn else [])
    part.record(recording, manifest)
    assert part.known.needs.keys() == {"body.weight"}
