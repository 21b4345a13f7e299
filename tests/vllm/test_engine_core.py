"""The engine core: orders to cores that refuse new requests while they are paused, and the adapters that requests may name."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
from resharder.client.inference.control.fence import clock_id
from resharder.client.inference.vllm.adapter_ids import request_of
from resharder.client.inference.vllm.engine_core import (
    check_adapters,
    paused_by_order,
    resharder_adapter,
    resharder_fenced,
    resharder_resume,
)


class Core:
    """As vLLM 0.33 has it: a core of a data parallel model that runs returns from `resume_scheduler` early."""

    def __init__(self, returns_early: bool) -> None:
        self.returns_early, self.reject_new_requests = returns_early, False

    def pause_generation(self, mode: str, clear_cache: bool) -> None:
        self.reject_new_requests = mode != "keep"

    def resume_scheduler(self) -> None:
        if not self.returns_early:
            self.reject_new_requests = False


def order(core: Core, method: str, *args: Any) -> Any:
    return resharder_fenced(core, [1, time.monotonic() + 60, clock_id()], method, list(args))


@pytest.mark.parametrize("returns_early", [False, True])
def test_a_core_takes_requests_again_after_a_resumption(returns_early: bool) -> None:
    core = Core(returns_early)
    order(core, "pause_generation", "abort", False)
    assert core.reject_new_requests
    order(core, "resume_scheduler")
    assert not core.reject_new_requests
    core.pause_generation("wait", clear_cache=False)
    resharder_resume(core)
    assert not core.reject_new_requests


def test_no_other_caller_ends_the_pause_of_an_order_by_pause_generation() -> None:
    core = Core(returns_early=False)
    order(core, "pause_generation", "abort", False)
    assert paused_by_order(core)
    resharder_resume(core)
    assert core.reject_new_requests
    order(core, "resume_scheduler")
    assert not paused_by_order(core)


class LoraRequest:
    """A request of vLLM's scheduler, of which nothing is computed."""

    def __init__(self, version: int) -> None:
        self.request_id, self.client_index, self.num_computed_tokens, self.status = f"of-{version}", 0, 0, None
        self.lora_request = request_of("lora", 1_000_000 + version, version)
        self.block_hashes = ["of the version that it named first"]

    def update_block_hashes(self) -> None:
        self.block_hashes.append(self.lora_request.lora_name)

    def is_finished(self) -> bool:
        return False


class CoreOfAdapters:
    """The part of an engine core that the plugin's methods use."""

    batch_queue = None

    def __init__(self) -> None:
        self.scheduler = SimpleNamespace(
            requests={"a": LoraRequest(3)},
            running=[],
            pause_state=None,
            set_pause_state=lambda state: None,
            finish_requests=lambda ids, status: list(ids),
        )
        self.answers: list[dict[str, object]] = []
        self.calls: list[tuple[object, ...]] = []
        self.added: list[LoraRequest] = []
        self.refused: list[str] = []
        self.aborted: list[str] = []

    def add_request(self, request: LoraRequest, request_wave: int = 0) -> None:
        self.added.append(request)

    def collective_rpc(self, method: str, args: tuple[object, ...]) -> list[dict[str, object]]:
        self.calls.append(args)
        return self.answers

    def _send_error_outputs_to_client(self, ids: list[str], client: int) -> None:
        self.refused += ids

    def _send_abort_outputs(self, aborted: list[str]) -> None:
        self.aborted += aborted


@pytest.fixture
def core() -> CoreOfAdapters:
    class Watched(CoreOfAdapters):
        pass

    check_adapters(Watched)
    return Watched()


def test_a_request_for_a_version_that_not_every_worker_has_loaded_is_refused(core: CoreOfAdapters) -> None:
    core.answers = [{"loaded": [1_000_003, 1_000_004]}, {"loaded": [1_000_003]}]
    resharder_adapter(core, "lora", "apply", ["install", "wait"])
    core.add_request(LoraRequest(3))
    core.add_request(LoraRequest(4))
    assert (len(core.added), core.refused) == (1, ["of-4"])
    core.answers = [{"loaded": [1_000_004]}] * 2
    resharder_adapter(core, "lora", "release", [])
    assert core.calls[-1] == ("lora", "release", [1_000_003]), "what requests in the scheduler use"
    core.add_request(LoraRequest(4))
    core.add_request(SimpleNamespace(lora_request=None))  # type: ignore[arg-type]
    assert (len(core.added), core.refused) == (3, ["of-4"])


def test_a_request_that_was_on_its_way_during_a_cut_over_gets_the_new_version_and_its_prefix_blocks(core: CoreOfAdapters) -> None:
    core.answers = [{"ok": True, "version": 4, "loaded": [1_000_003, 1_000_004]}]
    resharder_adapter(core, "lora", "apply", ["install", "keep"])
    assert core.calls == [("lora", "apply", "install", True), ("lora", "renew")]
    core.add_request(LoraRequest(3))
    for request in (core.added[0], core.scheduler.requests["a"]):
        assert (request.lora_request, request.block_hashes) == (request_of("lora", 1_000_004, 4), ["lora@4"])
    core.answers = [{"ok": True, "version": 5, "loaded": [1_000_004, 1_000_005]}]
    resharder_adapter(core, "lora", "apply", ["next", "wait"])
    core.add_request(LoraRequest(4))
    assert core.added[1].lora_request.lora_name == "lora@4", "an install that cuts nothing over leaves it what it named"
    assert core.aborted == []


def test_steps_in_progress_deliver_their_tokens_before_the_cut_and_none_begins(core: CoreOfAdapters) -> None:
    from vllm.v1.core.sched.interface import PauseState

    happened: list[object] = []
    core.scheduler.pause_state = PauseState.UNPAUSED
    core.scheduler.set_pause_state = happened.append
    core.batch_queue = [1, 2]  # type: ignore[assignment]
    core._process_engine_step = lambda: happened.append(core.batch_queue.pop())  # type: ignore[attr-defined]
    core.collective_rpc = lambda method, args: happened.append(args[1]) or [{"ok": True, "version": 4, "loaded": []}]  # type: ignore[method-assign,func-returns-value]
    for mode, expected in (("wait", ["apply"]), ("abort", [PauseState.PAUSED_ALL, 2, 1, PauseState.UNPAUSED, "apply"])):
        happened.clear()
        resharder_adapter(core, "lora", "apply", ["install", mode])
        assert happened == expected


def test_requests_stay_on_their_version_until_all_workers_have_applied_the_new_one(core: CoreOfAdapters) -> None:
    core.answers = [{"ok": True, "version": 4, "loaded": [1_000_003, 1_000_004]}, {"ok": False, "loaded": [1_000_003]}]
    resharder_adapter(core, "lora", "apply", ["install", "abort"])
    assert core.calls == [("lora", "apply", "install", True)]
    assert (core.aborted, core.scheduler.requests["a"].lora_request.lora_name) == ([], "lora@3")
    core.answers[1] = core.answers[0]
    resharder_adapter(core, "lora", "apply", ["install", "abort"])
    assert core.aborted == ["of-3"]


def test_requests_are_aborted_where_a_worker_cannot_have_them_go_on(core: CoreOfAdapters) -> None:
    replies = [[{"ok": True, "version": 4, "loaded": [1_000_004]}], [{"ok": False}]]
    core.collective_rpc = lambda *call, **args: replies.pop(0)  # type: ignore[method-assign]
    resharder_adapter(core, "lora", "apply", ["install", "keep"])
    assert core.aborted == ["of-3"]
