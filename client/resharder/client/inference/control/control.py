"""The control side's part that talks to the engine: carries out orders (orders.py), one at a time, on the engine's event loop.

An engine that sleeps is paused as well: EngineCore.sleep (v1/engine/core.py; 0.26, 0.28 and 0.32) pauses the scheduler and, above
level 0, resets its prefix, multimodal and encoder caches and the KV connector. So APPLY with the weights awake and the KV cache
asleep needs no pause of its own. vLLM would go on by itself when the last tag wakes, with requests that a pause in mode `keep`
froze or that slipped in before the gate was shut; asked with STAY_PAUSED it does not, and only RESUME lets it.

`is_sleeping` is true of an engine that is merely paused (same file), so what sleeps is asked of the workers.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from resharder.client.inference.control.fence import Fenced, OrderClaim, acting
from resharder.client.inference.control.gate import Gate, Position
from resharder.client.inference.control.orders import ControlOrder, Kind, Outcome, State, Step, decide
from resharder.client.inference.engine import Engine, Mode
from resharder.client.inference.power import STAY_PAUSED, WEIGHTS, PowerState
from resharder.client.tracing import Timings, timed

logger = logging.getLogger("vllm.resharder.control")  # vLLM shows only what is under its own name


class WorkersFailed(Exception):
    """The message has every worker's word."""


class OrderExecutor:
    """Not for concurrent use: one order at a time. `reattach` ends the stream to the daemon; it may be called from the loop.
    `power_changed` is called when the engine fell asleep or woke. `cannot_sleep`: why not; empty where it
    can."""

    def __init__(
        self,
        engine: Engine,
        gate: Gate,
        reattach: Callable[[str], None],
        version_name: Callable[[int], str],
        power_changed: Callable[[], None],
        cannot_sleep: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine, self._gate, self._power_changed = engine, gate, power_changed
        self._reattach, self._version_name, self._clock = reattach, version_name, clock
        self.state = State(cannot_sleep=cannot_sleep)
        self._turn = asyncio.Lock()  # held by the task that carries out an order, or by another hand's call
        self._holder: asyncio.Task[Any] | None = None
        self._watch()

    async def carry_out(self, order: ControlOrder) -> Outcome | None:
        """Never raises but for cancellation; None where nothing is to be reported."""
        async with self._in_turn():
            return await self._carry_out(order)

    @asynccontextmanager
    async def _in_turn(self) -> AsyncIterator[None]:
        """One at a time; a task that is inside already goes on."""
        task = asyncio.current_task()
        if task is not None and task is self._holder:
            yield
            return
        async with self._turn:
            self._holder = task
            try:
                yield
            finally:
                self._holder = None

    async def _carry_out(self, order: ControlOrder) -> Outcome | None:
        try:
            if self._may_be_mistaken(order):
                await self.look()
            step = decide(self.state, self._gate.open_on, self._gate.lease.permits(order.span), order)
            with acting(self._claim(order)):
                outcome = step if isinstance(step, Outcome) else await self._take(step, order)
        except Fenced as refusal:
            self._gate.lease.saw(refusal.term)
            # Logged here as well: the stream may have ended already, and its own reason is another.
            logger.warning("%s of version %d (%s) was refused: %s", order.kind.name, order.version, order.install, refusal)
            self._reattach(f"{order.kind.name} was refused: {refusal}")
            return None
        except WorkersFailed as error:
            logger.error("%s of version %d (%s) failed: %s", order.kind.name, order.version, order.install, error)
            outcome = self._remember(Outcome(order.kind, order.install, False, str(error), self._paused()))
        except Exception as error:
            logger.exception("%s of version %d (%s) failed", order.kind.name, order.version, order.install)
            problem = f"{type(error).__name__}: {error}"
            outcome = self._remember(Outcome(order.kind, order.install, False, problem, self._paused()))
        return None if order.kind is Kind.LEAD else outcome

    def _claim(self, order: ControlOrder) -> OrderClaim:
        lease = self._gate.lease
        return OrderClaim(order.term, lambda: lease.until_in(order.span) if order.leased else None)

    def _must_hold(self, order: ControlOrder) -> None:
        """Raises Fenced where the order's lease has ended, or the stream that it came by."""
        if not self._gate.lease.permits(order.span):
            raise Fenced("its lease has ended")

    def _may_be_mistaken(self, order: ControlOrder) -> bool:
        """About how awake the engine is: others may have put it to sleep or woken it, another control side while it led too."""
        if order.kind is Kind.RESUME:
            return self.state.power > PowerState.AWAKE or self.state.dropped
        return self.state.leads(order) and self.state.paused_at is None and order.kind in (Kind.APPLY, Kind.SLEEP, Kind.WAKE)

    async def look(self) -> None:
        """Learns how awake the engine is. Raises WorkersFailed, and what vLLM raises."""
        if self.state.dropped or await self._engine.is_sleeping():
            self._learn(await self._workers("resharder_describe"))
        else:
            self._learn([])

    async def _take(self, step: Step, order: ControlOrder) -> Outcome | None:
        match step:
            case Step.LEAD:
                # Another side may have led, and resumed, since this one paused; then the pause does not hold any more.
                went_on = self.state.led is not None and order.term == self.state.led + 1
                self.state = replace(self.state, led=order.term, paused_at=self.state.paused_at if went_on else None)
                self._learn(await self._workers("resharder_describe"))  # the engine's fence learns the term by this call
                return None
            case Step.STAGE:
                base = [self._version_name(order.ahead_of)] if order.ahead_of else []
                await self._workers("resharder_stage", order.install, self._version_name(order.version), *base)
            case Step.UNSTAGE:
                await self._workers("resharder_unstage", order.install)
                self.state = replace(self.state, staged=None)
            case Step.APPLY:
                return await self._apply(order)
            case Step.RESUME:
                return await self._resume(order)
            case Step.HOLD:
                self._gate.hold(order.reason or "a version is being installed")
            case Step.SHUT:
                self._gate.shut(order.reason or "the daemon closed the gate")
            case Step.SLEEP:
                await self._sleep(order)
            case Step.WAKE:
                await self._wake(order.power)
            case Step.REATTACH:
                self._reattach(f"the lease expired before {order.kind.name}")
                return None
        return self._remember(Outcome(order.kind, order.install))

    async def _apply(self, order: ControlOrder) -> Outcome | None:
        self._gate.hold(f"version {order.version} is being installed")
        timings: Timings = []
        try:
            if self.state.paused_at is None and self.state.power != PowerState.WEIGHTS_AWAKE:
                began = self._clock()
                with timed(timings, "pause"):
                    await pause(self._engine, order.mode)
                self.state = replace(self.state, paused_at=began)
            self._must_hold(order)  # a pause that waits for requests to end can outlive the lease
            self.state = replace(self.state, stale=True)
            with timed(timings, "workers"):
                await self._workers("resharder_apply", order.install, *([True] if order.profile else []))
            with timed(timings, "reset"):
                await self._reset_caches()
        except Fenced:
            raise
        except BaseException:
            self._gate.shut(f"installing version {order.version} failed")
            raise
        self.state = replace(self.state, dropped=False)
        return self._remember(Outcome(order.kind, order.install, pause_seconds=self._paused(), timings=tuple(timings)))

    async def _reset_caches(self) -> None:
        """Of what the weights before have made, frozen requests' KV cache too: these are computed anew. All of it is bookkeeping,
        which vLLM can reset while the KV cache itself sleeps. The pause leaves it to this, since what the engine does after it (a
        KV connector's saves, dummy batches of idle replicas) has to go as well. Raises WorkersFailed."""
        prefix, *_ = await asyncio.gather(
            self._engine.reset_prefix_cache(reset_running_requests=True, reset_connector=True),
            self._engine.reset_mm_cache(),
            self._engine.reset_encoder_cache(),
        )
        if not prefix:
            raise WorkersFailed("expected the prefix cache and its KV connector to be reset, got a refusal by vLLM")
        self.state = replace(self.state, stale=False)

    async def _resume(self, order: ControlOrder) -> Outcome:
        # A leader may have taken over from one that paused the engine, or put it to sleep, and not got as far as the caches.
        leads = self.state.leads(order)
        paused = leads and (self.state.paused_at is not None or await self._engine.is_paused())
        if not paused and self._gate.open_on == order.version:
            self.state = replace(self.state, resumed_in=order.term if leads else self.state.resumed_in)
            return self.state.resumed_as(order)
        if paused and self.state.paused_at is None:
            await self.look()
            decided = decide(self.state, None, self._gate.lease.permits(order.span), order)
            if isinstance(decided, Outcome):
                return decided
            self.state = replace(self.state, stale=True)
        timings: Timings = []
        if leads and self.state.stale:
            with timed(timings, "reset"):
                await self._reset_caches()
        if paused:
            self._must_hold(order)
            with timed(timings, "resume"):
                await self._engine.resume_generation()
        outcome = Outcome(order.kind, order.install, pause_seconds=self._paused(), timings=tuple(timings))
        self.state = replace(self.state, paused_at=None, resumed_in=order.term if leads else self.state.resumed_in)
        lapses = self._gate.lease.lapses
        self._must_hold(order)
        self.state = replace(self.state, resumed=outcome)
        self._gate.open(order.version, lapses)
        logger.info("serving version %d after a pause of %.3f s", order.version, outcome.pause_seconds)
        return outcome

    # Sleep and wake

    async def _sleep(self, order: ControlOrder) -> None:
        """Raises WorkersFailed where the engine is not so afterwards."""
        self._gate.shut("an operator put it to sleep")
        if self.state.power == order.power:
            return
        await self._wake(
            PowerState.AWAKE
        )  # vLLM's sleep does nothing while anything sleeps (0.26 and 0.28), or the weights (0.32)
        if order.mode == "wait":  # vLLM's sleep would wait by itself, and then sleep whether or not the lease still lives
            await pause(self._engine, order.mode)
        await self._engine.sleep(level=order.power.level, mode=order.mode)
        self.state = replace(self.state, paused_at=None, applied=None, resumed=None)
        self._expect(self.state.power == order.power, order.power)

    async def _wake(self, power: PowerState) -> None:
        """Leaves the engine paused, and the gate where it is. Raises WorkersFailed where the engine is not so afterwards."""
        tags = [tag for tag in self.state.asleep if tag == WEIGHTS or power == PowerState.AWAKE]
        if not tags:
            return
        began = self._clock()
        # Each by its name: where none is named, 0.26 maps the memory of those that are awake a second time.
        await self._engine.wake_up([*tags, STAY_PAUSED])
        self._expect(self.state.power <= power, power)
        if power == PowerState.AWAKE:
            self.state = replace(self.state, paused_at=began)

    def _expect(self, holds: bool, power: PowerState) -> None:
        """vLLM only logs it where it does not sleep or wake."""
        if not holds:
            raise WorkersFailed(f"expected the engine to be {power.name}, it is {self.state.power.name}")

    def _watch(self) -> None:
        """Coordinates sleep, wake_up and resume_generation with orders, for all who call them through this client: vLLM's routes,
        the program around the engine. Each waits for the order that is being carried out, and none ends the pause of an install.
        Weights that were dropped are not served, whoever dropped them."""
        sleep, wake_up, resume = self._engine.sleep, self._engine.wake_up, self._engine.resume_generation

        async def watched_sleep(level: int = 1, mode: Mode = "abort") -> None:
            async with self._in_turn():
                if level == 2 and self._gate.position is not Position.SHUT:
                    self._gate.shut("vLLM was put to sleep at level 2, which drops the weights")
                try:
                    await sleep(level, mode)
                finally:
                    await self.look()

        async def watched_wake_up(tags: list[str] | None = None) -> object:
            async with self._in_turn():
                dropped = self.state.dropped and self.state.asleep
                if (dropped or self.state.paused_at is not None) and STAY_PAUSED not in (tags or ()):
                    tags = [*(tags or self.state.asleep), STAY_PAUSED]
                try:
                    return await wake_up(tags)  # type: ignore[arg-type]  # vLLM's own takes None for all
                finally:
                    await self.look()

        async def watched_resume() -> None:
            ours = asyncio.current_task() is self._holder
            async with self._in_turn():
                if ours or self.state.paused_at is None:
                    await resume()
                else:
                    logger.warning("resume_generation by another caller is ignored: an install has paused the engine")

        self._engine.sleep, self._engine.wake_up = watched_sleep, watched_wake_up  # type: ignore[method-assign]
        self._engine.resume_generation = watched_resume  # type: ignore[method-assign]

    def _learn(self, answers: Sequence[Any]) -> None:
        """From what workers say of themselves; none: the engine is awake."""
        before = self.state.power
        power = PowerState(max((answer["power"] for answer in answers), default=PowerState.AWAKE))
        asleep = {tag for answer in answers for tag in answer["asleep"]}
        dropped = any(answer["dropped"] for answer in answers) if answers else self.state.dropped
        self.state = replace(self.state, power=power, asleep=tuple(sorted(asleep)), dropped=dropped)
        if power != before:
            self._power_changed()

    async def _workers(self, method: str, *args: Any) -> Sequence[Any]:
        """What the workers answered. With data parallelism those of the first engine alone answer, so every worker also reports
        to the daemon by itself. Raises WorkersFailed."""
        answers = await self._engine.collective_rpc(method, args=args)
        if problems := [problem for answer in answers if (problem := _problem(method, answer))]:
            raise WorkersFailed("; ".join(problems))
        return answers

    def _remember(self, outcome: Outcome) -> Outcome:
        match outcome.kind:
            case Kind.STAGE:
                self.state = replace(self.state, staged=outcome)
            case Kind.APPLY:
                self.state = replace(self.state, applied=outcome)
            case Kind.SLEEP | Kind.WAKE:
                self.state = replace(self.state, changed=outcome)
        return outcome

    def _paused(self) -> float:
        return 0.0 if self.state.paused_at is None else self._clock() - self.state.paused_at


async def pause(engine: Engine, mode: Mode) -> None:
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


def _problem(method: str, answer: Any) -> str:
    if not isinstance(answer, dict) or "ok" not in answer:
        return f"{method}: expected a worker's answer with `ok`, got {answer!r}"
    return "" if answer["ok"] else f"worker {answer.get('rank', '?')}: {answer.get('error') or 'no reason given'}"
