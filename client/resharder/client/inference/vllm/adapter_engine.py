"""The adapters of a vLLM server, on the side of its API servers: for each a control side of its own, as for the server's model.

For the daemon, an adapter on a server is a server that follows the adapter's model. Its orders are carried out by the same
`OrderExecutor` as the model's, on an `AdapterEngine`, which has nothing to pause: a version is loaded into a slot of its own
while the engine computes. The pause mode is that of the install's APPLY: with WAIT, requests in progress end on the version that
they began with, and the last one frees its slot; with KEEP they go on with the new version, with ABORT they end
(`engine_core.py`).
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from contextvars import Context
from typing import Any

from resharder.client.inference.control.control import OrderExecutor
from resharder.client.inference.control.gate import Gate, Refusal
from resharder.client.inference.control.lease import ControlIdentity, LeaseThread
from resharder.client.inference.control.orders import ControlOrder, Outcome
from resharder.client.inference.engine import Mode
from resharder.client.inference.settings import PluginSettings
from resharder.client.inference.version_page import Page, page
from resharder.client.inference.vllm.adapter_ids import request_of
from resharder.client.inference.vllm.engine_core import ADAPTER
from resharder.client.inference.worker.adapter_agent import adapter_id
from resharder.client.rpc.channel import Channel
from resharder.v1.resources_pb2 import Power
from resharder.v1.server_pb2 import Order

logger = logging.getLogger("vllm.resharder.adapter")

_TRY_SECONDS = 0.1  # between attempts to get a slot, and between the first two to free one
_LONGEST_PAUSE_SECONDS = 1.0  # between attempts to free a slot: each interrupts the engine
_SLOT_SECONDS = 60.0  # for requests of an older version to end, before staging fails for want of a slot
_METHODS = {f"resharder_{method}": method for method in ("describe", "stage", "unstage", "apply")}


class AdapterEngine:
    """The engine as the control side of one adapter sees it: `engine.Engine`.

    Args:
        engine: vLLM's `AsyncLLM`.
        adapter: Model of the adapter.
    """

    def __init__(self, engine: Any, adapter: str) -> None:
        self._engine, self._adapter = engine, adapter
        self._renumbered = False
        self._mode: Mode = "wait"  # of the next apply
        self._releasing: asyncio.Task[None] | None = None

    async def collective_rpc(self, method: str, *, args: tuple[Any, ...] = ()) -> Sequence[Any]:
        """Call a method of the adapter's agents."""
        called = _METHODS[method]
        if called == "stage":
            answers = await self._stage(*args[:2])
            self._release_soon()  # if it fails
            return answers
        if called != "apply":
            answers = await self._call(called, *args)
        else:
            answers = await self._call(called, args[0], self._mode)
        if called == "apply" and answers:
            self._renumbered = any(answer.get("renumbered") for answer in answers)
        if called in ("apply", "unstage"):
            self._release_soon()
        return answers

    async def _stage(self, install: str, version: str) -> Sequence[Any]:
        deadline = time.monotonic() + _SLOT_SECONDS
        while True:
            waits = time.monotonic() < deadline
            answers = await self._call("stage", install, version, waits)
            if not waits or not any(answer.get("full") for answer in answers):
                return answers
            await asyncio.sleep(_TRY_SECONDS)
            await self._call("release")

    def _release_soon(self) -> None:
        if self._releasing is None or self._releasing.done():
            loop, unclaimed = asyncio.get_running_loop(), Context()  # the order's lease may end before the requests do
            self._releasing = loop.create_task(self._release(), context=unclaimed)

    async def _release(self) -> None:
        """Free the slots of versions that are superseded or were staged in vain, each when its last request has ended."""
        left, pause = True, _TRY_SECONDS
        while left:
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            try:
                left = any(answer.get("left") for answer in await self._call("release"))
            except Exception as error:  # the engine has ended
                logger.info("adapter %s: superseded versions stay in their slots: %s", self._adapter, error)
                return

    async def _call(self, method: str, *args: Any) -> Sequence[Any]:
        answers: Sequence[Any] = await self._engine.engine_core.call_utility_async(ADAPTER, self._adapter, method, list(args))
        return answers

    async def reset_prefix_cache(self, reset_running_requests: bool, reset_connector: bool) -> bool:
        """Return whether the cache is right: it is keyed by a version's name, which only a new store gives a second time."""
        if not self._renumbered:
            return True
        self._renumbered = not await self._engine.reset_prefix_cache(reset_running_requests, reset_connector)
        return not self._renumbered

    async def pause_generation(self, *, mode: Mode, clear_cache: bool) -> None:
        """Note what happens to requests in progress when a version is applied. The engine goes on."""
        self._mode = mode

    async def resume_generation(self) -> None:
        """Do nothing."""

    async def is_paused(self) -> bool:
        """Return False."""
        return False

    async def sleep(self, level: int, mode: Mode) -> None:
        """Raise: an adapter sleeps with its base."""
        raise RuntimeError("an adapter sleeps with its base: put the base's server to sleep")

    async def wake_up(self, tags: list[str]) -> object:
        """Do nothing."""
        return None

    async def is_sleeping(self) -> bool:
        """Return False."""
        return False

    async def reset_mm_cache(self) -> None:
        """Do nothing."""

    async def reset_encoder_cache(self) -> None:
        """Do nothing."""


class Adapter:
    """One adapter on one API server or embedded engine: its gate, its control side, and the version that new requests get."""

    def __init__(self, engine: Any, index: int, settings: PluginSettings, world_size: int, address: str) -> None:
        own = settings.of_adapter(index)
        self.name, self._index = own.model, index
        self._base_version = 0  # the only version of the base with which this one may be served; 0: any
        self.gate = Gate(hold_seconds=settings.hold_seconds)
        self.page: Page = page(own.model)
        identity = ControlIdentity(own.server, world_size, address, own.model, own.fleet, base_server=own.base_server)
        loop = asyncio.get_running_loop()
        self._thread = LeaseThread(
            Channel(own.endpoint), identity, self.gate.lease, self._carry_out, self._status, loop, lambda: ""
        )
        self._control = OrderExecutor(
            AdapterEngine(engine, own.model),
            self.gate,
            self._thread.reattach,
            lambda version: f"models/{own.model}/versions/{version}",
            self._thread.report_now,
            "an adapter sleeps with its base",
            journal=self.page.read,
        )

    @property
    def version(self) -> int:
        """The version that new requests get; 0 for none."""
        return self.page.read().last

    def request(self) -> Any:
        """Return vLLM's `LoRARequest` of that version.

        Raises:
            KeyError: There is none.
        """
        if not (version := self.version):
            raise KeyError(self.name)
        return request_of(self.name, adapter_id(self._index, version), version)

    def unbound(self) -> Refusal | None:
        """Return why requests are refused although the gate is open: the base is at another version than the adapter's."""
        base = page().version
        if not self._base_version or base == self._base_version:
            return None
        return Refusal(
            f"version {self.gate.version} of {self.name} was trained on version {self._base_version} of its base, which is at "
            f"{base or 'none'}"
        )

    async def start(self) -> None:
        """Attach to the daemon. Returns at once, even if the daemon is away."""
        await self._control.refresh_power()
        self._thread.start()

    def leave(self) -> None:
        """Announce the end of this process to the daemon."""
        self._thread.leave()
        self._control.release()

    def close(self) -> None:
        """Release the lease of the adapter's server."""
        self._thread.close()
        self._control.release()

    async def _carry_out(self, order: ControlOrder) -> Outcome | None:
        if order.kind == Order.RESUME:
            self._base_version = order.base_version  # before the gate opens on it
        return await self._control.carry_out(order)

    def _status(self) -> tuple[Power, int, int]:
        return self._control.state.power, self.gate.in_flight, self.gate.serving
