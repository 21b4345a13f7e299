"""A server serves only versions of the config that it computes with."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from resharder.client.inference.engine import InstallError
from resharder.client.inference.vllm.endpoint import CONFIG_CHANGED
from resharder.client.inference.vllm.hf_config import EngineConfig
from resharder.client.inference.worker.model_part import MODEL, ModelParts
from resharder.client.operator import Operator
from vllm.config import ModelConfig

from tests.support.daemon import Daemon
from tests.support.observing import wait_until
from tests.support.tiny_hf import FAMILIES, save_tokenizer, tiny_config
from tests.support.vllm_engine import Engine
from tests.support.vllm_models import make_pair, publish, save_random, without_weights
from tests.support.vllm_server import VllmServer

pytestmark = pytest.mark.compat("other")
PROMPT = [5, 6, 7, 8, 9, 10]


def engine_config(folder: Path, config: dict[str, Any], **options: Any) -> EngineConfig:
    """Of a server that was started on a folder with this config. `options` are vLLM's."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    plain = {"hf_config_path": None, "revision": None, "trust_remote_code": False, "hf_overrides": {}, "hf_config": None}
    speculative = options.pop("speculative_config", None)
    model = SimpleNamespace(model=str(folder), **plain | options)
    return EngineConfig(SimpleNamespace(model_config=model, speculative_config=speculative))


def found(engine: EngineConfig, version: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Names that differ, with the engine's and the version's value."""
    return {name: (ours, theirs) for name, ours, theirs in engine.differences(json.dumps(version).encode())}


def on_disk(family: str, **changes: Any) -> dict[str, Any]:
    """transformers reads MiMo's config with code of the checkpoint's own; it is Qwen2's."""
    config = tiny_config(family, **changes)
    return config | {"model_type": "qwen2"} if config["model_type"] == "mimo" else config


def as_of_transformers_4(config: dict[str, Any]) -> dict[str, Any]:
    """The same config as transformers 4 saves it: the rotary base beside `rope_scaling`."""
    older = {name: value for name, value in config.items() if name != "rope_parameters"}
    ropes = config.get("rope_parameters") or {}
    if "full_attention" in ropes:  # Gemma 3
        slow, fast = ropes["full_attention"], ropes["sliding_attention"]
        older |= {"rope_theta": slow["rope_theta"], "rope_local_base_freq": fast["rope_theta"]}
        older["rope_scaling"] = {name: value for name, value in slow.items() if name != "rope_theta"}
    elif ropes:
        scaling = {name: value for name, value in ropes.items() if name not in ("rope_theta", "partial_rotary_factor")}
        older |= {name: value for name, value in ropes.items() if name not in scaling}
        older["rope_scaling"] = None if scaling.get("rope_type", "default") == "default" else scaling
    return older


@pytest.mark.parametrize("family", FAMILIES)
def test_one_config_is_no_other_one_however_it_was_saved(tmp_path: Path, family: str) -> None:
    config = on_disk(family)
    engine = engine_config(tmp_path / "model", config)
    forms: dict[str, dict[str, Any]] = {
        "the same": dict(config),
        "in another order": dict(reversed(config.items())),
        "as transformers 4 saves it": as_of_transformers_4(config),
        "without null": {name: value for name, value in config.items() if value is not None},
        "with whole numbers": {
            name: int(value) if isinstance(value, float) and value.is_integer() and "rope" not in name else value
            for name, value in config.items()
        },
        "with another writer's names": config
        | {"transformers_version": "4.1", "torch_dtype": "float16", "use_cache": False, "_name_or_path": "x"}
        | {"bos_token_id": 5, "eos_token_id": [6, 7], "pad_token_id": None, "initializer_range": 0.5, "unsloth_version": "1"},
    }
    assert {form: found(engine, version) for form, version in forms.items()} == {form: {} for form in forms}
    older = engine_config(tmp_path / "older", as_of_transformers_4(config))
    assert found(older, config) == {}


def other(value: Any) -> Any:
    """Another value of the same type, that transformers accepts; None if there is none."""
    if isinstance(value, bool):
        return not value
    return value * 2 if isinstance(value, int | float) and value else None


COMPUTED_WITH = {
    "rms_norm_eps", "num_experts_per_tok", "norm_topk_prob", "routed_scaling_factor", "sliding_window", "n_group", "topk_group",
    "query_pre_attn_scalar", "final_logit_softcapping", "attn_logit_softcapping", "tie_word_embeddings", "attention_bias",
    "intermediate_size", "num_experts", "n_routed_experts", "first_k_dense_replace", "swiglu_limit",
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_each_value_that_a_model_computes_with_is_compared(tmp_path: Path, family: str) -> None:
    config = on_disk(family)
    engine = engine_config(tmp_path / "model", config)
    changed = {name: other(config[name]) for name in COMPUTED_WITH & config.keys() if other(config[name]) is not None}
    assert len(changed) >= 3
    missed = {name for name, value in changed.items() if not any(name in each for each in found(engine, {**config, name: value}))}
    assert missed == set()
    rope = as_of_transformers_4(config)
    assert [name for name in found(engine, rope | {"rope_theta": 77.0}) if name.endswith("rope_theta")] != []


def started(folder: Path, config: dict[str, Any], **options: Any) -> EngineConfig:
    """Of a server that vLLM itself has configured."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_tokenizer(folder, 16)
    model = ModelConfig(model=str(folder), dtype="float32", **options)
    return EngineConfig(SimpleNamespace(model_config=model, speculative_config=None))


@pytest.mark.process  # vLLM looks at a model's class in one, if no run before has
def test_a_value_that_the_server_overrides_is_not_compared(tmp_path: Path) -> None:
    config = on_disk("llama")
    other_rope = config | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    ropes = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    overriding = started(tmp_path / "rope", config, hf_overrides=ropes | {"rms_norm_eps": 1e-3})
    assert found(overriding, other_rope | {"rms_norm_eps": 1e-2}) == {}
    assert found(overriding, other_rope | {"hidden_act": "gelu"}) == {"hidden_act": ("silu", "gelu")}

    longer = config | {"max_position_embeddings": 8192}
    assert found(started(tmp_path / "given", config, max_model_len=512), longer) == {}
    assert found(started(tmp_path / "derived", config), longer) == {"max_position_embeddings": (2048, 8192)}
    dynamic = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}
    stretched = started(tmp_path / "dynamic", config | dynamic, max_model_len=512)
    assert "max_position_embeddings" in found(stretched, longer | dynamic)

    window = on_disk("gpt_oss")
    assert found(started(tmp_path / "window", window, disable_sliding_window=True), window | {"sliding_window": 9}) == {}


def test_layers_of_a_drafter_count_for_a_server_with_one_alone(tmp_path: Path) -> None:
    config = on_disk("glm4_moe")
    without = config | {"num_nextn_predict_layers": 0}
    assert found(engine_config(tmp_path / "alone", config), without) == {}
    drafting = engine_config(tmp_path / "drafting", config, speculative_config=SimpleNamespace(method="mtp"))
    assert found(drafting, without) == {"num_nextn_predict_layers": (1, 0)}


def test_a_quantised_config_is_compared_but_for_its_list_of_modules(tmp_path: Path) -> None:
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    config = on_disk("qwen3") | {"quantization_config": fp8}
    engine = engine_config(tmp_path / "model", config)
    listed = config | {"quantization_config": fp8 | {"modules_to_not_convert": ["lm_head"], "ignored_layers": None}}
    assert found(engine, listed) == {}
    static = config | {"quantization_config": fp8 | {"activation_scheme": "static"}}
    assert found(engine, static) == {"quantization_config.activation_scheme": ("dynamic", "static")}
    assert "quantization_config" in found(engine, on_disk("qwen3"))


def test_what_a_server_was_started_with_counts_and_not_what_its_folder_has_later(tmp_path: Path) -> None:
    config, later = on_disk("qwen3"), on_disk("qwen3", rms_norm_eps=1e-3)
    engine = engine_config(tmp_path / "model", config)
    (tmp_path / "model" / "config.json").write_text(json.dumps(later))
    assert found(engine, later) == {"rms_norm_eps": (1e-6, 1e-3)}
    assert found(engine, config) == {}


def test_a_config_that_vllm_cannot_read_is_refused(tmp_path: Path) -> None:
    engine = engine_config(tmp_path / "model", on_disk("qwen3"))
    with pytest.raises(InstallError, match="cannot read the version's config"):
        found(engine, {"model_type": "no_such_type", "architectures": ["None"]})


def test_a_worker_refuses_such_a_version_before_it_records_or_stages_it_unless_it_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = on_disk("qwen3_moe")
    parts = ModelParts(SimpleNamespace(config_differences=engine_config(tmp_path / "model", config).differences))
    content = json.dumps(config | {"num_experts_per_tok": 3}).encode()
    manifest = SimpleNamespace(name="models/m/versions/2", config=content)
    text = "models/m/versions/2 has another config.json .*: num_experts_per_tok is 3 in the version, 2 here; restart the server"
    with pytest.raises(InstallError, match=text):
        parts.check(manifest)
    parts.part = lambda name: SimpleNamespace(share=lambda shared: False, recording=None)
    with pytest.raises(InstallError, match=text):
        parts.record_running({MODEL: torch.nn.Linear(1, 1)}, lambda: manifest)
    with pytest.raises(InstallError, match="start it on the version's config"):
        parts.check_config(manifest.name, content, booting=True)
    parts.check_config(manifest.name, b"")  # of a daemon that does not send it
    monkeypatch.setenv("RESHARDER_ALLOW", "server-config")
    parts.check(manifest)
    (warning,) = parts.warnings
    assert "allowed by RESHARDER_ALLOW=server-config: models/m/versions/2 has another config.json" in warning
    parts.check_config("models/m/versions/3", json.dumps(config).encode())
    assert parts.warnings == []


class Running:
    """A server that booted version 1 of job one, and job two with its own config."""

    def __init__(self, daemon: Daemon, folder: Path, engine: Engine, config: dict[str, Any]) -> None:
        self.daemon, self.folder, self.engine, self.config = daemon, folder, engine, config
        self.operator = Operator(daemon.endpoint)

    def publish(self, name: str, **changes: Any) -> str:
        """The version of a job whose config has these changes."""
        folder = save_random(self.folder / name, self.config | changes, 2, torch.float32)
        (version,) = publish(self.daemon, "served", folder)
        return version

    def warnings(self) -> str:
        (worker,) = self.operator.server("s").workers
        return "; ".join(worker.warnings)

    def refusal(self, version: str, install: str) -> str:
        """The error with which the worker refuses to stage a version."""
        assert self.engine.one("resharder_stage", install, version)["ok"]

        def report() -> Any:
            (worker,) = self.operator.server("s").workers
            return worker

        wait_until(lambda: report().install == install, "the worker's report")
        return str(report().error)


@pytest.fixture(scope="module")
def running(daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("served")
    a, _ = make_pair(folder, "qwen3_moe")
    publish(daemon, "served", a)
    environment = {"RESHARDER_ENDPOINT": daemon.endpoint, "RESHARDER_MODEL": "served", "RESHARDER_SERVER_ID": "s"}
    options = {"raw": True, "environment": environment, "dtype": "float32", "load_format": "resharder"}
    with Engine(without_weights(a, folder / "bare"), **options) as engine:
        yield Running(daemon, folder, engine, json.loads((a / "config.json").read_text()))


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_experts_per_tok", 3), ("rope_parameters", {"rope_type": "default", "rope_theta": 5e5}), ("norm_topk_prob", False)],
)
def test_a_version_of_another_config_is_refused_with_both_values_before_anything_is_applied(
    running: Running, name: str, value: Any
) -> None:
    before = running.engine.one("resharder_fingerprint")["tensors"]
    version = running.publish(name, **{name: value})
    error = running.refusal(version, name)
    assert "another config.json than this server was started with" in error
    path = {"rope_parameters": "rope_parameters.rope_theta"}.get(name, name)
    theirs, ours = (value["rope_theta"], 1e4) if isinstance(value, dict) else (value, running.config[name])
    assert f"{path} is {theirs!r} in the version, {ours!r} here" in error
    assert "restart the server" in error
    answer = running.engine.one("resharder_apply", name)
    assert (answer["ok"], "is not staged" in answer["error"]) == (False, True)
    assert running.engine.one("resharder_fingerprint")["tensors"] == before
    assert running.engine.one("resharder_describe")["version"] == 1


def test_the_same_config_as_another_job_saves_it_is_installed(running: Running) -> None:
    version = running.publish("older", **(as_of_transformers_4(running.config) | {"eos_token_id": [4, 5]}))
    assert running.engine.install(version, "older")["ok"]
    assert running.engine.one("resharder_describe")["version"] > 1


def test_an_operator_may_allow_another_config(running: Running) -> None:
    version = running.publish("allowed", rms_norm_eps=1e-3)
    running.engine.environ(RESHARDER_ALLOW="server-config")
    try:
        assert running.engine.install(version, "allowed")["ok"]
        wait_until(lambda: "rms_norm_eps is 0.001 in the version" in running.warnings(), "the warning in the report")
    finally:
        running.engine.environ(RESHARDER_ALLOW="")


def test_a_server_on_a_folder_of_its_own_does_not_boot_a_version_of_another_config(daemon: Daemon, tmp_path: Path) -> None:
    a, _ = make_pair(tmp_path, "qwen3")
    publish(daemon, "own", a)
    config = json.loads((a / "config.json").read_text())
    own = save_random(tmp_path / "own", config | {"rms_norm_eps": 1e-3}, 1, torch.float32)
    environment = {"RESHARDER_ENDPOINT": daemon.endpoint, "RESHARDER_MODEL": "own", "RESHARDER_SERVER_ID": "own"}
    with pytest.raises(RuntimeError, match=r"rms_norm_eps is 1e-06 in the version, 0\.001 here; start it on the version's"):
        Engine(without_weights(own, tmp_path / "bare"), load_format="resharder", dtype="float32", environment=environment)


@pytest.mark.full
def test_a_server_that_may_end_for_another_config_ends_with_its_status_and_starts_again_on_the_version(
    daemon: Daemon, tmp_path: Path
) -> None:
    a, _ = make_pair(tmp_path, "qwen3")
    publish(daemon, "ends", a)
    operator = Operator(daemon.endpoint)
    environment = {
        "RESHARDER_ENDPOINT": daemon.endpoint,
        "RESHARDER_MODEL": "ends",
        "RESHARDER_SERVER_ID": "ends",
        "RESHARDER_ON_CONFIG_CHANGE": "exit",
        "VLLM_PLUGINS": "resharder",
    }

    def served(folder: Path) -> VllmServer:
        operator.fetch_config(folder, model="ends")
        return VllmServer(folder, args=["--load-format", "resharder"], env=environment)

    with served(tmp_path / "one") as server:
        assert server.generate(PROMPT, max_tokens=2).version == "1"
        config = json.loads((a / "config.json").read_text())
        two = save_random(tmp_path / "two", config | {"rms_norm_eps": 1e-2}, 2, torch.float32)
        publish(daemon, "ends", two)
        assert server.process is not None
        assert server.process.wait(300) == CONFIG_CHANGED
        away = operator.server("ends")
        assert (away.state.name, "rms_norm_eps is 0.01 in the version, 1e-06 here" in away.reason) == ("BOOTING", True), away
    with served(tmp_path / "again") as server, VllmServer(two) as fresh:
        answer = server.generate(PROMPT, max_tokens=4)
        assert (answer.version, answer.logprobs) == ("2", fresh.generate(PROMPT, max_tokens=4).logprobs)
