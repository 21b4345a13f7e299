"""Installs of FP8 blocks into real vLLM engines: every reachable tensor and every answer is that of a fresh engine.

Kernels are those of `raw_mode/resharder_reference_fp8.py`, so that the engines run on any CPU.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import vllm
from packaging.version import Version
from resharder.client.inference.power import KV_CACHE, WEIGHTS
from resharder.client.inference.vllm.worker_rpc import agent_of
from resharder.client.tools.import_checkpoint import import_checkpoint

from tests.support.daemon import Daemon
from tests.support.fp8_checkpoint import save_fp8
from tests.support.vllm_engine import Engine
from tests.support.vllm_models import without_weights

pytestmark = [
    pytest.mark.compat,  # run against the oldest vLLM as well
    pytest.mark.skipif(Version(vllm.__version__) < Version("0.32"), reason="older CPU builds have no FP8 blocks"),
]

PROMPT = [5, 6, 7, 8, 9, 10]
PLUGINS = "resharder,dropping_sleep,raw_mode,reference_fp8"
FAMILIES = ("qwen3", "qwen3_moe", "deepseek_v3")
ATTENTION = {"qwen3": "q_proj", "qwen3_moe": "q_proj", "deepseek_v3": "q_a_proj"}
State = tuple[dict[str, int], list[tuple[int, float]]]


class Running(NamedTuple):
    """An engine that loaded A, what it held and answered then, and what an engine that loaded B itself holds and answers."""

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
    a, b = save_fp8(folder / "a", family, 1), save_fp8(folder / "b", family, 2)
    versions = [import_checkpoint(daemon.endpoint, path, family, step=step).name for step, path in enumerate((a, b), 1)]
    environment = {"RESHARDER_ENDPOINT": daemon.endpoint, "RESHARDER_MODEL": family, "VLLM_PLUGINS": PLUGINS}
    with Engine(b, environment=environment, dtype="bfloat16") as fresh:
        state_b = state(fresh)
    booted = family == "qwen3"  # from the daemon; the others load A from the folder
    model, load_format = (without_weights(a, folder / "bare"), "resharder") if booted else (a, "auto")
    with Engine(model, environment=environment, dtype="bfloat16", load_format=load_format) as engine:
        yield Running(family, engine, *versions, state(engine), state_b)


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


def verified_after_a_change_of_a_scale(worker: Any) -> list[str]:
    """Runs in the worker. Return the tensors that a verification finds to differ."""
    agent, models = agent_of(worker)
    name, scale = next((n, p) for n, p in models["model"].named_parameters() if n.endswith("weight_scale_inv"))
    scale.data[-1, -1] += 1
    found = agent.verifier.verify(models)
    assert list(found.different) == [name], (found, name)
    return list(found.different)


def test_a_verification_finds_a_changed_scale_and_the_next_install_mends_it(running: Running) -> None:
    install(running, running.version_b, "before the change")
    (found,) = running.engine.rpc(verified_after_a_change_of_a_scale)
    assert found[0].endswith("weight_scale_inv")
    assert running.engine.one("resharder_describe")["version"] == 0
    install(running, running.version_b, "after the change")
    assert state(running.engine) == running.b
