"""Progress of a fleet to its target: pure functions of the fleet, its servers and the time.

`advance` returns the fleet after one step of its move; `goals.goals` returns the goal of each server. The whole state is the
fleet, which is stored whenever it changes, and the servers' reports.

    ALL_AT_ONCE   MOVING -> DONE | STOPPED          a newer version replaces the target of the move
    ROLLING       MOVING -> DONE | STOPPED          at most `at_a_time` servers out of service for it
    CANARY        TRYING -> HOLDING -> MOVING ...   a failed canary or check, or an operator: BACK -> FAILED
    ATOMIC        STAGING -> APPLYING -> DONE       a failure in STAGING: FAILED; in APPLYING: BACK -> FAILED

A failed version is refused: LATEST skips it, as it skips one that was rolled back. The versions on which gates may open enforce
a skew bound; a jump beyond the bound is atomic.

Moves do not wait for servers that were LOST before they began. A server that is LOST in a move (`Move.counted`) counts as
failed at once, and no move is DONE without it: a rolling one stops at `max_failures`, an atomic one fails or goes back, and any
other ends STOPPED (`Move.short`) until its servers are back, forgotten, or given up by an operator. A server without a control
side may be LOST or return: a move waits for it until its lease ends. Where versions must not mix (atomic fleets, skew bounds),
leases are strict, so that an unreachable server has closed its gate by the time it is LOST.

A fleet that serves ahead takes versions before READY, once every rank offers them (`View.ahead`); each server falls
back by itself (`reconciler`). A version that becomes ABORTED is gone: the fleet returns to the newest READY one.
Servers boot from, are pinned to and return to READY versions only.

Durations are measured by the monotonic clock (`View.now`). The wall clock may jump at any time; it only labels moves.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace

from resharder.server.state.fleet import Fleet, Move, UpdateStrategy, View
from resharder.server.state.server import ASLEEP, Server
from resharder.v1 import resources_pb2
from resharder.v1.resources_pb2 import Power


def wanted(fleet: Fleet, view: View) -> int:
    """Return the version that `fleet.target` selects now; 0: no version is READY."""
    move = fleet.moving
    current = move.to if move else fleet.settled
    match fleet.target.kind:
        case resources_pb2.VersionTarget.NUMBER:
            number = fleet.target.version
            return number if number in view.ready and number not in fleet.refused else current
        case resources_pb2.VersionTarget.NONE:
            return current if current in view.usable else _instead(current, fleet, view)
    newest = latest(fleet, view, current)
    early = fleet.rest_left(view.now) > 0 and current in view.usable and current not in fleet.refused
    return current if early or not newest else newest


def latest(fleet: Fleet, view: View, current: int) -> int:
    """Return the newest version that is neither refused nor skipped; 0: none.

    If all others are gone, a fleet stays at a skipped version, or takes the newest one.
    """
    permitted = view.usable - fleet.refused.keys()
    listed = permitted - view.skipped
    if listed or current not in permitted:
        return max(listed or permitted, default=0)
    return current


def _instead(gone: int, fleet: Fleet, view: View) -> int:
    """Return the version before one that was served ahead and will not be READY, or the newest READY one."""
    ready = view.ready - fleet.refused.keys()
    return max((number for number in ready if number < gone), default=max(ready, default=gone)) if gone else gone


def advance(fleet: Fleet, view: View) -> Fleet:
    """Return the fleet after one step of its move, or the fleet itself. Call until nothing changes."""
    if (move := fleet.moving) is not None and _taken_back(fleet, move, view):
        return replace(fleet, move=replace(move, state=resources_pb2.Move.BACK, reason=fleet.refused[move.to]))
    if view.settling and (fleet.strict or fleet.strategy.kind != resources_pb2.UpdateStrategy.ALL_AT_ONCE):
        return fleet
    target, move = wanted(fleet, view), fleet.moving
    if move is None:
        return _begin(fleet, target, view) if target and target != fleet.settled else fleet
    if joined := present_servers(fleet, view).keys() - move.counted:
        return replace(fleet, move=replace(move, counted=move.counted | joined))
    if target and target != move.to and _gives_way(fleet, move, target, view):
        if target != move.back_to:
            return _begin(fleet, target, view)
        gone = "" if move.to in view.usable else f"version {move.to} was not completed"
        reason = fleet.refused.get(move.to, gone or f"version {target} is wanted again")
        return replace(fleet, move=replace(move, state=resources_pb2.Move.BACK, reason=reason))
    single = move.state in (resources_pb2.Move.TRYING, resources_pb2.Move.HOLDING, resources_pb2.Move.MOVING)
    if single and fleet.mixes(move.to, view.shown) and move.to not in fleet.refused:
        return _begin(fleet, move.to, view)  # servers returned with versions beyond the skew bound
    match move.state:
        case resources_pb2.Move.STAGING:
            return _staging(fleet, move, view)
        case resources_pb2.Move.APPLYING:
            return _applying(fleet, move, view)
        case resources_pb2.Move.TRYING | resources_pb2.Move.HOLDING:
            return _trying(fleet, move, view)
        case resources_pb2.Move.MOVING:
            return _moving(fleet, move, view)
        case resources_pb2.Move.BACK:
            return _back(fleet, move, view)
        case resources_pb2.Move.STOPPED if move.short:
            return _short(fleet, move, view)
    return fleet


def _begin(fleet: Fleet, to: int, view: View) -> Fleet:
    at = fleet.moving.to if fleet.moving else fleet.settled
    left = fleet.serves_ahead and at > to and at not in view.usable
    strategy, reason = fleet.strategy, f"version {at} was not completed" if left else ""
    back_to = fleet.settled if fleet.settled in view.ready else 0
    if fleet.mixes(to, view.shown):
        wide = strategy.kind != resources_pb2.UpdateStrategy.ATOMIC
        strategy, reason = (
            UpdateStrategy(resources_pb2.UpdateStrategy.ATOMIC),
            f"the jump is wider than the skew bound of {fleet.max_skew}" if wide else "",
        )
    elif not back_to:
        strategy = UpdateStrategy(resources_pb2.UpdateStrategy.ALL_AT_ONCE)
    elif strategy.kind == resources_pb2.UpdateStrategy.CANARY and fleet.settled in fleet.refused and to < fleet.settled:
        strategy = replace(strategy, kind=resources_pb2.UpdateStrategy.ROLLING)  # back to a tried version
    states = {
        resources_pb2.UpdateStrategy.CANARY: resources_pb2.Move.TRYING,
        resources_pb2.UpdateStrategy.ATOMIC: resources_pb2.Move.STAGING,
    }
    number = fleet.move.id + 1 if fleet.move else 1
    move = Move(
        number, states.get(strategy.kind, resources_pb2.Move.MOVING), back_to, to, strategy, view.wall, reason, began=view.now
    )
    return replace(fleet, move=replace(move, counted=_counted(fleet, move, view)))


def _counted(fleet: Fleet, move: Move, view: View) -> frozenset[str]:
    """Return the servers with which a move begins: those present or awaited, and those of a move to an older version before it.

    Servers that move all at once may always be on the way to a newer version, so that only the last one of such moves ends.
    """
    awaited = {id for id in fleet.members - view.servers.keys() if _takes_part(fleet, id)} if view.settling else set()
    before = fleet.moving
    follows = before is not None and before.state == resources_pb2.Move.MOVING and before.to < move.to
    alike = before is not None and {before.strategy.kind, move.strategy.kind} == {resources_pb2.UpdateStrategy.ALL_AT_ONCE}
    follows_on = before.counted if before is not None and follows and alike else frozenset[str]()
    return frozenset(present_servers(fleet, view).keys() | awaited | follows_on)


def _takes_part(fleet: Fleet, id: str) -> bool:
    """Return whether an operator has neither drained a server nor put it to sleep."""
    return fleet.power_of(id) == Power.AWAKE and id not in fleet.drained


def _taken_back(fleet: Fleet, move: Move, view: View) -> bool:
    """Return whether the move goes back because its version was refused meanwhile.

    If the previous version was refused as well, servers go straight to the target if they can.
    """
    if move.state == resources_pb2.Move.BACK or move.to not in fleet.refused or move.back_to not in view.ready:
        return False
    return move.back_to not in fleet.refused or move.state == resources_pb2.Move.APPLYING or view.settling


def _gives_way(fleet: Fleet, move: Move, target: int, view: View) -> bool:
    """Return whether another version may replace the target of a move."""
    if move.state in (resources_pb2.Move.APPLYING, resources_pb2.Move.BACK):
        return False
    if move.to in fleet.refused or move.to not in view.usable or fleet.target.kind == resources_pb2.VersionTarget.NUMBER:
        return True
    if move.state == resources_pb2.Move.STOPPED:
        return True
    return move.strategy.kind == resources_pb2.UpdateStrategy.ALL_AT_ONCE and not fleet.mixes(target, view.shown)


def present_servers(fleet: Fleet, view: View) -> dict[str, Server]:
    """Return the servers that a move waits for: attached, awake by order and in fact, and not drained."""
    return {
        id: server
        for id, server in sorted(view.servers.items())
        if is_attached(server) and _takes_part(fleet, id) and server.power not in ASLEEP
    }


def lost_servers(fleet: Fleet, move: Move, view: View) -> dict[str, str]:
    """Return the counted servers of a move that are LOST, with reasons. Those drained or put to sleep are not missing."""
    found = {}
    for id in sorted(move.counted & view.servers.keys()):
        server = view.servers[id]
        if server.lost_at is not None and _takes_part(fleet, id):
            over = f" while it installed version {move.to}" if _lost_over(server, move.to) and not server.failure else ""
            found[id] = server.failure or f"its lease ended{over}"
    return found


def uncertain_servers(fleet: Fleet, move: Move, view: View) -> set[str]:
    """Return the counted servers of a move without a control side, which return or are LOST when their leases end."""

    def awaited(id: str) -> bool:
        server = view.servers.get(id)
        if server is None:
            return id in fleet.members  # since the daemon's restart
        return server.lost_at is None and not server.controls and not server.left and server.power not in ASLEEP

    return {id for id in move.counted if _takes_part(fleet, id) and awaited(id)}


def is_attached(server: Server) -> bool:
    """Return whether a server is live and has a control side."""
    return server.lost_at is None and bool(server.controls)


def _hopeless(server: Server, version: int, move: Move, attempts: int) -> str:
    """Return the error of a version that has failed `attempts` times on a server; empty otherwise.

    Failures before this move, or before an operator's retry, do not count.
    """
    failure = server.failures.get(version) if server.goal.retry == move_tries(move) else None
    return failure.error if failure is not None and failure.count >= attempts else ""


def move_tries(move: Move) -> tuple[int, int]:
    """Return the key by which a change of `Goal.retry` clears a server's failures: the move, and its approved retries."""
    return move.id, move.tries


def _lost_over(server: Server, version: int) -> bool:
    """Return whether a server's lease expired while it installed a version."""
    install = server.install
    return server.lost_at is not None and install is not None and install.version == version and server.confirmed != version


def _end(fleet: Fleet, move: Move, state: resources_pb2.Move.State, view: View, reason: str = "") -> Fleet:
    settled = move.to if state == resources_pb2.Move.DONE else move.back_to
    move = replace(move, state=state, ended=view.wall, seconds=view.now - move.began, reason=reason or move.reason)
    return replace(fleet, move=move, settled=settled)


def _refuse(fleet: Fleet, version: int, reason: str, ready: Collection[int]) -> Fleet:
    return replace(fleet, refused=still_refused(fleet, ready) | {version: reason})


def still_refused(fleet: Fleet, ready: Collection[int]) -> dict[int, str]:
    """Return the refused versions that still exist, and those above the newest READY one."""
    newest = max(ready, default=0)
    return {number: why for number, why in fleet.refused.items() if number in ready or number > newest}


def turn_back(fleet: Fleet, move: Move, view: View, reason: str) -> Fleet:
    """Reverse a move and refuse its version; without an earlier version to return to, stop the move."""
    if move.back_to not in view.ready:
        return replace(
            fleet, move=replace(move, state=resources_pb2.Move.STOPPED, reason=f"{reason}; there is no version to go back to")
        )
    return replace(_refuse(fleet, move.to, reason, view.ready), move=replace(move, state=resources_pb2.Move.BACK, reason=reason))


def checked(fleet: Fleet, move: int, passed: bool, message: str, view: View) -> Fleet:
    """Record the result of a canary's check. Ignored if the move no longer waits for it."""
    found = fleet.moving
    if found is None or found.id != move or not found.checking:
        return fleet
    if passed:
        return replace(fleet, move=replace(found, checked=True))
    return turn_back(fleet, found, view, f"check {found.strategy.check}: {message}")


def _noted(fleet: Fleet, move: Move, view: View) -> Move:
    """Return the move with the servers that arrived or failed since.

    Servers that move all at once have failed after all their attempts. Others stop the move, and have after the first one.
    """
    there = {id for id, server in view.servers.items() if server.serving == move.to}
    attempts = view.settings.attempts if move.strategy.kind == resources_pb2.UpdateStrategy.ALL_AT_ONCE else 1
    failed = {id: error for id, error in move.failed.items() if id not in there} | lost_servers(fleet, move, view)
    for id in view.servers.keys() - there - failed.keys():
        if error := _hopeless(view.servers[id], move.to, move, attempts):
            failed[id] = error
    return replace(move, servers=(*move.servers, *sorted(there - set(move.servers))), failed=failed)


def _moving(fleet: Fleet, move: Move, view: View) -> Fleet:
    rolling = move.strategy.kind != resources_pb2.UpdateStrategy.ALL_AT_ONCE
    noted = _noted(fleet, move, view)
    if rolling and noted != move:
        return replace(fleet, move=noted)
    if rolling and len(move.failed) >= max(1, move.strategy.max_failures):
        return replace(fleet, move=replace(move, state=resources_pb2.Move.STOPPED, reason=f"it failed on {_listed(move.failed)}"))
    return _at_its_end(fleet, noted, view)


def _at_its_end(fleet: Fleet, noted: Move, view: View) -> Fleet:
    """End a move once all present servers have arrived or failed: DONE, or STOPPED if others are missing."""
    present = present_servers(fleet, view)
    arrived = all(server.serving == noted.to or id in noted.failed for id, server in present.items())
    if not arrived or uncertain_servers(fleet, noted, view):
        return fleet
    lost = lost_servers(fleet, noted, view)
    if not lost:
        return _end(fleet, replace(noted, short=False), resources_pb2.Move.DONE, view)
    are = "is" if len(lost) == 1 else "are"
    reason = f"{len(lost)} of {len(noted.counted)} servers {are} missing: {_listed(lost)}"
    return replace(fleet, move=replace(noted, state=resources_pb2.Move.STOPPED, short=True, reason=reason))


def _short(fleet: Fleet, move: Move, view: View) -> Fleet:
    """Return a fleet whose move has STOPPED without some servers, as those that return or are lost change it."""
    after = _at_its_end(fleet, _noted(fleet, replace(move, failed={}), view), view)
    return replace(after, move=replace(after.move, reason="")) if after.move is not None and not after.move.active else after


def _listed(errors: Mapping[str, str]) -> str:
    return "; ".join(f"servers/{id}: {error}" for id, error in sorted(errors.items()))


def _trying(fleet: Fleet, move: Move, view: View) -> Fleet:
    present, count = present_servers(fleet, view), max(1, move.strategy.canaries)
    kept = [id for id in move.servers if id not in fleet.drained and fleet.power_of(id) == Power.AWAKE]
    more = [id for id, server in present.items() if server.opened and id not in kept]
    chosen = (*kept, *more[: max(0, count - len(kept))])
    if chosen != move.servers:
        return replace(fleet, move=replace(move, servers=chosen))
    for id in chosen:
        if error := _canary_error(view.servers.get(id), move, view):
            return turn_back(fleet, move, view, f"canary servers/{id} {error}")
    if not chosen or not all(id in present and present[id].serving == move.to for id in chosen):
        return fleet
    if move.state == resources_pb2.Move.TRYING:
        return replace(fleet, move=replace(move, state=resources_pb2.Move.HOLDING, held=view.now))
    waits = move.hold_left(view.now) > 0 or move.checking or (move.strategy.approval and not move.approved)
    return fleet if waits else replace(fleet, move=replace(move, state=resources_pb2.Move.MOVING))


def _canary_error(server: Server | None, move: Move, view: View) -> str:
    if server is None or server.lost_at is not None:
        why = f": {server.failure}" if server is not None and server.failure else ""
        return f"was lost while it installed version {move.to}{why}"
    error = _hopeless(server, move.to, move, view.settings.attempts)
    return error and f"could not install version {move.to}: {error}"


def _staging(fleet: Fleet, move: Move, view: View) -> Fleet:
    present = present_servers(fleet, view)
    for id, server in present.items():
        if error := _hopeless(server, move.to, move, view.settings.attempts):
            reason = f"servers/{id} could not stage it: {error}"
            return _end(_refuse(fleet, move.to, reason, view.ready), move, resources_pb2.Move.FAILED, view, reason)
    if lost := lost_servers(fleet, move, view):
        reason = f"servers were lost before all had staged it: {_listed(lost)}"
        return _end(
            _refuse(fleet, move.to, reason, view.ready), replace(move, failed=lost), resources_pb2.Move.FAILED, view, reason
        )
    if uncertain_servers(fleet, move, view):
        return fleet
    able = [server for server in present.values() if not is_broken(server, move, view)]
    if any(server.shown for id, server in view.servers.items() if id not in present):
        return fleet  # it is unreachable and may serve until its lease expires
    if all(server.staged == move.to or server.agreed == move.to for server in able):
        return replace(fleet, move=replace(move, state=resources_pb2.Move.APPLYING, servers=tuple(present)))
    return fleet


def is_broken(server: Server, move: Move, view: View) -> bool:
    """Return whether a server is out of service and its previous version cannot be installed."""
    return not server.opened and bool(_hopeless(server, move.back_to, move, view.settings.attempts))


def _applying(fleet: Fleet, move: Move, view: View) -> Fleet:
    present = {id: server for id, server in present_servers(fleet, view).items() if id in move.servers}
    for id, server in present.items():
        if server.agreed != move.to and (error := _apply_error(server, move.to)):
            return turn_back(fleet, move, view, f"{id}: {error}")
    others = set(move.servers)
    if lost := {id: why for id, why in lost_servers(fleet, move, view).items() if id in others}:
        return turn_back(fleet, replace(move, failed=lost), view, f"servers were lost before all had applied it: {_listed(lost)}")
    if others & uncertain_servers(fleet, move, view):
        return fleet
    if all(server.agreed == move.to for server in present.values()) and view.shown.keys() <= {move.to}:
        return _end(fleet, move, resources_pb2.Move.DONE, view)
    return fleet


def _apply_error(server: Server, version: int) -> str:
    """Return the error of a server that had staged the version. Its install may have been replaced by now."""
    install, failure = server.install, server.failures.get(version)
    if install is not None and install.version == version:
        return install.error if install.state == resources_pb2.Install.FAILED else ""
    return failure.error if failure is not None else ""


def _back(fleet: Fleet, move: Move, view: View) -> Fleet:
    present = present_servers(fleet, view)
    stuck = {id for id, server in present.items() if _hopeless(server, move.back_to, move, view.settings.attempts)}
    back = all(server.serving == move.back_to or id in stuck for id, server in present.items())
    if not back or uncertain_servers(fleet, move, view):
        return fleet
    return _end(fleet, replace(move, failed={**move.failed, **lost_servers(fleet, move, view)}), resources_pb2.Move.FAILED, view)
