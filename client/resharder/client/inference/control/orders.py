"""The daemon's orders, and the control side's decision on each.

    order    precondition                              effect
    LEAD     none                                      this side leads; every worker reports its version to the daemon and its
                                                       power state to this side; the engine's fence receives the term. A gate
                                                       that is open on another version than the workers' is held
    STAGE    leads, install not staged before          `resharder_stage` in every worker, which returns at once; gate unchanged
    UNSTAGE  leads                                     `resharder_unstage` in every worker
    APPLY    leads, lease alive, weights awake,        hold the gate, pause, `resharder_apply`, reset caches; stays paused.
             not applied before                        An error closes the gate
    RESUME   lease alive, awake, weights not dropped,  resume the engine if it is paused, then open the gate
             the workers on this host have the version
    CLOSE    with an install                           hold the gate: another control side is applying the install
             without                                   close the gate
    SLEEP    leads, lease alive                        close the gate, then put the engine to sleep
    WAKE     leads, lease alive                        wake the tags that sleep; the engine stays paused, gate unchanged

A repeated order gets the outcome of its first execution. A side that does not lead refuses orders that
require leadership. On an expired lease, APPLY, RESUME, SLEEP and WAKE are neither executed nor answered:
the stream is ended, and the daemon sends the valid orders on the next one. The same applies to an order
whose lease ends or whose stream breaks during its execution, and to one that the engine refuses
(`fence.py`). A RESUME on a version that a worker on this host does not have is neither executed nor answered,
and the stream continues. Only RESUME opens the gate or resumes the engine.
"""

from dataclasses import dataclass, field
from enum import Enum

from resharder.client.inference.engine import SLEEP_LEVELS, Mode
from resharder.v1 import resources_pb2
from resharder.v1.resources_pb2 import Power
from resharder.v1.server_pb2 import Order

_MODES: dict[int, Mode] = {resources_pb2.KEEP: "keep", resources_pb2.WAIT: "wait", resources_pb2.ABORT: "abort"}
_LEADERS = (Order.STAGE, Order.UNSTAGE, Order.APPLY, Order.SLEEP, Order.WAKE)
_LEASED = (Order.APPLY, Order.RESUME, Order.SLEEP, Order.WAKE)
_POWERS = {Order.SLEEP: (Power.ASLEEP_1, Power.ASLEEP_2), Order.WAKE: (Power.WEIGHTS_AWAKE, Power.AWAKE)}


@dataclass(frozen=True)
class ControlOrder:
    """Order of the daemon to a control side, with the leadership and the lease under which it holds."""

    kind: Order.Kind
    install: str = ""
    """Id of the install or, for SLEEP and WAKE, of the power change."""
    version: int = 0
    mode: Mode = "keep"
    reason: str = ""
    power: Power = Power.POWER_UNSPECIFIED
    """Power state to reach, for SLEEP and WAKE."""
    profile: bool = False
    """Whether APPLY is profiled in every worker."""
    ahead_of: int = 0
    """For STAGE of a version that is not READY: the READY version to fall back on."""
    boots_another: bool = False
    """For STAGE: whether processes of the server that start now boot another version."""
    base_version: int = 0
    """For RESUME of an adapter: the only version of its base with which it may be served; 0 for any."""
    term: int = 0
    """Term of the leadership under which the daemon gave the order."""
    span: int = 0
    """Span of the lease (`gate.ServerLease`) in which the order arrived."""

    @property
    def leased(self) -> bool:
        """Whether the order requires a living lease."""
        return self.kind in _LEASED


@dataclass(frozen=True)
class Outcome:
    """The result of an order."""

    kind: Order.Kind
    install: str
    ok: bool = True
    error: str = ""
    pause_seconds: float = 0.0
    """Time since the pause was requested or, after RESUME, the length of the whole pause."""
    timings: tuple[resources_pb2.Timing, ...] = field(default=(), compare=False)
    restarting: bool = False
    """Whether STAGE failed for the server's config, and its processes end to start again."""
    workers_failed: bool = False
    """Whether STAGE or APPLY failed in workers, which report it to the daemon themselves."""


@dataclass(frozen=True)
class State:
    """The state on which decisions depend, besides the gate's."""

    led: int | None = None
    """Term of the last LEAD."""
    resumed_in: int | None = None
    """Term in which this side, as the leader, last resumed the engine or found it running."""
    paused_at: float | None = None
    """Monotonic time at which the current pause was requested; `None` without one. A sleep's own pause is not counted."""
    power: Power = Power.POWER_UNSPECIFIED
    asleep: tuple[str, ...] = ()
    """vLLM's tags that sleep."""
    stale: bool = False
    """Whether vLLM's caches may have entries that other weights produced."""
    dropped: bool = False
    """Whether a sleep at level 2 dropped the weights of a worker, and no version was installed since."""
    cannot_sleep: str = ""
    """Reason why the engine cannot sleep; empty if it can."""
    staged: Outcome | None = None
    applied: Outcome | None = None
    resumed: Outcome | None = None
    changed: Outcome | None = None
    """Outcome of the last SLEEP or WAKE."""

    def leads(self, order: ControlOrder) -> bool:
        """Whether this side led when the daemon gave the order; another side's LEAD begins a higher term."""
        return self.led == order.term

    def resumed_as(self, order: ControlOrder) -> Outcome:
        """Return the outcome of a RESUME that needs no step: the recorded one if it is the same order."""
        done = self.resumed
        return done if done and done.install == order.install else Outcome(order.kind, order.install)


class Step(Enum):
    """A step to take for an order."""

    LEAD = "lead"
    STAGE = "stage"
    UNSTAGE = "unstage"
    APPLY = "apply"
    RESUME = "resume"
    HOLD = "hold"
    SHUT = "shut"
    SLEEP = "sleep"
    WAKE = "wake"
    REATTACH = "reattach"


def decide(state: State, open_on: int | None, alive: bool, order: ControlOrder) -> Step | Outcome:
    """Decide on an order.

    Args:
        state: The control side's state.
        open_on: The version that the gate is open on; `None` while it is not open.
        alive: Whether the lease permits the order.
        order: The order.

    Returns:
        The step to take, or the outcome if no step is needed.
    """
    if order.kind in _LEADERS and not state.leads(order):
        return _refused(order, f"{Order.Kind.Name(order.kind)} is for the leading control side, and this one does not lead")
    if before := _recorded_outcome(state, order):
        return before
    if order.leased and not alive:
        return Step.REATTACH
    match order.kind:
        case Order.LEAD:
            return Step.LEAD
        case Order.STAGE:
            return Step.STAGE
        case Order.UNSTAGE:
            return Step.UNSTAGE
        case Order.APPLY if state.power in SLEEP_LEVELS:
            # On a GPU, an update during sleep is a segmentation fault (vLLM issue 57853).
            return _refused(order, f"the weights are not awake: the engine is {Power.Name(state.power)}")
        case Order.APPLY:
            return Step.APPLY
        case Order.RESUME if order.version < 1:
            return _refused(order, f"expected a version to resume on, got {order.version}")
        case Order.RESUME if state.power > Power.AWAKE:
            return _refused(order, f"the engine is not awake: it is {Power.Name(state.power)}")
        case Order.RESUME if state.dropped:
            return _refused(order, "a sleep at level 2 dropped the weights: install a version first")
        case Order.RESUME:
            may_be_paused = state.leads(order) and (state.paused_at is not None or state.resumed_in != order.term)
            return Step.RESUME if may_be_paused or open_on != order.version else state.resumed_as(order)
        case Order.CLOSE:
            return Step.HOLD if order.install else Step.SHUT
        case Order.SLEEP | Order.WAKE if order.power not in _POWERS[order.kind]:
            expected = " or ".join(Power.Name(power) for power in _POWERS[order.kind])
            kind, power = Order.Kind.Name(order.kind), Power.Name(order.power)
            return _refused(order, f"expected {expected} as the power to {kind} to, got {power}")
        case Order.SLEEP:
            return _refused(order, state.cannot_sleep) if state.cannot_sleep else Step.SLEEP
        case Order.WAKE:
            return Step.WAKE
    raise ValueError(f"expected an order to carry out, got {Order.Kind.Name(order.kind)}")


def _recorded_outcome(state: State, order: ControlOrder) -> Outcome | None:
    """Return the outcome of an earlier execution of the same order."""
    match order.kind:
        case Order.STAGE:
            done = state.staged
        case Order.APPLY:
            done = state.applied
        case Order.SLEEP | Order.WAKE:
            done = state.changed
        case _:
            return None
    return done if done and (done.kind, done.install) == (order.kind, order.install) else None


def _refused(order: ControlOrder, error: str) -> Outcome:
    return Outcome(order.kind, order.install, ok=False, error=error)


def order_from_proto(message: Order) -> ControlOrder:
    """Convert an order from its wire form.

    Raises:
        ValueError: This release does not support the kind, pause mode or power.
    """
    mode = _MODES.get(message.pause_mode, "keep") if message.pause_mode in (0, *_MODES) else None
    if mode is None:
        raise ValueError(f"expected {', '.join(resources_pb2.PauseMode.keys()[1:])} as the pause mode, got {message.pause_mode}")
    if not message.kind or message.kind not in Order.Kind.values():
        raise ValueError(f"expected {', '.join(Order.Kind.keys()[1:])} as the kind of an order, got {message.kind}")
    if message.power not in Power.values():
        raise ValueError(f"expected {', '.join(Power.keys()[1:])} as the power, got {message.power}")
    return ControlOrder(
        message.kind,
        message.install,
        message.version,
        mode,
        message.reason,
        message.power,
        message.profile,
        message.ahead_of,
        message.boots_another,
        message.base_version,
        message.term,
    )
