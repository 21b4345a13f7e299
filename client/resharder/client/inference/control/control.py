"""Execution of the daemon's orders (`orders.py`) on the engine, one at a time, on the engine's event loop.

A sleeping engine is also paused: vLLM's `EngineCore.sleep` (`v1/engine/core.py`; 0.26, 0.28 and 0.32)
pauses the scheduler and, above level 0, resets the prefix, multimodal and encoder caches and the KV
connector. APPLY with awake weights and a sleeping KV cache therefore needs no pause of its own.

When the last tag wakes, vLLM resumes by itself, with the requests that a pause in mode `keep` froze or
that arrived before the gate closed. With `STAY_PAUSED` among the tags it stays paused until RESUME.

vLLM's `is_sleeping` (same file) is also true for an engine that is only paused. The workers report
which tags sleep.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from resharder.client.inference.control.fence import Fenced, OrderClaim, acting
from resharder.client.inference.control.gate import Gate, Position
from resharder.client.inference.control.orders import ControlOrder, Outcome, State, Step, decide
from resharder.client.inference.engine import SLEEP_LEVELS, STAY_PAUSED, WEIGHTS, Engine, Mode
from resharder.client.inference.version_page import Journal
from resharder.client.tracing import Timings, timed
from resharder.converters.failpoints import failpoint
from resharder.v1.resources_pb2 import Power
from resharder.v1.server_pb2 import Order

_INSTALLS = ("resharder_stage", "resharder_apply")
logger = logging.getLogger("resharder.inference.control")


class WorkersFailed(Exception):
    """A call to the workers failed. The message has the error of each worker."""


class InstallFailed(WorkersFailed):
    """Workers failed to stage or apply an install. Each reports it to the daemon itself."""


class OrderExecutor:
    """Executes orders on an engine, one at a time, and serialises other callers' sleep, wake and resume with them.

    Args:
        engine: The engine's client. Its `sleep`, `wake_up` and `resume_generation` are replaced by
            versions that wait for the order in progress.
        gate: The gate to hold, open and close.
        reattach: Ends the stream to the daemon, so that another follows. Called on the event loop.
        version_name: Returns the full name of a version from its number.
        power_changed: Called when the engine fell asleep or woke.
        cannot_sleep: Reason why the engine cannot sleep; empty if it can.
        clock: A monotonic clock, in seconds.
        journal: Returns the versions that the workers on this host have installed; without it, RESUME does not compare them.
        why_restart: Returns why the engine must start again for a version, given its name; empty if it need not. Without it, the
            engine is not ended for a version. Called on a thread.
        pause: Pauses the engine: on return no step is in progress and none begins, and caches are unchanged. By default the
            engine's `pause_generation`.
    """

    def __init__(
        self,
        engine: Engine,
        gate: Gate,
        reattach: Callable[[str], None],
        version_name: Callable[[int], str],
        power_changed: Callable[[], None],
        cannot_sleep: str = "",
        clock: Callable[[], float] = time.monotonic,
        journal: Callable[[], Journal] = Journal,
        why_restart: Callable[[str], str] | None = None,
        pause: Callable[[Mode], Awaitable[object]] | None = None,
    ) -> None:
        self._engine, self._gate, self._power_changed = engine, gate, power_changed
        self._pause = pause or (lambda mode: engine.pause_generation(mode=mode, clear_cache=False))
        self._journal, self._why_restart = journal, why_restart
        self._reattach, self._version_name, self._clock = reattach, version_name, clock
        self.state, self._released = State(cannot_sleep=cannot_sleep), False
        self._lock = asyncio.Lock()  # of the task that executes an order, or of another caller's sleep, wake or resume
        self._lock_owner: asyncio.Task[Any] | None = None
        self._serialise_other_callers()

    def release(self) -> None:
        """Let other callers' sleep, wake and resume pass, as if the engine had no control side. No order follows."""
        self._released = True

    async def carry_out(self, order: ControlOrder) -> Outcome | None:
        """Execute an order.

        Returns:
            The outcome to report, or `None`. Errors become outcomes; only cancellation raises.
        """
        async with self._exclusive():
            return await self._carry_out(order)

    @asynccontextmanager
    async def _exclusive(self) -> AsyncIterator[None]:
        """Acquire the lock; reentrant for the task that has it."""
        task = asyncio.current_task()
        if task is not None and task is self._lock_owner:
            yield
            return
        async with self._lock:
            self._lock_owner = task
            try:
                yield
            finally:
                self._lock_owner = None

    async def _carry_out(self, order: ControlOrder) -> Outcome | None:
        kind = Order.Kind.Name(order.kind)
        try:
            if self._power_may_be_outdated(order):
                await self.refresh_power()
            step = decide(self.state, self._gate.open_on, self._gate.lease.permits(order.span), order)
            lease = self._gate.lease
            with acting(OrderClaim(order.term, lambda: lease.until_in(order.span) if order.leased else None)):
                outcome = step if isinstance(step, Outcome) else await self._take(step, order)
        except Fenced as refusal:
            self._gate.lease.observe_term(refusal.term)
            # Logged here as well, because the stream may already have ended for another reason.
            logger.warning("%s of version %d (%s) was refused: %s", kind, order.version, order.install, refusal)
            self._reattach(f"{kind} was refused: {refusal}")
            return None
        except WorkersFailed as error:
            logger.error("%s of version %d (%s) failed: %s", kind, order.version, order.install, error)
            by_workers = isinstance(error, InstallFailed)
            outcome = self._record(
                Outcome(order.kind, order.install, False, str(error), self._paused(), workers_failed=by_workers)
            )
        except Exception as error:
            logger.exception("%s of version %d (%s) failed", kind, order.version, order.install)
            problem = f"{type(error).__name__}: {error}"
            outcome = self._record(Outcome(order.kind, order.install, False, problem, self._paused()))
        return None if order.kind == Order.LEAD else outcome

    def _check_lease(self, order: ControlOrder) -> None:
        """Raise `Fenced` if the order's lease, or the stream that delivered the order, has ended."""
        if not self._gate.lease.permits(order.span):
            raise Fenced("its lease has ended")

    def _power_may_be_outdated(self, order: ControlOrder) -> bool:
        """Whether another caller, or another control side while it led, may have put the engine to sleep or woken it."""
        if order.kind == Order.RESUME:
            return self.state.power > Power.AWAKE or self.state.dropped
        return self.state.leads(order) and self.state.paused_at is None and order.kind in (Order.APPLY, Order.SLEEP, Order.WAKE)

    async def refresh_power(self) -> None:
        """Update the power state from the engine and its workers.

        Raises:
            WorkersFailed: A worker did not answer. Errors of the engine itself propagate.
        """
        if self.state.dropped or await self._engine.is_sleeping():
            self._update_power(await _call_workers(self._engine, "resharder_describe"))
        else:
            self._update_power([])

    async def _take(self, step: Step, order: ControlOrder) -> Outcome | None:
        match step:
            case Step.LEAD:
                await self._lead(order)
                return None
            case Step.STAGE if why := await self._restart_for(order):
                return self._record(Outcome(order.kind, order.install, False, why, restarting=True))
            case Step.STAGE:
                base = [self._version_name(order.ahead_of)] if order.ahead_of else []
                await _call_workers(self._engine, "resharder_stage", order.install, self._version_name(order.version), *base)
            case Step.UNSTAGE:
                await _call_workers(self._engine, "resharder_unstage", order.install)
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
                self._reattach(f"the lease expired before {Order.Kind.Name(order.kind)}")
                return None
        return self._record(Outcome(order.kind, order.install))

    async def _restart_for(self, order: ControlOrder) -> str:
        """Return why the server starts again for the version of a STAGE order; empty if it does not."""
        if self._why_restart is None or order.boots_another or order.profile:
            return ""
        return await asyncio.to_thread(self._why_restart, self._version_name(order.version))

    async def _lead(self, order: ControlOrder) -> None:
        """Lead from now on. Hold an open gate if the workers have another version than the one that it is open on.

        A side whose stream was cut may have missed the orders of an install that a former leader applied.
        """
        failpoint("control.lead")
        # If another side led in between, it may have resumed the engine: this side's pause no longer counts.
        consecutive = self.state.led is not None and order.term == self.state.led + 1
        try:
            answers = await _call_workers(self._engine, "resharder_describe")  # carries the term to the engine's fence
        finally:
            self.state = replace(self.state, led=order.term, paused_at=self.state.paused_at if consecutive else None)
        if self._gate.open_on is not None and {answer["version"] for answer in answers} != {self._gate.open_on}:
            self._gate.hold("the engine has another version, which is not confirmed yet")
        self._update_power(answers)

    async def _apply(self, order: ControlOrder) -> Outcome | None:
        self._gate.hold(f"version {order.version} is being installed")
        timings: Timings = []
        try:
            if self.state.paused_at is None and self.state.power != Power.WEIGHTS_AWAKE:
                began = self._clock()
                with timed(timings, "pause"):
                    failpoint("control.pause")
                    await self._pause(await _effective_mode(self._engine, order.mode))
                self.state = replace(self.state, paused_at=began)
            self._check_lease(order)  # a pause that waits for requests to end can outlive the lease
            failpoint("control.apply")
            self.state = replace(self.state, stale=True)
            with timed(timings, "workers"):
                await _call_workers(self._engine, "resharder_apply", order.install, *([True] if order.profile else []))
            with timed(timings, "reset"):
                await self._reset_caches()
        except Fenced:
            raise
        except BaseException:
            self._gate.shut(f"installing version {order.version} failed")
            raise
        self.state = replace(self.state, dropped=False)
        return self._record(Outcome(order.kind, order.install, pause_seconds=self._paused(), timings=tuple(timings)))

    async def _reset_caches(self) -> None:
        """Drop all caches that the previous weights filled, frozen requests' KV cache included; the engine recomputes them.

        The caches are reset here and not by the pause, because the engine still fills them after the
        pause (a KV connector's saves, dummy batches of idle replicas). The reset changes bookkeeping
        only, so it also works while the KV cache's memory sleeps.

        Raises:
            WorkersFailed: The engine did not reset the prefix cache or its KV connector.
        """
        failpoint("control.reset")
        prefix, *_ = await asyncio.gather(
            self._engine.reset_prefix_cache(reset_running_requests=True, reset_connector=True),
            self._engine.reset_mm_cache(),
            self._engine.reset_encoder_cache(),
        )
        if not prefix:
            raise WorkersFailed("the engine refused to reset the prefix cache and its KV connector")
        self.state = replace(self.state, stale=False)

    async def _resume(self, order: ControlOrder) -> Outcome | None:
        # A former leader may have paused the engine, or put it to sleep, and ended before it reset the caches.
        leads = self.state.leads(order)
        paused = leads and (self.state.paused_at is not None or await self._engine.is_paused())
        if not paused and self._gate.open_on == order.version:
            self.state = replace(self.state, resumed_in=order.term if leads else self.state.resumed_in)
            return self.state.resumed_as(order)
        if paused and self.state.paused_at is None:
            await self.refresh_power()
            decided = decide(self.state, None, self._gate.lease.permits(order.span), order)
            if isinstance(decided, Outcome):
                return decided
            self.state = replace(self.state, stale=True)
        if others := self._journal().others(order.version):
            found = ", ".join(f"worker {rank} has {installed or 'none'}" for rank, installed in others.items())
            logger.warning("not resuming on version %d (%s): %s", order.version, order.install, found)
            return None  # the daemon acted on a late report, and orders another version after the workers' next ones
        timings: Timings = []
        if leads and self.state.stale:
            with timed(timings, "reset"):
                await self._reset_caches()
        failpoint("control.resume")
        if paused:
            self._check_lease(order)
            with timed(timings, "resume"):
                await self._engine.resume_generation()
        outcome = Outcome(order.kind, order.install, pause_seconds=self._paused(), timings=tuple(timings))
        self.state = replace(self.state, paused_at=None, resumed_in=order.term if leads else self.state.resumed_in)
        lapses = self._gate.lease.lapses
        self._check_lease(order)
        self.state = replace(self.state, resumed=outcome)
        failpoint("control.open")
        self._gate.open(order.version, lapses)
        logger.info("serving version %d after a pause of %.3f s", order.version, outcome.pause_seconds)
        return outcome

    # Sleep and wake

    async def _sleep(self, order: ControlOrder) -> None:
        """Close the gate and put the engine to sleep.

        Raises:
            WorkersFailed: The engine does not reach the ordered power state.
        """
        self._gate.shut("an operator put the server to sleep")
        if self.state.power == order.power:
            return
        # vLLM's `sleep` is a no-op while any tag sleeps (0.26 and 0.28), or while the weights sleep (0.32).
        await self._wake(Power.AWAKE)
        mode = await _effective_mode(self._engine, order.mode)
        if mode == "wait":  # vLLM's `sleep` would wait too, but then sleep even if the lease has ended
            await self._pause(mode)
        failpoint("control.sleep")
        await self._engine.sleep(level=SLEEP_LEVELS[order.power], mode=mode)
        self.state = replace(self.state, paused_at=None, applied=None, resumed=None)
        self._expect(self.state.power == order.power, order.power)

    async def _wake(self, power: Power) -> None:
        """Wake the engine up to `power`. The engine stays paused and the gate unchanged.

        Raises:
            WorkersFailed: The engine does not reach the power state.
        """
        tags = [tag for tag in self.state.asleep if tag == WEIGHTS or power == Power.AWAKE]
        if not tags:
            return
        began = self._clock()
        # Tags are named, because vLLM 0.26 without tags maps the memory of awake tags a second time.
        failpoint("control.wake")
        await self._engine.wake_up([*tags, STAY_PAUSED])
        self._expect(self.state.power <= power, power)
        if power == Power.AWAKE:
            self.state = replace(self.state, paused_at=began)

    def _expect(self, reached: bool, power: Power) -> None:
        """Raise `WorkersFailed` unless `power` is reached: vLLM only logs a sleep or wake that has no effect."""
        if not reached:
            raise WorkersFailed(f"the engine is {Power.Name(self.state.power)}, not {Power.Name(power)}")

    def _serialise_other_callers(self) -> None:
        """Serialise `sleep`, `wake_up` and `resume_generation` of all callers of this client with orders.

        Callers are vLLM's routes and the program around the engine. A call waits for the order in
        progress and does not end the pause of an install. After any sleep at level 2 the gate stays
        closed and the engine paused until a version is installed.
        """
        sleep, wake_up, resume = self._engine.sleep, self._engine.wake_up, self._engine.resume_generation

        async def watched_sleep(level: int = 1, mode: Mode = "abort") -> None:
            if self._released:
                return await sleep(level, mode)
            async with self._exclusive():
                if level == 2 and self._gate.position is not Position.SHUT:
                    self._gate.shut("the engine was put to sleep at level 2, which drops the weights")
                try:
                    await sleep(level, mode)
                finally:
                    await self.refresh_power()

        async def watched_wake_up(tags: list[str] | None = None) -> object:
            if self._released:
                return await wake_up(tags)  # type: ignore[arg-type]
            async with self._exclusive():
                dropped = self.state.dropped and self.state.asleep
                if (dropped or self.state.paused_at is not None) and STAY_PAUSED not in (tags or ()):
                    tags = [*(tags or self.state.asleep), STAY_PAUSED]
                try:
                    return await wake_up(tags)  # type: ignore[arg-type]  # vLLM wakes all tags for None
                finally:
                    await self.refresh_power()

        async def watched_resume() -> None:
            ours = asyncio.current_task() is self._lock_owner
            async with self._exclusive():
                if ours or self._released or self.state.paused_at is None:
                    await resume()
                else:
                    logger.warning("ignoring another caller's resume_generation: an install has paused the engine")

        self._engine.sleep, self._engine.wake_up = watched_sleep, watched_wake_up  # type: ignore[method-assign]
        self._engine.resume_generation = watched_resume  # type: ignore[method-assign]

    def _update_power(self, answers: Sequence[Any]) -> None:
        """Update the power state from the workers' descriptions; without any, the engine is awake."""
        before = self.state.power
        power = max((answer["power"] for answer in answers), default=Power.AWAKE)
        asleep = {tag for answer in answers for tag in answer["asleep"]}
        dropped = any(answer["dropped"] for answer in answers) if answers else self.state.dropped
        self.state = replace(self.state, power=power, asleep=tuple(sorted(asleep)), dropped=dropped)
        if power != before:
            self._power_changed()

    def _record(self, outcome: Outcome) -> Outcome:
        match outcome.kind:
            case Order.STAGE:
                self.state = replace(self.state, staged=outcome)
            case Order.APPLY:
                self.state = replace(self.state, applied=outcome)
            case Order.SLEEP | Order.WAKE:
                self.state = replace(self.state, changed=outcome)
        return outcome

    def _paused(self) -> float:
        return 0.0 if self.state.paused_at is None else self._clock() - self.state.paused_at


async def _effective_mode(engine: Engine, mode: Mode) -> Mode:
    """Return the mode in which to pause an engine: `keep` instead of `wait` if it is paused already.

    In mode `wait`, vLLM also runs requests that an earlier pause froze. That pause may be of a former
    leader or of an order that failed, and the weights may be torn or the caches stale.
    """
    return "keep" if mode == "wait" and await engine.is_paused() else mode


async def _call_workers(engine: Engine, method: str, *args: Any) -> Sequence[Any]:
    """Call `method` in the workers and return their answers.

    With data parallelism only the first engine's workers answer; each worker also reports to the daemon itself.

    Raises:
        WorkersFailed: A worker answered with an error. InstallFailed, if it was to stage or apply an install.
    """
    answers = await engine.collective_rpc(method, args=args)
    if problems := [problem for answer in answers if (problem := _problem(method, answer))]:
        raise (InstallFailed if method in _INSTALLS else WorkersFailed)("; ".join(problems))
    return answers


def _problem(method: str, answer: Any) -> str:
    if not isinstance(answer, dict) or "ok" not in answer:
        return f"{method}: expected a worker's answer with `ok`, got {answer!r}"
    return "" if answer["ok"] else f"worker {answer.get('rank', '?')}: {answer.get('error') or 'no reason given'}"
