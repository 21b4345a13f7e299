"""A worker's agent knows what sleeps, whatever vLLM makes of the rest of the GPU."""

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from resharder.client.inference.engine import STAY_PAUSED, SleepState
from resharder.client.inference.vllm import sleep
from resharder.client.inference.vllm.sleep import NOTHING_GAINED
from resharder.v1.resources_pb2 import Power
from vllm.v1.engine.core import EngineCore
from vllm.v1.worker import gpu_worker

pytestmark = pytest.mark.compat("sleep")


class Agent:
    def __init__(self) -> None:
        self.sleep_state = SleepState()
        self.verifier = SimpleNamespace(exclusive=nullcontext)
        self.host = SimpleNamespace(device=torch.device("cpu"))
        self.released: list[int | None] = []
        self.reporter = SimpleNamespace(slept=self.released.append)

    def fall_asleep(self, models: object, level: int) -> None:
        pass

    def woke(self, tags: list[str] | None) -> None:
        self.sleep_state.end(tags)


class Core:
    """An engine core that an order has paused; `registered` counts what peers of a KV connector were told."""

    def __init__(self) -> None:
        self._resharder_paused, self.registered = True, 0
        self.model_executor = SimpleNamespace(wake_up=lambda tags: None, is_sleeping=True)

    def _set_kv_connector_handshake_metadata(self) -> None:
        self.registered += 1


@pytest.mark.parametrize(
    ("tags", "registered"),
    [(["kv_cache", STAY_PAUSED], 1), (["weights", STAY_PAUSED], 0), ([STAY_PAUSED], 0), (None, 1), (["weights", "kv_cache"], 1)],
)
def test_peers_of_a_kv_connector_get_the_addresses_of_a_kv_cache_that_an_order_woke(
    tags: list[str] | None, registered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `EngineCore.wake_up` of vLLM 0.33 does."""
    monkeypatch.setattr(EngineCore, "wake_up", EngineCore.wake_up)
    sleep.let_stay_paused()
    core = Core()
    EngineCore.wake_up(core, tags)  # type: ignore[arg-type]
    assert core.registered == registered


class Worker:
    def __init__(self, last: Callable[[], None]) -> None:
        self.last = last

    def sleep(self, level: int = 1) -> None:
        self.last()

    def wake_up(self, tags: list[str] | None = None) -> None:
        pass


def watched(last: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> tuple[Worker, Agent]:
    agent, worker = Agent(), Worker(last)
    monkeypatch.setattr(sleep, "agent_of", lambda worker: (agent, {}))
    sleep.watch_sleep(worker)
    return worker, agent


def fails(message: str) -> Callable[[], None]:
    def last() -> None:
        raise AssertionError(message)

    return last


@pytest.mark.parametrize(
    "last", [lambda: None, fails("Memory usage increased after sleeping.")], ids=["alone", "beside a trainer"]
)
def test_a_worker_that_sleeps_is_known_to_though_other_processes_took_what_it_freed(
    last: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, agent = watched(last, monkeypatch)
    worker.sleep(2)
    assert agent.sleep_state.power is Power.ASLEEP_2
    worker.wake_up(["weights"])
    assert agent.sleep_state.power is Power.WEIGHTS_AWAKE


def test_any_other_failure_to_sleep_is_vllms_to_report(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, agent = watched(fails("the allocator is not there"), monkeypatch)
    with pytest.raises(AssertionError, match="allocator"):
        worker.sleep(1)
    assert agent.sleep_state.power == Power.AWAKE


def test_vllm_still_says_it_in_the_words_that_are_waited_for() -> None:
    assert NOTHING_GAINED in inspect.getsource(gpu_worker.Worker.sleep)


def test_the_memory_that_a_sleep_releases_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's CPU worker ignores the sleep; another one releases what it has."""
    worker, agent = watched(lambda: None, monkeypatch)
    worker.sleep(2)
    assert agent.released == [0]
    held = [torch.ones(64 << 20, dtype=torch.uint8)]
    worker.last = held.clear
    worker.sleep(2)
    released = agent.released[-1]
    assert released is not None
    assert released >= 60 << 20
