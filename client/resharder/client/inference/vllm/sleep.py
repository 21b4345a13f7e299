"""Hooks into vLLM's sleep mode, in its workers and its engine core; read against 0.26, 0.28 and 0.32."""

import functools
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from resharder.client.inference.engine import STAY_PAUSED
from resharder.client.inference.vllm.engine_core import paused_by_order
from resharder.client.inference.vllm.worker_rpc import agent_of
from resharder.converters.units import size_text

logger = logging.getLogger("vllm.resharder.power")

_LEAST_RELEASED = 1 << 20  # smaller differences are noise
_SCHEDULING = "scheduling"  # vLLM's tag for the scheduler alone
NOTHING_GAINED = "Memory usage increased after sleeping"


def cannot_sleep(vllm_config: Any) -> str:
    """Return why this engine cannot sleep; empty if it can.

    A CPU worker's sleep is a no-op (`v1/worker/cpu_worker.py`) but permitted, with the same states and orders.
    """
    if vllm_config.device_config.device_type == "cpu" or vllm_config.model_config.enable_sleep_mode:
        return ""
    return "the engine has no sleep mode: start vLLM with --enable-sleep-mode"


def let_stay_paused() -> None:
    """Make the engine core accept `STAY_PAUSED` among the tags to wake, and keep the pause of an order through any wake-up.

    vLLM's own `wake_up` resumes the scheduler when the last tag wakes, also if none sleeps
    (`v1/engine/core.py`; 0.26, 0.28 and 0.32), and a pause after it may be one step late. A core without
    this change logs "Tag … is not in sleeping tags" and wakes nothing.
    """
    from vllm.v1.engine.core import EngineCore

    plain = EngineCore.wake_up

    @functools.wraps(plain)
    def wake_up(self: Any, tags: list[str] | None = None) -> Any:
        if STAY_PAUSED not in (tags or ()) and not paused_by_order(self):
            return plain(self, tags)
        named = None if tags is None else [tag for tag in tags if tag not in (STAY_PAUSED, _SCHEDULING)]
        if named is None or named:
            self.model_executor.wake_up(named)
            register = getattr(self, "_set_kv_connector_handshake_metadata", None)  # since 0.33, where `wake_up` calls it
            if register is not None and (named is None or "kv_cache" in named):
                register()  # prefill and decode peers read the new addresses of the KV cache
        return not self.model_executor.is_sleeping

    EngineCore.wake_up = wake_up


def watch_sleep(worker: Any) -> None:
    """Notify a worker's agent of each sleep and wake, by the control side, vLLM's own routes or the program around the engine."""
    if not hasattr(worker, "sleep"):  # WorkerBase itself has none
        return
    plain_sleep, plain_wake_up = worker.sleep, worker.wake_up

    @functools.wraps(plain_sleep)
    def sleep(level: int = 1) -> None:
        agent, models = agent_of(worker)
        with agent.verifier.exclusive(), agent.sleep_state.lock:
            began = time.monotonic()
            agent.fall_asleep(models, level)
            prepared, before = time.monotonic() - began, _free_memory(agent.host.device)
            with tolerate_other_processes():
                plain_sleep(level)
            released = _free_memory(agent.host.device) - before
            released = released if released >= _LEAST_RELEASED else 0
            agent.sleep_state.begin(level)
            agent.reporter.slept(released)
            took = time.monotonic() - began
            logger.info(
                "asleep at level %d after %.3f s, %.3f s of it to prepare: %s of memory released",
                *(level, took, prepared, size_text(released)),
            )

    @functools.wraps(plain_wake_up)
    def wake_up(tags: list[str] | None = None) -> None:
        agent, _ = agent_of(worker)
        with agent.verifier.exclusive():
            plain_wake_up(tags)
            agent.woke(tags)

    worker.sleep, worker.wake_up = sleep, wake_up


def _free_memory(device: torch.device) -> int:
    """Return the free bytes of a GPU; of a CPU the negative of this process's resident memory, so that differences compare."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with open("/proc/self/statm") as file:
        return -int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def tolerate_other_processes() -> Iterator[None]:
    """Suppress the assertion at the end of vLLM's sleep that the GPU has more free memory than before.

    The assertion (`Worker.sleep` in `v1/worker/gpu_worker.py`; 0.26 to 0.32) fails if another process, e.g. a
    trainer, allocates memory during the sleep (vLLM pull request 45620, verl issue 3902). All memory sleeps
    by then, and an engine that treated itself as awake would read it.
    """
    try:
        yield
    except AssertionError as error:
        if NOTHING_GAINED not in str(error):
            raise
        logger.warning("the engine sleeps, but other processes allocated more GPU memory in the meantime than the sleep freed")
