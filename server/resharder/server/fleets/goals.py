"""Goals: the intended state of each server of a fleet, as pure functions.

On the direct path, staged servers stay in service until their turn is near (`held_back`). A rank sends to one server at a time,
so a server that paused together with all others would wait for every transfer before its own. For each server that ranks can
send to at the same time, at most two pause: one receives the version, the other is ready when that transfer ends. Servers that
finish requests before they pause (PauseMode.WAIT) pause together, since that may take minutes.
"""

from collections.abc import Set
from dataclasses import replace

from resharder.server.fleets.reconciler.installs import why_not_ahead
from resharder.server.fleets.updates import (
    is_attached,
    is_broken,
    move_tries,
    present_servers,
    uncertain_servers,
    wanted,
)
from resharder.server.state.fleet import NOBODY, Fleet, View
from resharder.server.state.server import Goal, Server
from resharder.v1 import resources_pb2
from resharder.v1.resources_pb2 import BaseBinding, PauseMode

_PAUSED = 2  # paused servers for each that ranks can send to at the same time
_PATIENCE = 20.0  # seconds of a pause after which a server no longer counts as paused


def goals(fleet: Fleet, view: View) -> dict[str, Goal]:
    """Return the goal of every server of the view."""
    found, move = {}, fleet.moving
    turns = _turns(fleet, view)
    together = move is not None and move.strategy.kind == resources_pb2.UpdateStrategy.ATOMIC
    late = held_back(view) if fleet.pause_mode != PauseMode.WAIT and not together else frozenset()
    for id, server in view.servers.items():
        version, apply, why = _part(fleet, id, server, view, id in turns)
        version = _instead(version, fleet, server, view)
        if apply and id in late:
            apply, why = False, "it waits for its turn on the direct path"
        leaves, warning, holds = "", "", fleet.base_binding == BaseBinding.HOLD
        if id in view.bases:
            shown = server.opened or server.agreed
            warning = _unbound(view, id, shown)
            if warning and holds:
                leaves, why, warning = warning, warning, ""
            if apply and holds and version != shown and (waits := _unbound(view, id, version)):
                apply, why = False, waits
        if misplaced := view.misplaced.get(id):
            version, apply, leaves, why = _in_service(fleet, id, view), False, misplaced, misplaced
        found[id] = Goal(
            version=version,
            boot=boots(fleet, view),
            apply=apply,
            serves=_range(fleet, id, view),
            leaves=leaves,
            warning=warning,
            bound=view.base_versions if holds else {},
            open=id not in fleet.drained,
            power=fleet.power_of(id),
            strict=fleet.strict,
            retry=move_tries(fleet.move) if fleet.move else (0, 0),
            why=why,
        )
    return found


def _unbound(view: View, id: str, version: int) -> str:
    """Return how the base's version differs from that of an adapter's version; empty if it does not."""
    needed, base = view.base_versions.get(version, 0), view.bases[id]
    if not needed or base == needed:
        return ""
    return f"version {version} was trained on version {needed} of its base, which is at {base or 'none'}"


def boots(fleet: Fleet, view: View) -> int:
    """Return the version from which a server of the fleet should boot now; 0: none is READY."""
    move = fleet.moving
    version = fleet.settled
    short = move is not None and move.state == resources_pb2.Move.STOPPED and move.short
    if move is not None and (short or move.state in (resources_pb2.Move.MOVING, resources_pb2.Move.APPLYING)):
        version = move.to
    elif move is not None:
        version = move.back_to
    if version not in view.ready - fleet.refused.keys():
        version = wanted(fleet, replace(view, ahead=frozenset()))
    return version if version in view.ready else 0


def _part(fleet: Fleet, id: str, server: Server, view: View, turn: bool) -> tuple[int, bool, str]:
    """Return the version for a server, whether it may apply it, and the reason if it has to wait."""
    move = fleet.moving
    if move is None:
        return (fleet.settled, True, "") if turn else (_in_service(fleet, id, view), True, "it waits for its turn")
    install = server.install
    stays = _in_service(fleet, id, view) or move.back_to or move.to
    match move.state:
        case resources_pb2.Move.STAGING:
            if is_broken(server, move, view):
                return move.to, True, ""
            if not server.opened and server.agreed != move.back_to and move.back_to in view.ready - fleet.refused.keys():
                return move.back_to, True, ""
            return move.to, False, "all servers stage before any applies"
        case resources_pb2.Move.APPLYING:
            return move.to, True, "no server serves it before all have applied it"
        case resources_pb2.Move.TRYING | resources_pb2.Move.HOLDING:
            return (move.to, True, "") if id in move.canaries else (stays, True, f"version {move.to} goes to the canaries first")
        case resources_pb2.Move.BACK:
            return move.back_to, True, f"the fleet goes back: {move.reason}"
        case resources_pb2.Move.STOPPED:
            return (move.to if id in move.servers or move.short else stays), True, f"the move stopped: {move.reason}"
    if id in move.failed and move.strategy.kind != resources_pb2.UpdateStrategy.ALL_AT_ONCE:
        return stays, True, f"version {move.to} failed here: {move.failed[id]}"
    if (
        move.strategy.kind == resources_pb2.UpdateStrategy.ALL_AT_ONCE
        and install is not None
        and install.active
        and not fleet.max_skew
    ):
        # An install in progress ends first: if versions arrive faster than installs, no server would ever arrive.
        keeps = install.version in view.usable and install.version not in fleet.refused and install.version > server.opened
        if keeps and fleet.target.kind == resources_pb2.VersionTarget.LATEST:
            return install.version, True, ""
    return (move.to, True, "") if turn else (stays, True, "it waits for its turn")


def _instead(version: int, fleet: Fleet, server: Server, view: View) -> int:
    """Return a newer READY version for a server that has to wait until `version` is READY; else `version`."""
    install = server.install
    installs = install is not None and install.active and install.version == version
    if version not in view.ahead or installs or not why_not_ahead(server, version):
        return version
    newer = view.ready - fleet.refused.keys() - view.skipped
    return max((number for number in newer if max(server.opened, server.agreed) < number < version), default=version)


def _turns(fleet: Fleet, view: View) -> set[str]:
    """Return the servers that may move now: those out of service, and as many more as `at_a_time` allows.

    An absent server gets its goal when it returns.
    """
    move = fleet.moving
    strategy, version = (move.strategy, move.to) if move else (fleet.strategy, fleet.settled)
    if strategy.kind in (resources_pb2.UpdateStrategy.ALL_AT_ONCE, resources_pb2.UpdateStrategy.ATOMIC):
        return set(view.servers)
    if view.settling:
        return set()
    present = present_servers(fleet, view)
    installing = {id for id, server in present.items() if server.install is not None and server.install.active}
    away = installing | {id for id, server in present.items() if not server.serving}
    away |= {id for id, server in view.servers.items() if server.restarts}
    away |= uncertain_servers(fleet, move, view) if move else set()
    given_up = move.failed.keys() if move else set()
    room = (strategy.at_a_time or len(view.servers)) - len(away - given_up)
    behind = [id for id in present if _in_service(fleet, id, view) not in (0, version) and id not in installing]
    # A failed server waits for its retry in service: others may go first.
    waiting = sorted(behind, key=lambda id: (version in present[id].failures, present[id].serving, id))
    return ({id for id in view.servers if is_attached(view.servers[id])} - set(behind)) | set(waiting[: max(0, room)])


def _in_service(fleet: Fleet, id: str, view: View) -> int:
    """Return the version that a server serves, or is about to serve; 0: none. No gate opens anew on a retired version."""
    server = view.servers[id]
    low, high = _range(fleet, id, view) or (server.agreed, server.agreed)
    return server.opened or (server.agreed if low <= server.agreed <= high and server.serves(server.agreed) else 0)


def _range(fleet: Fleet, id: str, view: View) -> tuple[int, int] | None:
    """Return the range of versions on which a server may open its gate now."""
    move = fleet.moving
    if move is not None and move.state == resources_pb2.Move.APPLYING:
        return NOBODY
    if move is not None and move.strategy.kind == resources_pb2.UpdateStrategy.ATOMIC and move.state == resources_pb2.Move.BACK:
        return move.back_to, move.back_to
    if fleet.strategy.kind == resources_pb2.UpdateStrategy.ATOMIC:
        version = fleet.settled if move is None else move.to if move.state == resources_pb2.Move.MOVING else move.back_to
        return version, version
    if not fleet.max_skew:
        return None
    goals = {fleet.settled, move.to if move is not None else fleet.settled}
    others = [version for version, ids in view.shown.items() if ids - {id}]
    low, high = min(goals) - fleet.max_skew, max(goals) + fleet.max_skew
    return max([low, *(other - fleet.max_skew for other in others)]), min([high, *(other + fleet.max_skew for other in others)])


def held_back(view: View) -> Set[str]:
    """Return the servers that must not pause yet. Without capacity, this includes servers that still stage."""
    joined = {id for id, server in view.servers.items() if server.joined}
    if not joined:
        return frozenset()
    staging = {id: server for id, server in view.servers.items() if _is(server, resources_pb2.Install.STAGING)}
    staged = {id for id, server in staging.items() if server.staged}
    waiting = [id for id in staged & joined if _can_go(staging[id])]
    room = _PAUSED * view.at_once - sum(_takes(view.servers[id], view.now) for id in joined)
    if len(waiting) < room:
        return frozenset()
    waiting.sort(key=lambda id: (bool(staging[id].opened), _began(staging[id]), id))
    return staging.keys() - (staged - joined) - set(waiting[: max(0, room)])


def _is(server: Server, state: resources_pb2.Install.State) -> bool:
    return server.install is not None and server.install.state == state


def _began(server: Server) -> float:
    return server.install.step_started if server.install is not None else 0.0


def _can_go(server: Server) -> bool:
    return server.lost_at is None and bool(server.controls) and not server.busy_elsewhere(server.controls[0])


def _takes(server: Server, now: float) -> bool:
    return _is(server, resources_pb2.Install.APPLYING) and now < _began(server) + _PATIENCE
