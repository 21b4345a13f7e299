"""Installs into real vLLM workers, proven tensor by tensor against servers that loaded the same checkpoint themselves."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm
from packaging.version import Version
from resharder.client.inference.engine import KV_CACHE, STAY_PAUSED, WEIGHTS
from resharder.client.inference.recording.recorder import Recording
from resharder.client.inference.vllm.blueprint import ServerSizes, worker_recording
from resharder.client.inference.vllm.worker_rpc import agent_of
from resharder.client.inference.worker.model_part import MODEL
from resharder.converters.geometry.layout import TensorSpec
from resharder.v1.resources_pb2 import Power

from tests.support.daemon import Daemon
from tests.support.tiny_hf import load_checkpoint
from tests.support.variants import sampled
from tests.support.vllm_engine import PROMPT, Engine, weights
from tests.support.vllm_models import DELTA, DRAFTS, MLA, MTP, make_pair, publish, without_weights

pytestmark = pytest.mark.compat("boxes")
APPLIED_B = {"ok": True, "rank": 0, "nonce": "", "error": "", "version": 2}
GATE, UP = (f"model.layers.0.mlp.{which}_proj.weight" for which in ("gate", "up"))


class Case:
    """A model published as versions A and B, and what a server that loaded B itself holds and says. `changes` are those of its
    config, `options` the engine's."""

    def __init__(
        self,
        daemon: Daemon,
        folder: Path,
        family: str,
        dtype: torch.dtype,
        changes: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.daemon, self.folder, self.name = daemon, folder, folder.name
        self.options = {"dtype": str(dtype).removeprefix("torch."), **options}
        self.a, self.b = make_pair(folder, family, dtype, **changes or {})
        self.bytes = sum(tensor.nbytes for tensor in load_checkpoint(self.b).values())
        (self.version_a,) = publish(daemon, self.name, self.a)
        with self.engine(self.b) as fresh:
            self.tensors = weights(fresh)
            self.logprobs = fresh.logprobs(PROMPT)

    def engine(self, model: Path, **changes: Any) -> Engine:
        environment = {"RESHARDER_ENDPOINT": self.daemon.endpoint, "RESHARDER_MODEL": self.name}
        environment |= changes.pop("environment", {})
        return Engine(model, environment=environment, **self.options | changes)

    def publish_b(self) -> str:
        (version,) = publish(self.daemon, self.name, self.b)
        return version


@pytest.fixture(scope="module")
def raw(daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(daemon, tmp_path_factory.mktemp("raw"), "qwen3", torch.float32, raw=True)


@pytest.fixture(scope="module")
def running(raw: Case) -> Iterator[tuple[Engine, str]]:
    """A server that vLLM loaded with A from disk, and version B."""
    with raw.engine(raw.a) as engine:
        assert engine.install(raw.version_a, "first")["ok"]
        yield engine, raw.publish_b()


def test_boxes_over_old_weights_leave_every_reachable_tensor_as_a_fresh_server_has_it(raw: Case, running: Any) -> None:
    engine, version_b = running
    before = weights(engine)
    assert before != raw.tensors
    assert engine.install(version_b, "b") | {"nonce": ""} == APPLIED_B
    about = engine.one("resharder_describe")
    assert about["boxed_bytes"] >= 0.99 * raw.bytes
    assert about["loaded"] == []
    assert about["proven"] == len(load_checkpoint(raw.b))
    assert weights(engine) == raw.tensors
    assert engine.logprobs(PROMPT) == raw.logprobs


@pytest.mark.parametrize("fault", [f"misplace:{GATE}", f"skip:{UP}", f"swap:{GATE},{UP}", "half-way"])
def test_a_wrong_copy_is_noticed_and_the_previous_version_mends_it(raw: Case, running: Any, fault: str) -> None:
    engine, version_b = running
    assert engine.install(raw.version_a, f"before {fault}")["ok"]
    engine.environ(RESHARDER_FAULT=fault)
    answer = engine.install(version_b, fault)
    engine.environ(RESHARDER_FAULT="")
    assert not answer["ok"]
    assert GATE in answer["error"] or UP in answer["error"] or "half-way" in answer["error"]
    assert engine.one("resharder_describe")["version"] == 0
    assert engine.install(version_b, f"after {fault}")["ok"]
    assert weights(engine) == raw.tensors


def altered(worker: Any) -> None:
    """Change a weight behind the plugin's back."""
    with torch.no_grad():
        next(iter(worker.model_runner.model.parameters())).view(-1)[0] += 1


def test_what_the_version_before_has_too_is_not_copied_unless_memory_has_changed(raw: Case, running: Any) -> None:
    engine, version_b = running
    assert engine.install(version_b, "kept: first")["ok"]
    for install, is_altered in (("kept: again", False), ("kept: altered", True)):
        if is_altered:
            engine.rpc(altered)
            assert weights(engine) != raw.tensors
        assert engine.install(version_b, install)["ok"]
        about = engine.one("resharder_describe")
        assert about["proven"] == len(load_checkpoint(raw.b))
        assert 0 < about["kept_bytes"] <= about["boxed_bytes"]
        assert (about["kept_bytes"] < about["boxed_bytes"]) == is_altered
        assert weights(engine) == raw.tensors


def test_an_install_that_is_not_staged_is_refused_and_nothing_is_written(raw: Case, running: Any) -> None:
    engine, version_b = running
    assert engine.install(version_b, "held")["ok"]
    answer = engine.one("resharder_apply", "never staged")
    assert (answer["ok"], answer["rank"]) == (False, 0)
    assert "never staged" in answer["error"]
    assert weights(engine) == raw.tensors
    assert engine.one("resharder_describe")["version"] == 2


@pytest.mark.compat("sleep")
def test_after_a_sleep_at_level_2_an_install_brings_back_every_tensor_and_only_then_may_the_engine_go_on(
    raw: Case, running: Any
) -> None:
    engine, version_b = running
    assert engine.install(version_b, "before the sleep")["ok"]
    engine.sleep(2)
    about = engine.one("resharder_describe")
    assert (about["version"], about["power"], about["dropped"]) == (0, Power.ASLEEP_2, True)
    asleep = engine.install(version_b, "asleep")
    assert "cannot apply install asleep: the weights sleep" in asleep["error"]
    assert not engine.one("resharder_fingerprint")["ok"]

    engine.wake(WEIGHTS)
    lost = {path for path, value in weights(engine)[0].items() if value != raw.tensors[0][path]}
    assert lost == {path for path in raw.tensors[0] if path.endswith("weight")}
    assert engine.one("resharder_apply", "asleep") | {"nonce": ""} == APPLIED_B
    engine.wake(KV_CACHE, STAY_PAUSED)
    assert (engine.one("resharder_describe")["power"], engine.paused) == (Power.AWAKE, True)
    engine.wake("scheduling")
    assert not engine.paused
    assert weights(engine) == raw.tensors
    assert engine.logprobs(PROMPT) == raw.logprobs


@pytest.mark.compat("sleep")
def test_a_sleep_at_level_1_costs_no_version_and_no_install(raw: Case, running: Any) -> None:
    engine, version_b = running
    assert engine.install(version_b, "before level 1")["ok"]
    engine.sleep(1)
    assert engine.one("resharder_describe")["power"] == Power.ASLEEP_1
    engine.wake(WEIGHTS, KV_CACHE)
    about = engine.one("resharder_describe")
    assert (about["version"], about["power"], about["dropped"]) == (2, Power.AWAKE, False)
    assert weights(engine) == raw.tensors
    assert engine.logprobs(PROMPT) == raw.logprobs


def test_what_was_staged_is_let_go_of_on_order_alone(raw: Case, running: Any) -> None:
    engine, version_b = running
    assert engine.one("resharder_stage", "kept", version_b)["ok"]
    engine.wait_staged("kept", 60)
    assert engine.one("resharder_unstage", "another")["ok"]
    assert engine.one("resharder_describe")["staged"] == "kept"
    assert engine.one("resharder_unstage", "kept")["ok"]
    assert engine.one("resharder_describe")["staged"] == ""
    assert "install kept is not staged" in engine.one("resharder_apply", "kept")["error"]


NGRAM = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}}
OLDER = Version(vllm.__version__) < Version("0.32")
# The CPU build of 0.28 does not run them: its MLA imports a name that its own fa_utils has not, and its
# chunk_gated_delta_rule_cpu refuses its own state's dtype.
NOT_IN_OLDER = ("latent attention", "gated delta net")
PACKED: dict[str, tuple[str, torch.dtype, dict[str, Any]]] = {
    "dense, drafts by n-grams": ("llama", torch.float32, NGRAM),
    "tied": ("qwen3_tied", torch.bfloat16, {}),
    "moe": ("qwen3_moe", torch.bfloat16, {}),
    "moe with an MTP drafter": ("glm4_moe", torch.bfloat16, MTP),
    "latent attention": ("deepseek_v2_lite", torch.bfloat16, {"changes": MLA, "raw": True}),
    "experts written without a loader": ("gpt_oss", torch.bfloat16, {}),
    "norms around zero": ("gemma3", torch.bfloat16, {"changes": {"layer_types": ["sliding_attention", "full_attention"]}}),
    "gated delta net": ("qwen3_next", torch.bfloat16, {"changes": DELTA}),
    "gate and up as one": ("glm4", torch.float32, {}),
    "fp8": ("qwen3", torch.bfloat16, {"quantization": "fp8_per_channel"}),
    "compiled": ("qwen3", torch.bfloat16, {"enforce_eager": False}),
    "tied raw": ("qwen3_tied", torch.bfloat16, {"raw": True}),
    "moe raw": ("qwen3_moe", torch.float32, {"raw": True}),
}
DENSE_BF16 = ("tied", "norms around zero", "compiled")
PACKS_BF16 = torch.cpu._is_avx512_supported()
"""oneDNN multiplies no bfloat16 on AVX2: vLLM keeps dense weights as they are there (`dispatch_cpu_unquantized_gemm`)."""


@pytest.mark.compat("load_weights")
@pytest.mark.parametrize("kind", sampled(PACKED, ["moe", "latent attention", "fp8"]))
def test_a_server_booted_from_the_daemon_takes_the_next_version_as_a_fresh_one_loads_it(
    daemon: Daemon, tmp_path_factory: pytest.TempPathFactory, kind: str
) -> None:
    if OLDER and kind in NOT_IN_OLDER:
        pytest.skip("run with vLLM 0.32 and later alone")
    if not DRAFTS and kind == "moe with an MTP drafter":
        pytest.skip("this CPU build does not run drafters")
    family, dtype, options = PACKED[kind]
    case = Case(daemon, tmp_path_factory.mktemp(kind.replace(" ", "-").replace(",", "")), family, dtype, **options)
    bare = without_weights(case.a, case.folder / "bare")
    with case.engine(bare, load_format="resharder") as engine:
        assert engine.one("resharder_describe")["version"] == 1
        assert weights(engine) != case.tensors
        answer = engine.install(case.publish_b(), "b")
        assert answer["ok"], answer["error"]
        assert weights(engine) == case.tensors
        assert engine.logprobs(PROMPT) == case.logprobs
        assert any(path.endswith("W_UV") for path in case.tensors[0]) == (kind == "latent attention")
        loaded = bool(engine.one("resharder_describe")["loaded"])
        assert loaded == (kind != "tied raw" and (PACKS_BF16 or kind not in DENSE_BF16))


def recorded(worker: Any) -> Recording:
    """Runs in the worker."""
    agent, _ = agent_of(worker)
    return agent.parts.by_name[MODEL].known


def recorded_without_a_server(folder: Path, server: ServerSizes, dtype: str) -> list[Recording]:
    config = json.loads((folder / "config.json").read_text())
    kind = {"float32": "F32", "bfloat16": "BF16"}[dtype]
    specs = {name: TensorSpec(name, kind, tuple(tensor.shape)) for name, tensor in load_checkpoint(folder).items()}
    return [worker_recording(config, specs, server, worker, dtype=dtype) for worker in range(server.workers)]


@pytest.mark.full
@pytest.mark.skipif(OLDER, reason="compared with the newest vLLM alone")
def test_workers_with_half_of_the_experts_each_record_what_is_recorded_without_a_server(daemon: Daemon, tmp_path: Path) -> None:
    a, _ = make_pair(tmp_path, "qwen3_moe", torch.bfloat16)
    publish(daemon, "experts", a)
    bare = without_weights(a, tmp_path / "bare")
    environment = {"RESHARDER_ENDPOINT": daemon.endpoint, "RESHARDER_MODEL": "experts"}
    options = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    with Engine(bare, load_format="resharder", environment=environment, **options) as engine:
        assert engine.rpc(recorded) == recorded_without_a_server(a, ServerSizes(tp=2, ep=True), "bfloat16")


@pytest.mark.full
def test_two_workers_fetch_only_their_boxes_over_http(daemon: Daemon, tmp_path: Path) -> None:
    case = Case(daemon, tmp_path / "tp2", "qwen3", torch.float32, raw=True, tensor_parallel_size=2)
    bare = without_weights(case.a, case.folder / "bare")
    with case.engine(bare, load_format="resharder", environment={"RESHARDER_TRANSPORT": "http"}) as engine:
        assert all(answer["ok"] for answer in engine.rpc("resharder_describe"))
        assert engine.install(case.publish_b(), "b")["ok"]
        abouts = engine.rpc("resharder_describe")
        assert [about["rank"] for about in abouts] == [0, 1]
        assert OLDER or engine.rpc(recorded) == recorded_without_a_server(case.a, ServerSizes(tp=2), "float32")
        for about in abouts:
            assert about["transport"] == "http"
            assert about["needed_bytes"] < 0.55 * case.bytes
            assert about["boxed_bytes"] == about["needed_bytes"]
        assert weights(engine) == case.tensors
        assert engine.logprobs(PROMPT) == case.logprobs
