"""Orders to the engine core in releases whose cores refuse new requests while they are paused."""

import time
from typing import Any

import pytest
from resharder.client.inference.control.fence import clock_id
from resharder.client.inference.vllm.engine_core import paused_by_order, resharder_fenced, resharder_resume


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
