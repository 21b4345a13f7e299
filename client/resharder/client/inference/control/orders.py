"""The daemon's orders, and what a control side does about them.

    order    when                                      what is done
    LEAD     always                                    this side leads; the workers tell the daemon what they hold, and this side
                                                       learns from them how awake they are; the engine learns the term
    STAGE    leads, install not staged before          `resharder_stage` in every worker, which returns at once; the gate stays
    UNSTAGE  leads                                     `resharder_unstage` in every worker
    APPLY    leads, lease alive, weights awake,        hold the gate, pause, `resharder_apply`, reset caches; stays paused.
             not applied before                        What fails in here leaves the gate shut
    RESUME   lease alive, awake, weights not dropped   go on if paused, then open the gate
    CLOSE    with an install                           hold the gate: another control side is applying it
             without                                   shut the gate
    SLEEP    leads, lease alive                        shut the gate, then put the engine to sleep
    WAKE     leads, lease alive                        wake what still sleeps; the engine stays paused and the gate as it is

An order that was carried out before is answered as it was then. What only a leader may do is refused by a side that does not
lead. On an expired lease APPLY, RESUME, SLEEP and WAKE are not carried out and not answered: the stream is ended instead, and
the daemon tells again what holds. The same goes for an order whose lease ends, or whose stream breaks, while it is carried out,
and for one that the engine refuses (fence.py). Nothing but RESUME opens the gate or resumes.
"""

from dataclasses import dataclass, field, replace
from enum import Enum, IntEnum

from resharder.client.inference.engine import Mode
from resharder.client.inference.power import PowerState
from resharder.v1 import resources_pb2, server_pb2

_MODES: dict[int, Mode] = {resources_pb2.KEEP: "keep", resources_pb2.WAIT: "wait", resources_pb2.ABORT: "abort"}


class Kind(IntEnum):
    RENEWED = server_pb2.Order.RENEWED
    LEAD = server_pb2.Order.LEAD
    STAGE = server_pb2.Order.STAGE
    APPLY = server_pb2.Order.APPLY
    RESUME = server_pb2.Order.RESUME
    CLOSE = server_pb2.Order.CLOSE
    UNSTAGE = server_pb2.Order.UNSTAGE
    SLEEP = server_pb2.Order.SLEEP
    WAKE = server_pb2.Order.WAKE


_LEADERS = (Kind.STAGE, Kind.UNSTAGE, Kind.APPLY, Kind.SLEEP, Kind.WAKE)
_LEASED = (Kind.APPLY, Kind.RESUME, Kind.SLEEP, Kind.WAKE)
_POWERS = {Kind.SLEEP: (PowerState.ASLEEP_1, PowerState.ASLEEP_2), Kind.WAKE: (PowerState.WEIGHTS_AWAKE, PowerState.AWAKE)}


@dataclass(frozen=True)
class ControlOrder:
    """`install`: of an order about power, the id of that change."""

    kind: Kind
    install: str = ""
    version: int = 0
    mode: Mode = "keep"
    reason: str = ""
    power: PowerState = PowerState.UNKNOWN
    profile: bool = False  # of APPLY: in every worker
    ahead_of: int = 0  # of STAGE: the READY version to fall back on, where `version` is not READY
    term: int = 0  # of the leadership under which it was given
    span: int = 0  # of the lease (gate.ServerLease) in which it was received

    @property
    def leased(self) -> bool:
        """Whether it is carried out on a living lease only."""
        return self.kind in _LEASED


@dataclass(frozen=True)
class Outcome:
    """How an order went. `pause_seconds`: from asking for the pause to now, or to the resumption."""

    kind: Kind
    install: str
    ok: bool = True
    error: str = ""
    pause_seconds: float = 0.0
    timings: tuple[resources_pb2.Timing, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class State:
    """What decisions depend on, next to the gate. `cannot_sleep`: why not; empty where it can."""

    led: int | None = None  # the term that LEAD brought last
    resumed_in: int | None = None  # the term in which this side last had the engine running, as its leader
    paused_at: float | None = None  # when the pause that still holds was asked for; a sleep's own pause is not counted
    power: PowerState = PowerState.UNKNOWN
    asleep: tuple[str, ...] = ()  # vLLM's tags of what sleeps
    stale: bool = False  # vLLM's caches may hold what other weights made
    dropped: bool = False  # some worker's weights went away with a sleep at level 2, and no version came since
    cannot_sleep: str = ""
    staged: Outcome | None = None
    applied: Outcome | None = None
    resumed: Outcome | None = None
    changed: Outcome | None = None  # the last SLEEP or WAKE

    def leads(self, order: ControlOrder) -> bool:
        """Whether this side led when the order was given: another one's LEAD begins a higher term."""
        return self.led == order.term

    def resumed_as(self, order: ControlOrder) -> Outcome:
        """The answer to a RESUME that holds already: the earlier one, if it is the same order."""
        done = self.resumed
        return done if done and done.install == order.install else Outcome(order.kind, order.install)


class Step(Enum):
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
    """What to do, or the answer if there is nothing to do. `open_on`: the version the gate is open on, None while closed."""
    if order.kind in _LEADERS and not state.leads(order):
        return _refused(order, f"{order.kind.name} came to a control side that does not lead")
    if before := _answered(state, order):
        return before
    if order.leased and not alive:
        return Step.REATTACH
    match order.kind:
        case Kind.LEAD:
            return Step.LEAD
        case Kind.STAGE:
            return Step.STAGE
        case Kind.UNSTAGE:
            return Step.UNSTAGE
        case Kind.APPLY if state.power.asleep:  # vLLM issue 57853: an update while asleep is a segmentation fault on a GPU
            return _refused(order, f"expected the weights to be awake, the engine is {state.power.name}")
        case Kind.APPLY:
            return Step.APPLY
        case Kind.RESUME if order.version < 1:
            return _refused(order, f"expected a version to resume on, got {order.version}")
        case Kind.RESUME if state.power > PowerState.AWAKE:
            return _refused(order, f"expected the engine to be awake, it is {state.power.name}")
        case Kind.RESUME if state.dropped:
            return _refused(order, "expected a version to be installed first: a sleep at level 2 dropped the weights")
        case Kind.RESUME:
            unsure = state.leads(order) and (state.paused_at is not None or state.resumed_in != order.term)
            return Step.RESUME if unsure or open_on != order.version else state.resumed_as(order)
        case Kind.CLOSE:
            return Step.HOLD if order.install else Step.SHUT
        case Kind.SLEEP | Kind.WAKE if order.power not in _POWERS[order.kind]:
            wanted = " or ".join(power.name for power in _POWERS[order.kind])
            return _refused(order, f"expected {wanted} as the power to {order.kind.name} to, got {order.power.name}")
        case Kind.SLEEP:
            return _refused(order, state.cannot_sleep) if state.cannot_sleep else Step.SLEEP
        case Kind.WAKE:
            return Step.WAKE
    raise ValueError(f"expected an order to carry out, got {order.kind.name}")


def _answered(state: State, order: ControlOrder) -> Outcome | None:
    """What this very order was answered before."""
    match order.kind:
        case Kind.STAGE:
            done = state.staged
        case Kind.APPLY:
            done = state.applied
        case Kind.SLEEP | Kind.WAKE:
            done = state.changed
        case _:
            return None
    return done if done and (done.kind, done.install) == (order.kind, order.install) else None


def _refused(order: ControlOrder, error: str) -> Outcome:
    return Outcome(order.kind, order.install, ok=False, error=error)


def order_from_proto(message: server_pb2.Order) -> ControlOrder:
    """Raises ValueError for a kind, pause mode or power that this release does not know."""
    mode = _MODES.get(message.pause_mode, "keep") if message.pause_mode in (0, *_MODES) else None
    if mode is None:
        raise ValueError(f"expected a pause mode of {sorted(_MODES)}, got {message.pause_mode}")
    kind, power = Kind(message.kind), PowerState(message.power)
    order = ControlOrder(kind, message.install, message.version, mode, message.reason, power, message.profile, message.ahead_of)
    return replace(order, term=message.term)
