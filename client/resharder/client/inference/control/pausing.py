"""vLLM's pause, without what an install does not need of it."""

from typing import TYPE_CHECKING

from resharder.client.inference.control.orders import Mode

if TYPE_CHECKING:
    from resharder.client.inference.control.control import Engine


async def pause(engine: "Engine", mode: Mode) -> None:
    """When it returns, no step is under way and none begins; caches are as they were.

    AsyncLLM.pause_generation (v1/engine/async_llm.py; 0.26, 0.28 and 0.32) asks the engine core, which answers when it is idle,
    and then sleeps for 20 ms, so that the last tokens leave before it returns: "not required for correctness". They leave all the
    same, before any later ones. So the engine core is asked here too, where there is one.
    """
    ask = getattr(getattr(engine, "engine_core", None), "pause_scheduler_async", None)
    if ask is None:
        await engine.pause_generation(mode=mode, clear_cache=False)
    else:
        await ask(mode=mode, clear_cache=False)
