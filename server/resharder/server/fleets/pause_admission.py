"""Pause admission: the staged servers that stay in service until their turn on the direct path is near, as a pure function.

A rank sends to one server at a time, so a server that paused together with all others would wait for every transfer before its
own. For each server that ranks can send to at the same time, at most two pause: one receives the version, the other is ready
when that transfer ends.

Servers that finish requests before they pause (PauseMode.WAIT) pause together, since that may take minutes.
"""

from collections.abc import Set

from resharder.server.state.fleet import View
from resharder.server.state.server import InstallState, Server

_PAUSED = 2  # paused servers for each that ranks can send to at the same time
_PATIENCE = 20.0  # seconds of a pause after which a server no longer counts as paused


def held_back(view: View) -> Set[str]:
    """Return the servers that must not pause yet. Without capacity, this includes servers that still stage."""
    joined = {id for id, server in view.servers.items() if server.joined}
    if not joined:
        return frozenset()
    staging = {id: server for id, server in view.servers.items() if _is(server, InstallState.STAGING)}
    staged = {id for id, server in staging.items() if server.staged}
    waiting = [id for id in staged & joined if _can_go(staging[id])]
    room = _PAUSED * view.at_once - sum(_takes(view.servers[id], view.now) for id in joined)
    if len(waiting) < room:
        return frozenset()
    waiting.sort(key=lambda id: (bool(staging[id].opened), _began(staging[id]), id))
    return staging.keys() - (staged - joined) - set(waiting[: max(0, room)])


def _is(server: Server, state: InstallState) -> bool:
    return server.install is not None and server.install.state == state


def _began(server: Server) -> float:
    return server.install.step_started if server.install is not None else 0.0


def _can_go(server: Server) -> bool:
    return server.lost_at is None and bool(server.controls) and not server.busy_elsewhere(server.controls[0])


def _takes(server: Server, now: float) -> bool:
    return _is(server, InstallState.APPLYING) and now < _began(server) + _PATIENCE
