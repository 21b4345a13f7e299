"""Attachment of an embedded engine to the daemon: the control side without HTTP.

    handle = await attach(engine)          # an AsyncLLM, on the engine's event loop
    await handle.wait(version=3)
    handle.version, handle.close()

The endpoint plugin does the same for an API server, and adds the gate to its routes. vLLM's first call for weight
transfer attaches an engine that is not attached yet (`weight_transfer.py`).
"""

import asyncio
import atexit
import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from resharder.client.errors import UsageError, WaitTimeout
from resharder.client.inference.control import metrics
from resharder.client.inference.control.control import OrderExecutor
from resharder.client.inference.control.gate import Gate
from resharder.client.inference.control.labels import Answer, answering
from resharder.client.inference.control.lease import ControlIdentity, LeaseThread
from resharder.client.inference.control.orders import ControlOrder, Outcome
from resharder.client.inference.control.weight_update import WeightUpdates
from resharder.client.inference.engine import InstallError, refuse_config
from resharder.client.inference.settings import PluginSettings
from resharder.client.inference.version_page import Journal, page
from resharder.client.inference.vllm import outputs, refusals, weight_transfer
from resharder.client.inference.vllm.adapter_engine import Adapter
from resharder.client.inference.vllm.engine_core import EngineEnd, engines_are_here, guard, passes_kv
from resharder.client.inference.vllm.hf_config import EngineConfig
from resharder.client.inference.vllm.sleep import cannot_sleep
from resharder.client.operator import Operator
from resharder.client.rpc.channel import Channel
from resharder.client.settings import ON_CONFIG_CHANGE
from resharder.client.versions.manifest import get_manifest
from resharder.v1.resources_pb2 import Power
from resharder.v1.server_pb2 import Order

logger = logging.getLogger("vllm.resharder.attach")

_LOOK_SECONDS = 1.0  # between looks whether a handle that waits was closed


class AttachedEngine:
    """An engine that follows the daemon. Not thread-safe; use it on the engine's event loop only."""

    def __init__(self, gate: Gate, thread: LeaseThread, control: OrderExecutor, adapters: Sequence[Adapter] = ()) -> None:
        self._gate, self._thread, self._control = gate, thread, control
        self.adapters = {adapter.name: adapter for adapter in adapters}
        """The adapters of RESHARDER_ADAPTERS, by name. `adapters[name].request()` is the `LoRARequest` for new requests."""
        self._closed = False

    @property
    def version(self) -> int | None:
        """The version in service; `None` while none is confirmed or one is being installed."""
        return self._gate.open_on or None

    async def wait(self, version: int, timeout: float | None = None) -> int:
        """Wait until a version or a later one is in service.

        Args:
            version: Number of the version.
            timeout: Maximum time in seconds; `None` for no limit.

        Returns:
            The version in service.

        Raises:
            UsageError: The handle is closed, also while it waits, and the version is not in service.
            WaitTimeout: The version is not in service after `timeout` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while (self.version or 0) < version:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise WaitTimeout(f"expected version {version} within {timeout:g} s, got {self.version or 'none'}")
            if self._closed:
                raise UsageError(f"cannot wait for version {version}: the engine is detached, because its handle was closed")
            await self._gate.changed(_LOOK_SECONDS if left is None else min(left, _LOOK_SECONDS))
        return self._gate.version

    @staticmethod
    def answering() -> AbstractContextManager[Answer]:
        """Collect the versions that compute the tokens of requests begun inside the block.

        Returns:
            A context manager; the versions are in its `versions`, in order, 0 for weights that are not a confirmed version.
        """
        return answering()

    def leave(self) -> None:
        """Announce the end of this process to the daemon, which then removes the server. If the engine has failed, it is LOST."""
        self._closed = True
        for adapter in self.adapters.values():
            adapter.leave()
        self._thread.leave()
        self._control.release()

    def close(self) -> None:
        """Release the server's lease and the engine's `sleep`, `wake_up` and `resume_generation`. A second call is a no-op.

        The engine does not change: in the middle of an install it stays paused, until it is attached again or resumed.
        """
        self._closed = True
        for adapter in self.adapters.values():
            adapter.close()
        self._thread.close()
        self._control.release()


async def attach(
    engine: Any,
    settings: PluginSettings | None = None,
    *,
    gate: Gate | None = None,
    address: str = "",
    end: Callable[[], None] | None = None,
) -> AttachedEngine:
    """Attach an engine to the daemon. Returns at once, even if the daemon is away.

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
    if settings.restarts and end is None:
        raise UsageError(f"{ON_CONFIG_CHANGE.name}=exit is for vLLM's API server: leave it out where a program embeds the engine")
    engine_config, restarting = EngineConfig(config) if settings.restarts else None, False
    world_size = config.parallel_config.world_size_across_dp
    identity = ControlIdentity(settings.server, world_size, address, settings.model, settings.fleet, passes_kv(config))
    gate = gate or Gate(prefer=settings.prefer, hold_seconds=settings.hold_seconds)

    processor = getattr(engine, "output_processor", None)
    if processor is not None:
        outputs.watch_outputs(processor, page(), one_clock=engines_are_here(config))
    journal = Journal if processor is None else page().read
    numbers = metrics.numbers()
    numbers.connect(gate)

    def why_restart(version: str) -> str:
        content = get_manifest(channel, version).config
        try:
            refuse_config(version, engine_config.differences(content) if engine_config is not None and content else [])
        except InstallError as error:
            return str(error)
        return ""

    def close_and_end() -> None:
        for adapter in adapters:
            adapter.close()
        thread.close()
        if end is not None:
            end()

    async def carry_out(order: ControlOrder) -> Outcome | None:
        nonlocal restarting
        outcome = await control.carry_out(order)
        if outcome is not None:
            numbers.carried_out(outcome)
            restarting = restarting or outcome.restarting
        if end is not None and restarting and order.kind == Order.CLOSE:  # the daemon has noted it, and this side is closed
            logger.warning("this process ends, to start again with the version's config: %s", order.reason)
            threading.Thread(target=close_and_end, name="resharder-end", daemon=True).start()
        return outcome

    def status() -> tuple[Power, int, int]:
        return control.state.power, gate.in_flight, gate.serving

    guard(getattr(engine, "engine_core", None))
    channel = Channel(settings.endpoint)
    loop, engine_end = asyncio.get_running_loop(), EngineEnd(engine, lambda: thread.report_now())
    engine_end.watch_signals(loop)
    thread = LeaseThread(channel, identity, gate.lease, carry_out, status, loop, lambda: engine_end.failure)
    control = OrderExecutor(
        engine,
        gate,
        thread.reattach,
        lambda version: f"models/{thread.model}/versions/{version}",
        thread.report_now,
        cannot_sleep(config),
        journal=journal,
        why_restart=why_restart if settings.restarts else None,
    )
    gate.emptied.connect(thread.report_now)
    adapters = [Adapter(engine, index, settings, world_size, address) for index in range(len(settings.adapters))]
    if weight_transfer.is_selected(config):
        weight_transfer.take_over(engine, _updates(gate, settings, lambda: thread.model))
    try:
        await control.refresh_power()
    except Exception as error:  # LEAD queries the workers again
        logger.warning("cannot tell yet whether the engine sleeps: %s", error)
    await engine_end.find_processes()
    thread.start()
    for adapter in adapters:
        await adapter.start()
    return AttachedEngine(gate, thread, control, adapters)


async def attach_until_shutdown(engine: Any) -> None:
    """Attach an engine whose program has no use for the handle. The server leaves when its engine or the process ends.

    Args:
        engine: As for `attach`.

    Raises:
        UsageError: As for `attach`.
    """
    handle = await attach(engine)
    atexit.register(handle.leave)
    core = engine.engine_core  # `AsyncLLM.shutdown` may be bound to a Ray actor
    shut_down = core.shutdown

    @functools.wraps(shut_down)
    def leave_and_shut_down(*args: Any, **kwargs: Any) -> None:
        handle.leave()
        shut_down(*args, **kwargs)

    core.shutdown = leave_and_shut_down


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
