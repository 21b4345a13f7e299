"""How a fleet gets to the version it should serve: pure functions of the fleet, its servers and the time.

`advance(fleet, ...)` gives the fleet after what happened; `goals(fleet, ...)` what each server is to do now. Between them and the
servers' reconcilers nothing else is remembered: a fleet, which is written down whenever it changes, and what servers report.

    ALL_AT_ONCE   MOVING -> DONE                    a newer version takes the move over at once
    ROLLING       MOVING -> DONE | STOPPED          at most `at_a_time` servers out of service for it
    CANARY        TRYING -> HOLDING -> MOVING ...   a canary that fails, a check or an operator: BACK -> FAILED
    ATOMIC        STAGING -> APPLYING -> DONE       a failure in STAGING: FAILED; in APPLYING: BACK -> FAILED

A version that failed so is refused: LATEST does not take it again by itself, as little as one that was rolled back. A skew bound
is kept by which version a gate may be opened on; a jump that is wider than the bound is made atomically. Nobody waits for lost
servers: where versions must not mix (atomic fleets, skew bounds) leases are strict, so that a server that cannot be reached has
shut its gate by the time it is called lost.

A fleet that serves ahead takes versions that are not READY yet, once every rank offers them (`View.ahead`); each server falls
back by itself (reconciler.py). What becomes ABORTED then is a version that is gone: the fleet goes back to the newest READY one.
Nobody boots from a version that is not READY, is pinned to one or goes back to one.

Durations are measured by the monotonic clock (`View.now`), as the reconciler's are. The wall clock may jump at any time: it
labels moves and decides nothing.
"""

from collections.abc import Collection, Iterable
from dataclasses import replace

from resharder.server.fleets.pause_admission import held_back
from resharder.server.state.fleet import (
    NOBODY,
    Fleet,
    FleetStrategy,
    FleetStrategyKind,
    FleetTarget,
    FleetTargetKind,
    Move,
    MoveState,
    PauseMode,
    View,
)
from resharder.server.state.server import Goal, InstallState, Power, Server


def wanted(fleet: Fleet, view: View) -> int:
    """What `fleet.target` comes to now; 0: no version is READY."""
    move = fleet.moving
    current = move.to if move else fleet.settled
    match fleet.target.kind:
        case FleetTargetKind.NUMBER:
            number = fleet.target.version
            return number if number in view.ready and number not in fleet.refused else current
        case FleetTargetKind.NONE:
            return current if current in view.usable else _instead(current, fleet, view)
    newest = max((version for version in view.usable if version not in fleet.refused), default=0)
    early = fleet.rest_left(view.now) > 0 and current in view.usable and current not in fleet.refused
    return current if early or not newest else newest


def _instead(gone: int, fleet: Fleet, view: View) -> int:
    """Of a version that was served ahead and is not to be READY: the one before it, or what there is."""
    ready = view.ready - fleet.refused.keys()
    return max((number for number in ready if number < gone), default=max(ready, default=gone)) if gone else gone


def advance(fleet: Fleet, view: View) -> Fleet:
    """The fleet after one step of its move, or itself. To be called until nothing changes."""
    if (move := fleet.moving) is not None and _taken_back(fleet, move, view):
        return replace(fleet, move=replace(move, state=MoveState.BACK, reason=fleet.refused[move.to]))
    if view.settling and (fleet.strict or fleet.strategy.kind != FleetStrategyKind.ALL_AT_ONCE):
        return fleet
    target, move = wanted(fleet, view), fleet.moving
    if move is None:
        return _begin(fleet, target, view) if target and target != fleet.settled else fleet
    if target and target != move.to and _gives_way(fleet, move, target, view):
        if target != move.back_to:
            return _begin(fleet, target, view)
        gone = "" if move.to in view.usable else f"version {move.to} was not completed"
        reason = fleet.refused.get(move.to, gone or f"version {target} is wanted again")
        return replace(fleet, move=replace(move, state=MoveState.BACK, reason=reason))
    single = move.state in (MoveState.TRYING, MoveState.HOLDING, MoveState.MOVING)
    if single and fleet.mixes(move.to, view.shown) and move.to not in fleet.refused:
        return _begin(fleet, move.to, view)  # servers came back with versions that it is too far from
    match move.state:
        case MoveState.STAGING:
            return _staging(fleet, move, view)
        case MoveState.APPLYING:
            return _applying(fleet, move, view)
        case MoveState.TRYING | MoveState.HOLDING:
            return _trying(fleet, move, view)
        case MoveState.MOVING:
            return _moving(fleet, move, view)
        case MoveState.BACK:
            return _back(fleet, move, view)
    return fleet


def _begin(fleet: Fleet, to: int, view: View) -> Fleet:
    at = fleet.moving.to if fleet.moving else fleet.settled
    left = fleet.serve_ahead and at > to and at not in view.usable
    strategy, reason = fleet.strategy, f"version {at} was not completed" if left else ""
    back_to = fleet.settled if fleet.settled in view.ready else 0
    if fleet.mixes(to, view.shown):
        wide = strategy.kind != FleetStrategyKind.ATOMIC
        strategy, reason = (
            FleetStrategy(FleetStrategyKind.ATOMIC),
            f"the jump is wider than the skew bound of {fleet.max_skew}" if wide else "",
        )
    elif not back_to:
        strategy = FleetStrategy(FleetStrategyKind.ALL_AT_ONCE)
    elif strategy.kind == FleetStrategyKind.CANARY and fleet.settled in fleet.refused and to < fleet.settled:
        strategy = replace(strategy, kind=FleetStrategyKind.ROLLING)  # back to what has been tried
    states = {FleetStrategyKind.CANARY: MoveState.TRYING, FleetStrategyKind.ATOMIC: MoveState.STAGING}
    number = fleet.move.id + 1 if fleet.move else 1
    move = Move(number, states.get(strategy.kind, MoveState.MOVING), back_to, to, strategy, view.wall, reason, began=view.now)
    return replace(fleet, move=move)


def _taken_back(fleet: Fleet, move: Move, view: View) -> bool:
    """Its version was refused meanwhile, and servers must not take it up even while others are still coming back. Where the one
    before it was refused too, they go straight to the wanted one, if they can."""
    if move.state == MoveState.BACK or move.to not in fleet.refused or move.back_to not in view.ready:
        return False
    return move.back_to not in fleet.refused or move.state == MoveState.APPLYING or view.settling


def _gives_way(fleet: Fleet, move: Move, target: int, view: View) -> bool:
    """Whether another version may take the move over before it has ended."""
    if move.state in (MoveState.APPLYING, MoveState.BACK):
        return False
    if move.to in fleet.refused or move.to not in view.usable or fleet.target.kind == FleetTargetKind.NUMBER:
        return True
    if move.state == MoveState.STOPPED:
        return True
    return move.strategy.kind == FleetStrategyKind.ALL_AT_ONCE and not fleet.mixes(target, view.shown)


# What servers are at


def _present(fleet: Fleet, view: View) -> dict[str, Server]:
    """Servers that a move has to do with: attached, awake, and wanted so."""
    return {
        id: server
        for id, server in sorted(view.servers.items())
        if _attached(server) and fleet.power_of(id) == Power.AWAKE and not server.power.asleep and id not in fleet.drained
    }


def _attached(server: Server) -> bool:
    return server.lost_at is None and bool(server.controls)


def _hopeless(server: Server, version: int, move: Move, view: View) -> str:
    """The error that a version failed with as often as it may; empty while there is hope. What failed before this move, or before
    an operator had it tried again, does not count: the server has not been told yet."""
    failure = server.failures.get(version) if server.goal.retry == _tries(move) else None
    return failure.error if failure is not None and failure.count >= view.settings.attempts else ""


def _tries(move: Move) -> tuple[int, int]:
    return move.id, move.tries


def _lost_over(server: Server, version: int) -> bool:
    """Its lease ended while it installed this version."""
    install = server.install
    return server.lost_at is not None and install is not None and install.version == version and server.confirmed != version


# Steps


def _end(fleet: Fleet, move: Move, state: MoveState, view: View, reason: str = "") -> Fleet:
    settled = move.to if state == MoveState.DONE else move.back_to
    move = replace(move, state=state, ended=view.wall, seconds=view.now - move.began, reason=reason or move.reason)
    return replace(fleet, move=move, settled=settled)


def _refuse(fleet: Fleet, version: int, reason: str, ready: Collection[int]) -> Fleet:
    return replace(fleet, refused=_still_refused(fleet, ready) | {version: reason})


def _still_refused(fleet: Fleet, ready: Collection[int]) -> dict[int, str]:
    """Without what is gone; what comes after all that is READY may come yet."""
    newest = max(ready, default=0)
    return {number: why for number, why in fleet.refused.items() if number in ready or number > newest}


def _turn_back(fleet: Fleet, move: Move, view: View, reason: str) -> Fleet:
    if move.back_to not in view.ready:
        return replace(fleet, move=replace(move, state=MoveState.STOPPED, reason=f"{reason}; there is no version to go back to"))
    return replace(_refuse(fleet, move.to, reason, view.ready), move=replace(move, state=MoveState.BACK, reason=reason))


def _noted(move: Move, view: View) -> Move:
    """With the servers that arrived or failed since."""
    there = {id for id, server in view.servers.items() if server.serving == move.to}
    failed = {id: error for id, error in move.failed.items() if id not in there}
    for id in view.servers.keys() - there - failed.keys():
        server = view.servers[id]
        if error := _hopeless(server, move.to, move, view):
            failed[id] = error
        elif _lost_over(server, move.to):
            failed[id] = "its lease ended while it installed"
    return replace(move, servers=(*move.servers, *sorted(there - set(move.servers))), failed=failed)


def _moving(fleet: Fleet, move: Move, view: View) -> Fleet:
    rolling = move.strategy.kind != FleetStrategyKind.ALL_AT_ONCE
    present = _present(fleet, view)
    noted = _noted(move, view)
    if rolling and noted != move:
        return replace(fleet, move=noted)
    if rolling and len(move.failed) >= max(1, move.strategy.max_failures):
        reason = "; ".join(f"{id}: {error}" for id, error in sorted(move.failed.items()))
        return replace(fleet, move=replace(move, state=MoveState.STOPPED, reason=f"it failed on {reason}"))
    if all(server.serving == move.to or id in noted.failed for id, server in present.items()):
        return _end(fleet, noted, MoveState.DONE, view)
    return fleet


def _trying(fleet: Fleet, move: Move, view: View) -> Fleet:
    present, count = _present(fleet, view), max(1, move.strategy.canaries)
    kept = [id for id in move.servers if id not in fleet.drained and fleet.power_of(id) == Power.AWAKE]
    more = [id for id, server in present.items() if server.opened and id not in kept]
    chosen = (*kept, *more[: max(0, count - len(kept))])
    if chosen != move.servers:
        return replace(fleet, move=replace(move, servers=chosen))
    for id in chosen:
        if error := _canary_error(view.servers.get(id), move, view):
            return _turn_back(fleet, move, view, f"canary {id}: {error}")
    if not chosen or not all(id in present and present[id].serving == move.to for id in chosen):
        return fleet
    if move.state == MoveState.TRYING:
        return replace(fleet, move=replace(move, state=MoveState.HOLDING, held=view.now))
    waits = move.hold_left(view.now) > 0 or move.checking or (move.strategy.approval and not move.approved)
    return fleet if waits else replace(fleet, move=replace(move, state=MoveState.MOVING))


def _canary_error(server: Server | None, move: Move, view: View) -> str:
    if server is None or server.lost_at is not None:
        return "its lease ended"
    return _hopeless(server, move.to, move, view)


def _staging(fleet: Fleet, move: Move, view: View) -> Fleet:
    present = _present(fleet, view)
    for id, server in present.items():
        if error := _hopeless(server, move.to, move, view):
            reason = f"{id} could not stage it: {error}"
            return _end(_refuse(fleet, move.to, reason, view.ready), move, MoveState.FAILED, view, reason)
    able = [server for server in present.values() if not _broken(server, move, view)]
    if any(server.shown for id, server in view.servers.items() if id not in present):
        return fleet  # it cannot be reached and may serve on until its lease ends
    if all(server.staged == move.to or server.agreed == move.to for server in able):
        return replace(fleet, move=replace(move, state=MoveState.APPLYING, servers=tuple(present)))
    return fleet


def _broken(server: Server, move: Move, view: View) -> bool:
    """Out of service, and the version that the fleet comes from cannot mend it."""
    return not server.opened and bool(_hopeless(server, move.back_to, move, view))


def _applying(fleet: Fleet, move: Move, view: View) -> Fleet:
    present = {id: server for id, server in _present(fleet, view).items() if id in move.servers}
    for id, server in present.items():
        if server.agreed != move.to and (error := _apply_error(server, move.to)):
            return _turn_back(fleet, move, view, f"{id}: {error}")
    if all(server.agreed == move.to for server in present.values()) and view.shown.keys() <= {move.to}:
        return _end(fleet, move, MoveState.DONE, view)
    return fleet


def _apply_error(server: Server, version: int) -> str:
    """Of a server that had staged it. Its install may have given way to one that mends it by now."""
    install, failure = server.install, server.failures.get(version)
    if install is not None and install.version == version:
        return install.error if install.state == InstallState.FAILED else ""
    return failure.error if failure is not None else ""


def _back(fleet: Fleet, move: Move, view: View) -> Fleet:
    present = _present(fleet, view)
    stuck = {id for id, server in present.items() if _hopeless(server, move.back_to, move, view)}
    if all(server.serving == move.back_to or id in stuck for id, server in present.items()):
        return _end(fleet, move, MoveState.FAILED, view)
    return fleet


# What servers are to do


def goals(fleet: Fleet, view: View) -> dict[str, Goal]:
    """For every server of the view."""
    found, move = {}, fleet.moving
    turns = _turns(fleet, view)
    together = move is not None and move.strategy.kind == FleetStrategyKind.ATOMIC
    late = held_back(view) if fleet.pause_mode != PauseMode.WAIT and not together else frozenset()
    for id, server in view.servers.items():
        version, apply, why = _part(fleet, id, server, view, id in turns)
        if apply and id in late:
            apply, why = False, "it waits for its turn on the direct path"
        found[id] = Goal(
            version=version,
            boot=boots(fleet, view),
            apply=apply,
            serves=_range(fleet, id, view),
            open=id not in fleet.drained,
            power=fleet.power_of(id),
            strict=fleet.strict,
            retry=_tries(fleet.move) if fleet.move else (0, 0),
            why=why,
        )
    return found


def boots(fleet: Fleet, view: View) -> int:
    """The version that a server which starts now should have; 0: none is READY."""
    move = fleet.moving
    version = fleet.settled
    if move is not None and move.state in (MoveState.MOVING, MoveState.APPLYING):
        version = move.to
    elif move is not None:
        version = move.back_to
    if version not in view.ready - fleet.refused.keys():
        version = wanted(fleet, replace(view, ahead=frozenset()))
    return version if version in view.ready or not fleet.serve_ahead else 0


def _part(fleet: Fleet, id: str, server: Server, view: View, turn: bool) -> tuple[int, bool, str]:
    """The version that a server is to hold, whether it may apply it, and why it has to wait where it has."""
    move = fleet.moving
    if move is None:
        return (fleet.settled, True, "") if turn else (_in_service(fleet, id, view), True, "it waits for its turn")
    install = server.install
    stays = _in_service(fleet, id, view) or move.back_to or move.to
    match move.state:
        case MoveState.STAGING:
            if _broken(server, move, view):
                return move.to, True, ""
            if not server.opened and server.agreed != move.back_to and move.back_to in view.ready - fleet.refused.keys():
                return move.back_to, True, ""
            return move.to, False, "all servers stage before any applies"
        case MoveState.APPLYING:
            return move.to, True, "no server serves it before all have applied it"
        case MoveState.TRYING | MoveState.HOLDING:
            return (move.to, True, "") if id in move.canaries else (stays, True, f"version {move.to} is tried first")
        case MoveState.BACK:
            return move.back_to, True, f"the fleet goes back: {move.reason}"
        case MoveState.STOPPED:
            return (move.to if id in move.servers else stays), True, f"the move stopped: {move.reason}"
    if id in move.failed and move.strategy.kind != FleetStrategyKind.ALL_AT_ONCE:
        return stays, True, f"version {move.to} failed here: {move.failed[id]}"
    if move.strategy.kind == FleetStrategyKind.ALL_AT_ONCE and install is not None and install.active and not fleet.max_skew:
        # One that is under way ends first: where versions come faster than installs, nobody would ever arrive.
        keeps = install.version in view.usable and install.version not in fleet.refused and install.version > server.opened
        if keeps and fleet.target.kind == FleetTargetKind.LATEST:
            return install.version, True, ""
    return (move.to, True, "") if turn else (stays, True, "it waits for its turn")


def _turns(fleet: Fleet, view: View) -> set[str]:
    """The servers that may move now: with `at_a_time`, those out of service anyway and as many more as it allows. Who is away is
    told when it is back: what it would do on an older word is not counted."""
    move = fleet.moving
    strategy, version = (move.strategy, move.to) if move else (fleet.strategy, fleet.settled)
    if strategy.kind in (FleetStrategyKind.ALL_AT_ONCE, FleetStrategyKind.ATOMIC):
        return set(view.servers)
    if view.settling:
        return set()
    present = _present(fleet, view)
    installing = {id for id, server in present.items() if server.install is not None and server.install.active}
    away = installing | {id for id, server in present.items() if not server.serving}
    given_up = move.failed.keys() if move else set()
    room = (strategy.at_a_time or len(view.servers)) - len(away - given_up)
    behind = [id for id in present if _in_service(fleet, id, view) not in (0, version) and id not in installing]
    # Who failed waits for its next try in service: others may go first.
    waiting = sorted(behind, key=lambda id: (version in present[id].failures, present[id].serving, id))
    return ({id for id in view.servers if _attached(view.servers[id])} - set(behind)) | set(waiting[: max(0, room)])


def _in_service(fleet: Fleet, id: str, view: View) -> int:
    """The version that it serves, or is about to; 0: none."""
    server = view.servers[id]
    low, high = _range(fleet, id, view) or (server.agreed, server.agreed)
    return server.opened or (server.agreed if low <= server.agreed <= high else 0)


def _range(fleet: Fleet, id: str, view: View) -> tuple[int, int] | None:
    """The versions that this server may open its gate on now."""
    move = fleet.moving
    if move is not None and move.state == MoveState.APPLYING:
        return NOBODY
    if move is not None and move.strategy.kind == FleetStrategyKind.ATOMIC and move.state == MoveState.BACK:
        return move.back_to, move.back_to
    if fleet.strategy.kind == FleetStrategyKind.ATOMIC:
        version = fleet.settled if move is None else move.to if move.state == MoveState.MOVING else move.back_to
        return version, version
    if not fleet.max_skew:
        return None
    goals = {fleet.settled, move.to if move is not None else fleet.settled}
    others = [version for version, ids in view.shown.items() if ids - {id}]
    low, high = min(goals) - fleet.max_skew, max(goals) + fleet.max_skew
    return max([low, *(other - fleet.max_skew for other in others)]), min([high, *(other + fleet.max_skew for other in others)])


# What operators say


def set_power(fleet: Fleet, power: Power, servers: Iterable[str] = ()) -> Fleet:
    """Of the named servers, or of all, those that come later too."""
    named = tuple(servers)
    if not named:
        return replace(fleet, power=power, powers={})
    return replace(fleet, powers={**fleet.powers, **dict.fromkeys(named, power)})


def set_drained(fleet: Fleet, drained: bool, servers: Iterable[str]) -> Fleet:
    names = frozenset(servers)
    return replace(fleet, drained=fleet.drained | names if drained else fleet.drained - names)


def roll_back(fleet: Fleet, to: int, view: View, reason: str, request: str) -> Fleet:
    """Wants `to`; READY versions after it are refused, and a NUMBER that was wanted gives way to it."""
    later = {version: reason for version in view.usable if version > to}
    kept = {version: why for version, why in _still_refused(fleet, view.ready).items() if version != to}
    target = fleet.target if fleet.target.kind == FleetTargetKind.LATEST else FleetTarget(FleetTargetKind.NUMBER, to)
    return replace(fleet, target=target, refused=later | kept, rolled_back=request)


def decide(fleet: Fleet, go_on: bool, reason: str, view: View) -> Fleet:
    """An operator's word on the move that goes on. Raises ValueError where there is nothing to decide."""
    move = fleet.moving
    if move is None:
        raise ValueError("expected a move that goes on, there is none")
    if not go_on:
        if move.state == MoveState.BACK:
            return fleet
        if move.back_to not in view.ready:
            raise ValueError("there is no version to go back to")
        return _turn_back(fleet, move, view, reason or "an operator sent it back")
    match move.state:
        case MoveState.STOPPED:
            return replace(fleet, move=replace(move, state=MoveState.MOVING, failed={}, tries=move.tries + 1, reason=reason))
        case MoveState.TRYING | MoveState.HOLDING:
            return replace(fleet, move=replace(move, approved=True, reason=reason))
    raise ValueError(f"a move that is {move.state.name} goes on by itself")


def checked(fleet: Fleet, move: int, passed: bool, message: str, view: View) -> Fleet:
    """How the check of a canary ended."""
    found = fleet.moving
    if found is None or found.id != move or not found.checking:
        return fleet
    if passed:
        return replace(fleet, move=replace(found, checked=True))
    return _turn_back(fleet, found, view, f"check {found.strategy.check}: {message}")
