"""Conditions for the end of a command on a fleet: pure functions of the fleet and its servers."""

from collections.abc import Callable, Container, Iterable, Sequence

from resharder.client.operator.answers import Fleet, Move, Power, Server

FleetListener = Callable[[Fleet, Sequence[Server]], None]
Condition = Callable[[Fleet, Sequence[Server]], bool]

_WENT_WRONG = (Move.State.FAILED, Move.State.STOPPED)
_ENDED = (Move.State.UNSPECIFIED, Move.State.DONE, *_WENT_WRONG)
_OUT = (Server.State.LOST, Server.State.ASLEEP, Server.State.DRAINED)
"""States of servers that no move waits for; they follow when they are back."""


def moved(asked: Fleet) -> Condition:
    """Return the condition that the move which a command began, or joined, has ended. `asked` is the command's answer."""

    def ended(fleet: Fleet, servers: Sequence[Server]) -> bool:
        if _move_state(fleet) not in _ENDED:
            return False
        ours = _began(asked, fleet)
        if ours and _move_state(fleet) in _WENT_WRONG:
            return True
        return _settled(fleet, servers, _failed(fleet) if ours else ())

    return ended


def went_well(asked: Fleet, fleet: Fleet) -> bool:
    """Return whether the move of a command, and any after it, did not fail or stop and left no failed servers.

    Args:
        asked: The command's answer.
        fleet: The fleet now.
    """
    return not (_began(asked, fleet) and (_failed(fleet) or _move_state(fleet) in _WENT_WRONG))


def powered(power: Power, server: str = "") -> Condition:
    """Return the condition that the fleet's servers, or one, are in state `power`; with AWAKE, that they serve as well."""
    awake = power == Power.AWAKE
    return lambda fleet, servers: not _away(fleet, server) and all(
        one.power == power and not (awake and one.state not in (Server.State.SERVING, Server.State.DRAINED))
        for one in _chosen(servers, server)
    )


def drained(server: str = "") -> Condition:
    """Return the condition that draining servers accept no requests and have answered the last one."""
    shut = (Server.State.DRAINED, Server.State.ASLEEP, Server.State.FAILED)
    return lambda fleet, servers: not _away(fleet, server) and all(
        one.state in shut and not one.in_flight for one in _chosen(servers, server) if one.drained or server
    )


def serving(server: str = "") -> Condition:
    """Return the condition that the fleet's servers, or one, serve or sleep."""
    up = (Server.State.SERVING, Server.State.ASLEEP)
    return lambda fleet, servers: not _away(fleet, server) and all(one.state in up for one in _chosen(servers, server))


def why(fleet: Fleet, servers: Iterable[Server]) -> str:
    """Return the reason of the fleet's state, and those of servers that do not serve its target."""
    others = (s for s in servers if s.state not in (Server.State.SERVING, Server.State.LOST) or s.version != fleet.wanted_version)
    return "; ".join([fleet.reason, *(f"{server.name}: {server.reason}" for server in others)])


def _move_state(fleet: Fleet) -> Move.State:
    return fleet.move.state if fleet.move else Move.State.UNSPECIFIED


def _failed(fleet: Fleet) -> Container[str]:
    return fleet.move.failed if fleet.move else ()


def _began(asked: Fleet, fleet: Fleet) -> bool:
    """Return whether the fleet's move is that of `asked` or a later one, rather than one that had ended before the command.

    A move to the target that has stopped has not ended: nothing happens until an operator decides about it.
    """
    before, now = (one.move.id if one.move else 0 for one in (asked, fleet))
    stopped = asked.move is not None and asked.move.state == Move.State.STOPPED and asked.move.to_version == asked.wanted_version
    return now > before or stopped or _move_state(asked) not in _ENDED


def _settled(fleet: Fleet, servers: Sequence[Server], left_behind: Container[str]) -> bool:
    """Return whether all awaited servers serve the target; True for a fleet without one. `left_behind` has ids of servers."""
    awaited = (s for s in servers if s.state not in _OUT and s.name.removeprefix("servers/") not in left_behind)
    arrived = all(s.state == Server.State.SERVING and s.version == fleet.wanted_version for s in awaited)
    return not fleet.wanted_version or (fleet.settled_version == fleet.wanted_version and arrived and not fleet.returning)


def _away(fleet: Fleet, name: str) -> bool:
    """Return whether the daemon still awaits the named server, or any, after its restart."""
    return name in fleet.returning if name else bool(fleet.returning)


def _chosen(servers: Iterable[Server], name: str) -> list[Server]:
    return [server for server in servers if server.state != Server.State.LOST and name in ("", server.name)]
