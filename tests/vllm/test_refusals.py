"""What the worker side says no to before anything is loaded or installed."""

import importlib.machinery
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from resharder.client.errors import UsageError
from resharder.client.inference.settings import PluginSettings
from resharder.client.inference.vllm import refusals, register
from resharder.client.inference.vllm.boot_loader import ResharderLoader
from vllm.config.load import LoadConfig


def config(**changes: Any) -> SimpleNamespace:
    """As vLLM's own: its parts, with what is looked at."""
    parallel = SimpleNamespace(enable_eplb=False, enable_elastic_ep=False)
    model = SimpleNamespace(model="org/model")
    parts = {
        "parallel_config": parallel,
        "model_config": model,
        "lora_config": None,
        "speculative_config": None,
        "quant_config": None,
    }
    return SimpleNamespace(**(parts | changes))


def parallel(**changes: bool) -> SimpleNamespace:
    return SimpleNamespace(**{"enable_eplb": False, "enable_elastic_ep": False, **changes})


REQUANTISED = "online quantisation of a checkpoint that is quantised already (--quantization-config)"
PRUNED = "constants in the place of experts (expert_substitution, approximate_experts)"
SUBSTITUTION = {"transform_config": {"expert_substitution": {"version": 1}}}


def pruned(**configs: SimpleNamespace) -> SimpleNamespace:
    return SimpleNamespace(model="org/model", **configs)


def drafter(method: str, model: str) -> SimpleNamespace:
    return SimpleNamespace(method=method, model=model, draft_model_config=SimpleNamespace(model=model))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"parallel_config": parallel(enable_eplb=True)}, "EPLB (--enable-eplb)"),
        ({"parallel_config": parallel(enable_elastic_ep=True)}, "elastic expert parallelism"),
        (
            {"speculative_config": SimpleNamespace(method="ngram", draft_lm_head_quantization="fp8")},
            "a drafter with its own copy of the output layer (draft_lm_head_quantization=fp8)",
        ),
        ({"quant_config": SimpleNamespace(online_quantization_config=object())}, REQUANTISED),
        ({"model_config": pruned(hf_config=SimpleNamespace(approximate_experts={"1": [0]}))}, PRUNED),
        ({"model_config": pruned(hf_text_config=SimpleNamespace(approximate_experts={"1": [0]}))}, PRUNED),
        ({"model_config": pruned(hf_config=SimpleNamespace(compression_config=SUBSTITUTION))}, PRUNED),
        ({"speculative_config": drafter("eagle3", "org/eagle")}, "a drafter with its own weights (eagle3, org/eagle)"),
        (
            {"speculative_config": drafter("draft_model", "org/small")},
            "a drafter with its own weights (draft_model, org/small)",
        ),
        ({"speculative_config": drafter("mtp", "org/mtp")}, "a drafter with its own checkpoint (org/mtp)"),
        (
            {"parallel_config": parallel(enable_eplb=True, enable_elastic_ep=True)},
            "EPLB (--enable-eplb) and elastic expert parallelism",
        ),
    ],
)
def test_a_server_with_weights_that_would_not_be_installed_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    refusal = f"Resharder does not support servers with {named}"
    assert refusals.refuse_unsupported(config(**changes)) == refusal
    with pytest.raises(UsageError, match=named.split(" (")[0]):
        ResharderLoader(LoadConfig()).load_model(config(**changes), None)


def test_quantised_models_with_all_their_experts_are_supported() -> None:
    quantised = SimpleNamespace(online_quantization_config=None)
    whole = pruned(hf_config=SimpleNamespace(approximate_experts=None, compression_config={"transform_config": {}}))
    assert refusals.refuse_unsupported(config(quant_config=quantised, model_config=whole)) == ""


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_speculation_without_weights_of_its_own_is_supported(method: str) -> None:
    assert refusals.refuse_unsupported(config(speculative_config=SimpleNamespace(method=method))) == ""


def test_mtp_layers_of_the_models_own_checkpoint_are_supported() -> None:
    assert refusals.refuse_unsupported(config(speculative_config=drafter("mtp", "org/model"))) == ""


def test_vllm_before_elastic_expert_parallelism_is_supported() -> None:
    assert refusals.refuse_unsupported(config(parallel_config=SimpleNamespace(enable_eplb=False))) == ""


def refused_start(monkeypatch: pytest.MonkeyPatch) -> str:
    """The same in every process: in the plugin that starts it, and for a worker that is asked to install."""
    monkeypatch.setenv("RESHARDER_ENDPOINT", "127.0.0.1:1")
    monkeypatch.setenv("RESHARDER_SERVER_ID", "s")
    monkeypatch.setenv("VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY", "RESHARDER_")
    with pytest.raises(UsageError) as caught:
        register()
    reason = refusals.refuse_unsupported(config())
    assert str(caught.value).startswith(reason)
    return reason


def test_the_rust_front_end_is_refused_because_no_gate_stands_in_front_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "0")
    assert refusals.refuse_unsupported(config()) == ""
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    assert "the Rust front end (VLLM_USE_RUST_FRONTEND), which has no gate" in refused_start(monkeypatch)


@pytest.mark.parametrize(
    "command",
    [["/venv/bin/vllm", "serve", "m", "--grpc"], ["/site-packages/vllm/entrypoints/cli/main.py", "serve", "m", "--grpc"]],
)
def test_a_grpc_server_is_refused_by_its_flag(monkeypatch: pytest.MonkeyPatch, command: list[str]) -> None:
    monkeypatch.setattr(sys, "argv", command[:-1])
    assert refusals.refuse_unsupported(config()) == ""
    monkeypatch.setattr(sys, "argv", command)
    assert "the gRPC server (--grpc), which has no gate" in refused_start(monkeypatch)


def test_a_grpc_server_is_refused_when_vllms_config_file_asks_for_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    monkeypatch.setattr(sys, "argv", ["/venv/bin/vllm", "serve", "m", "--config", str(file), "--port", "8000"])
    assert refusals.refuse_unsupported(config()) == "", "a file that is not there is vLLM's to refuse"
    file.write_text("grpc: false\nport: 1\n")
    assert refusals.refuse_unsupported(config()) == ""
    file.write_text("grpc: true\nspeculative-config:\n  method: ngram\n")
    assert "the gRPC server (--grpc), which has no gate" in refused_start(monkeypatch)


def test_a_flag_of_another_program_is_none_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/opt/trainer/main.py", "--grpc"])
    assert refusals.refuse_unsupported(config()) == ""


@pytest.mark.parametrize("name", ["vllm.entrypoints.launchers.grpc_server", "vllm.entrypoints.grpc_server"])
def test_a_grpc_server_is_refused_however_it_was_asked_for(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    with monkeypatch.context() as loaded:
        loaded.setitem(sys.modules, name, ModuleType(name))
        assert "the gRPC server" in refused_start(loaded)
    program = ModuleType("__main__")
    program.__spec__ = importlib.machinery.ModuleSpec(name, None)
    monkeypatch.setitem(sys.modules, "__main__", program)
    assert "the gRPC server" in refused_start(monkeypatch)


@pytest.mark.parametrize(("device_type", "needed"), [("cuda", 3), ("cpu", 4)])
def test_a_server_needs_a_slot_for_each_adapter_and_one_for_the_next_version(device_type: str, needed: int) -> None:
    environment = {"RESHARDER_ENDPOINT": "daemon:7677", "RESHARDER_MODEL": "policy", "RESHARDER_SERVER_ID": "one"}
    settings = PluginSettings.from_environment(environment | {"RESHARDER_ADAPTERS": "first,second"})

    def with_slots(number: int) -> SimpleNamespace:
        slots = SimpleNamespace(max_loras=number)
        return SimpleNamespace(lora_config=slots, device_config=SimpleNamespace(device_type=device_type))

    refusals.refuse_adapters(with_slots(needed), settings)
    with pytest.raises(UsageError, match=rf"2 adapters need {needed} slots.*--max-loras {needed} \(got {needed - 1}\)"):
        refusals.refuse_adapters(with_slots(needed - 1), settings)
