"""Refusals of the plugin before it starts anything, without SGLang."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from resharder.client.errors import UsageError
from resharder.client.inference.engine import InstallError
from resharder.client.inference.settings import PluginSettings
from resharder.client.inference.sglang import release_of, too_old, untested
from resharder.client.inference.sglang.hf_config import EngineConfig
from resharder.client.inference.sglang.refusals import cannot_sleep, refuse_settings, refuse_unsupported
from resharder.converters.quantization.scheme import CHANNELS

PLAIN = {"pp_size": 1, "dp_size": 1, "nnodes": 1, "tokenizer_worker_num": 1, "disaggregation_mode": "null"}
TEXT = SimpleNamespace(quantization=None, is_multimodal=False)


def test_releases_are_read_from_versions() -> None:
    assert release_of("0.5.23") == (0, 5, 23)
    assert release_of("0.5.24.post1") == (0, 5, 24)
    assert release_of("0.0.0.dev1+g123") is None


def test_a_release_is_refused_if_it_is_too_old_and_warned_of_if_nobody_has_tested_it() -> None:
    assert "SGLang 0.5.16 is not supported" in too_old("0.5.16")
    assert too_old("0.5.17") == too_old("0.6.0") == untested("0.5.17") == untested("0.5.23") == ""
    assert "SGLang 0.6.0 is not tested" in untested("0.6.0")


def test_a_plain_server_is_supported() -> None:
    for options in (PLAIN, PLAIN | {"ep_size": 2, "moe_a2a_backend": "none"}):
        assert refuse_unsupported(SimpleNamespace(**options), TEXT, replicas=True) == ""


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ({"pp_size": 2}, "--pp-size"),
        ({"moe_dp_size": 2}, "--moe-dp-size"),
        ({"moe_a2a_backend": "deepep"}, "--moe-a2a-backend"),
        ({"tokenizer_worker_num": 4}, "--tokenizer-worker-num"),
        ({"speculative_algorithm": "EAGLE"}, "--speculative-algorithm"),
        ({"enable_lora": True}, "--enable-lora"),
        ({"disaggregation_mode": "prefill"}, "--disaggregation-mode"),
        ({"enable_hierarchical_cache": True}, "--enable-hierarchical-cache"),
        ({"grpc_port": 50051}, "--grpc-port"),
    ],
)
def test_what_is_not_supported_is_refused_by_the_name_of_its_option(option: dict[str, Any], named: str) -> None:
    assert named in refuse_unsupported(SimpleNamespace(**PLAIN | option), TEXT, replicas=True)


def test_replicas_are_supported_by_some_releases() -> None:
    two = SimpleNamespace(**PLAIN | {"dp_size": 2})
    assert refuse_unsupported(two, TEXT, replicas=True) == ""
    assert "--dp-size" in refuse_unsupported(two, TEXT, replicas=False)
    assert "--ep-size" in refuse_unsupported(SimpleNamespace(**PLAIN | {"ep_size": 2}), TEXT, replicas=False)


def test_models_that_are_not_supported_are_refused() -> None:
    plain, seeing = SimpleNamespace(**PLAIN), SimpleNamespace(quantization=None, is_multimodal=True)
    assert "images" in refuse_unsupported(plain, seeing, replicas=True)
    gemma, next_gemma = (
        SimpleNamespace(**vars(TEXT), hf_config=SimpleNamespace(model_type=kind)) for kind in ("gemma", "gemma2")
    )
    assert "Gemma" in refuse_unsupported(plain, gemma, replicas=True)
    assert refuse_unsupported(plain, next_gemma, replicas=True) == ""


BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}


@pytest.mark.parametrize(
    ("method", "stated", "supported"),
    [
        ("fp8", BLOCKS | {"modules_to_not_convert": ["lm_head"]}, True),
        ("fp8", BLOCKS | {"hf_config": object(), "packed_modules_mapping": {}}, True),  # SGLang's own, from the load on
        ("fp8", None, False),  # weights in BF16, which SGLang casts
        ("fp8", BLOCKS | {"weight_block_size": [64, 128]}, False),
        ("fp8", BLOCKS | {"activation_scheme": "static"}, False),
        ("fp8", BLOCKS | {"scale_fmt": "ue8m0"}, False),
        ("fp8", {"quant_method": "fp8", "activation_scheme": "dynamic"}, False),  # one scale for each tensor
        ("w8a8_fp8", BLOCKS, False),
        ("compressed-tensors", CHANNELS, False),
        ("awq", {"quant_method": "awq"}, False),
    ],
)
def test_quantised_weights_are_supported_as_versions_have_them_and_refused_by_their_method(
    method: str, stated: dict[str, Any] | None, supported: bool
) -> None:
    config = SimpleNamespace(quantization=method, is_multimodal=False, hf_config=SimpleNamespace(quantization_config=stated))
    found = refuse_unsupported(SimpleNamespace(**PLAIN), config, replicas=True)
    assert found == "" if supported else f"FP8 blocks of 128 by 128 ({method})" in found


def test_several_reasons_are_given_at_once() -> None:
    found = refuse_unsupported(SimpleNamespace(**PLAIN | {"pp_size": 2, "enable_eplb": True}), TEXT, replicas=True)
    assert "--pp-size" in found
    assert "--enable-eplb" in found


def test_settings_of_vllm_servers_alone_are_refused() -> None:
    with pytest.raises(UsageError, match="RESHARDER_ADAPTERS is for vLLM servers"):
        refuse_settings(PluginSettings("d:1", "s", adapters=(("lora", ""),)))
    with pytest.raises(UsageError, match="RESHARDER_ON_CONFIG_CHANGE=exit is for vLLM servers"):
        refuse_settings(PluginSettings("d:1", "s", restarts=True))
    refuse_settings(PluginSettings("d:1", "s"))


def test_an_engine_on_a_gpu_sleeps_only_with_sglangs_memory_saver() -> None:
    assert cannot_sleep(SimpleNamespace(device="cpu", enable_memory_saver=False)) == ""
    assert cannot_sleep(SimpleNamespace(device="cuda", enable_memory_saver=True)) == ""
    assert "--enable-memory-saver" in cannot_sleep(SimpleNamespace(device="cuda", enable_memory_saver=False))


CONFIG = {"hidden_size": 64, "rope_theta": 1e4, "max_position_embeddings": 512}


def engine_config(folder: Path, overrides: str = "{}", context_length: int | None = None) -> EngineConfig:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return EngineConfig(str(folder), overrides, context_length)


def test_configs_are_compared_by_what_they_mean(tmp_path: Path) -> None:
    config = engine_config(tmp_path)
    assert config.differences(json.dumps(CONFIG | {"dtype": "bfloat16"}).encode()) == []
    assert config.differences(b"") == []
    assert config.differences(json.dumps(CONFIG | {"is_encoder_decoder": False}).encode()) == []
    assert config.differences(json.dumps(CONFIG | {"is_encoder_decoder": True}).encode()) != []
    (found,) = config.differences(json.dumps(CONFIG | {"rope_theta": 1e6}).encode())
    assert (found.first, found.second) == (1e4, 1e6)
    with pytest.raises(InstallError, match="cannot be read"):
        config.differences(b"{")


def test_what_the_servers_options_set_is_not_compared(tmp_path: Path) -> None:
    longer = json.dumps(CONFIG | {"max_position_embeddings": 1024}).encode()
    assert engine_config(tmp_path).differences(longer) != []
    assert engine_config(tmp_path, context_length=256).differences(longer) == []
    wider = json.dumps(CONFIG | {"hidden_size": 128}).encode()
    assert engine_config(tmp_path, '{"hidden_size": 128}').differences(wider) == []


def test_the_name_of_a_model_on_the_hub_has_no_config_here() -> None:
    assert EngineConfig("Qwen/Qwen3-0.6B", "", None).differences(json.dumps(CONFIG).encode()) == []
