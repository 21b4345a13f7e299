"""Current state of servers and fleets, and views of them."""

import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from resharder.server.fleets import updates
from resharder.server.fleets.explain import explain, explain_fleet, state_of
from resharder.server.fleets.pins import FleetPins
from resharder.server.fleets.seen_versions import SeenVersions
from resharder.server.infra.change_signal import ChangeSignal
from resharder.server.state.errors import ResourceNotFound, unknown_server
from resharder.server.state.fleet import Fleet, PauseMode, View
from resharder.server.state.server import Server, Settings

_SETTLE = 2.0  # seconds beyond a lease in which servers may return to a restarted daemon


@dataclass(frozen=True)
class ServerView:
    """A server for display. Times are in seconds since 1970."""

    server: Server
    state: int
    reason: str
    lease_expires: float
    to_wall: float
    """Seconds to add to the reconciler's times."""


@dataclass(frozen=True)
class FleetView:
    """A fleet for display. `moving_for` is in seconds, since the current move began."""

    fleet: Fleet
    wanted_version: int
    servers: tuple[str, ...]
    reason: str
    moving_for: float = 0.0
    returning: tuple[str, ...] = ()


class Roster:
    """State of all servers and fleets.

    `lock` guards changes. It is taken before ingest's and the store's locks, so a subscriber of the store must not wait for it.
    Queries take no lock: `by_id`, `by_name` and their values are replaced, never modified. `changed` signals each change.
    """

    def __init__(
        self,
        seen: SeenVersions,
        pins: FleetPins,
        fleets: Mapping[str, Fleet],
        *,
        settings: Settings,
        pause_mode: PauseMode,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.lock, self.changed = threading.RLock(), ChangeSignal()
        self.settings, self.clock = settings, clock
        self.by_id: Mapping[str, Server] = {}
        self.by_name: Mapping[str, Fleet] = fleets
        self._seen, self._pins, self._pause_mode, self._wall = seen, pins, pause_mode, wall
        self.started = clock()
        self._settled_at = self.started + settings.lease + _SETTLE

    # Changes, for callers that hold `lock`

    def put_server(self, server: Server) -> None:
        """Add or replace a server."""
        self.by_id = {**self.by_id, server.id: server}

    def remove(self, *, server: str = "", fleet: str = "") -> None:
        """Remove the server with this id, or the fleet of this name."""
        self.by_id = {id: known for id, known in self.by_id.items() if id != server}
        self.by_name = {name: known for name, known in self.by_name.items() if name != fleet}

    def put_fleet(self, fleet: Fleet) -> None:
        """Add or replace a fleet."""
        self.by_name = {**self.by_name, fleet.name: fleet}

    def new_fleet(self, name: str, model: str) -> Fleet:
        """Return a fleet with default settings, without adding it."""
        return Fleet(name, model, self._pause_mode)

    def of_fleet(self, name: str) -> list[Server]:
        """Return the servers of a fleet."""
        return [server for server in self.by_id.values() if server.fleet == name]

    def see(self, fleet: Fleet) -> View:
        """Return the inputs of decisions about a fleet, besides its own state."""
        now = self.clock()
        servers = {server.id: server for server in self.of_fleet(fleet.name)}
        ready = self._seen.ready(fleet.model).keys() | self._pins.of(f"fleets/{fleet.name}", fleet.model)
        here = {id for id, server in servers.items() if server.lost_at is not None or server.complete}
        settling = now < self._settled_at and not fleet.members <= here
        ahead = frozenset(number for number, one in self._seen.ahead(fleet).items() if one.staging) - ready
        at_once, aside = self._seen.at_once(fleet.model), self._seen.set_aside(fleet.model)
        return View(servers, ready, now, self.settings, settling, ahead, self._wall(), at_once, aside)

    def missing(self) -> list[tuple[str, Fleet]]:
        """Return the servers that have not returned since the daemon's restart and are no longer awaited, with their fleets."""
        if self.clock() < self._settled_at:
            return []
        return [(id, fleet) for fleet in self.by_name.values() for id in sorted(fleet.members - self.by_id.keys())]

    # Queries

    def server(self, id: str) -> Server:
        """Return a server. Raises ResourceNotFound (SERVER_UNKNOWN)."""
        found = self.by_id.get(id)
        if found is None:
            raise unknown_server(id)
        return found

    def servers(self, fleet: str = "") -> list[ServerView]:
        """Return views of all servers, or of those of one fleet, by id."""
        chosen = self.of_fleet(fleet) if fleet else list(self.by_id.values())
        return [self.server_view(server) for server in sorted(chosen, key=lambda server: server.id)]

    def server_view(self, server: Server) -> ServerView:
        """Return the view of a server."""
        now = self.clock()
        to_wall = self._wall() - now
        reason = explain(server, now, self.settings)
        return ServerView(server, state_of(server), reason, server.seen + server.lease(self.settings) + to_wall, to_wall)

    def fleets(self) -> list[FleetView]:
        """Return views of all fleets by name. A model's default fleet is listed before it has a server."""
        models = self._seen.look_at_all()
        known = self.by_name
        missing = [self.new_fleet(model, model) for model in models if model not in known]
        return sorted(map(self.fleet_view, [*known.values(), *missing]), key=lambda view: view.fleet.name)

    def fleet(self, name: str) -> FleetView:
        """Return the view of a fleet. Raises ResourceNotFound (FLEET_UNKNOWN)."""
        views = {view.fleet.name: view for view in self.fleets()}
        if name not in views:
            raise ResourceNotFound("FLEET_UNKNOWN", f"fleet {name!r} is unknown; there are {list(views)}")
        return views[name]

    def fleet_view(self, fleet: Fleet) -> FleetView:
        """Return the view of a fleet."""
        view = self.see(fleet)
        moving_for = view.now - fleet.moving.began if fleet.moving else 0.0
        wanted, servers = updates.wanted(fleet, view), tuple(sorted(view.servers))
        return FleetView(
            fleet,
            wanted,
            servers,
            explain_fleet(fleet, view),
            moving_for,
            _returning(fleet, self.by_id.keys(), self.clock() < self._settled_at),
        )

    def model_of(self, server: str) -> str:
        """Return the model of a server, or an empty name for an unknown server."""
        known = self.by_id.get(server)
        return known.model if known else ""

    def fleet_of(self, server: str) -> str:
        """Return the fleet of a server, or an empty name for an unknown server."""
        known = self.by_id.get(server)
        return known.fleet if known else ""

    def only_model(self) -> str:
        """Return the name of the only model; empty without models. Raises InvalidArgument (MODEL_AMBIGUOUS)."""
        return self._seen.only_model()

    def following(self) -> dict[str, str]:
        """Return the model of every fleet. A model's default fleet may be missing."""
        return {fleet.name: fleet.model for fleet in self.by_name.values()}

    def policy(self, server: str) -> tuple[PauseMode, bool]:
        """Return a server's pause mode and whether its lease is strict. Raises ResourceNotFound (SERVER_UNKNOWN)."""
        fleet = self.by_name[self.server(server).fleet]
        return fleet.pause_mode, fleet.strict

    def serving(self, model: str, number: int) -> tuple[int, int]:
        """Count live servers that serve a version or a newer one, and servers of the model that should be in service.

        The latter are live, or still awaited since the daemon's restart.
        """
        awaits = self.clock() < self._settled_at
        fleets = [fleet for fleet in self.by_name.values() if fleet.model == model]
        away = sum(len({*_returning(fleet, self.by_id.keys(), awaits)} - fleet.drained) for fleet in fleets)
        live = [s for s in self.by_id.values() if s.model == model and s.lost_at is None and s.goal.in_service]
        return sum(1 for server in live if server.serving >= number), len(live) + away

    def processes(self, server: str) -> dict[int, str]:
        """Return the process nonce of every worker by rank; empty unless all are known.

        Raises ResourceNotFound (SERVER_UNKNOWN).
        """
        known = self.server(server)
        return {rank: worker.process for rank, worker in known.workers.items()} if known.complete else {}


def without_server(fleet: Fleet, id: str) -> Fleet:
    """Return the fleet without one of its members, which its move no longer waits for."""
    move = replace(fleet.move, counted=fleet.move.counted - {id}) if fleet.move is not None else None
    return replace(fleet, members=fleet.members - {id}, drained=fleet.drained - {id}, move=move)


def _returning(fleet: Fleet, present: Collection[str], awaits: bool) -> tuple[str, ...]:
    """Return the ids of a fleet's servers that have not returned since the daemon's restart, if they are still awaited."""
    return tuple(sorted(fleet.members - set(present))) if awaits else ()
