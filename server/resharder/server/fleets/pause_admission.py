"""Which servers of a fleet serve on, staged, until their turn on the direct path is near: a pure function of what they are at.

A rank sends to one server at a time (direct.py). One that paused with all the others would stand still through every transfer
before its own. So no more than two of a fleet pause for it, or two for each that ranks can send to at the same time: one takes
the version, another is ready when the first has it.

Fleets whose servers first answer what they have begun to (PauseMode.WAIT) pause all together: that may take minutes.
"""

from collections.abc import Set

from resharder.server.state.fleet import View
from resharder.server.state.server import InstallState, Server

_PAUSED = 2  # for each that ranks can send to
_PATIENCE = 20.0  # seconds: whoever is paused for longer is not waited for


def held_back(view: View) -> Set[str]:
    """Servers that are not to pause yet. Where there is no room, who stages is one: how it gets the version shows when it has
    staged."""
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
