"""Versions of the base model under `--enable-lora`, held against fresh engines that serve adapters too."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
import vllm
from packaging.version import Version
from resharder.client.inference.engine import KV_CACHE, WEIGHTS
from resharder.client.inference.recording import inventory
from resharder.client.inference.recording.places import adapter_tensors
from resharder.client.inference.recording.recorder import Recording
from resharder.client.inference.recording.wrappers import wrappers
from resharder.client.inference.vllm.worker_rpc import agent_of
from resharder.client.inference.worker.memory import live_tensors
from resharder.client.inference.worker.model_part import MODEL

from tests.support.adapters import RANK, save_adapter
from tests.support.daemon import Daemon
from tests.support.fp8_checkpoint import fp8_config, save_fp8
from tests.support.tiny_hf import load_checkpoint
from tests.support.variants import sampled
from tests.support.vllm_engine import PROMPT, Engine, weights
from tests.support.vllm_models import DELTA, DRAFTS, MLA, MTP, make_pair, publish, save_random, without_weights

pytestmark = pytest.mark.compat("other")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
OLDER = Version(vllm.__version__) < Version("0.32")


class Kind(NamedTuple):
    """A model, and the options of its engines."""

    family: str
    dtype: torch.dtype = torch.bfloat16
    options: Mapping[str, Any] = MappingProxyType({})
    changes: Mapping[str, Any] = MappingProxyType({})
    targets: tuple[str, ...] = ()
    """What vLLM wraps and adapters have; empty for all that it can."""
    fp8: str = ""
    """Whether the `checkpoint` is in FP8 blocks, or a BF16 checkpoint is quantised when it is `loaded`."""
    oldest: bool = True
    """Whether the CPU build of 0.28 runs it."""


TP2 = {"tensor_parallel_size": 2}
ONLINE = {"raw": True, "quantization": "fp8_per_block"}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"]}
KINDS = {
    "dense": Kind("qwen3", torch.float32, {"raw": True}),
    "dense, packed": Kind("qwen3"),
    "dense, packed, tp 2, fully sharded": Kind("qwen3", options={"fully_sharded_loras": True, **TP2}),
    "dense, online fp8": Kind("qwen3", options={"quantization": "fp8_per_channel"}),
    "compiled": Kind("qwen3", options={"enforce_eager": False}),
    "tied": Kind("qwen3_tied"),
    "tied, raw": Kind("qwen3_tied", options={"raw": True}),
    "gate and up as one": Kind("glm4", torch.float32, targets=(*ATTENTION, "down_proj")),
    "norms around zero": Kind("gemma3", changes=SLIDING),
    "experts": Kind("qwen3_moe", oldest=False),
    "experts, tp 2": Kind("qwen3_moe", options={"raw": True, **TP2}, oldest=False),
    "experts without adapters": Kind("qwen3_moe", targets=ATTENTION, oldest=False),
    "experts written without a loader": Kind("gpt_oss", targets=ATTENTION, oldest=False),
    "experts in fp8 blocks": Kind("qwen3_moe", options={"raw": True}, fp8="checkpoint", oldest=False),
    "experts in online fp8": Kind("qwen3_moe", options=ONLINE, fp8="loaded", oldest=False),
    "latent attention": Kind("deepseek_v2_lite", options={"raw": True}, changes=MLA, oldest=False),
    "gated delta net": Kind("qwen3_next", changes=DELTA, oldest=False),
    "an MTP drafter": Kind("glm4_moe", options=MTP, targets=ATTENTION, oldest=False),
}


class State(NamedTuple):
    """What an engine holds and answers, by the base and by the adapter."""

    tensors: list[dict[str, int]]
    base: list[tuple[int, float]]
    adapted: list[tuple[int, float]]


class Running(NamedTuple):
    """An engine that booted A from the daemon and serves an adapter, and what engines that loaded A and B themselves hold."""

    kind: Kind
    engine: Engine
    adapter: Path
    other: Path
    versions: tuple[str, str]
    states: tuple[State, State]
    over: State
    """What the engine that loaded A holds after an install of B over it."""
    recorded: list[Recording]
    """What that engine's workers recorded under the wrappers."""

    @property
    def state(self) -> State:
        return state(self.engine, self.adapter)

    def install(self, which: int, install: str) -> None:
        answer = self.engine.install(self.versions[which], install)
        assert answer["ok"], answer["error"]


def state(engine: Engine, adapter: Path) -> State:
    """The answers first: the first of all may cast a constant (the cache of YaRN's embedding of positions)."""
    base, adapted = engine.logprobs(PROMPT), engine.logprobs(PROMPT, adapter=adapter)
    return State(weights(engine), base, adapted)


def checkpoints(kind: Kind, folder: Path) -> tuple[Path, Path]:
    if not kind.fp8:
        return make_pair(folder, kind.family, kind.dtype, **kind.changes)
    if kind.fp8 == "checkpoint":
        return save_fp8(folder / "a", kind.family, 1), save_fp8(folder / "b", kind.family, 2)
    config = fp8_config(kind.family)
    del config["quantization_config"]
    return save_random(folder / "a", config, 1, kind.dtype), save_random(folder / "b", config, 2, kind.dtype)


@pytest.fixture(scope="module", params=sampled(KINDS, ["dense", "dense, packed", "experts", "experts in online fp8"]))
def running(request: pytest.FixtureRequest, daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    kind: Kind = KINDS[request.param]
    if OLDER and not kind.oldest:
        pytest.skip("run with vLLM 0.32 and later alone")
    if not DRAFTS and kind.options is MTP:
        pytest.skip("this CPU build does not run drafters")
    name = request.param.replace(" ", "-").replace(",", "")
    folder = tmp_path_factory.mktemp(name)
    a, b = checkpoints(kind, folder)
    base = {tensor: weight for tensor, weight in load_checkpoint(a).items() if weight.is_floating_point()}
    if kind.fp8 == "checkpoint":
        base = {tensor: weight.bfloat16() for tensor, weight in base.items() if not tensor.endswith("scale_inv")}
    adapter, other = (save_adapter(folder / f"adapter-{seed}", base, seed, *kind.targets) for seed in (1, 2))
    options = {"dtype": str(kind.dtype).removeprefix("torch."), "enable_lora": True, "max_loras": 2, "max_lora_rank": RANK}
    options |= dict(kind.options) | ({"lora_target_modules": list(kind.targets)} if kind.targets else {})
    plugins = ["resharder", "dropping_sleep", *(["raw_mode"] if kind.options.get("raw") else [])]
    plugins += [*(["reference_fp8"] if kind.fp8 else []), "lora_experts"]
    environment = {
        "RESHARDER_ENDPOINT": daemon.endpoint,
        "RESHARDER_MODEL": name,
        "VLLM_PLUGINS": ",".join(plugins),
    }
    with Engine(b, environment=environment, **options) as fresh:
        state_b = state(fresh, adapter)
    (version_a,) = publish(daemon, name, a)
    with Engine(without_weights(a, folder / "bare"), load_format="resharder", environment=environment, **options) as engine:
        (version_b,) = publish(daemon, name, b)
        with Engine(a, environment=environment, **options) as loaded:
            state_a = state(loaded, adapter)
            answer = loaded.install(version_b, "over the engine's own")
            assert answer["ok"], answer["error"]
            over = state(loaded, adapter), loaded.rpc(recorded)
        yield Running(kind, engine, adapter, other, (version_a, version_b), (state_a, state_b), *over)


def recorded(worker: Any) -> Recording:
    """Runs in the worker."""
    agent, _ = agent_of(worker)
    return agent.parts.by_name[MODEL].known


def of_adapters(worker: Any) -> list[int]:
    """The fingerprints of what the wrappers hold. Runs in the worker."""
    return [inventory.fingerprint(tensor) for tensor in adapter_tensors(worker.get_model())]


def lora_tensors_of_the_base(worker: Any) -> list[str]:
    """The paths of an adapter's tensors among those of the base. Runs in the worker."""
    model = worker.get_model()
    theirs = {tensor.untyped_storage()._cdata for tensor in adapter_tensors(model)}
    return [f.path for f in inventory.reachable(model) if f.tensor.untyped_storage()._cdata in theirs or "lora" in f.path]


def wrapped(worker: Any) -> list[str]:
    """The names of the classes of wrappers. Runs in the worker."""
    return sorted({type(wrapper).__name__ for wrapper in wrappers(worker.get_model())})


def test_versions_over_one_another_leave_what_a_fresh_engine_with_the_adapter_has(running: Running) -> None:
    a, b = running.states
    assert len({str(answers) for state in (a, b) for answers in (state.base, state.adapted)}) == 4
    assert running.state == a
    for turn, which in enumerate((1, 0, 1)):
        running.install(which, f"turn-{turn}")
        assert running.state == running.states[which], turn


def test_an_engine_that_loaded_a_checkpoint_itself_records_under_the_wrappers_what_a_boot_does(running: Running) -> None:
    assert running.over == running.states[1]
    assert running.recorded == running.engine.rpc(recorded)


def test_the_names_of_the_base_are_those_of_a_server_without_adapters(running: Running) -> None:
    assert len(running.engine.rpc(wrapped)[0]) > 1
    experts = running.kind.family in ("qwen3_moe", "qwen3_next", "deepseek_v2_lite") and not running.kind.targets
    assert ("FusedMoEWithLoRA" in running.engine.rpc(wrapped)[0]) == experts
    for tensors in running.states[0].tensors:
        assert not [path for path in tensors if "base_layer" in path or "lora" in path or "old_quant" in path]


def test_installs_leave_the_adapters_memory_alone_and_adapters_that_of_the_base(running: Running) -> None:
    engine = running.engine
    running.install(0, "before")
    assert not any(engine.rpc(lora_tensors_of_the_base))
    held = engine.rpc(of_adapters)
    assert all(held)
    running.install(1, "after")
    assert engine.rpc(of_adapters) == held
    assert engine.add_adapter(running.other)
    assert engine.rpc(of_adapters) != held
    assert weights(engine) == running.states[1].tensors


def test_after_a_sleep_at_level_2_an_install_brings_back_the_base_and_the_adapter_is_still_there(running: Running) -> None:
    running.install(0, "before the sleep")
    running.engine.sleep(2)
    running.engine.wake(WEIGHTS)
    running.install(1, "awake")
    running.engine.wake(KV_CACHE)
    assert running.state == running.states[1]


def altered(worker: Any, path: str) -> list[str]:
    """What verification finds after one element of a tensor was changed. Runs in the worker."""
    agent, models = agent_of(worker)
    tensor = live_tensors(models[MODEL])[path] if path else adapter_tensors(models[MODEL])[0]
    tensor.detach().view(-1)[3] += 1
    return list(agent.verifier.verify(models).different)


@pytest.mark.parametrize("running", ["dense"], indirect=True)
def test_verification_finds_an_altered_weight_under_a_wrapper_and_no_adapter(running: Running) -> None:
    running.install(1, "before")
    (found,) = running.engine.rpc(altered, "")
    assert found == []
    path = "model.layers.0.self_attn.qkv_proj.weight"
    (found,) = running.engine.rpc(altered, path)
    assert found == [path]
    assert running.engine.one("resharder_describe")["version"] == 0
    running.install(1, "after")
    assert running.engine.one("resharder_describe")["version"] == 2
