"""Events of servers and fleets for the event log."""

from collections.abc import Callable

from resharder.server.fleets.explain import explain, state_of
from resharder.server.fleets.ports import FleetObserver, Note
from resharder.server.state.fleet import Fleet
from resharder.server.state.server import Server, Settings
from resharder.v1 import resources_pb2


class FleetLog(FleetObserver):
    """Recorder of each change of a server's state or version, each difference in its memory, and each state of a move."""

    def __init__(self, note: Note, settings: Settings, clock: Callable[[], float]) -> None:
        self._note, self._settings, self._clock = note, settings, clock

    def server_stepped(self, before: Server, after: Server) -> None:
        """Record what changed between two states of a server."""
        subject = f"servers/{after.id}"
        if after.differs and not before.differs:
            self._note("server", subject, "differs", after.differs, version=after.opened, fleet=after.fleet)
        for rank in sorted(after.altered.keys() - before.altered.keys()):
            self._note("server", subject, "altered", after.altered[rank], rank=rank, fleet=after.fleet)
        if state_of(before) != state_of(after) or before.opened != after.opened:
            reason = explain(after, self._clock(), self._settings)
            state = resources_pb2.Server.State.Name(state_of(after))
            self._note("server", subject, state.lower(), reason, version=after.opened, fleet=after.fleet)

    def fleet_stepped(self, before: Fleet | None, after: Fleet) -> None:
        """Record a move that began or changed its state."""
        move = after.move
        known = before.move if before is not None else None
        if move is None or (known is not None and (known.id, known.state) == (move.id, move.state)):
            return
        what, subject = move.state.name.lower(), f"fleets/{after.name}"
        self._note("move", subject, what, move.reason, to=move.to, back_to=move.back_to, strategy=move.strategy.kind.name)
