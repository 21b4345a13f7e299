"""The worker's side in SGLang's scheduler processes, one for each rank; read against 0.5.17 and 0.5.23.

A scheduler takes its messages one after the other, between two steps, and all ranks take the same ones in the same order. A call
of the plugin is such a message: check of the token and execution are atomic, and on return no step is in progress. The first
rank decides about the token for all, because the ranks' clocks run on between their checks.

A paused engine has no request in progress: SGLang's pause in mode `retract` finishes the step and puts requests back into the
queue, so that their KV cache can be dropped and is computed again.
"""

import functools
import inspect
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from resharder.client.inference.control.fence import Fence
from resharder.client.inference.engine import KV_CACHE, WEIGHTS, InstallError
from resharder.client.inference.settings import PluginSettings
from resharder.client.inference.sglang.host import SGLangHost, rank
from resharder.client.inference.sglang.loader import AGENTS
from resharder.client.inference.sglang.messages import ResharderReqInput, ResharderReqOutput
from resharder.client.inference.sglang.spans import follow_page, watch_sending
from resharder.client.inference.worker.agent import Agent
from resharder.client.inference.worker.calls import CALLS, answered
from resharder.client.inference.worker.model_part import MODEL, Models
from sglang.srt.managers import scheduler as scheduler_module
from sglang.srt.managers.io_struct import (
    ContinueGenerationReqInput,
    PauseGenerationReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
)
from sglang.srt.runtime_context import get_exec, get_parallel
from sglang.utils import TypeBasedDispatcher

_PAUSED, _FENCE = "_resharder_paused", "_resharder_fence"  # attributes of a scheduler
_GRAPHS = "cuda_graph"  # SGLang's tag of captured graphs' memory, which sleeps with the KV cache
_KNOWS_PAUSED = "ignore_waiting" in inspect.signature(scheduler_module.Scheduler.is_fully_idle).parameters
"""Whether SGLang lets waiting requests be when it drops the cache of a paused scheduler: not in 0.5.17."""
logger = logging.getLogger("sglang.resharder.scheduler")


def agent_of(scheduler: Any) -> tuple[Agent, Models]:
    """Return the agent of a scheduler process, created on the first call, and its models."""
    runner = scheduler.tp_worker.model_runner
    model = runner.model
    if model not in AGENTS:
        device = next(model.parameters()).device
        AGENTS[model] = Agent(SGLangHost.of(runner.model_config, device), PluginSettings.from_environment())
    return AGENTS[model], {MODEL: model}


# The engine's calls


def _state(scheduler: Any) -> dict[str, Any]:
    agent, _ = agent_of(scheduler)
    return {"paused": bool(scheduler._engine_paused), "asleep": bool(agent.sleep_state.tags)}


def _pause(scheduler: Any) -> dict[str, Any]:
    scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))
    setattr(scheduler, _PAUSED, True)
    return {}


def _resume(scheduler: Any, held: bool) -> dict[str, Any]:
    """End the pause of orders; with `held` the engine stays paused until a program continues it."""
    setattr(scheduler, _PAUSED, False)
    if held:
        return {}
    scheduler.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))
    return {}


def _reset(scheduler: Any) -> dict[str, Any]:
    """Drop the KV cache."""
    with _waiting_set_aside(scheduler):
        return {"reset": bool(scheduler.flush_cache(empty_cache=False))}


@contextmanager
def _waiting_set_aside(scheduler: Any) -> Iterator[None]:
    """Set the waiting requests of a paused scheduler aside: they have no KV cache, and must not keep it from being dropped."""
    grammars = scheduler.grammar_manager
    queued, grammars.grammar_queue = grammars.grammar_queue, []
    waiting = scheduler.waiting_queue
    if not _KNOWS_PAUSED:
        scheduler.waiting_queue = []
    try:
        yield
    finally:
        grammars.grammar_queue, scheduler.waiting_queue = queued, waiting


def _sleep(scheduler: Any, level: int) -> dict[str, Any]:
    agent, models = agent_of(scheduler)
    if scheduler.weight_updater.offload_tags - {*agent.sleep_state.tags, _GRAPHS}:
        raise InstallError("a program has released memory of the engine: try again when it has restored it")
    on_gpu = agent.host.device.type != "cpu"
    if level == 1 and on_gpu and not get_exec().features.enable_weights_cpu_backup:
        raise InstallError("level 1 keeps the weights on the host: start SGLang with --enable-weights-cpu-backup, or use level 2")
    with agent.verifier.exclusive(), agent.sleep_state.lock:
        began = time.monotonic()
        agent.fall_asleep(models, level)
        before = torch.cuda.mem_get_info(agent.host.device)[0] if on_gpu else 0
        tags = [KV_CACHE, WEIGHTS, *([_GRAPHS] if on_gpu else [])]
        with _waiting_set_aside(scheduler):
            scheduler.weight_updater.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=tags))
        agent.sleep_state.begin(level)
        agent.reporter.slept(max(0, torch.cuda.mem_get_info(agent.host.device)[0] - before) if on_gpu else 0)
        logger.info("asleep at level %d after %.3f s", level, time.monotonic() - began)
    return {}


def _wake(scheduler: Any, tags: list[str]) -> dict[str, Any]:
    agent, _ = agent_of(scheduler)
    tags = [tag for tag in tags if tag in agent.sleep_state.tags]
    if tags:
        graphs = [_GRAPHS] if KV_CACHE in tags and agent.host.device.type != "cpu" else []
        with agent.verifier.exclusive():
            scheduler.weight_updater.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=[*tags, *graphs]))
            agent.woke(tags)
    return {}


_ENGINE_CALLS: Mapping[str, Callable[..., dict[str, Any]]] = {
    "state": _state,
    "pause": _pause,
    "resume": _resume,
    "reset": _reset,
    "sleep": _sleep,
    "wake": _wake,
}
"""The calls that take the scheduler; the others take the agent and its models."""


def handle(scheduler: Any, request: ResharderReqInput) -> ResharderReqOutput:
    """Carry out a call in every rank, and return all ranks' answers."""
    if refused := _refused(scheduler, request.token):
        return ResharderReqOutput(answers=json.dumps(refused))
    args = json.loads(request.args)

    def act(agent: Agent, models: Models) -> dict[str, Any]:
        if call := _ENGINE_CALLS.get(request.method):
            return call(scheduler, *args)
        return CALLS[request.method](agent, models, *args)

    with torch.inference_mode(False), torch.no_grad():
        answer = answered(rank(), lambda: agent_of(scheduler), act)
    answers = _gathered(scheduler, answer)
    follow_page(scheduler)
    return ResharderReqOutput(answers=json.dumps(answers))


def _refused(scheduler: Any, token: str) -> list[Any]:
    """Return the fence's refusal; empty if it accepts the token, or there is none."""
    if not token:
        return []
    fence: Fence = scheduler.__dict__.setdefault(_FENCE, Fence())
    found = [fence.refuse(json.loads(token))]
    if get_parallel().tp_size > 1:
        group = scheduler.tp_group
        torch.distributed.broadcast_object_list(found, src=group.ranks[0], group=group.cpu_group)
    return fence.refused(found[0]) if found[0] else []


def _gathered(scheduler: Any, answer: dict[str, Any]) -> list[dict[str, Any]]:
    size = int(get_parallel().tp_size)
    if size == 1:
        return [answer]
    answers: list[Any] = [None] * size
    torch.distributed.all_gather_object(answers, answer, group=scheduler.tp_group.cpu_group)
    return answers


def watch_scheduler() -> None:
    """Have schedulers take the plugin's calls, and label tokens with the installed version."""
    kind = scheduler_module.Scheduler
    if hasattr(kind.init_request_dispatcher, "resharder"):
        return
    plain_dispatcher, plain_init, plain_continue = kind.init_request_dispatcher, kind.__init__, kind.continue_generation

    @functools.wraps(plain_dispatcher)
    def init_request_dispatcher(self: Any) -> None:
        plain_dispatcher(self)
        self._request_dispatcher += TypeBasedDispatcher([(ResharderReqInput, functools.partial(handle, self))])

    @functools.wraps(plain_init)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        plain_init(self, *args, **kwargs)
        follow_page(self)

    @functools.wraps(plain_continue)
    def continue_generation(self: Any, request: Any) -> None:
        if getattr(self, _PAUSED, False):
            logger.warning("ignoring another caller's continue_generation: an order has paused the engine")
        else:
            plain_continue(self, request)

    init_request_dispatcher.resharder = True  # type: ignore[attr-defined]
    kind.init_request_dispatcher, kind.__init__, kind.continue_generation = init_request_dispatcher, init, continue_generation
    _watch_steps(kind)
    watch_sending()


def _watch_steps(kind: Any) -> None:
    """Follow the page: verification may find that memory has no confirmed version any more."""
    plain_process = kind.process_batch_result

    @functools.wraps(plain_process)
    def process_batch_result(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._engine_paused:
            follow_page(self)
        return plain_process(self, *args, **kwargs)

    kind.process_batch_result = process_batch_result
