"""Calls to the engine and its workers that orders are made of."""

from collections.abc import Sequence
from typing import Any

from resharder.client.inference.engine import Engine, Mode

_INSTALLS = ("resharder_stage", "resharder_apply")


class WorkersFailed(Exception):
    """A call to the workers failed. The message has the error of each worker."""


class InstallFailed(WorkersFailed):
    """Workers failed to stage or apply an install. Each reports it to the daemon itself."""


async def effective_mode(engine: Engine, mode: Mode) -> Mode:
    """Return the mode in which to pause an engine: `keep` instead of `wait` if it is paused already.

    In mode `wait`, vLLM also runs requests that an earlier pause froze. That pause may be of a former
    leader or of an order that failed, and the weights may be torn or the caches stale.
    """
    return "keep" if mode == "wait" and await engine.is_paused() else mode


async def call_workers(engine: Engine, method: str, *args: Any) -> Sequence[Any]:
    """Call `method` in the workers and return their answers.

    With data parallelism only the first engine's workers answer; each worker also reports to the daemon itself.

    Raises:
        WorkersFailed: A worker answered with an error. InstallFailed, if it was to stage or apply an install.
    """
    answers = await engine.collective_rpc(method, args=args)
    if problems := [problem for answer in answers if (problem := _problem(method, answer))]:
        raise (InstallFailed if method in _INSTALLS else WorkersFailed)("; ".join(problems))
    return answers


async def pause(engine: Engine, mode: Mode) -> None:
    """Pause the engine: on return no step is in progress and none begins. Caches are unchanged.

    vLLM's `AsyncLLM.pause_generation` (`v1/engine/async_llm.py`; 0.26, 0.28 and 0.32) calls the engine
    core, which answers when it is idle, and then sleeps for 20 ms so that the last tokens leave before
    it returns, which is "not required for correctness". Without the sleep, these tokens still leave
    before later ones. This function therefore calls the engine core directly, if the engine has one.
    """
    pause_core = getattr(getattr(engine, "engine_core", None), "pause_scheduler_async", None)
    if pause_core is None:
        await engine.pause_generation(mode=mode, clear_cache=False)
    else:
        await pause_core(mode=mode, clear_cache=False)


def _problem(method: str, answer: Any) -> str:
    if not isinstance(answer, dict) or "ok" not in answer:
        return f"{method}: expected a worker's answer with `ok`, got {answer!r}"
    return "" if answer["ok"] else f"worker {answer.get('rank', '?')}: {answer.get('error') or 'no reason given'}"
