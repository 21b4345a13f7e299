"""Versions of adapters in real vLLM workers, held against engines that loaded the same adapter from its folder."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import vllm
from packaging.version import Version
from resharder.client.inference.engine import KV_CACHE, WEIGHTS
from resharder.client.inference.vllm.worker_rpc import adapter_agents
from resharder.client.inference.worker.adapter_agent import GRACE_SECONDS, adapter_id
from resharder.client.inference.worker.slot_copy import SlotCopy

from tests.support.adapter_engine import LORA, Adapters
from tests.support.adapters import publish_adapter, save_adapter
from tests.support.daemon import Daemon
from tests.support.tiny_hf import load_checkpoint, load_model
from tests.support.variants import sampled
from tests.support.vllm_engine import PROMPT, Engine, weights
from tests.support.vllm_models import make_pair, publish, without_weights

pytestmark = pytest.mark.compat("other")
OLDER = Version(vllm.__version__) < Version("0.32")


class Case(NamedTuple):
    """An engine with a base and one adapter from the daemon, and what an engine that loaded their folders answers."""

    adapters: Adapters
    expected: list[list[tuple[int, float]]]
    """The tokens of the base, and of each version of the adapter."""
    versions: list[str]
    base_version: str
    base: Path
    folders: list[Path]


def tokens(answer: list[tuple[int, float]]) -> list[int]:
    """Without logprobs, whose last bits depend on the other requests of a batch."""
    return [token for token, _ in answer]


TP2 = {"tensor_parallel_size": 2}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("qwen3", {}),
    "experts": ("qwen3_moe", {}),
    "dense, tp 2": ("qwen3", TP2),
    "dense, tp 2, fully sharded": ("qwen3", {"fully_sharded_loras": True, **TP2}),
    "experts, tp 2": ("qwen3_moe", TP2),
}


@pytest.fixture(scope="module", params=sampled(KINDS, ["dense", "experts", "dense, tp 2"]))
def case(request: pytest.FixtureRequest, daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    if OLDER and "experts" in request.param:
        pytest.skip("run with vLLM 0.32 and later alone")
    (family, more), folder = KINDS[request.param], tmp_path_factory.mktemp("adapters")
    options = LORA | more
    base, _ = make_pair(folder, family, torch.float32)
    name = folder.name
    (base_version,) = publish(daemon, name, base)
    folders = [save_adapter(folder / f"adapter{seed}", load_checkpoint(base), seed) for seed in (1, 2)]
    with Engine(base, environment={"VLLM_PLUGINS": "lora_experts"}, **options) as fresh:
        expected = [fresh.logprobs(PROMPT), *(fresh.logprobs(PROMPT, 8, each) for each in folders)]
    assert expected[0] != expected[1] != expected[2]
    lora = f"{name}-lora"
    environment = {"RESHARDER_ENDPOINT": daemon.endpoint, "RESHARDER_MODEL": name, "RESHARDER_ADAPTERS": lora}
    environment["VLLM_PLUGINS"] = "resharder,dropping_sleep,lora_experts"
    versions = publish_adapter(daemon, lora, name, *folders)
    bare = without_weights(base, folder / "bare")
    with Engine(bare, load_format="resharder", environment=environment, **options) as engine:
        yield Case(Adapters(engine, lora), expected, versions, base_version, base, folders)


def test_versions_answer_as_an_engine_that_loaded_their_folder(case: Case) -> None:
    adapters, expected, versions = case.adapters, case.expected, case.versions
    base = weights(adapters.engine)
    adapters.install("first", versions[0])
    assert adapters.logprobs(1) == expected[1]
    adapters.stage("second", versions[1])
    assert adapters.logprobs(1) == expected[1], "while the next version is being staged"
    adapters.wait_staged("second")
    adapters.call("apply", "second", "wait")
    assert adapters.logprobs(2) == expected[2]
    assert adapters.logprobs(1) == expected[1], "requests in progress end on it"
    assert adapters.engine.logprobs(PROMPT) == expected[0]
    assert weights(adapters.engine) == base


@torch.no_grad()
def test_versions_compute_what_peft_has_merged_into_the_base(case: Case) -> None:
    peft = pytest.importorskip("peft")  # environments of other releases of vLLM have none
    for number, (version, folder) in enumerate(zip(case.versions, case.folders, strict=True), 1):
        case.adapters.install(f"merged {number}", version)
        merged = peft.PeftModel.from_pretrained(load_model(case.base), folder).merge_and_unload().eval()
        tokens = list(PROMPT)
        for token, logprob in case.adapters.logprobs(number):
            found = merged(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
            assert abs(float(found[token]) - logprob) < 1e-4
            tokens.append(token)


def packed(worker: Any) -> Any:
    modules = worker.model_runner.lora_manager._adapter_manager.modules
    return next(module for name, module in modules.items() if name.endswith("qkv_proj"))


def tamper(worker: Any) -> None:
    """From now on one module of the last worker keeps another value than it is given. Runs in the worker."""
    if worker.rank + 1 < worker.parallel_config.tensor_parallel_size:
        return
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
    vars(packed(worker)).pop("set_lora", None)
    SlotCopy.write = getattr(worker, "plain", SlotCopy.write)  # type: ignore[method-assign]


def forget(worker: Any) -> None:
    """Forget all kinds of adapters, so that vLLM's own code writes the next version. Runs in the worker."""
    for agent in adapter_agents(worker).values():
        agent._writer._kinds.clear()


def slots(worker: Any) -> tuple[int, int]:
    """How many slots, and adapters on the host, vLLM holds. Runs in the worker."""
    manager = worker.model_runner.lora_manager._adapter_manager
    return sum(id is not None for id in manager.lora_index_to_id), len(manager._registered_adapters)


@pytest.mark.parametrize("first", [True, False], ids=["written by vLLM", "copied"])
def test_a_slot_that_does_not_contain_the_version_takes_no_request(case: Case, first: bool) -> None:
    adapters, expected, versions = case.adapters, case.expected, case.versions
    adapters.install("good", versions[0])
    time.sleep(GRACE_SECONDS)
    adapters.call("release")
    if first:
        adapters.engine.rpc(forget)
    adapters.engine.rpc(tamper)
    try:
        adapters.stage("altered", versions[1])
        problem = adapters.problem(-1)
    finally:
        adapters.engine.rpc(restore)
    assert "tensors of the slot differ from the version" in problem
    adapters.call("unstage", "altered")  # as the daemon orders, in whose eyes one worker has failed
    assert not any(answer["ok"] for answer in adapters.call("apply", "altered", "wait"))
    assert all(answer["version"] == 1 for answer in adapters.call("describe"))
    assert adapters.logprobs(1) == expected[1]
    adapters.install("again", versions[1])
    assert adapters.logprobs(2) == expected[2]


def test_superseded_versions_leave_slots_and_host(case: Case) -> None:
    adapters, versions = case.adapters, case.versions
    for round in range(3):
        for version in versions:
            adapters.install(f"{round} {version}", version)
    time.sleep(GRACE_SECONDS)
    assert all(answer["left"] == [] for answer in adapters.call("release"))
    assert set(map(tuple, adapters.engine.rpc(slots))) == {(1, 1)}
    assert adapters.logprobs(2)


def slow(worker: Any) -> None:
    """From now on one module takes a second to be written. Runs in the worker."""
    module = packed(worker)
    plain = module.set_lora

    def late(*args: Any) -> None:
        time.sleep(1)
        plain(*args)

    module.set_lora = late


@pytest.mark.parametrize("level", [1, 2])
def test_a_server_that_falls_asleep_while_a_version_is_written_keeps_it_whole(case: Case, level: int) -> None:
    adapters = case.adapters
    adapters.install(f"before {level}", case.versions[0])
    time.sleep(GRACE_SECONDS)
    adapters.call("release")
    adapters.engine.rpc(slow)
    try:
        adapters.stage(f"asleep {level}", case.versions[1])
        time.sleep(0.3)  # it writes
        adapters.engine.sleep(level)
        time.sleep(1.5)
        adapters.engine.wake(WEIGHTS, KV_CACHE)
        adapters.wait_staged(f"asleep {level}")
    finally:
        adapters.engine.rpc(restore)
    if level == 2:
        assert adapters.engine.install(case.base_version, "base again")["ok"]
    adapters.call("apply", f"asleep {level}", "wait")
    assert [adapters.logprobs(number) for number in (1, 2)] == case.expected[1:]


def take(worker: Any, but: int) -> None:
    """Have no free slot but one. Runs in the worker."""
    ids = worker.model_runner.lora_manager._adapter_manager.lora_index_to_id
    ids[:] = [id if id is not None or slot == but else -1 - slot for slot, id in enumerate(ids)]


def slot_of(worker: Any, number: int) -> int:
    ids = worker.model_runner.lora_manager._adapter_manager.lora_index_to_id
    return int(ids.index(adapter_id(0, number)))


def give_back(worker: Any) -> None:
    ids = worker.model_runner.lora_manager._adapter_manager.lora_index_to_id
    ids[:] = [id if id is None or id > 0 else None for id in ids]


@pytest.mark.parametrize("slot", range(LORA["max_loras"]))
def test_requests_without_an_adapter_get_the_base_whatever_slot_the_adapter_beside_them_has(case: Case, slot: int) -> None:
    adapters, expected = case.adapters, case.expected
    adapters.install(f"before {slot}", case.versions[0])
    time.sleep(GRACE_SECONDS)
    adapters.call("release")
    adapters.engine.rpc(take, slot)
    try:
        if not all(answer["ok"] for answer in adapters.call("stage", f"slot {slot}", case.versions[1])):
            assert slot in (adapters.engine.rpc(slot_of, 1)[0], LORA["max_loras"] - 1), "CPUs have one less than vLLM"
            return
        adapters.install(f"slot {slot}", case.versions[1])
        requests = [None, *((adapters.model, adapter_id(0, number), number) for number in (1, 2))]
        found = adapters.engine.logprobs_together(PROMPT, 8, requests)
    finally:
        adapters.engine.rpc(give_back)
    assert [tokens(each) for each in found] == [tokens(each) for each in expected]
