"""Versions of adapters in real vLLM workers, held against engines that loaded the same adapter from its folder."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from resharder.client.inference.vllm.engine_core import ADAPTER
from resharder.client.inference.vllm.worker_rpc import adapter_agents
from resharder.client.inference.worker.adapter_agent import GRACE_SECONDS, adapter_id
from resharder.client.inference.worker.slot_copy import SlotCopy

from tests.support.adapters import RANK, publish_adapter, save_adapter
from tests.support.daemon import Daemon
from tests.support.tiny_hf import load_checkpoint
from tests.support.vllm_engine import PROMPT, Engine, weights
from tests.support.vllm_models import make_pair, publish, without_weights

LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 3, "max_lora_rank": RANK, "dtype": "float32"}


class Adapters:
    """An engine with a base from the daemon, and one adapter."""

    def __init__(self, engine: Engine, model: str, index: int = 0) -> None:
        self.engine, self.model, self.index = engine, model, index

    def call(self, method: str, *args: Any) -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = self.engine.core(ADAPTER, self.model, method, list(args))
        return answers

    def stage(self, install: str, version: str) -> None:
        for answer in self.call("stage", install, version):
            assert answer["ok"], answer["error"]

    def install(self, install: str, version: str) -> None:
        self.stage(install, version)
        self.wait_staged(install)
        for answer in self.call("apply", install):
            assert answer["ok"], answer["error"]

    def wait_staged(self, install: str) -> None:
        deadline = time.monotonic() + 20
        while not all(answer["staged"] == install for answer in self.call("describe")):
            assert time.monotonic() < deadline, [answer["problem"] for answer in self.call("describe")]
            time.sleep(0.02)

    def problem(self) -> str:
        """Why the version that is being staged cannot be."""
        deadline = time.monotonic() + 20
        while not (problem := self.call("describe")[0]["problem"]):
            assert time.monotonic() < deadline, [answer["problem"] for answer in self.call("describe")]
            time.sleep(0.02)
        return str(problem)

    def logprobs(self, version: int) -> list[tuple[int, float]]:
        return self.engine.logprobs(PROMPT, 8, (self.model, adapter_id(self.index, version), version))


FAMILIES = ("qwen3", "qwen3_moe")


@pytest.fixture(scope="module", params=FAMILIES)
def case(
    request: pytest.FixtureRequest, daemon: Daemon, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Adapters, Any]]:
    family, folder = request.param, tmp_path_factory.mktemp("adapters")
    base, _ = make_pair(folder, family, torch.float32)
    name = folder.name
    publish(daemon, name, base)
    folders = [save_adapter(folder / f"adapter{seed}", load_checkpoint(base), seed) for seed in (1, 2)]
    with Engine(base, environment={"VLLM_PLUGINS": "lora_experts"}, **LORA) as fresh:
        expected = [fresh.logprobs(PROMPT), *(fresh.logprobs(PROMPT, 8, each) for each in folders)]
    assert expected[0] != expected[1] != expected[2]
    lora = f"{name}-lora"
    environment = {"RESHARDER_ENDPOINT": daemon.endpoint, "RESHARDER_MODEL": name, "RESHARDER_ADAPTERS": lora}
    environment["VLLM_PLUGINS"] = "resharder,dropping_sleep,lora_experts"
    versions = publish_adapter(daemon, lora, name, *folders)
    bare = without_weights(base, folder / "bare")
    with Engine(bare, load_format="resharder", environment=environment, **LORA) as engine:
        yield Adapters(engine, lora), (expected, versions)


def test_versions_answer_as_an_engine_that_loaded_their_folder(case: tuple[Adapters, Any]) -> None:
    adapters, (expected, versions) = case
    base = weights(adapters.engine)
    adapters.install("first", versions[0])
    assert adapters.logprobs(1) == expected[1]
    adapters.stage("second", versions[1])
    assert adapters.logprobs(1) == expected[1], "while the next version is being staged"
    adapters.wait_staged("second")
    adapters.call("apply", "second")
    assert adapters.logprobs(2) == expected[2]
    assert adapters.logprobs(1) == expected[1], "requests in progress end on it"
    assert adapters.engine.logprobs(PROMPT) == expected[0]
    assert weights(adapters.engine) == base


def packed(worker: Any) -> Any:
    modules = worker.model_runner.lora_manager._adapter_manager.modules
    return next(module for name, module in modules.items() if name.endswith("qkv_proj"))


def tamper(worker: Any) -> None:
    """From now on one module of the model keeps another value than it is given. Runs in the worker."""
    module = packed(worker)
    plain, worker.plain = module.set_lora, SlotCopy.write

    def changed(slot: int, *args: Any) -> None:
        plain(slot, *args)
        if (module.lora_b_stacked[0][slot] % 1).any():  # no numbered tensors, by which places are learnt
            module.lora_b_stacked[0][slot].view(-1)[0] += 1

    def written(self: SlotCopy, slot: int, *args: Any) -> None:
        worker.plain(self, slot, *args)
        module.lora_b_stacked[0][slot].view(-1)[0] += 1

    module.set_lora, SlotCopy.write = changed, written  # type: ignore[method-assign]


def restore(worker: Any) -> None:
    del packed(worker).set_lora
    SlotCopy.write = worker.plain  # type: ignore[method-assign]


def forget(worker: Any) -> None:
    """Forget all kinds of adapters, so that vLLM's own code writes the next version. Runs in the worker."""
    for agent in adapter_agents(worker).values():
        agent._writer._kinds.clear()


def slots(worker: Any) -> tuple[int, int]:
    """How many slots, and adapters on the host, vLLM holds. Runs in the worker."""
    manager = worker.model_runner.lora_manager._adapter_manager
    return sum(id is not None for id in manager.lora_index_to_id), len(manager._registered_adapters)


@pytest.mark.parametrize("first", [True, False], ids=["written by vLLM", "copied"])
def test_a_slot_that_does_not_contain_the_version_takes_no_request(case: tuple[Adapters, Any], first: bool) -> None:
    adapters, (expected, versions) = case
    adapters.install("good", versions[0])
    time.sleep(GRACE_SECONDS)
    adapters.call("release")
    if first:
        adapters.engine.rpc(forget)
    adapters.engine.rpc(tamper)
    try:
        adapters.stage("altered", versions[1])
        problem = adapters.problem()
    finally:
        adapters.engine.rpc(restore)
    assert "tensors of the slot differ from the version" in problem
    (answer,) = adapters.call("apply", "altered")
    assert not answer["ok"]
    assert adapters.logprobs(1) == expected[1]
    adapters.install("again", versions[1])
    assert adapters.logprobs(2) == expected[2]


def test_superseded_versions_leave_slots_and_host(case: tuple[Adapters, Any]) -> None:
    adapters, (_, versions) = case
    for round in range(3):
        for version in versions:
            adapters.install(f"{round} {version}", version)
    time.sleep(GRACE_SECONDS)
    (answer,) = adapters.call("release")
    assert (answer["left"], adapters.engine.rpc(slots)) == ([], [(1, 1)])
    assert adapters.logprobs(2)
