"""Changes that operators make to fleets and servers."""

from collections.abc import Callable

from resharder.server.fleets.explain import explain
from resharder.server.fleets.ports import Note
from resharder.server.fleets.roster import FleetView, Roster
from resharder.server.fleets.seen_versions import SeenVersions
from resharder.server.fleets.sessions import Sessions, check_name
from resharder.server.fleets.steering import Steering
from resharder.server.state.errors import FailedPrecondition, ResourceNotFound
from resharder.server.state.fleet import Fleet, View
from resharder.server.state.server_events import Reinstalled


class FleetChanges:
    """Changes by operators. Thread-safe. A change is durable and in effect when its method returns."""

    def __init__(self, roster: Roster, seen: SeenVersions, steering: Steering, sessions: Sessions, note: Note) -> None:
        self._roster, self._seen, self._steering, self._sessions, self._note = roster, seen, steering, sessions, note

    def change(self, name: str, act: Callable[[Fleet, View], Fleet], model: str = "") -> FleetView:
        """Replace a fleet by the result of `act`, and create it if it is new.

        Args:
            name: Name of the fleet.
            act: Function of the fleet and its view that returns the changed fleet, or raises.
            model: Model of a new fleet that is not a model's default one.

        Raises:
            ResourceNotFound: FLEET_UNKNOWN, MODEL_UNKNOWN.
            InvalidArgument: NAME.
            OSError: the change cannot be stored.
        """
        check_name("fleet", name)
        models = self._seen.look_at_all()
        with self._roster.lock:
            fleet = self._roster.by_name.get(name) or self._new_fleet(name, model, models)
            self._steering.store(act(fleet, self._roster.see(fleet)))
            for server in self._roster.of_fleet(name):
                self._steering.see_versions(server.id)
            self._steering.steer(name)
            self._roster.changed.notify()
            return self._roster.fleet_view(self._roster.by_name[name])

    def _new_fleet(self, name: str, model: str, models: list[str]) -> Fleet:
        model = model or (name if name in models else "")
        if not model:
            there = sorted({*self._roster.by_name, *models})
            raise ResourceNotFound("FLEET_UNKNOWN", f"fleet {name!r} is unknown, there are {there}; a new one needs a model")
        if model not in models:
            raise ResourceNotFound("MODEL_UNKNOWN", f"model {model!r} is unknown; there are {models}")
        return self._roster.new_fleet(name, model)

    def reinstall(self, server: str) -> tuple[str, int]:
        """Order a server to repeat its install under a profiler, and return the install's id and the number of workers.

        Raises:
            ResourceNotFound: SERVER_UNKNOWN.
            FailedPrecondition: NOT_SERVING.
        """
        with self._roster.lock:
            known = self._roster.server(server)
            fleet = self._roster.by_name[known.fleet]
            if fleet.moving is None:
                self._steering.happen(server, Reinstalled())
            install = self._roster.by_id[server].install
            if install is None or install is known.install or not install.profiled:
                why = f"fleet {fleet.name} moves" if fleet.moving else explain(known, self._roster.clock(), self._roster.settings)
                raise FailedPrecondition(
                    "NOT_SERVING", f"expected server {server} to serve its target and do nothing else: {why}"
                )
            self._note("operator", f"servers/{server}", "profile", version=install.version, install=install.id)
            return install.id, known.world_size

    def delete(self, name: str) -> None:
        """Delete a fleet without servers.

        Raises:
            ResourceNotFound: FLEET_UNKNOWN.
            FailedPrecondition: FLEET_IN_USE.
            OSError: the fleet's file cannot be removed.
        """
        with self._roster.lock:
            fleet = self._roster.by_name.get(name)
            if fleet is None:
                there = sorted(self._roster.by_name)
                raise ResourceNotFound(
                    "FLEET_UNKNOWN", f"fleet {name!r} has no settings to delete; fleets with settings: {there}"
                )
            if servers := sorted(server.id for server in self._roster.of_fleet(name)):
                raise FailedPrecondition(
                    "FLEET_IN_USE",
                    f"expected fleet {name} to have no servers, it has {', '.join(servers[:8])}: stop them, and forget lost ones",
                )
            self._note("operator", f"fleets/{name}", "delete")
            self._steering.delete(fleet)
            self._roster.changed.notify()

    def forget(self, id: str) -> None:
        """Forget a LOST server, with its pins and its membership.

        Raises:
            ResourceNotFound: SERVER_UNKNOWN.
            FailedPrecondition: NOT_LOST.
            OSError: the fleet cannot be stored.
        """
        with self._roster.lock:
            server = self._roster.server(id)
            if server.lost_at is None:
                why = explain(server, self._roster.clock(), self._roster.settings)
                raise FailedPrecondition("NOT_LOST", f"expected server {id} to be LOST, it is not: {why}")
            self._note("operator", f"servers/{id}", "forget")
            self._sessions.forget(server)
            self._steering.steer(server.fleet)
            self._roster.changed.notify()
