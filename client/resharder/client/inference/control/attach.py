"""The control side of one engine: the gate, the stream to the daemon, and the executor of its orders, put together.

An engine's folder says what the engine is (`EngineTraits`) and gives its client; the rest is the same for all engines.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from resharder.client.errors import UsageError, WaitTimeout
from resharder.client.inference.control import metrics
from resharder.client.inference.control.control import OrderExecutor
from resharder.client.inference.control.gate import Gate
from resharder.client.inference.control.labels import Answer, answering
from resharder.client.inference.control.lease import ControlIdentity, LeaseThread
from resharder.client.inference.control.orders import ControlOrder, Outcome
from resharder.client.inference.engine import Engine, EngineTraits, InstallError, Mode, refuse_config
from resharder.client.inference.settings import PluginSettings
from resharder.client.inference.version_page import Journal
from resharder.client.rpc.channel import Channel
from resharder.client.settings import ON_CONFIG_CHANGE
from resharder.client.versions.manifest import get_manifest
from resharder.converters.hf_config import Difference
from resharder.v1.resources_pb2 import Power
from resharder.v1.server_pb2 import Order

logger = logging.getLogger("resharder.inference.attach")

_LOOK_SECONDS = 1.0  # between looks whether a handle that waits was closed


class FollowedAdapter(Protocol):
    """An adapter of RESHARDER_ADAPTERS, with a control side of its own."""

    name: str

    def leave(self) -> None:
        """Announce the end of this process to the daemon."""

    def close(self) -> None:
        """Release the lease of the adapter's server."""


class AttachedEngine:
    """An engine that follows the daemon. Not thread-safe; use it on the engine's event loop only."""

    def __init__(self, gate: Gate, thread: LeaseThread, control: OrderExecutor, adapters: Sequence[FollowedAdapter] = ()) -> None:
        self._gate, self._thread, self._control = gate, thread, control
        self.adapters: dict[str, Any] = {adapter.name: adapter for adapter in adapters}
        """The adapters of RESHARDER_ADAPTERS, by name. `adapters[name].request()` is the `LoRARequest` for new requests."""
        self._closed = False

    @property
    def version(self) -> int | None:
        """The version in service; `None` while none is confirmed or one is being installed."""
        return self._gate.open_on or None

    @property
    def closed(self) -> bool:
        """Whether the engine follows the daemon no more."""
        return self._closed

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


class ControlSide:
    """The parts of an engine's control side. `start` begins to follow the daemon.

    Create it on the engine's event loop.

    Args:
        engine: The engine's client.
        settings: The plugin's settings.
        traits: What the engine is.
        gate: The gate in front of the engine, by default a new one.
        address: Address of the server, as the daemon's operators see it.
        failure: Returns why the engine has ended without an order; empty while it has not. Called on any thread.
        journal: Returns the versions that the workers on this host have installed.
        pause: As for `OrderExecutor`.
        config_differences: Returns how the engine's config.json differs from that of a version, given its content.
        end: Ends the process, to be started again on another config.json (RESHARDER_ON_CONFIG_CHANGE=exit). Called when the
            daemon no longer counts on the server.

    Raises:
        UsageError: RESHARDER_ON_CONFIG_CHANGE is `exit`, and a program embeds the engine.
    """

    def __init__(
        self,
        engine: Engine,
        settings: PluginSettings,
        traits: EngineTraits,
        *,
        gate: Gate | None = None,
        address: str = "",
        failure: Callable[[], str] = lambda: "",
        journal: Callable[[], Journal] = Journal,
        pause: Callable[[Mode], Any] | None = None,
        config_differences: Callable[[bytes], list[Difference]] = lambda content: [],
        end: Callable[[], None] | None = None,
    ) -> None:
        if settings.restarts and end is None:
            raise UsageError(
                f"{ON_CONFIG_CHANGE.name}=exit is for {traits.title}'s API server: leave it out where a program embeds the engine"
            )
        self.gate = gate or Gate(prefer=settings.prefer, hold_seconds=settings.hold_seconds)
        self.adapters: Sequence[FollowedAdapter] = ()
        self._config_differences, self._end, self._restarting = config_differences, end, False
        self._numbers = metrics.numbers(traits.name)
        self._numbers.connect(self.gate)
        self._channel = Channel(settings.endpoint)
        identity = ControlIdentity(settings.server, traits.world_size, address, settings.model, settings.fleet, traits.passes_kv)
        loop = asyncio.get_running_loop()
        self.thread = LeaseThread(self._channel, identity, self.gate.lease, self._carry_out, self._status, loop, failure)
        self.control = OrderExecutor(
            engine,
            self.gate,
            self.thread.reattach,
            lambda version: f"models/{self.thread.model}/versions/{version}",
            self.thread.report_now,
            traits.cannot_sleep,
            journal=journal,
            why_restart=self._why_restart if settings.restarts else None,
            pause=pause,
        )
        self.gate.emptied.connect(self.thread.report_now)

    async def start(self, adapters: Sequence[FollowedAdapter] = ()) -> AttachedEngine:
        """Follow the daemon from now on, which may be away.

        Args:
            adapters: The adapters of the engine.

        Returns:
            The handle of the attached engine.
        """
        self.adapters = adapters
        try:
            await self.control.refresh_power()
        except Exception as error:  # LEAD queries the workers again
            logger.warning("cannot tell yet whether the engine sleeps: %s", error)
        self.thread.start()
        return AttachedEngine(self.gate, self.thread, self.control, adapters)

    def _why_restart(self, version: str) -> str:
        content = get_manifest(self._channel, version).config
        try:
            refuse_config(version, self._config_differences(content) if content else [])
        except InstallError as error:
            return str(error)
        return ""

    def _close_and_end(self, end: Callable[[], None]) -> None:
        for adapter in self.adapters:
            adapter.close()
        self.thread.close()
        end()

    async def _carry_out(self, order: ControlOrder) -> Outcome | None:
        outcome = await self.control.carry_out(order)
        if outcome is not None:
            self._numbers.carried_out(outcome)
            self._restarting = self._restarting or outcome.restarting
        if self._end is not None and self._restarting and order.kind == Order.CLOSE:  # the daemon has noted it
            logger.warning("this process ends, to start again with the version's config: %s", order.reason)
            threading.Thread(target=self._close_and_end, args=(self._end,), name="resharder-end", daemon=True).start()
        return outcome

    def _status(self) -> tuple[Power, int, int]:
        return self.control.state.power, self.gate.in_flight, self.gate.serving
