"""When what was asked of a fleet has come to its end: pure questions about what the daemon says of it and its servers."""

from collections.abc import Callable, Container, Iterable, Sequence

from resharder.v1 import resources_pb2

Fleet, Server, Move = resources_pb2.Fleet, resources_pb2.Server, resources_pb2.Move
Progress = Callable[[resources_pb2.Fleet, Sequence[resources_pb2.Server]], None]
Question = Callable[[resources_pb2.Fleet, Sequence[resources_pb2.Server]], bool]

_ENDED = (Move.STATE_UNSPECIFIED, Move.STOPPED, Move.DONE, Move.FAILED)
_OUT = (Server.LOST, Server.ASLEEP, Server.DRAINED)
"""They catch up when they are back: no move waits for them."""


def moved(asked: resources_pb2.Fleet) -> Question:
    """Whether the move that a command began, or found going on, has ended. `asked` is the daemon's answer to that command."""

    def ended(fleet: resources_pb2.Fleet, servers: Sequence[resources_pb2.Server]) -> bool:
        if fleet.move.state not in _ENDED:
            return False
        ours = _began(asked, fleet)
        if ours and fleet.move.state in (Move.FAILED, Move.STOPPED):
            return True
        return _settled(fleet, servers, fleet.move.failed if ours else ())

    return ended


def went_well(asked: resources_pb2.Fleet, fleet: resources_pb2.Fleet) -> bool:
    """False if the move of `asked`, or one after it, is FAILED or STOPPED, or left servers behind that failed."""
    return not (_began(asked, fleet) and (fleet.move.failed or fleet.move.state in (Move.FAILED, Move.STOPPED)))


def _began(asked: resources_pb2.Fleet, fleet: resources_pb2.Fleet) -> bool:
    """Whether the fleet's move is that of `asked` or one after it; one that had ended before says nothing."""
    return fleet.move.id > asked.move.id or asked.move.state not in _ENDED


def powered(power: resources_pb2.Power, server: str = "") -> Question:
    """Whether the fleet's servers, or one, are at `power`; AWAKE means that they serve, too."""
    awake = power == resources_pb2.AWAKE
    return lambda fleet, servers: all(
        one.power == power and not (awake and one.state not in (Server.SERVING, Server.DRAINED))
        for one in _chosen(servers, server)
    )


def drained(server: str = "") -> Question:
    """Whether those that are to be drained take no request and answer none any more."""
    shut = (Server.DRAINED, Server.ASLEEP, Server.FAILED)
    return lambda fleet, servers: all(
        one.state in shut and not one.in_flight for one in _chosen(servers, server) if one.drained or server
    )


def serving(server: str = "") -> Question:
    return lambda fleet, servers: all(one.state in (Server.SERVING, Server.ASLEEP) for one in _chosen(servers, server))


def why(fleet: resources_pb2.Fleet, servers: Iterable[resources_pb2.Server]) -> str:
    """The fleet's reason, and those of servers that do not serve what it wants."""
    others = (s for s in servers if s.state not in (Server.SERVING, Server.LOST) or s.version != fleet.wanted_version)
    return "; ".join([fleet.reason, *(f"{server.name}: {server.reason}" for server in others)])


def _settled(fleet: resources_pb2.Fleet, servers: Sequence[resources_pb2.Server], left_behind: Container[str]) -> bool:
    """With nothing to want yet there is nothing to wait for. `left_behind`: ids of servers."""
    awaited = (s for s in servers if s.state not in _OUT and s.name.removeprefix("servers/") not in left_behind)
    arrived = all(s.state == Server.SERVING and s.version == fleet.wanted_version for s in awaited)
    return not fleet.wanted_version or (fleet.settled_version == fleet.wanted_version and arrived)


def _chosen(servers: Iterable[resources_pb2.Server], name: str) -> list[resources_pb2.Server]:
    return [server for server in servers if server.state != Server.LOST and name in ("", server.name)]
