"""The engine core: orders to cores that refuse new requests while they are paused, and the adapters that requests may name."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
from resharder.client.inference.control.fence import clock_id
from resharder.client.inference.vllm.adapter_ids import request_of
from resharder.client.inference.vllm.engine_core import (
    paused_by_order,
    refuse_missing_adapters,
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


class CoreOfAdapters:
    """The part of an engine core that the plugin's methods use."""

    def __init__(self) -> None:
        self.scheduler = SimpleNamespace(requests={"a": SimpleNamespace(lora_request=request_of("lora", 1_000_003, 3))})
        self.answers: list[dict[str, object]] = []
        self.calls: list[tuple[object, ...]] = []

    def preprocess_add_request(self, request: object) -> object:
        return request

    def collective_rpc(self, method: str, args: tuple[object, ...]) -> list[dict[str, object]]:
        self.calls.append(args)
        return self.answers


def test_a_request_for_a_version_that_not_every_worker_has_loaded_is_refused() -> None:
    class Watched(CoreOfAdapters):
        pass

    refuse_missing_adapters(Watched)
    core, fourth = Watched(), SimpleNamespace(lora_request=request_of("lora", 1_000_004, 4))
    core.answers = [{"loaded": [1_000_003, 1_000_004]}, {"loaded": [1_000_003]}]
    resharder_adapter(core, "lora", "apply", ["install"])
    assert core.preprocess_add_request(SimpleNamespace(lora_request=request_of("lora", 1_000_003, 3)))
    with pytest.raises(ValueError, match="lora@4 was superseded and has left this engine: send the request again"):
        core.preprocess_add_request(fourth)
    core.answers = [{"loaded": [1_000_004]}] * 2
    resharder_adapter(core, "lora", "release", [])
    assert core.calls[-1] == ("lora", "release", [1_000_003]), "what requests in the scheduler use"
    assert core.preprocess_add_request(fourth)
    assert core.preprocess_add_request(SimpleNamespace(lora_request=None))
