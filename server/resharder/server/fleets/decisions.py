"""Decisions of operators and checks about a fleet, as pure functions."""

from collections.abc import Iterable
from dataclasses import replace

from resharder.server.fleets.updates import lost_servers, still_refused, turn_back
from resharder.server.state.fleet import (
    Fleet,
    FleetTarget,
    FleetTargetKind,
    MoveState,
    View,
)
from resharder.server.state.server import Power


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
    target = fleet.target if fleet.target.kind == FleetTargetKind.LATEST else FleetTarget(FleetTargetKind.NUMBER, to)
    return replace(fleet, target=target, refused=later | kept, rolled_back=request)


def decide(fleet: Fleet, go_on: bool, reason: str, view: View) -> Fleet:
    """Apply an operator's decision about the current move. Raises ValueError if there is nothing to decide."""
    move = fleet.moving
    if move is None:
        raise ValueError("expected a move that goes on, there is none")
    if not go_on:
        if move.state == MoveState.BACK:
            return fleet
        if move.back_to not in view.ready:
            raise ValueError("there is no version to go back to")
        return turn_back(fleet, move, view, reason or "an operator sent it back")
    match move.state:
        case MoveState.STOPPED:
            counted = frozenset(move.counted - lost_servers(fleet, move, view).keys())  # it goes on without those
            move = replace(move, state=MoveState.MOVING, counted=counted, short=False, failed={}, tries=move.tries + 1)
            return replace(fleet, move=replace(move, reason=reason))
        case MoveState.TRYING | MoveState.HOLDING:
            return replace(fleet, move=replace(move, approved=True, reason=reason))
    raise ValueError(f"a move that is {move.state.name} goes on by itself")


def checked(fleet: Fleet, move: int, passed: bool, message: str, view: View) -> Fleet:
    """Record the result of a canary's check. Ignored if the move no longer waits for it."""
    found = fleet.moving
    if found is None or found.id != move or not found.checking:
        return fleet
    if passed:
        return replace(fleet, move=replace(found, checked=True))
    return turn_back(fleet, found, view, f"check {found.strategy.check}: {message}")
