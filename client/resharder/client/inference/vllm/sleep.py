"""vLLM's sleep mode, in its workers and its engine core; read against 0.26, 0.28 and 0.32."""

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from resharder.client.inference.power import STAY_PAUSED
from resharder.client.inference.vllm.worker_rpc import agent_of

logger = logging.getLogger("vllm.resharder.power")

NOTHING_GAINED = "Memory usage increased after sleeping"


def cannot_sleep(vllm_config: Any) -> str:
    """Why this engine would only pretend to sleep; empty if it can. The CPU worker always pretends (v1/worker/cpu_worker.py),
    and may: states and orders are then as they are elsewhere."""
    if vllm_config.device_config.device_type == "cpu" or vllm_config.model_config.enable_sleep_mode:
        return ""
    return "expected an engine with sleep mode: start vLLM with --enable-sleep-mode"


def let_stay_paused() -> None:
    """Has the engine core understand STAY_PAUSED among the tags to wake. vLLM's own `wake_up` lets the scheduler go on as soon
    as nothing sleeps any more (v1/engine/core.py; 0.26, 0.28 and 0.32), and a pause that comes after it may come a step too
    late. A core that was not told says "Tag … is not in sleeping tags" and wakes nothing."""
    from vllm.v1.engine.core import EngineCore

    plain = EngineCore.wake_up

    @functools.wraps(plain)
    def wake_up(self: Any, tags: list[str] | None = None) -> Any:
        if STAY_PAUSED not in (tags or ()):
            return plain(self, tags)
        self.model_executor.wake_up([tag for tag in tags or () if tag != STAY_PAUSED])
        return not self.model_executor.is_sleeping

    EngineCore.wake_up = wake_up


def watch_sleep(worker: Any) -> None:
    """Has a worker's agent know of its sleep, whoever asks for it: the control side, vLLM's own route, the program around it."""
    if not hasattr(worker, "sleep"):  # WorkerBase itself has none
        return
    plain_sleep, plain_wake_up = worker.sleep, worker.wake_up

    @functools.wraps(plain_sleep)
    def sleep(level: int = 1) -> None:
        agent, models = agent_of(worker)
        with agent.verifier.undisturbed():
            agent.fall_asleep(models, level)
            with beside_others():
                plain_sleep(level)
            agent.slumber.begin(level)

    @functools.wraps(plain_wake_up)
    def wake_up(tags: list[str] | None = None) -> None:
        agent, _ = agent_of(worker)
        with agent.verifier.undisturbed():
            plain_wake_up(tags)
            agent.woke(tags)

    worker.sleep, worker.wake_up = sleep, wake_up


@contextmanager
def beside_others() -> Iterator[None]:
    """For vLLM's sleep, which ends with a look at how much of the GPU is free (Worker.sleep in v1/worker/gpu_worker.py; 0.26 to
    0.32) and fails where that is less than before: where another process, as a trainer, took some meanwhile (vLLM pull request
    45620, verl issue 3902). All that was to sleep does so by then, and an engine that believes otherwise would read it."""
    try:
        yield
    except AssertionError as error:
        if NOTHING_GAINED not in str(error):
            raise
        logger.warning("asleep, but other processes took more of the GPU's memory meanwhile than that freed")
