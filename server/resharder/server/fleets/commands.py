"""Operators' requests about fleets: validation, and the change that each one makes."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

from google.protobuf.json_format import MessageToJson
from google.protobuf.message import Message
from resharder.server.fleets.explain import FleetView
from resharder.server.fleets.fleets import Fleets
from resharder.server.fleets.updates import lost_servers, still_refused, turn_back
from resharder.server.state.errors import FailedPrecondition, InvalidArgument, ResourceNotFound, listed, unknown_value
from resharder.server.state.fleet import Fleet, UpdateStrategy, VersionTarget, View
from resharder.server.state.server import ASLEEP
from resharder.v1 import operator_pb2, resources_pb2
from resharder.v1.resources_pb2 import BaseBinding, PauseMode, Power

_FIELDS = ("target", "strategy", "pause_mode", "max_skew", "serve_ahead", "serve_ahead_setting", "base_binding")
SERVE_AHEAD: dict[int, bool | None] = {
    resources_pb2.SERVE_AHEAD_AUTO: None,
    resources_pb2.SERVE_AHEAD_ON: True,
    resources_pb2.SERVE_AHEAD_OFF: False,
}
_Act = Callable[[Fleet, View], Fleet]


class Operations:
    """Requests of operators, validated, and recorded before they take effect.

    Args:
        fleets: Fleets that they change.
        checks: Names of the commands that canaries can wait for.
    """

    def __init__(self, fleets: Fleets, checks: Collection[str] = ()) -> None:
        self._fleets, self._checks = fleets, checks

    def _change(self, fleet: str, what: str, request: Message, act: _Act, model: str = "") -> FleetView:
        def noted(fleet: Fleet, view: View) -> Fleet:
            after = act(fleet, view)
            asked, reason = MessageToJson(request, indent=None, preserving_proto_field_name=True), getattr(request, "reason", "")
            self._fleets.note("operator", f"fleets/{fleet.name}", what, reason[:1000], request=asked[:1000])
            return after

        return self._fleets.change(fleet.removeprefix("fleets/"), noted, model)

    def update(self, request: operator_pb2.UpdateFleetRequest) -> FleetView:
        """Set the fields of a fleet that the mask names.

        Raises:
            InvalidArgument: UPDATE_MASK, TARGET, STRATEGY, PAUSE_MODE, MAX_SKEW, SERVE_AHEAD, BASE_BINDING, CHECK_UNKNOWN.
            FailedPrecondition: VERSION_NOT_READY, KV_FLEET, FLEET_MODEL.
            ResourceNotFound: FLEET_UNKNOWN, MODEL_UNKNOWN.
        """
        message, fields = request.fleet, list(request.update_mask.paths)
        if unknown := set(fields) - set(_FIELDS):
            raise InvalidArgument("UPDATE_MASK", f"expected fields of {listed(_FIELDS)}, got {listed(sorted(unknown))}")
        target = read_target(message.target) if "target" in fields else None
        strategy = read_strategy(message.strategy, self._checks) if "strategy" in fields else None
        mode = message.pause_mode if "pause_mode" in fields else None
        if mode is not None and (problem := unknown_value(PauseMode, mode, "a pause mode")):
            raise InvalidArgument("PAUSE_MODE", problem)
        ahead = _read_serve_ahead(message.serve_ahead_setting) if "serve_ahead_setting" in fields else None
        binding = message.base_binding if "base_binding" in fields else None
        if binding is not None and (problem := unknown_value(BaseBinding, binding, "base_binding")):
            raise InvalidArgument("BASE_BINDING", problem)
        if message.max_skew < 0:
            raise InvalidArgument("MAX_SKEW", f"expected max_skew of 0 or more, got {message.max_skew}")
        model = message.model.removeprefix("models/")

        def act(fleet: Fleet, view: View) -> Fleet:
            if model and fleet.model != model:
                raise FailedPrecondition("FLEET_MODEL", f"fleet {fleet.name} follows model {fleet.model}, not {model}")
            if request.accept_refused and (target is None or target.kind != resources_pb2.VersionTarget.NUMBER):
                fleet = replace(fleet, refused={})
            if target is not None:
                fleet = _set_target(fleet, target, view)
            if strategy is not None:
                _check_kv(fleet, strategy, view)
                _check_canaries(fleet, strategy, view)
                fleet = replace(fleet, strategy=strategy)
            if mode is not None:
                fleet = replace(fleet, pause_mode=mode)
            if binding is not None:
                if not view.base:
                    what = f"fleet {fleet.name} follows {fleet.model}, which is no adapter: leave base_binding out"
                    raise InvalidArgument("BASE_BINDING", what)
                fleet = replace(fleet, base_binding=binding)
            if "max_skew" in fields:
                fleet = replace(fleet, max_skew=message.max_skew)
            if "serve_ahead" in fields:
                fleet = replace(fleet, serve_ahead=message.serve_ahead)
            if "serve_ahead_setting" in fields:
                fleet = replace(fleet, serve_ahead=ahead)
            _check_ahead(fleet)
            return fleet

        # Only the fields that the mask names: others may have any value, even one that JSON cannot represent.
        asked = operator_pb2.UpdateFleetRequest(
            fleet=resources_pb2.Fleet(name=message.name, model=message.model),
            update_mask=request.update_mask,
            accept_refused=request.accept_refused,
        )
        request.update_mask.MergeMessage(message, asked.fleet)
        return self._change(message.name, "update", asked, act, model)

    def roll_back(self, request: operator_pb2.RollBackFleetRequest) -> FleetView:
        """Return a fleet to an earlier version.

        Raises:
            FailedPrecondition: VERSION_NOT_READY, NO_EARLIER.
            InvalidArgument: VERSION.
            ResourceNotFound: FLEET_UNKNOWN.
        """

        def act(fleet: Fleet, view: View) -> Fleet:
            if request.request_id and request.request_id == fleet.rolled_back:
                return fleet
            at = fleet.moving.to if fleet.moving else fleet.settled
            to = request.version or max((v for v in view.ready if v < at and v not in fleet.refused), default=0)
            if not to:
                raise FailedPrecondition("NO_EARLIER", f"no READY version is before {at}; READY: {listed(sorted(view.ready))}")
            _check_ready(to, view)
            if to >= at:
                raise InvalidArgument(
                    "VERSION", f"expected a version before {at}, the fleet's target, got {to}: `update {to}` goes there"
                )
            reason = request.reason[:1000] or f"rolled back to version {to}"
            return roll_back(fleet, to, view, reason, request.request_id)

        return self._change(request.fleet, "rollback", request, act)

    def decide(self, request: operator_pb2.DecideMoveRequest) -> FleetView:
        """Approve or reverse the current move.

        Raises FailedPrecondition (NOTHING_TO_DECIDE), ResourceNotFound (FLEET_UNKNOWN).
        """

        def act(fleet: Fleet, view: View) -> Fleet:
            now = fleet.move.id if fleet.move else 0
            if request.move not in (0, now):
                raise FailedPrecondition("NOTHING_TO_DECIDE", f"fleet {fleet.name} is at move {now}, not {request.move}")
            try:
                return decide(fleet, request.go_on, request.reason[:1000], view)
            except ValueError as error:
                raise FailedPrecondition("NOTHING_TO_DECIDE", f"fleet {fleet.name}: {error}") from error

        return self._change(request.fleet, "approve" if request.go_on else "back", request, act)

    def set_power(self, request: operator_pb2.SetPowerRequest) -> FleetView:
        """Put servers to sleep or wake them. Returns before the engines have changed.

        Raises InvalidArgument (POWER), ResourceNotFound (FLEET_UNKNOWN, SERVER_UNKNOWN).
        """
        if problem := unknown_value(Power, request.power, "a power"):
            raise InvalidArgument("POWER", problem)
        power, servers = request.power, _servers(request.server)
        act = _of(servers, lambda fleet, _: set_power(fleet, power, servers))
        return self._change(request.fleet, "sleep" if power in ASLEEP else "wake", request, act)

    def set_drained(self, request: operator_pb2.SetDrainedRequest) -> FleetView:
        """Drain servers or resume them. Raises ResourceNotFound (FLEET_UNKNOWN, SERVER_UNKNOWN)."""
        servers = _servers(request.server)

        def act(fleet: Fleet, view: View) -> Fleet:
            return set_drained(fleet, request.drained, servers or fleet.members)

        return self._change(request.fleet, "drain" if request.drained else "resume", request, _of(servers, act))


def set_power(fleet: Fleet, power: Power, servers: Iterable[str] = ()) -> Fleet:
    """Set the power state of the named servers; without names, of all present and future servers."""
    named = tuple(servers)
    if not named:
        return replace(fleet, power=power, powers={})
    return replace(fleet, powers={**fleet.powers, **dict.fromkeys(named, power)})


def set_drained(fleet: Fleet, drained: bool, servers: Iterable[str]) -> Fleet:
    """Drain the named servers, or resume them. Names may be those of servers that have not returned after a restart."""
    names = frozenset(servers)
    return replace(fleet, drained=fleet.drained | names if drained else fleet.drained - names)


def roll_back(fleet: Fleet, to: int, view: View, reason: str, request: str) -> Fleet:
    """Return to version `to`, and refuse the versions after it. A target that is not LATEST becomes `to`."""
    later = {version: reason for version in view.usable if version > to}
    kept = {version: why for version, why in still_refused(fleet, view.ready).items() if version != to}
    target = (
        fleet.target
        if fleet.target.kind == resources_pb2.VersionTarget.LATEST
        else VersionTarget(resources_pb2.VersionTarget.NUMBER, to)
    )
    return replace(fleet, target=target, refused=later | kept, rolled_back=request)


def decide(fleet: Fleet, go_on: bool, reason: str, view: View) -> Fleet:
    """Apply an operator's decision about the current move. Raises ValueError if there is nothing to decide."""
    move = fleet.moving
    if move is None:
        raise ValueError("nothing to approve or turn back: no move is in progress")
    if not go_on:
        if move.state == resources_pb2.Move.BACK:
            return fleet
        if move.back_to not in view.ready:
            raise ValueError("there is no version to go back to")
        return turn_back(fleet, move, view, reason or "an operator sent it back")
    match move.state:
        case resources_pb2.Move.STOPPED:
            counted = frozenset(move.counted - lost_servers(fleet, move, view).keys())  # it goes on without those
            move = replace(move, state=resources_pb2.Move.MOVING, counted=counted, short=False, failed={}, tries=move.tries + 1)
            return replace(fleet, move=replace(move, reason=reason))
        case resources_pb2.Move.TRYING | resources_pb2.Move.HOLDING:
            return replace(fleet, move=replace(move, approved=True, reason=reason))
    raise ValueError(f"a move that is {resources_pb2.Move.State.Name(move.state)} continues by itself")


def read_target(message: resources_pb2.VersionTarget) -> VersionTarget:
    """Convert and validate a version target. Raises InvalidArgument (TARGET)."""
    if problem := unknown_value(resources_pb2.VersionTarget.Kind, message.kind, "a target"):
        raise InvalidArgument("TARGET", problem)
    kind = resources_pb2.VersionTarget.Kind.Name(message.kind)
    target = VersionTarget(message.kind, message.version, message.every_seconds)
    if (target.kind == resources_pb2.VersionTarget.NUMBER) != (target.version > 0):
        raise InvalidArgument(
            "TARGET",
            f"expected a version of 1 or more with NUMBER alone, got {kind} {target.version}",
        )
    if not 0 <= target.every_seconds < 1e9 or (target.every_seconds and target.kind != resources_pb2.VersionTarget.LATEST):
        raise InvalidArgument("TARGET", f"expected every_seconds of 0 or more, with LATEST alone, got {target.every_seconds:g}")
    return target


def read_strategy(message: resources_pb2.UpdateStrategy, checks: Collection[str]) -> UpdateStrategy:
    """Convert and validate an update strategy. Raises InvalidArgument (STRATEGY, CHECK_UNKNOWN)."""
    if problem := unknown_value(resources_pb2.UpdateStrategy.Kind, message.kind, "a strategy"):
        raise InvalidArgument("STRATEGY", problem)
    kind = resources_pb2.UpdateStrategy.Kind.Name(message.kind)
    strategy = UpdateStrategy(
        message.kind,
        message.at_a_time,
        message.max_failures,
        message.canaries,
        message.hold_seconds,
        message.approval,
        message.check,
    )
    for name in ("at_a_time", "max_failures", "canaries", "hold_seconds"):
        if not 0 <= getattr(strategy, name) < 1e9:
            raise InvalidArgument("STRATEGY", f"expected {name} of 0 to 1e9, got {getattr(strategy, name)}")
    if strategy.kind != resources_pb2.UpdateStrategy.CANARY and (
        strategy.canaries or strategy.hold_seconds or strategy.approval or strategy.check
    ):
        raise InvalidArgument("STRATEGY", f"canaries, a hold, approval and a check are for CANARY alone, not for {kind}")
    if strategy.kind in (resources_pb2.UpdateStrategy.ALL_AT_ONCE, resources_pb2.UpdateStrategy.ATOMIC) and (
        strategy.at_a_time or strategy.max_failures
    ):
        raise InvalidArgument("STRATEGY", f"at_a_time and max_failures are for ROLLING and CANARY, not for {kind}")
    if strategy.check and strategy.check not in checks:
        there = sorted(checks)
        raise InvalidArgument("CHECK_UNKNOWN", f"expected a check of the daemon's configuration {there}, got {strategy.check!r}")
    return strategy


def _read_serve_ahead(setting: int) -> bool | None:
    """Convert a setting; None is AUTO. Raises InvalidArgument (SERVE_AHEAD)."""
    if problem := unknown_value(resources_pb2.ServeAhead, setting, "serve_ahead_setting"):
        raise InvalidArgument("SERVE_AHEAD", problem)
    return SERVE_AHEAD[setting]


def _set_target(fleet: Fleet, target: VersionTarget, view: View) -> Fleet:
    refused = dict(fleet.refused)
    if target.kind == resources_pb2.VersionTarget.NUMBER:
        _check_ready(target.version, view)
        refused.pop(target.version, None)  # naming a refused version permits it again
    fleet = replace(fleet, target=target, refused=refused)
    if fleet.move is not None and not fleet.move.active:
        fleet = replace(
            fleet, move=replace(fleet.move, tries=fleet.move.tries + 1)
        )  # servers that have used all attempts try again
    return fleet


def _check_ready(version: int, view: View) -> None:
    if version not in view.ready:
        raise FailedPrecondition("VERSION_NOT_READY", f"version {version} is not READY; READY: {listed(sorted(view.ready))}")


def _check_ahead(fleet: Fleet) -> None:
    if fleet.serve_ahead and not fleet.independent:
        bound = f"a skew bound of {fleet.max_skew}" if fleet.max_skew else "no skew bound"
        raise InvalidArgument(
            "SERVE_AHEAD",
            f"a fleet serves ahead of READY only if it moves ALL_AT_ONCE without a skew bound: {fleet.name} moves "
            f"{resources_pb2.UpdateStrategy.Kind.Name(fleet.strategy.kind)} with {bound}",
        )


def _check_kv(fleet: Fleet, strategy: UpdateStrategy, view: View) -> None:
    passing = sorted(id for id, server in view.servers.items() if server.passes_kv)
    if passing and strategy.kind != resources_pb2.UpdateStrategy.ATOMIC:
        raise FailedPrecondition(
            "KV_FLEET",
            f"servers {listed(passing)} pass KV caches on, so fleet {fleet.name} has to move atomically: it would move "
            f"{resources_pb2.UpdateStrategy.Kind.Name(strategy.kind)}",
        )


def _check_canaries(fleet: Fleet, strategy: UpdateStrategy, view: View) -> None:
    """Raise InvalidArgument (STRATEGY) for more canaries than a fleet has servers; one without servers may get any number."""
    count = len(fleet.members | view.servers.keys())
    if count and strategy.canaries > count:
        raise InvalidArgument(
            "STRATEGY", f"expected at most {count} canaries, the number of servers of fleet {fleet.name}, got {strategy.canaries}"
        )


def _of(servers: tuple[str, ...], act: _Act) -> _Act:
    """Return `act` with a check that the servers belong to the fleet."""

    def checked(fleet: Fleet, view: View) -> Fleet:
        there = sorted(fleet.members | view.servers.keys())  # after a restart of the daemon, servers may still return
        if missing := [id for id in servers if id not in there]:
            raise ResourceNotFound(
                "SERVER_UNKNOWN", f"server {missing[0]!r} is not of fleet {fleet.name}; its servers: {listed(there)}"
            )
        return act(fleet, view)

    return checked


def _servers(name: str) -> tuple[str, ...]:
    return (name.removeprefix("servers/"),) if name else ()
