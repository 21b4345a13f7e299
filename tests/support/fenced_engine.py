"""Control sides of one engine core, which is simulated as vLLM's is built: one call after the other."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextvars import Context
from typing import Any

from resharder.client.inference.control.control import OrderExecutor
from resharder.client.inference.control.fence import FENCED, Fence
from resharder.client.inference.control.gate import Gate, Position, ServerLease
from resharder.client.inference.control.orders import ControlOrder, Outcome
from resharder.client.inference.engine import STAY_PAUSED, SleepState
from resharder.client.inference.vllm.engine_core import guard, pausing
from resharder.v1.server_pb2 import Order

LEASE = 10.0
OWN_TERM, NEXT_TERM = 1, 2
METHODS = ("resharder_stage", "resharder_unstage", "resharder_apply")


class Core:
    """State of an engine core. `done`: its changes, in order."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.fence = Fence(clock)
        self.paused, self.slumber, self.done = False, SleepState(), list[str]()
        self.version = 1

    def handle(self, method: str, args: Sequence[Any]) -> Any:
        if method == FENCED:
            token, method, args = args
            refusal = self.fence.refuse(token)
            return self.fence.refused(refusal) if refusal else self.handle(method, args)
        return getattr(self, method)(*args)

    def pause_scheduler(self, mode: str, clear_cache: bool) -> None:
        self.paused = True
        self.done.append("pause")

    def resume_scheduler(self) -> None:
        self.paused = False
        self.done.append("resume")

    def is_scheduler_paused(self) -> bool:
        return self.paused

    def is_sleeping(self) -> bool:
        return self.paused or bool(self.slumber.tags)

    def sleep(self, level: int, mode: str) -> None:
        self.paused = True
        self.slumber.begin(level)
        self.done.append("sleep")

    def wake_up(self, tags: list[str]) -> None:
        self.slumber.end(tags)
        self.paused = self.paused and (STAY_PAUSED in tags or bool(self.slumber.tags))
        self.done.append("wake")

    def reset_prefix_cache(self, running: bool, connector: bool) -> bool:
        self.done.append("reset")
        return True

    def reset_mm_cache(self) -> None: ...
    def reset_encoder_cache(self) -> None: ...

    def collective_rpc(self, method: str, args: Sequence[Any]) -> list[dict[str, Any]]:
        if method in METHODS:
            self.done.append(method)
        power, asleep = self.slumber.power, sorted(self.slumber.tags)
        return [{"ok": True, "version": self.version, "power": power, "asleep": asleep, "dropped": False}]


async def alone(act: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """In no order's context, as another process is."""
    await asyncio.create_task(act(), context=Context())


class Client:
    """The calls reach the core after whatever `meanwhile` does: their sender was stopped when they were on their way."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.meanwhile: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {}
        self.afterwards: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {}

    async def _call_utility_async(self, method: str, *args: Any) -> Any:
        name = args[1] if method == FENCED else method
        if name == "collective_rpc":
            name = args[-1][0] if method == FENCED else args[0]
        if stopped := self.meanwhile.pop(name, None):
            await alone(stopped)
        answer = self.core.handle(method, args)
        if stopped := self.afterwards.pop(name, None):
            await alone(stopped)
        return answer

    async def pause_scheduler_async(self, *, mode: str, clear_cache: bool) -> None:
        await self._call_utility_async("pause_scheduler", mode, clear_cache)


class AsyncEngine:
    """vLLM's AsyncLLM, as far as control sides use it."""

    def __init__(self, core: Core) -> None:
        self.engine_core = Client(core)
        guard(self.engine_core)
        self._call = lambda *args: self.engine_core._call_utility_async(*args)

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        raise NotImplementedError("control sides pause the engine core itself")

    async def resume_generation(self) -> None:
        await self._call("resume_scheduler")

    async def is_paused(self) -> bool:
        return bool(await self._call("is_scheduler_paused"))

    async def sleep(self, level: int, mode: str) -> None:
        await self._call("sleep", level, mode)

    async def wake_up(self, tags: list[str]) -> None:
        await self._call("wake_up", tags)

    async def is_sleeping(self) -> bool:
        return bool(await self._call("is_sleeping"))

    async def collective_rpc(self, method: str, *, args: tuple[Any, ...] = ()) -> Any:
        return await self._call("collective_rpc", method, args)

    async def reset_prefix_cache(self, reset_running_requests: bool, reset_connector: bool) -> bool:
        return bool(await self._call("reset_prefix_cache", reset_running_requests, reset_connector))

    async def reset_mm_cache(self) -> None:
        await self._call("reset_mm_cache")

    async def reset_encoder_cache(self) -> None:
        await self._call("reset_encoder_cache")


class Server:
    """One engine core, and control sides that share its clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.core = Core(lambda: self.now)

    def side(self) -> "Side":
        return Side(self)


class Side:
    def __init__(self, server: Server) -> None:
        self.server = server
        self.lease = ServerLease(lambda: server.now)
        self.gate = Gate(lease=self.lease, clock=lambda: server.now)
        self.engine = AsyncEngine(server.core)
        self.reattached: list[str] = []
        names, clock = (lambda n: f"models/policy/versions/{n}"), (lambda: server.now)
        self.control = OrderExecutor(
            self.engine,  # type: ignore[arg-type]
            self.gate,
            self.reattached.append,
            names,
            lambda: None,
            clock=clock,
            pause=pausing(self.engine),
        )
        self.renew()

    def renew(self) -> None:
        self.lease.renew(self.server.now + LEASE)

    async def do(self, kind: Order.Kind, version: int = 0, *, term: int = OWN_TERM, **fields: Any) -> Outcome | None:
        order = ControlOrder(kind, fields.pop("install", f"i{version}"), version, term=term, span=self.lease.span, **fields)
        return await self.control.carry_out(order)

    async def serve(self, version: int, term: int = OWN_TERM) -> None:
        await self.do(Order.LEAD, term=term)
        await self.do(Order.RESUME, version, term=term)
        assert self.gate.position is Position.OPEN

    async def past_its_lease(self) -> None:
        self.server.now = self.lease.until + 1

    async def past_its_lease_and_renewed(self) -> None:
        """Its thread went on before its event loop did."""
        await self.past_its_lease()
        self.renew()

    async def cut_off(self) -> None:
        self.lease.end_span()
