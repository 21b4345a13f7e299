"""Attachment of an embedded engine to the daemon: the control side without HTTP.

    handle = await attach(engine)          # an AsyncLLM, on the engine's event loop
    await handle.wait(version=3)
    handle.version, handle.close()

The endpoint plugin does the same for an API server, and adds the gate to its routes. vLLM's first call for weight
transfer attaches an engine that is not attached yet (`weight_transfer.py`).
"""

import asyncio
import atexit
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from resharder.client.errors import UsageError
from resharder.client.inference.control.attach import AttachedEngine, ControlSide
from resharder.client.inference.control.gate import Gate
from resharder.client.inference.control.weight_update import WeightUpdates
from resharder.client.inference.engine import EngineTraits
from resharder.client.inference.settings import PluginSettings
from resharder.client.inference.version_page import Journal, page
from resharder.client.inference.vllm import outputs, refusals, weight_transfer
from resharder.client.inference.vllm.adapter_engine import Adapter
from resharder.client.inference.vllm.engine_core import EngineEnd, engines_are_here, guard, passes_kv, pausing
from resharder.client.inference.vllm.hf_config import EngineConfig
from resharder.client.inference.vllm.sleep import cannot_sleep
from resharder.client.operator import Operator


async def attach(
    engine: Any,
    settings: PluginSettings | None = None,
    *,
    gate: Gate | None = None,
    address: str = "",
    end: Callable[[], None] | None = None,
) -> AttachedEngine:
    """Attach an engine to the daemon. Returns at once, even if the daemon is away.

    The server leaves when the engine is shut down.

    Args:
        engine: vLLM's `AsyncLLM`, on whose event loop this is called. Its workers must have loaded the plugin.
        settings: The plugin's settings, by default from the environment.
        gate: The gate in front of the engine, by default a new one.
        address: Address of the server, as the daemon's operators see it.
        end: Ends the process, to be started again on another config.json (RESHARDER_ON_CONFIG_CHANGE=exit). Called when the
            daemon no longer counts on the server.

    Returns:
        The handle of the attached engine.

    Raises:
        UsageError: The engine or its configuration is not supported.
    """
    settings = settings or PluginSettings.from_environment()
    config = engine.vllm_config
    refuse_unsupported(config)
    refusals.refuse_adapters(config, settings)
    engine_config = EngineConfig(config) if settings.restarts else None
    world_size = config.parallel_config.world_size_across_dp
    processor = getattr(engine, "output_processor", None)
    if processor is not None:
        outputs.watch_outputs(processor, page(), one_clock=engines_are_here(config))
    guard(getattr(engine, "engine_core", None))
    leaving = ExitStack()
    engine_end = EngineEnd(engine, leaving.close)
    engine_end.watch_signals(asyncio.get_running_loop())
    side = ControlSide(
        engine,
        settings,
        EngineTraits("vllm", "vLLM", world_size, cannot_sleep(config), passes_kv(config)),
        gate=gate,
        address=address,
        failure=lambda: engine_end.failure,
        journal=Journal if processor is None else page().read,
        pause=pausing(engine),
        config_differences=engine_config.differences if engine_config is not None else lambda content: [],
        end=end,
    )
    adapters = [Adapter(engine, index, settings, world_size, address) for index in range(len(settings.adapters))]
    if weight_transfer.is_selected(config):
        weight_transfer.take_over(engine, _updates(side.gate, settings, lambda: side.thread.model))
    await engine_end.find_processes()
    handle = await side.start(adapters)
    leaving.callback(handle.leave)
    for adapter in adapters:
        await adapter.start()
    return handle


async def attach_until_shutdown(engine: Any) -> None:
    """Attach an engine whose program has no use for the handle. The server leaves when the process ends, too.

    Args:
        engine: As for `attach`.

    Raises:
        UsageError: As for `attach`.
    """
    handle = await attach(engine)
    atexit.register(handle.leave)


def _updates(gate: Gate, settings: PluginSettings, model: Callable[[], str]) -> WeightUpdates:
    def connect() -> Operator:
        return Operator(settings.endpoint)

    return WeightUpdates(gate, settings.server, model, connect, timeout=settings.update_seconds)


def refuse_unsupported(config: Any) -> None:
    """Raise `UsageError` for a configuration (vLLM's `VllmConfig`) that Resharder does not support."""
    parallel = config.parallel_config
    refused = {
        "external data-parallel load balancing": parallel.data_parallel_external_lb,
        "hybrid data-parallel load balancing": parallel.data_parallel_hybrid_lb,
    }
    problems = [f"Resharder does not support servers with {name}" for name, used in refused.items() if used]
    problems += [problem] if (problem := refusals.refuse_unsupported(config)) else []
    if problems:
        raise UsageError(f"{'; '.join(problems)}: start vLLM without it, or leave the plugin out of VLLM_PLUGINS")
