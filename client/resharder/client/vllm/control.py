"""The control side's part that talks to the engine: the daemon's orders, carried out one at a time on the engine's event loop.

    order    when                                      what is done
    LEAD     always                                    this side leads; the workers tell the daemon what they hold
    STAGE    leads, install not staged before          `resharder_stage` in every worker, which returns at once; the gate stays
    APPLY    leads, lease alive, not applied before    hold the gate, pause, `resharder_apply`, reset caches; stays paused.
                                                       What fails in here leaves the gate shut
    RESUME   lease alive, not open on that version     go on if paused, then open the gate
    CLOSE    with an install                           hold the gate: another control side is applying it
             without                                   shut the gate

An order that was carried out before is answered as it was then. STAGE and APPLY are refused by a side that does not lead. On an
expired lease APPLY and RESUME are not carried out and not answered: the stream is ended instead, and the daemon tells again what
holds. Nothing here opens the gate or resumes but RESUME.

`decide` is all of that table; `Control` does what it says.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, IntEnum
from typing import Any, Literal, Protocol

from resharder.client.vllm.gate import Gate, Position
from resharder.v1 import resources_pb2, server_pb2

logger = logging.getLogger("vllm.resharder.control")  # vLLM shows only what is under its own name

Mode = Literal["keep", "wait", "abort"]
_MODES: dict[int, Mode] = {resources_pb2.KEEP: "keep", resources_pb2.WAIT: "wait", resources_pb2.ABORT: "abort"}


class Kind(IntEnum):
    RENEWED = server_pb2.Order.RENEWED
    LEAD = server_pb2.Order.LEAD
    STAGE = server_pb2.Order.STAGE
    APPLY = server_pb2.Order.APPLY
    RESUME = server_pb2.Order.RESUME
    CLOSE = server_pb2.Order.CLOSE


@dataclass(frozen=True)
class Order:
    kind: Kind
    install: str = ""
    version: int = 0
    mode: Mode = "keep"
    reason: str = ""


@dataclass(frozen=True)
class Outcome:
    """How an order went. `pause_seconds`: from asking for the pause to now, or to the resumption."""

    kind: Kind
    install: str
    ok: bool = True
    error: str = ""
    pause_seconds: float = 0.0


class Engine(Protocol):
    """The part of vLLM's EngineClient that is used. `collective_rpc` has no `timeout`: one desynchronises TP workers (vLLM issue
    49972)."""

    async def pause_generation(self, *, mode: Mode, clear_cache: bool) -> None: ...
    async def resume_generation(self) -> None: ...
    async def is_paused(self) -> bool: ...
    async def collective_rpc(self, method: str, *, args: tuple[Any, ...] = ()) -> Sequence[Any]: ...
    async def reset_prefix_cache(self, reset_running_requests: bool, reset_connector: bool) -> bool: ...
    async def reset_mm_cache(self) -> None: ...
    async def reset_encoder_cache(self) -> None: ...


class Lease:
    """Written by the thread of the stream, read on the event loop; `until` is of the monotonic clock."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.until = float("-inf")

    def renew(self, until: float) -> None:
        self.until = max(self.until, until)

    @property
    def alive(self) -> bool:
        return self._clock() < self.until


@dataclass(frozen=True)
class State:
    """What decisions depend on, next to the gate."""

    leads: bool = False
    paused_at: float | None = None  # when the pause that still holds was asked for
    staged: Outcome | None = None
    applied: Outcome | None = None
    resumed: Outcome | None = None


class Step(Enum):
    LEAD = "lead"
    STAGE = "stage"
    APPLY = "apply"
    RESUME = "resume"
    HOLD = "hold"
    SHUT = "shut"
    REATTACH = "reattach"


def decide(state: State, open_on: int | None, alive: bool, order: Order) -> Step | Outcome:
    """What to do, or the answer if there is nothing to do. `open_on`: the version the gate is open on, None while closed."""
    match order.kind:
        case Kind.LEAD:
            return Step.LEAD
        case Kind.STAGE | Kind.APPLY if not state.leads:
            return Outcome(
                order.kind, order.install, ok=False, error=f"{order.kind.name} came to a control side that does not lead"
            )
        case Kind.STAGE:
            return state.staged if state.staged and state.staged.install == order.install else Step.STAGE
        case Kind.APPLY if state.applied and state.applied.install == order.install:
            return state.applied
        case Kind.APPLY:
            return Step.APPLY if alive else Step.REATTACH
        case Kind.RESUME if not alive:
            return Step.REATTACH
        case Kind.RESUME if order.version < 1:
            return Outcome(order.kind, order.install, ok=False, error=f"expected a version to resume on, got {order.version}")
        case Kind.RESUME:
            if open_on != order.version or state.paused_at is not None:
                return Step.RESUME
            return (
                state.resumed if state.resumed and state.resumed.install == order.install else Outcome(order.kind, order.install)
            )
        case Kind.CLOSE:
            return Step.HOLD if order.install else Step.SHUT
    raise ValueError(f"expected an order to carry out, got {order.kind.name}")


class Control:
    """Not for concurrent use: one order at a time. `reattach` ends the stream to the daemon; it may be called from the loop."""

    def __init__(
        self,
        engine: Engine,
        gate: Gate,
        lease: Lease,
        reattach: Callable[[str], None],
        version_name: Callable[[int], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine, self._gate, self._lease = engine, gate, lease
        self._reattach, self._version_name, self._clock = reattach, version_name, clock
        self.state = State()

    async def carry_out(self, order: Order) -> Outcome | None:
        """Never raises but for cancellation; None where nothing is to be reported."""
        open_on = self._gate.version if self._gate.position is Position.OPEN else None
        step = decide(self.state, open_on, self._lease.alive, order)
        if isinstance(step, Outcome):
            return step
        try:
            return await self._take(step, order)
        except Exception as error:
            logger.exception("%s of version %d (install %s) failed", order.kind.name, order.version, order.install)
            return self._remember(Outcome(order.kind, order.install, False, f"{type(error).__name__}: {error}", self._paused()))

    async def _take(self, step: Step, order: Order) -> Outcome | None:
        match step:
            case Step.LEAD:
                self.state = replace(self.state, leads=True)
                if problem := await self._workers("resharder_describe"):
                    logger.error("the workers could not tell the daemon what they hold: %s", problem)
                return None
            case Step.STAGE:
                error = await self._workers("resharder_stage", order.install, self._version_name(order.version))
                return self._remember(Outcome(order.kind, order.install, not error, error))
            case Step.APPLY:
                return await self._apply(order)
            case Step.RESUME:
                return await self._resume(order)
            case Step.HOLD:
                self._gate.hold(order.version, order.reason or "a version is being installed")
            case Step.SHUT:
                self._gate.shut(order.reason or "the daemon closed the gate")
            case Step.REATTACH:
                self._reattach(f"the lease expired before {order.kind.name}")
                return None
        return Outcome(order.kind, order.install)

    async def _apply(self, order: Order) -> Outcome | None:
        self._gate.hold(order.version, f"version {order.version} is being installed")
        try:
            if self.state.paused_at is None:
                began = self._clock()
                await self._engine.pause_generation(mode=order.mode, clear_cache=True)
                self.state = replace(self.state, paused_at=began)
            if not self._lease.alive:  # a pause that waits for requests to end can outlive the lease
                self._reattach("the lease expired while pausing")
                return None
            error = await self._workers("resharder_apply", order.install) or await self._reset_caches()
        except BaseException:
            self._gate.shut(f"installing version {order.version} failed")
            raise
        if error:
            logger.error("installing version %d (install %s) failed: %s", order.version, order.install, error)
            self._gate.shut(f"installing version {order.version} failed")
        return self._remember(Outcome(order.kind, order.install, not error, error, self._paused()))

    async def _reset_caches(self) -> str:
        """What the engine did since the pause cleared them (a KV connector's saves, dummy batches of idle replicas) goes here."""
        if not await self._engine.reset_prefix_cache(reset_running_requests=True, reset_connector=True):
            return "expected the prefix cache and its KV connector to be reset, got a refusal by vLLM"
        await self._engine.reset_mm_cache()
        await self._engine.reset_encoder_cache()
        return ""

    async def _resume(self, order: Order) -> Outcome:
        # A leader may have taken over from one that paused the engine.
        if self.state.paused_at is not None or (self.state.leads and await self._engine.is_paused()):
            await self._engine.resume_generation()
        outcome = Outcome(order.kind, order.install, pause_seconds=self._paused())
        self.state = replace(self.state, paused_at=None, resumed=outcome)
        self._gate.open(order.version)
        logger.info("serving version %d after a pause of %.3f s", order.version, outcome.pause_seconds)
        return outcome

    async def _workers(self, method: str, *args: Any) -> str:
        """What went wrong in the workers that answered; empty if nothing did. With data parallelism those of the first engine
        alone answer, so every worker also reports to the daemon by itself."""
        answers = await self._engine.collective_rpc(method, args=args)
        return "; ".join(problem for answer in answers if (problem := _problem(method, answer)))

    def _remember(self, outcome: Outcome) -> Outcome:
        match outcome.kind:
            case Kind.STAGE:
                self.state = replace(self.state, staged=outcome)
            case Kind.APPLY:
                self.state = replace(self.state, applied=outcome)
        return outcome

    def _paused(self) -> float:
        return 0.0 if self.state.paused_at is None else self._clock() - self.state.paused_at


def order_from_proto(message: server_pb2.Order) -> Order:
    """Raises ValueError for a kind or pause mode that this release does not know."""
    mode = _MODES.get(message.pause_mode, "keep") if message.pause_mode in (0, *_MODES) else None
    if mode is None:
        raise ValueError(f"expected a pause mode of {sorted(_MODES)}, got {message.pause_mode}")
    return Order(Kind(message.kind), message.install, message.version, mode, message.reason)


def _problem(method: str, answer: Any) -> str:
    if not isinstance(answer, dict) or "ok" not in answer:
        return f"{method}: expected a worker's answer with `ok`, got {answer!r}"
    return "" if answer["ok"] else f"worker {answer.get('rank', '?')}: {answer.get('error') or 'no reason given'}"
