"""Installs of FP8 blocks into real vLLM engines: every reachable tensor and every answer is that of a fresh engine.

Kernels are those of `raw_mode/resharder_reference_fp8.py`, so that the engines run on any CPU. Dense and MLA versions are
checkpoints that are quantised already; those of the mixture of experts come from BF16 weights that two Megatron ranks cast.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import vllm
from packaging.version import Version
from resharder.client.inference.engine import KV_CACHE, WEIGHTS
from resharder.converters.quantization.scheme import CHANNELS

from tests.support.daemon import Daemon
from tests.support.fp8_checkpoint import fp8_config, save_fp8
from tests.support.tiny_hf import save_tokenizer
from tests.support.vllm_engine import Engine
from tests.support.vllm_models import publish
from tests.support.weights import random_weights

pytestmark = [
    pytest.mark.full,
    pytest.mark.compat("other"),
    pytest.mark.skipif(Version(vllm.__version__) < Version("0.32"), reason="older CPU builds have no FP8 blocks"),
]

PROMPT = [5, 6, 7, 8, 9, 10]
PLUGINS = "resharder,dropping_sleep,raw_mode,reference_fp8"
FAMILIES = ("qwen3", "qwen3_moe", "deepseek_v3")
ATTENTION = {"qwen3": "q_proj", "qwen3_moe": "q_proj", "deepseek_v3": "q_a_proj"}
State = tuple[dict[str, int], list[tuple[int, float]]]


class Running(NamedTuple):
    """An engine that loaded A itself, and what engines that loaded A and B themselves hold and answer."""

    family: str
    engine: Engine
    version_a: str
    version_b: str
    a: State
    b: State


def state(engine: Engine) -> State:
    tensors = engine.one("resharder_fingerprint")["tensors"]
    return {path: value for path, value in tensors.items() if not path.endswith("handler_tensor")}, engine.logprobs(PROMPT)


@pytest.fixture(scope="module", params=FAMILIES)
def running(request: pytest.FixtureRequest, daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    family = request.param
    folder = tmp_path_factory.mktemp(family)
    if family == "qwen3_moe":
        (a, b), versions = from_ranks(daemon, family, folder)
    else:
        a, b = save_fp8(folder / "a", family, 1), save_fp8(folder / "b", family, 2)
        versions = publish(daemon, family, a, b)
    environment = {"RESHARDER_ENDPOINT": daemon.endpoint, "RESHARDER_MODEL": family, "VLLM_PLUGINS": PLUGINS}
    with Engine(b, environment=environment, dtype="bfloat16") as fresh:
        state_b = state(fresh)
    with Engine(a, environment=environment, dtype="bfloat16") as engine:
        yield Running(family, engine, *versions, state(engine), state_b)


def from_ranks(
    daemon: Daemon, family: str, folder: Path, model: str = "", quantization: dict[str, Any] | None = None
) -> tuple[list[Path], list[str]]:
    """Publish A and B from Megatron ranks with TP 2, and EP 2 if there are experts, which cast BF16 weights, and export them."""
    from tests.client.models import exported
    from tests.support.fp8_ranks import Ranks  # needs megatron-core

    config = fp8_config(family)
    layout = {"tp": 2, "ep": 2} if "num_experts_per_tok" in config else {"tp": 2}
    blocks, model, folders, versions = config.pop("quantization_config"), model or family, list[Path](), list[str]()
    with Ranks(daemon, model, config, 2, layout, quantization_config=quantization or blocks) as ranks:
        for step, name in enumerate("ab", 1):
            ranks.fill(random_weights(config, step, torch.bfloat16))
            versions.append(f"models/{model}/versions/{ranks.publish(step)}")
            folders.append(folder / name)
            exported(daemon.endpoint, versions[-1], folders[-1])
            save_tokenizer(folders[-1], config["vocab_size"])
    return folders, versions


def install(running: Running, version: str, install_id: str) -> None:
    answer = running.engine.install(version, install_id)
    assert answer["ok"], answer["error"]


def test_versions_over_one_another_leave_what_a_fresh_engine_has(running: Running) -> None:
    assert running.a[1] != running.b[1]
    turns = [(running.version_a, running.a), (running.version_b, running.b)] * 2
    for turn, (version, expected) in enumerate(turns):
        install(running, version, f"turn-{turn}")
        assert state(running.engine) == expected, turn
    about: dict[str, Any] = running.engine.one("resharder_describe")
    left = [name for name in about["loaded"] if "kv_b_proj" not in name]  # MLA derives tensors from it
    assert left == []
    assert about["boxed_bytes"] == about["needed_bytes"] or running.family == "deepseek_v3"


def test_after_a_sleep_at_level_2_an_install_brings_back_weights_scales_and_answers(running: Running) -> None:
    install(running, running.version_a, "before the sleep")
    running.engine.sleep(2)
    running.engine.wake(WEIGHTS)
    install(running, running.version_b, "awake")
    running.engine.wake(KV_CACHE)
    assert state(running.engine) == running.b


@pytest.mark.parametrize("fault", ["skip", "misplace"])
def test_a_scale_left_old_and_a_scale_of_the_wrong_block_fail_the_install(running: Running, fault: str) -> None:
    scale = f"model.layers.0.self_attn.{ATTENTION[running.family]}.weight_scale_inv"
    install(running, running.version_a, f"before {fault}")
    running.engine.environ(RESHARDER_FAULT=f"{fault}:{scale}")
    answer = running.engine.install(running.version_b, fault)
    running.engine.environ(RESHARDER_FAULT="")
    assert not answer["ok"]
    assert scale in answer["error"]
    assert running.engine.one("resharder_describe")["version"] == 0
    install(running, running.version_b, f"after {fault}")
    assert state(running.engine) == running.b


Workers = tuple[list[dict[str, int]], list[tuple[int, float]]]


def state_of_all(engine: Engine) -> Workers:
    """Fingerprints of every tensor of each worker, and an answer."""
    workers = [answer["tensors"] for answer in engine.rpc("resharder_fingerprint")]
    return [{path: value for path, value in w.items() if not path.endswith("handler_tensor")} for w in workers], engine.logprobs(
        PROMPT
    )


def test_weights_cast_by_channel_go_by_boxes_and_leave_what_a_fresh_engine_has(daemon: Daemon, tmp_path: Path) -> None:
    """Two ranks share the channels of projections that tensor parallelism cuts along their rows. vLLM transposes projections."""
    (a, b), versions = from_ranks(daemon, "qwen3_moe", tmp_path, "channels", CHANNELS)
    environment = {"RESHARDER_ENDPOINT": daemon.endpoint, "RESHARDER_MODEL": "channels", "VLLM_PLUGINS": PLUGINS}
    options: dict[str, Any] = {"environment": environment, "dtype": "bfloat16", "tensor_parallel_size": 2}
    with Engine(b, **options) as fresh:
        state_b = state_of_all(fresh)
    with Engine(a, **options) as engine:
        state_a = state_of_all(engine)
        assert any(path.endswith("weight_scale") for path in state_a[0][0])
        assert state_a[1] != state_b[1]
        for turn, (version, expected) in enumerate([(versions[0], state_a), (versions[1], state_b)] * 2):
            answer = engine.install(version, f"turn-{turn}")
            assert answer["ok"], answer["error"]
            assert state_of_all(engine) == expected, turn
        for about in engine.rpc("resharder_describe"):
            assert (about["loaded"], about["boxed_bytes"]) == ([], about["needed_bytes"])
