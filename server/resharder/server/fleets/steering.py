"""Steps of servers and fleets: events in, durable state, pins and orders out.

`Steering.step` processes one event of a server: it runs the reconciler, pins the versions that the server needs, then sends the
orders. A version is pinned before any order names it; if one has retired meanwhile, the step is repeated without it.
`Steering.steer` advances a fleet and gives every server its goal, until nothing changes. A fleet is durable before its state
takes effect.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import structlog
from resharder.server.fleets import updates
from resharder.server.fleets.decisions import checked
from resharder.server.fleets.goals import goals
from resharder.server.fleets.persistence import FleetFiles
from resharder.server.fleets.pins import FleetPins
from resharder.server.fleets.ports import FleetObserver, StartCheck
from resharder.server.fleets.reconciler.step import step
from resharder.server.fleets.roster import Roster
from resharder.server.fleets.seen_versions import SeenVersions
from resharder.server.state.fleet import Fleet
from resharder.server.state.server import Server, in_use
from resharder.server.state.server_events import Event, Order, VersionsChanged, Wanted

_ROUNDS = 1000  # bound on the rounds of steering, in case they do not converge
_log = structlog.get_logger("resharder.fleet")


class Steering:
    """Changes of a roster. Callers hold the roster's lock, except for `observe`."""

    def __init__(
        self,
        roster: Roster,
        seen: SeenVersions,
        pins: FleetPins,
        files: FleetFiles | None,
        send: Callable[[str, Order], None],
        start_check: StartCheck,
    ) -> None:
        self._roster, self._seen, self._pins, self._files = roster, seen, pins, files
        self._send, self._start_check = send, start_check
        self._observers: list[FleetObserver] = []

    def observe(self, observer: FleetObserver) -> None:
        """Report every later step to an observer."""
        self._observers.append(observer)

    def happen(self, id: str, event: Event) -> None:
        """Take a step of a server, then steer its fleet."""
        self.step(id, event)
        self.steer(self._roster.by_id[id].fleet)

    def step(self, id: str, event: Event) -> None:
        """Take one step of a server: new state, pins, orders, observers."""
        now, settings = self._roster.clock(), self._roster.settings
        before, holder = self._roster.by_id[id], f"servers/{id}"
        after, orders = step(before, event, now, settings)
        while gone := self._pins.pin(holder, after.model, in_use(after, now, settings)):
            ready = {number: fingerprint for number, fingerprint in before.ready.items() if number not in gone}
            before, first = step(before, VersionsChanged(ready, before.ahead), now, settings)
            after, orders = step(before, event, now, settings)
            orders = (*first, *orders)
        self._roster.put_server(after)
        for order in orders:
            self._send(id, replace(order, term=after.term))
        self._pins.release(holder, after.model, keep=in_use(after, now, settings))
        for observer in self._observers:
            observer.server_stepped(before, after)
        self._roster.changed.notify()
        if (before.serving, before.lost_at is None) != (after.serving, after.lost_at is None):
            for observer in self._observers:
                observer.serving_changed()

    def see_versions(self, id: str) -> None:
        """Take a step of a server if its versions have changed.

        A pinned version counts as READY: it cannot retire, and the last look may be older than the pin.
        """
        server = self._roster.by_id[id]
        pinned = {number: server.ready[number] for number in self._pins.of(f"servers/{id}", server.model)}
        versions = {**self._seen.ready(server.model), **pinned}
        ahead = self._seen.ahead(self._roster.by_name[server.fleet])
        if (versions, ahead) != (server.ready, server.ahead):
            self.step(id, VersionsChanged(versions, ahead))

    def steer(self, name: str) -> None:
        """Advance a fleet and give its servers their goals until nothing changes."""
        self.pin_versions(self._roster.by_name[name])
        for _ in range(_ROUNDS):
            fleet = self._roster.by_name[name]
            view = self._roster.see(fleet)
            after = updates.advance(fleet, view)
            if after != fleet:
                self.store(after)
                continue
            changed = [(id, goal) for id, goal in goals(fleet, view).items() if goal != view.servers[id].goal]
            if not changed:
                break
            for id, goal in changed[:1] if fleet.strict else changed:  # an opened gate affects the next server's goal
                self.step(id, Wanted(goal))
        else:
            _log.error("fleet_unsteady", fleet=name)
        if fleet.moving is not None and fleet.moving.checking:
            canaries = [self._roster.by_id[id] for id in fleet.moving.canaries if id in self._roster.by_id]
            addresses = [server.controls[0].address for server in canaries if server.controls]
            self._start_check(fleet, addresses, partial(self.checked, fleet.name, fleet.moving.id))

    def checked(self, name: str, move: int, passed: bool, message: str) -> None:
        """Record the result of a canary's check and steer the fleet. Takes the lock."""
        with self._roster.lock:
            fleet = self._roster.by_name.get(name)
            if fleet is not None:
                self.store(checked(fleet, move, passed, message, self._roster.see(fleet)))
                self.steer(name)

    def awaiting(self, model: str, number: int) -> frozenset[str]:
        """Return the live servers that install a version next and can receive it over the direct path. Takes the lock."""
        self._seen.look(model)
        with self._roster.lock:
            for server in [server for server in self._roster.by_id.values() if server.model == model]:
                self.see_versions(server.id)
                self.steer(server.fleet)
            servers = [server for server in self._roster.by_id.values() if server.model == model]
            return frozenset(server.id for server in servers if _installs_directly(server, number))

    def store(self, fleet: Fleet) -> None:
        """Make a fleet's new state durable, then put it into effect. Raises OSError; the state is then unchanged."""
        before = self._roster.by_name.get(fleet.name)
        if fleet == before:
            return
        if self._files is not None:
            self._files.save(fleet, self._roster.clock())
        self._roster.put_fleet(fleet)
        self.pin_versions(fleet)
        for observer in self._observers:
            observer.fleet_stepped(before, fleet)

    def delete(self, fleet: Fleet) -> None:
        """Remove a fleet without servers, durably, and its pins. Raises OSError; the state is then unchanged."""
        if self._files is not None:
            self._files.delete(fleet.name)
        self._roster.remove(fleet=fleet.name)
        self._pins.release(f"fleets/{fleet.name}", fleet.model)

    def pin_versions(self, fleet: Fleet) -> None:
        """Pin the versions that a fleet needs, and release others. A fleet that serves ahead needs the newest READY version."""
        newest = max(self._seen.ready(fleet.model), default=0) if fleet.serves_ahead else 0
        holder, needed = f"fleets/{fleet.name}", (fleet.needs() | {newest}) - {0}
        self._pins.pin(holder, fleet.model, needed)
        self._pins.release(holder, fleet.model, keep=needed)


def _installs_directly(server: Server, number: int) -> bool:
    """Return whether a server is about to install a version, without an earlier failure, into memory that ranks can write to."""
    reachable = server.complete and all(worker.memory for worker in server.workers.values())
    wakes = not server.goal.power.asleep and not (server.power.asleep and server.change_failed is not None)
    up = server.lost_at is None and bool(server.controls) and wakes
    return reachable and up and server.wanted == number != server.agreed and number not in server.failures
