"""Installs of FP8 versions into vLLM engines on a GPU: every reachable tensor and every answer is that of a fresh engine.

DeepGEMM compiles its kernels at their first use, which takes a minute; keep its cache (DG_JIT_CACHE_DIR) for later runs.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.daemon import Daemon
from tests.support.fp8_checkpoint import SHAPES, save_channels, save_fp8
from tests.support.tiny_hf import tiny_config
from tests.support.vllm_engine import Engine
from tests.support.vllm_models import publish, save_random

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

PROMPT = [5, 6, 7, 8, 9, 10]
FAMILIES = ("qwen3", "qwen3_moe", "deepseek_v3")
OPTIONS = {"dtype": "bfloat16", "gpu_memory_utilization": 0.07, "kv_cache_memory_bytes": 1 << 28}
State = tuple[dict[str, int], list[tuple[int, float]]]


def state(engine: Engine) -> State:
    """Return the fingerprint of every tensor that the engine reads, and an answer."""
    return engine.one("resharder_fingerprint")["tensors"], engine.logprobs(PROMPT)


def differences(found: State, expected: State) -> list[str]:
    tensors = [path for path in found[0].keys() | expected[0].keys() if found[0].get(path) != expected[0].get(path)]
    return sorted(tensors) + (["log-probabilities"] if found[1] != expected[1] else [])


def assert_installs_equal_fresh_engines(
    folders: list[Path], environment: dict[str, str], *, boxes: bool = False, **options: Any
) -> None:
    """Install A, B, C and A again into an engine that loaded A itself, and compare each with an engine that loaded it itself.

    `boxes`: after the first install, nothing goes through `load_weights`.
    """
    environment = {"VLLM_PLUGINS": "resharder", "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_DEEP_GEMM_WARMUP": "skip"} | environment
    options = OPTIONS | options
    with Daemon() as daemon:
        versions = publish(daemon, "m", *folders)
        environment |= {"RESHARDER_ENDPOINT": daemon.endpoint, "RESHARDER_MODEL": "m"}
        fresh = []
        for folder in folders[1:]:
            with Engine(folder, environment=environment, **options) as engine:
                fresh.append(state(engine))
        with Engine(folders[0], environment=environment, **options) as engine:
            expected = [state(engine), *fresh]
            assert expected[0][1] != expected[1][1]
            for turn, i in enumerate((0, 1, 2, 0, 1)):
                answer = engine.install(versions[i], f"turn-{turn}")
                assert answer["ok"], answer["error"]
                about = engine.one("resharder_describe")
                print(f"turn {turn}: {about['boxed_bytes']} of {about['needed_bytes']} bytes by boxes, impure {about['impure']}")
                assert differences(state(engine), expected[i]) == [], (turn, sorted(about["loaded"])[:8])
                assert not boxes or about["loaded"] == [], (turn, sorted(about["loaded"])[:8])


@pytest.mark.parametrize("deep_gemm", ["0", "1"])
@pytest.mark.parametrize("family", FAMILIES)
def test_fp8_blocks_over_one_another_leave_what_a_fresh_engine_has(family: str, deep_gemm: str, tmp_path: Path) -> None:
    folders = [save_fp8(tmp_path / str(seed), family, seed) for seed in (1, 2, 3)]
    assert_installs_equal_fresh_engines(folders, {"VLLM_USE_DEEP_GEMM": deep_gemm})


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_fp8_by_channel_over_one_another_leaves_what_a_fresh_engine_has(family: str, tmp_path: Path) -> None:
    folders = [save_channels(tmp_path / str(seed), family, seed) for seed in (1, 2, 3)]
    assert_installs_equal_fresh_engines(folders, {"VLLM_USE_DEEP_GEMM": "0"}, boxes=family == "qwen3")


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_versions_are_quantised_by_the_engine_as_a_fresh_engine_does(family: str, tmp_path: Path) -> None:
    config = tiny_config(family, num_hidden_layers=2, dtype="bfloat16", **SHAPES[family])
    folders = [save_random(tmp_path / str(seed), config, seed, torch.bfloat16) for seed in (1, 2, 3)]
    assert_installs_equal_fresh_engines(folders, {"VLLM_USE_DEEP_GEMM": "0"}, quantization="fp8")
