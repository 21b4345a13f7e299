"""A version that does not write all that a server reads is refused by the names of the parameters, before anything is applied."""

import json
import uuid
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from resharder.client.inference import version_page
from resharder.client.inference.engine import InstallError
from resharder.client.inference.recording import inventory
from resharder.client.inference.recording.recorder import Recording, record
from resharder.client.inference.settings import PluginSettings
from resharder.client.inference.vllm.host import VLLMHost
from resharder.client.inference.worker.agent import Agent
from resharder.client.inference.worker.install import Installed
from resharder.client.inference.worker.model_part import MODEL, ModelPart, ModelParts
from resharder.client.trainer import connect
from resharder.client.versions.manifest import VersionManifest
from resharder.converters.geometry.layout import Layout, TensorSpec
from resharder.converters.wire.boxes import fingerprint_of
from resharder.v1 import resources_pb2

from tests.support.daemon import Daemon
from tests.support.tiny_hf import load_checkpoint
from tests.support.vllm_engine import Engine
from tests.support.vllm_models import make_pair, publish, without_weights

pytestmark = pytest.mark.compat("other")
VERSION = VersionManifest("models/m/versions/1", 1, "", "", {}, {}, ())
PROMPT = [5, 6, 7, 8, 9, 10]
LEFT_OUT = "model.layers.1.self_attn.k_proj.weight"
KEPT = r"model\.layers\.1\.self_attn\.qkv_proj\.weight \(49152 of its 65536 elements, from model\.layers\.1\.self_attn\.q_proj"


def without_table(folder: Path) -> Path:
    """Give a Llama another of the names under which vLLM knows it."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"architectures": ["TeleChat3ForCausalLM"]}))
    return folder


def publish_without(daemon: Daemon, model: str, folder: Path, left_out: Iterable[str]) -> str:
    """Publish a checkpoint without some of its tensors, as a family without a table allows it."""
    tensors = load_checkpoint(folder)
    for name in left_out:
        del tensors[name]
    config = json.loads((folder / "config.json").read_text())
    with connect.connect(daemon.endpoint, model=model, job=uuid.uuid4().hex, rank=0, world_size=1, config=config) as publisher:
        handle = publisher.publish_tensors(1, tensors.items())
        handle.wait_ready(60)
        return handle.name


@pytest.mark.full
def test_a_server_does_not_boot_a_version_without_k_proj_and_a_running_one_keeps_its_weights(
    daemon: Daemon, tmp_path: Path
) -> None:
    a, b = map(without_table, make_pair(tmp_path, "llama", torch.float32))
    version = publish_without(daemon, "lacking", b, [LEFT_OUT])
    environment = {"RESHARDER_ENDPOINT": daemon.endpoint, "RESHARDER_MODEL": "lacking"}
    with pytest.raises(RuntimeError, match=rf"{version} lacks tensors .*{KEPT}"):
        Engine(without_weights(a, tmp_path / "bare"), load_format="resharder", environment=environment, dtype="float32")
    with Engine(a, environment=environment, dtype="float32", raw=True) as running:
        before = running.one("resharder_fingerprint")["tensors"], running.logprobs(PROMPT)
        answer = running.one("resharder_stage", "lacking", version)
        assert not answer["ok"]
        assert LEFT_OUT.replace("k_proj", "qkv_proj") in answer["error"]
        assert "install lacking is not staged" in running.one("resharder_apply", "lacking")["error"]
        assert (running.one("resharder_fingerprint")["tensors"], running.logprobs(PROMPT)) == before
        (whole,) = publish(daemon, "lacking", b)
        assert running.install(whole, "whole")["ok"], "a version that is complete is installed afterwards"


class Attention(torch.nn.Module):
    """A weight, and the scale of a KV cache, which has a default."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4, 128), requires_grad=False)
        self.k_scale = torch.nn.Parameter(torch.tensor(-1.0), requires_grad=False)
        self.register_buffer("table", torch.arange(4.0))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            getattr(self, name).data.copy_(tensor)


@pytest.mark.parametrize("stored", [{}, {"k_scale": torch.tensor(0.5)}, {"table": torch.ones(4)}], ids=str)
def test_a_version_without_what_a_running_server_loaded_itself_is_refused_although_a_new_server_has_a_default(
    stored: dict[str, torch.Tensor],
) -> None:
    model = Attention()
    inventory.before_loading(model)
    model.load_weights([("weight", torch.ones(4, 128)), *stored.items()])
    inventory.after_own_checkpoint(model)
    own = inventory.NOTES[model].own
    recording = record(
        model, {"weight": TensorSpec("weight", "F32", (4, 128))}, lambda parameter: None, lambda module: ["k_scale"]
    )
    part = ModelPart(MODEL, SimpleNamespace(quantization=None))
    part.record(recording, VERSION)  # a server that boots it
    if not stored:
        part.record(recording, VERSION, own)
        return
    (name,) = stored
    with pytest.raises(InstallError, match=rf"{name} \(nothing, but the server has loaded it from a checkpoint of its own"):
        part.record(recording, VERSION, own)


def test_what_the_environment_allows_is_installed_and_goes_into_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Attention()
    part = ModelPart(MODEL, SimpleNamespace(quantization=None))
    recording = record(model, {}, lambda parameter: None, lambda module: ["k_scale"])
    with pytest.raises(InstallError, match=r"weight \(0 of its 512 elements\)\. .*RESHARDER_ALLOW=unwritten-parameters"):
        part.record(recording, VERSION)
    assert (part.recording, part.warnings) == (None, ())
    monkeypatch.setenv("RESHARDER_ALLOW", "unwritten-parameters")
    pages: dict[str, str] = {}
    version_page.provide("s", pages, tmp_path)
    monkeypatch.setenv(version_page.VARIABLE, pages[version_page.VARIABLE])
    part.record(recording, VERSION)
    (warning,) = part.warnings
    assert "weight (0 of its 512 elements)" in warning
    agent = Agent(VLLMHost(SimpleNamespace(), torch.device("cpu"), 0), PluginSettings("127.0.0.1:1", "s"))
    agent.parts.by_name[MODEL] = part
    sent: list[resources_pb2.Worker] = []
    monkeypatch.setattr(agent.reporter, "report", lambda worker, **how: sent.append(worker))
    agent.booted(VERSION, Installed(0, 0, 0.0), 0.0)
    assert list(sent[0].warnings) == [warning]


def test_a_later_version_with_other_tensors_is_refused_by_their_names() -> None:
    specs = {name: TensorSpec(name, "F32", (4, 4)) for name in ("a", "b", "c")}
    parts = ModelParts(VLLMHost(SimpleNamespace(model_config=None), torch.device("cpu"), 0))
    parts.part(MODEL).recording = Recording(Layout(specs, ()), {}, {}, {})
    later = {"a": specs["a"], "b": specs["b"]._replace(shape=(4, 5)), "d": TensorSpec("d", "F32", (1,))}
    parts.check(replace(VERSION, specs=specs))
    parts.check_early(VERSION.name, b"", fingerprint_of(reversed(specs.values())))
    parts.check_early(VERSION.name, b"", "")  # of a daemon that does not send it
    with pytest.raises(InstallError, match=r"versions/1 has other tensors than .*, so it is not installed ahead of READY"):
        parts.check_early(VERSION.name, b"", fingerprint_of(later.values()))
    with pytest.raises(InstallError, match=r"it lacks c; new are d; of another shape or dtype are b\. If the model has changed"):
        parts.check(replace(VERSION, specs=later))
