"""An order executor over a fake engine, with the orders that tests give it."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

from resharder.client.inference.control.control import OrderExecutor
from resharder.client.inference.control.gate import Gate, Position, ServerLease
from resharder.client.inference.control.orders import ControlOrder, Outcome
from resharder.client.inference.engine import STAY_PAUSED, SleepState
from resharder.client.inference.version_page import Journal
from resharder.client.inference.vllm.engine_core import pausing
from resharder.v1.resources_pb2 import Power
from resharder.v1.server_pb2 import Order

LEAD = ControlOrder(Order.LEAD)
FINE = [{"ok": True, "rank": 0}, {"ok": True, "rank": 1}]
RESETS = [("reset prefix", True, True), "reset mm", "reset encoder"]
TORN = [{"ok": True, "rank": 0}, {"ok": False, "rank": 1, "error": "digest of lm_head.weight differs"}]


class FakeEngine:
    """Writes down what is asked of it, together with where the gate stood. It sleeps as vLLM 0.26 does."""

    def __init__(self, gate: Gate) -> None:
        self.gate, self.lease = gate, gate.lease
        self.engine_core: Core | None = None
        self.slumber, self.dropped, self.version = SleepState(), False, 1
        self.calls: list[Any] = []
        self.positions: dict[str, Position] = {}
        self.answers: dict[str, Sequence[Any]] = {}
        self.failing: set[str] = set()
        self.paused = False
        self.cache_resets = True
        self.lease_ends_while_pausing = False
        self.others: list[dict[str, Any]] = []  # what further workers say of themselves

    def _note(self, name: str, *details: Any) -> None:
        self.calls.append((name, *details) if details else name)
        self.positions[name] = self.gate.position
        if name in self.failing:
            raise RuntimeError(f"{name} broke")

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self._note("pause", mode, clear_cache)
        self.paused = True
        if self.lease_ends_while_pausing:
            self.lease.until = float("-inf")

    async def resume_generation(self) -> None:
        self._note("resume")
        self.paused = False

    async def is_paused(self) -> bool:
        return self.paused

    async def sleep(self, level: int, mode: str) -> None:
        self._note("sleep", level, mode)
        self.paused = True
        if not self.slumber.tags:
            self.slumber.begin(level)
            self.dropped = self.dropped or level == 2

    async def wake_up(self, tags: list[str]) -> None:
        self._note("wake", *tags)
        if set(tags) - {STAY_PAUSED} <= self.slumber.tags:
            self.slumber.end(tags)
        self.paused = self.paused and (STAY_PAUSED in tags or bool(self.slumber.tags))

    async def is_sleeping(self) -> bool:
        return self.paused or bool(self.slumber.tags)

    async def collective_rpc(self, method: str, *, args: tuple[Any, ...] = ()) -> Sequence[Any]:
        if method == "resharder_describe":
            asleep = sorted(self.slumber.tags)
            return [
                {"ok": True, "version": self.version, "power": self.slumber.power, "asleep": asleep, "dropped": self.dropped},
                *self.others,
            ]
        self._note(method, *args)
        self.dropped = self.dropped and method != "resharder_apply"
        return self.answers.get(method, FINE)

    async def reset_prefix_cache(self, reset_running_requests: bool, reset_connector: bool) -> bool:
        self._note("reset prefix", reset_running_requests, reset_connector)
        return self.cache_resets

    async def reset_mm_cache(self) -> None:
        self._note("reset mm")

    async def reset_encoder_cache(self) -> None:
        self._note("reset encoder")


class Side:
    """A control side at time `now`, with a lease of 10 s from 0."""

    def __init__(
        self,
        *,
        leads: bool = True,
        cannot_sleep: str = "",
        engine: FakeEngine | None = None,
        gate: Gate | None = None,
        why_restart: Callable[[str], str] | None = None,
    ) -> None:
        self.now, self.journal = 0.0, Journal()
        self.lease = gate.lease if gate else ServerLease(lambda: self.now)
        self.gate = gate or Gate(lease=self.lease, clock=lambda: self.now)
        self.lease.renew(10.0)
        self.engine = engine or FakeEngine(self.gate)
        self.reattached: list[str] = []
        self.reported_power: list[Power] = []
        self.control = OrderExecutor(
            self.engine,
            self.gate,
            self.reattached.append,
            lambda n: f"models/policy/versions/{n}",
            lambda: self.reported_power.append(self.control.state.power),
            cannot_sleep,
            lambda: self.now,
            lambda: self.journal,
            why_restart,
            pausing(self.engine),
        )
        if leads:
            self.do(LEAD)
            self.engine.calls.clear()

    def do(self, *orders: ControlOrder) -> Outcome | None:
        """Carries them out; the last one's outcome."""
        return [run(self.control.carry_out(replace(order, span=self.lease.span))) for order in orders][-1]


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


def apply(version: int, install: str = "i1", mode: Any = "keep") -> ControlOrder:
    return ControlOrder(Order.APPLY, install, version, mode)


def resume(version: int, install: str = "i1") -> ControlOrder:
    return ControlOrder(Order.RESUME, install, version)


def stage(version: int, install: str = "i1") -> ControlOrder:
    return ControlOrder(Order.STAGE, install, version)


def sleep(level: int, change: str = "p1", mode: Any = "keep") -> ControlOrder:
    return ControlOrder(Order.SLEEP, change, mode=mode, power=Power.ASLEEP_2 if level == 2 else Power.ASLEEP_1)


def wake(power: Power = Power.AWAKE, change: str = "p2") -> ControlOrder:
    return ControlOrder(Order.WAKE, change, power=power)


def serving(version: int = 1, **options: Any) -> Side:
    side = Side(**options)
    side.do(resume(version, "i0"))
    side.engine.calls.clear()
    return side


class Core:
    """vLLM's own client of its engine core, behind an AsyncLLM."""

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine

    async def pause_scheduler_async(self, *, mode: str, clear_cache: bool) -> None:
        self._engine._note("pause at once", mode, clear_cache)
        self._engine.paused = True
