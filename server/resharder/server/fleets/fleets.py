"""Servers and fleets: their state, and the control loop that brings them to their versions.

`step` processes one event of a server: it runs the reconciler, pins the versions that the server needs, then sends the orders. A
version is pinned before any order names it; if one has retired meanwhile, the step is repeated without it. `steer` advances a
fleet and gives every server its goal, until nothing changes. A fleet is durable before its state takes effect.
"""

import ipaddress
import queue
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import structlog
from resharder.converters.signal import Signal
from resharder.server.direct.offered_versions import OfferedVersions
from resharder.server.fleets import updates
from resharder.server.fleets.canary_checks import Checks
from resharder.server.fleets.explain import FleetView, ServerView, explain, explain_fleet, state_of
from resharder.server.fleets.goals import boots, goals
from resharder.server.fleets.persistence import FleetFiles
from resharder.server.fleets.reconciler.installs import why_out_of_reach
from resharder.server.fleets.reconciler.step import step
from resharder.server.fleets.versions import FleetVersions
from resharder.server.infra.change_signal import ChangeSignal, Waiting
from resharder.server.infra.event_log import Kind
from resharder.server.infra.medium import medium_error
from resharder.server.state.errors import FailedPrecondition, InvalidArgument, ResourceNotFound, Unavailable, unknown_server
from resharder.server.state.fleet import Fleet, View
from resharder.server.state.server import ASLEEP, Ahead, Reach, Server, Settings, Worker, in_use, processes
from resharder.server.state.server_events import (
    Attached,
    Claimed,
    Detached,
    Event,
    Order,
    Reinstalled,
    Reported,
    Ticked,
    VersionsChanged,
    Wanted,
    WorkerReported,
)
from resharder.server.store.catalogue import Catalogue
from resharder.server.store.lifecycle import VersionLifecycle
from resharder.v1 import resources_pb2
from resharder.v1.resources_pb2 import PauseMode

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
MAX_WORLD_SIZE = 65536
MAX_WAIT = 3600.0
"""Bound on the seconds that a claim may wait."""
MAX_TERM = 1 << 62
_TERM_BITS = 32  # low bits of a term, for the leaders of one server in one lifetime of the daemon
_TICK = 0.5
_LOOK = 0.5  # longest pause of a waiting claim, in seconds
_SETTLE = 2.0  # seconds beyond a lease in which servers may return to a restarted daemon
_CHECKPOINT = 30.0  # seconds of a wait that a killed daemon may lose
_ROUNDS = 1000  # bound on the rounds of steering, in case they do not converge
_RETURNING = "servers that may come back"
_log = structlog.get_logger("resharder.fleet")


class Note(Protocol):
    """Recorder of events."""

    def __call__(self, kind: Kind, subject: str, what: str, reason: str = "", **details: object) -> object: ...


def _no_note(kind: Kind, subject: str, what: str, reason: str = "", **details: object) -> None:
    pass


@dataclass(eq=False)
class Attachment:
    """Stream of one control side. Methods are thread-safe."""

    server: str
    first: Attached
    on_report: Callable[["Attachment", Reported], None]
    on_close: Callable[["Attachment"], None]
    orders: queue.SimpleQueue[Order | None] = field(default_factory=queue.SimpleQueue)
    """Orders to send; None ends the stream."""
    changed: ChangeSignal = field(default_factory=ChangeSignal)
    """Signals new orders."""

    def put(self, order: Order | None) -> None:
        """Queue an order, or with None the end of the stream."""
        self.orders.put(order)
        self.changed.emit()

    def report(self, report: Reported) -> None:
        """Process a report. Raises ResourceNotFound (SERVER_UNKNOWN) if the server was removed."""
        self.on_report(self, report)

    def close(self) -> None:
        """Detach the control side. A no-op if a newer stream has replaced this one."""
        self.on_close(self)


class Fleets:
    """State of all servers and fleets, under one lock. Thread-safe.

    `lock` guards changes. It is taken before ingest's and the store's locks: what is connected to the store's signals must not
    wait for it.
    Queries take no lock: `by_id`, `by_name` and their values are replaced, never modified.

    A thread ticks every `tick_seconds` and after `wake`. After a restart of the daemon, all READY versions of a model stay pinned
    until the fleet's servers have returned or their leases have expired, since they may return with any version.

    Attributes:
        lock: Lock of all changes.
        changed: Signal of each change.
        settings: Durations and bounds of installs.
        clock: Monotonic clock in seconds, which all decisions use.
        note: Recorder of events.
        by_id: Servers by id.
        by_name: Fleets by name.

    Args:
        versions: Records of the versions in the store.
        pins: Pins of the versions in the store.
        offers: Versions offered over the direct path.
        wall: Clock in seconds since 1970, for display.
        files: Durable state of fleets; None: in memory only.
        pause_mode: Pause mode of new fleets, except those of adapters, which begin with WAIT.
        checks: Commands that decide about canaries; None: none is started.
        tick_seconds: Interval of the ticks; 0: there is no thread, and the caller ticks.
    """

    def __init__(
        self,
        versions: Catalogue,
        pins: VersionLifecycle,
        *,
        offers: OfferedVersions | None = None,
        settings: Settings | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        files: FleetFiles | None = None,
        pause_mode: PauseMode = PauseMode.KEEP,
        note: Note = _no_note,
        checks: Checks | None = None,
        tick_seconds: float = _TICK,
    ) -> None:
        offers = offers or OfferedVersions()
        self.lock, self.changed = threading.RLock(), ChangeSignal()
        self.settings, self.clock, self.note = settings or Settings(), clock, note
        self._versions = FleetVersions(versions, pins, offers)
        self._wall, self._files, self._pause_mode, self._checks = wall, files, pause_mode, checks
        self.by_id: Mapping[str, Server] = {}
        self.by_name: Mapping[str, Fleet] = files.load(clock()) if files else {}
        self.start_number = files.next_start() if files else 0
        """Number of the daemon's start on its folder, from 1; 0 without files."""
        self._term = self.start_number << _TERM_BITS  # of new servers, above every earlier one of this store
        self._life = secrets.token_hex(4)
        self._streams: dict[tuple[str, str], Attachment] = {}  # attached control sides, by server and nonce
        self._left: dict[str, frozenset[str]] = {}  # processes of servers that have left, by id
        # Emitted with the lock held.
        self.server_stepped: Signal[Server, Server] = Signal()  # before and after each step, even if nothing changed
        self.fleet_stepped: Signal[Fleet | None, Fleet] = Signal()  # before, None for a new fleet, and after each change
        self.serving_changed: Signal[()] = Signal()  # `serving` may have changed
        self._started = self._checkpointed = clock()
        self._settled_at = self._started + self.settings.lease + _SETTLE
        self._returning = {fleet.model for fleet in self.by_name.values() if fleet.members}
        for fleet in self.by_name.values():
            self._pin_versions(fleet)
        for model in self._returning:
            self._versions.pin(_RETURNING, model, self._versions.look(model))
        self._wake, self._closed = threading.Event(), False
        self._thread = threading.Thread(target=self._run, args=(tick_seconds,), name="fleets", daemon=True)
        if tick_seconds:
            self._thread.start()
        versions.version_changed.connect(self._versions.version_changed)
        versions.version_changed.connect(lambda _: self.wake())
        offers.offers_changed.connect(self.wake)

    # Calls of servers

    def claim(
        self,
        server: str,
        model: str,
        fleet: str,
        *,
        wait_seconds: float,
        boot: bool,
        renews: bool = False,
        base_server: str = "",
    ) -> Waiting[Server]:
        """Register a server, and return it. With `boot`, wait for a READY version and assign the boot version.

        Args:
            server: Id that the processes of the server share.
            model: Model to follow; empty for the only one.
            fleet: Fleet to join; empty for the model's default fleet.
            wait_seconds: Bound on the wait, 0 to 3600.
            boot: Whether the server boots from the daemon.
            renews: Whether the claim is repeated within every lease.
            base_server: For an adapter, id of the server that it is loaded into.

        Raises:
            Unavailable: NO_VERSION after `wait_seconds`, or DRAINING.
            InvalidArgument: NAME, WAIT_SECONDS, MODEL_AMBIGUOUS.
            FailedPrecondition: SERVER_ELSEWHERE, FLEET_MODEL, BASE_SERVER.
        """
        for what, name in (("server", server), ("model", model), ("fleet", fleet), ("base server", base_server)):
            if name or what == "server":
                check_name(what, name)
        if not 0 <= wait_seconds <= MAX_WAIT:
            raise InvalidArgument("WAIT_SECONDS", f"expected wait_seconds between 0 and {MAX_WAIT:g}, got {wait_seconds:g}")
        deadline = self.clock() + wait_seconds
        while True:
            changes = self.changed.count
            name = model or self._versions.only_model()
            ready = self._versions.look(name) if name else {}
            with self.lock:
                if name and (ready or not boot):
                    self._check_base(server, name, base_server)
                    self._enter(server, name, fleet or name, base_server)
                    self._happen(server, Claimed(boot, renews))
                    if not boot or self.by_id[server].boot_version:
                        return self.by_id[server]
                left = deadline - self.clock()
                if self._closed:
                    raise Unavailable("DRAINING", "the daemon is shutting down and assigns no versions")
                if left <= 0:
                    what = f"model {name} has no READY version" if name else "no model has been published"
                    if ready:
                        what = f"fleet {fleet or name} has no version to serve"
                    raise Unavailable("NO_VERSION", f"{what} after {wait_seconds:g} s")
            yield self.changed.pause(changes, min(left, _LOOK))

    def _check_base(self, id: str, model: str, base_server: str) -> None:
        """Raise FailedPrecondition (BASE_SERVER) for an adapter on a server that follows another model than its base."""
        base, host = self._versions.base(model), self.by_id.get(base_server)
        if base and not base_server:
            raise FailedPrecondition(
                "BASE_SERVER", f"{model} is an adapter of {base}: a server follows it by RESHARDER_ADAPTERS beside {base}"
            )
        if misplaced := _misplaced(model, base, host):
            raise FailedPrecondition("BASE_SERVER", misplaced)

    def _enter(self, id: str, model: str, fleet: str, base_server: str) -> None:
        known = self.by_id.get(id)
        if known is not None and (known.model, known.fleet) != (model, fleet):
            raise FailedPrecondition(
                "SERVER_ELSEWHERE",
                f"server {id} follows {known.model} in fleet {known.fleet}, not {model} in {fleet}: "
                "choose another RESHARDER_SERVER_ID",
            )
        found = self.by_name.get(fleet) or self._default_fleet(fleet, model, bool(base_server))
        if found.model != model:
            raise FailedPrecondition("FLEET_MODEL", f"fleet {fleet} follows model {found.model}, not {model}")
        if id not in found.members:
            self._store(replace(found, members=found.members | {id}))
        if known is None:
            left, ready = self._left.pop(id, frozenset()), self._versions.ready(model)
            life, now = self._new_life(), self.clock()
            self._put(Server(id, model, fleet, life, now, ready, gone=left, term=self._term, base_server=base_server))
        else:
            self._see_versions(id)
        self._steer(fleet)

    def _new_life(self) -> str:
        return f"{self._life}-{secrets.token_hex(2)}"

    def attach(self, server: str, first: Attached) -> Attachment:
        """Begin the stream of a control side with its first report.

        Raises:
            ResourceNotFound: SERVER_UNKNOWN, if the server has not claimed its id.
            InvalidArgument: CONTROL, WORLD_SIZE.
            FailedPrecondition: WORLD_SIZE, KV_FLEET.
        """
        if not first.control:
            raise InvalidArgument("CONTROL", "the first report of the control side has no nonce")
        if not 0 <= first.term <= MAX_TERM:
            raise InvalidArgument("CONTROL", f"expected a term of at most {MAX_TERM}, got {first.term}")
        if not 1 <= first.world_size <= MAX_WORLD_SIZE:
            raise InvalidArgument("WORLD_SIZE", f"expected 1 to {MAX_WORLD_SIZE} workers, got {first.world_size}")
        attachment = Attachment(server, first, self._reported, self._detach)
        with self.lock:
            known = self.server(server)
            others = [c for c in known.controls if c.nonce != first.control]
            if others and known.world_size != first.world_size:
                raise FailedPrecondition(
                    "WORLD_SIZE",
                    f"server {server} has {known.world_size} workers according to its other control sides, "
                    f"and {first.world_size} according to this one: give each server its own RESHARDER_SERVER_ID",
                )
            strategy = self.by_name[known.fleet].strategy.kind
            if first.passes_kv and strategy != resources_pb2.UpdateStrategy.ATOMIC:
                raise FailedPrecondition(
                    "KV_FLEET",
                    f"server {server} transfers KV caches, so fleet {known.fleet} has to update atomically (`fleet set "
                    f"--atomic`): it updates {resources_pb2.UpdateStrategy.Kind.Name(strategy)}",
                )
            former = self._streams.get((server, first.control))
            if former is not None:
                former.put(None)
            self._streams[server, first.control] = attachment
            self._happen(server, first)
            self._replace_lost(self.by_id[server])
        return attachment

    def _replace_lost(self, server: Server) -> None:
        """Forget servers that are LOST, or end to start again, whose place another server has taken under an id of its own."""
        for lost in self._of_fleet(server.fleet):
            gone = lost.lost_at is not None or (lost.ending and not lost.controls)
            if gone and lost.id != server.id and _is_a_place(lost.address) and lost.address == server.address:
                self.note(
                    "server", f"servers/{lost.id}", "replaced", f"by servers/{server.id} at {lost.address}", fleet=lost.fleet
                )
                self._forget(lost)
                self._steer(server.fleet)

    def _reported(self, attachment: Attachment, report: Reported) -> None:
        with self.lock:
            known = self.server(attachment.server)
            if self._streams.get((attachment.server, report.control)) is not attachment:
                return
            if all(control.nonce != report.control for control in known.controls):
                # Its lease expired. A new lease must not revive orders that it has not begun: they are dropped with the
                # stream, and the next stream starts over.
                attachment.put(None)
                return
            self._happen(known.id, report)
            if not report.leaving and not report.failure:
                return
            attachment.put(None)
            left = self.by_id[known.id]
            # Clients may still reach a server that only the daemon lost sight of: a strict fleet waits for its lease.
            if left.left and not self.by_name[left.fleet].strict:
                self._leave(left)

    def _detach(self, attachment: Attachment) -> None:
        key = (attachment.server, attachment.first.control)
        with self.lock:
            if self._streams.get(key) is not attachment:
                return
            del self._streams[key]
            if attachment.server in self.by_id:
                self._happen(attachment.server, Detached(attachment.first.control))

    def report_worker(self, server: str, worker: Worker) -> ServerView:
        """Process a worker's report, and return the server's view.

        Raises:
            ResourceNotFound: SERVER_UNKNOWN, if the server has not claimed its id.
            FailedPrecondition: SERVER_LEFT, if the server has left and this process remains.
            InvalidArgument: WORKER.
        """
        if server not in self.by_id and worker.process in self._left.get(server, ()):
            raise FailedPrecondition("SERVER_LEFT", f"server {server} has left: its API servers have ended")
        known = self.server(server)
        loaded = worker.state in (resources_pb2.Worker.BOOTED, resources_pb2.Worker.APPLIED)
        if loaded and worker.fingerprint != known.ready.get(worker.version):
            self._versions.look(known.model)  # the version may have become READY since the last tick
        with self.lock:
            known = self.server(server)
            self._see_versions(server)
            size = known.world_size or MAX_WORLD_SIZE
            if not 0 <= worker.rank < size or not worker.process:
                raise InvalidArgument(
                    "WORKER", f"expected a rank below {size} and a process nonce, got {worker.rank} and {worker.process!r}"
                )
            self._happen(server, WorkerReported(worker))
            return self._server_view(self.by_id[server])

    def _leave(self, server: Server) -> None:
        """Forget a server that has left. Its workers may end later; until it returns, their reports are refused."""
        self.note("server", f"servers/{server.id}", "left", "its API servers have ended", fleet=server.fleet)
        self._left[server.id] = processes(server)
        self._forget(server)
        self._steer(server.fleet)
        self.changed.emit()

    def _forget(self, server: Server) -> None:
        """Remove a server, its pins and its membership, so that its fleet's move no longer waits for it."""
        self.by_id = {id: known for id, known in self.by_id.items() if id != server.id}
        self._term = max(self._term, server.term)
        self._versions.release(f"servers/{server.id}", server.model)
        fleet, gone = self.by_name[server.fleet], {server.id}
        move = replace(fleet.move, counted=fleet.move.counted - gone) if fleet.move is not None else None
        self._store(replace(fleet, members=fleet.members - gone, drained=fleet.drained - gone, move=move))

    # Calls of operators. A change is durable and in effect when its method returns.

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
        models = self._versions.look_at_all()
        with self.lock:
            fleet = self.by_name.get(name) or self._new_fleet(name, model, models)
            self._store(act(fleet, self._see(fleet)))
            for server in self._of_fleet(name):
                self._see_versions(server.id)
            self._steer(name)
            self.changed.emit()
            return self._fleet_view(self.by_name[name])

    def _new_fleet(self, name: str, model: str, models: list[str]) -> Fleet:
        model = model or (name if name in models else "")
        if not model:
            there = sorted({*self.by_name, *models})
            raise ResourceNotFound("FLEET_UNKNOWN", f"there is no fleet {name!r}, only {there}; a new one needs a model")
        if model not in models:
            raise ResourceNotFound("MODEL_UNKNOWN", f"there is no model {model!r}; the daemon has {models}")
        return self._default_fleet(name, model)

    def _default_fleet(self, name: str, model: str, adapter: bool = False) -> Fleet:
        """Return a fleet with default settings, without adding it. Requests for an adapter end on their version."""
        adapter = adapter or bool(self._versions.base(model))
        return Fleet(name, model, PauseMode.WAIT if adapter else self._pause_mode)

    def reinstall(self, server: str) -> tuple[str, int]:
        """Order a server to repeat its install under a profiler, and return the install's id and the number of workers.

        Raises:
            ResourceNotFound: SERVER_UNKNOWN.
            FailedPrecondition: NOT_SERVING.
        """
        with self.lock:
            known = self.server(server)
            fleet = self.by_name[known.fleet]
            if fleet.moving is None:
                self._happen(server, Reinstalled())
            install = self.by_id[server].install
            if install is None or install is known.install or not install.profiled:
                why = f"fleet {fleet.name} moves" if fleet.moving else explain(known, self.clock(), self.settings)
                raise FailedPrecondition("NOT_SERVING", f"server {server} is busy, or does not serve its target: {why}")
            self.note("operator", f"servers/{server}", "profile", version=install.version, install=install.id)
            return install.id, known.world_size

    def delete(self, name: str) -> None:
        """Delete a fleet without servers.

        Raises:
            ResourceNotFound: FLEET_UNKNOWN.
            FailedPrecondition: FLEET_IN_USE.
            OSError: the fleet's file cannot be removed; the fleet is then unchanged.
        """
        with self.lock:
            fleet = self.by_name.get(name)
            if fleet is None:
                there = sorted(self.by_name)
                raise ResourceNotFound(
                    "FLEET_UNKNOWN", f"fleet {name!r} has no settings to delete; fleets with settings: {there}"
                )
            if servers := sorted(server.id for server in self._of_fleet(name)):
                raise FailedPrecondition(
                    "FLEET_IN_USE",
                    f"fleet {name} still has servers {', '.join(servers[:8])}: stop them, and forget lost ones",
                )
            self.note("operator", f"fleets/{name}", "delete")
            if self._files is not None:
                self._files.delete(name)
            self.by_name = {other: known for other, known in self.by_name.items() if other != name}
            self._versions.release(f"fleets/{name}", fleet.model)
            self.changed.emit()

    def forget(self, id: str) -> None:
        """Forget a LOST server, with its pins and its membership.

        Raises:
            ResourceNotFound: SERVER_UNKNOWN.
            FailedPrecondition: NOT_LOST.
            OSError: the fleet cannot be stored.
        """
        with self.lock:
            server = self.server(id)
            if server.lost_at is None:
                why = explain(server, self.clock(), self.settings)
                raise FailedPrecondition("NOT_LOST", f"server {id} is not LOST: {why}")
            self.note("operator", f"servers/{id}", "forget")
            self._forget(server)
            self._steer(server.fleet)
            self.changed.emit()

    # Steps. Callers hold the lock.

    def _happen(self, id: str, event: Event) -> None:
        """Take a step of a server, then steer its fleet."""
        confirmed = self.by_id[id].confirmed, self.by_id[id].agreed
        self._step(id, event)
        self._steer(self.by_id[id].fleet)
        if (self.by_id[id].confirmed, self.by_id[id].agreed) != confirmed:
            for fleet in {server.fleet for server in self.by_id.values() if server.base_server == id}:
                self._steer(fleet)

    def _step(self, id: str, event: Event) -> None:
        """Take one step of a server: new state, pins, orders, signals."""
        now, settings = self.clock(), self.settings
        before, holder = self.by_id[id], f"servers/{id}"
        after, orders = step(before, event, now, settings)
        while gone := self._versions.pin(holder, after.model, in_use(after, now, settings)):
            ready = {number: fingerprint for number, fingerprint in before.ready.items() if number not in gone}
            before, first = step(before, VersionsChanged(ready, before.ahead), now, settings)
            after, orders = step(before, event, now, settings)
            orders = (*first, *orders)
        self._put(after)
        for order in orders:
            if (attachment := self._streams.get((id, order.control))) is not None:
                attachment.put(replace(order, term=after.term))
        self._versions.release(holder, after.model, keep=in_use(after, now, settings))
        self._note_step(before, after)
        self.server_stepped.emit(before, after)
        self.changed.emit()
        if (before.serving, before.lost_at is None) != (after.serving, after.lost_at is None):
            self.serving_changed.emit()

    def _put(self, server: Server) -> None:
        self.by_id = {**self.by_id, server.id: server}

    def _note_step(self, before: Server, after: Server) -> None:
        """Record a change of a server's state or version, and each difference in its memory."""
        subject = f"servers/{after.id}"
        if after.differs and not before.differs:
            self.note("server", subject, "differs", after.differs, version=after.opened, fleet=after.fleet)
        for rank in sorted(after.altered.keys() - before.altered.keys()):
            self.note("server", subject, "altered", after.altered[rank], rank=rank, fleet=after.fleet)
        if state_of(before) != state_of(after) or before.opened != after.opened:
            reason = explain(after, self.clock(), self.settings)
            state = resources_pb2.Server.State.Name(state_of(after))
            to = after.install.version if after.install is not None and after.install.active else after.opened
            versions = {"version": after.opened, "from": before.opened or before.confirmed, "to": to}
            self.note("server", subject, state.lower(), reason, fleet=after.fleet, **versions)

    def _see_versions(self, id: str) -> None:
        """Take a step of a server if its versions have changed.

        A pinned version counts as READY: it cannot retire, and the last look may be older than the pin.
        """
        server = self.by_id[id]
        pinned = {number: server.ready[number] for number in self._versions.pinned(f"servers/{id}", server.model)}
        versions = {**self._versions.ready(server.model), **pinned}
        ahead = self._versions.ahead(self.by_name[server.fleet])
        if (versions, ahead) != (server.ready, server.ahead):
            self._step(id, VersionsChanged(versions, ahead))

    def _steer(self, name: str) -> None:
        """Advance a fleet and give its servers their goals until nothing changes."""
        self._pin_versions(self.by_name[name])
        for _ in range(_ROUNDS):
            fleet = self.by_name[name]
            view = self._see(fleet)
            after = updates.advance(fleet, view)
            if after != fleet:
                self._store(after)
                continue
            changed = [(id, goal) for id, goal in goals(fleet, view).items() if goal != view.servers[id].goal]
            if not changed:
                break
            for id, goal in changed[:1] if fleet.strict else changed:  # an opened gate affects the next server's goal
                self._step(id, Wanted(goal))
        else:
            _log.error("fleet_unsteady", fleet=name)
        if self._checks is not None and fleet.moving is not None and fleet.moving.checking:
            canaries = [self.by_id[id] for id in fleet.moving.canaries if id in self.by_id]
            addresses = [server.controls[0].address for server in canaries if server.controls]
            self._checks.start_for(fleet, addresses, partial(self._checked, fleet.name, fleet.moving.id))

    def _checked(self, name: str, move: int, passed: bool, message: str) -> None:
        """Record the result of a canary's check and steer the fleet. Takes the lock."""
        with self.lock:
            fleet = self.by_name.get(name)
            if fleet is not None:
                self._store(updates.checked(fleet, move, passed, message, self._see(fleet)))
                self._steer(name)

    def _of_fleet(self, name: str) -> list[Server]:
        return [server for server in self.by_id.values() if server.fleet == name]

    def _see(self, fleet: Fleet) -> View:
        """Return the inputs of decisions about a fleet, besides its own state."""
        now = self.clock()
        servers = {server.id: server for server in self._of_fleet(fleet.name)}
        ready = self._versions.ready(fleet.model).keys() | self._versions.pinned(f"fleets/{fleet.name}", fleet.model)
        here = {id for id, server in servers.items() if server.lost_at is not None or server.complete}
        settling = now < self._settled_at and not fleet.members <= here
        offered = self._versions.ahead(fleet).items()
        there = [server for server in servers.values() if server.workers]
        reaches = {number: one.reach for number, one in offered if one.staging}
        ahead = frozenset(n for n, reach in reaches.items() if not reach.hosts or not all(map(reach.why_not, there))) - ready
        at_once, skipped = self._versions.at_once(fleet.model), self._versions.skipped(fleet.model)
        below = {id: self.by_id.get(server.base_server) for id, server in servers.items() if server.base_server}
        bases = {id: host.agreed or host.confirmed if host is not None else 0 for id, host in below.items()}
        bound = self._versions.base_versions(fleet.model) if bases else {}
        base = self._versions.base(fleet.model)
        misplaced = {id: _misplaced(fleet.model, base, host) for id, host in below.items()}
        return View(
            servers, ready, now, self.settings, settling, ahead, self._wall(), at_once, skipped, base, bases, bound, misplaced
        )

    def _store(self, fleet: Fleet) -> None:
        """Make a fleet's new state durable, then put it into effect. Raises OSError; the state is then unchanged."""
        before = self.by_name.get(fleet.name)
        if fleet == before:
            return
        if self._files is not None:
            self._files.save(fleet, self.clock())
        self.by_name = {**self.by_name, fleet.name: fleet}
        self._pin_versions(fleet)
        self._note_move(before, fleet)
        self.fleet_stepped.emit(before, fleet)

    def _note_move(self, before: Fleet | None, after: Fleet) -> None:
        """Record a move that began or changed its state."""
        move = after.move
        known = before.move if before is not None else None
        if move is None or (known is not None and (known.id, known.state) == (move.id, move.state)):
            return
        what, subject = resources_pb2.Move.State.Name(move.state).lower(), f"fleets/{after.name}"
        versions = {"from": move.back_to, "to": move.to}
        strategy = resources_pb2.UpdateStrategy.Kind.Name(move.strategy.kind)
        self.note("move", subject, what, move.reason, strategy=strategy, **versions)

    def _pin_versions(self, fleet: Fleet) -> None:
        """Pin the versions that a fleet needs, and release others. A fleet that serves ahead needs the newest READY version."""
        newest = max(self._versions.ready(fleet.model), default=0) if fleet.serves_ahead else 0
        holder, needed = f"fleets/{fleet.name}", (fleet.needs() | {newest}) - {0}
        self._versions.pin(holder, fleet.model, needed)
        self._versions.release(holder, fleet.model, keep=needed)

    # Passage of time

    def wake(self) -> None:
        """Request a tick as soon as possible. Never blocks."""
        self._wake.set()

    def _run(self, tick_seconds: float) -> None:
        while not self._closed:
            self._wake.wait(tick_seconds)
            self._wake.clear()
            try:
                self.tick()
            except OSError as error:
                _log.error("tick_failed", reason=str(medium_error(error)))
            except Exception as error:
                _log.error("tick_failed", exc_info=error)

    def tick(self) -> None:
        """Apply changes of the store and the current time. Raises OSError."""
        self._versions.look_at_all()
        with self.lock:
            now = self.clock()
            self._miss(now)
            for server in list(self.by_id.values()):
                if server.left and now > server.seen + server.lease(self.settings):
                    self._leave(server)
                    continue
                self._see_versions(server.id)
                if self.by_name[server.fleet].strict:  # a step may open a gate, on which other servers' goals depend
                    self._happen(server.id, Ticked())
                else:
                    self._step(server.id, Ticked())
                server = self.by_id[server.id]
                if server.lost_at is not None and now > server.lost_at + max(self.settings.forget, self.settings.grace):
                    self._forget(server)
            for name in list(self.by_name):
                self._steer(name)
            self._release_returning()
            self.changed.emit()
            if now >= self._checkpointed + _CHECKPOINT:
                self._checkpointed = now
                self._save_waits()

    def _miss(self, now: float) -> None:
        """List servers as LOST that have not returned since the daemon's restart and are no longer awaited."""
        if now < self._settled_at:
            return
        missed = [(id, fleet) for fleet in self.by_name.values() for id in sorted(fleet.members - self.by_id.keys())]
        for id, fleet in missed:
            ready, why = self._versions.ready(fleet.model), "it has not come back since the daemon's restart"
            life, since = self._new_life(), self._started
            self._put(Server(id, fleet.model, fleet.name, life, since, ready, renews=True, term=self._term, failure=why))
            self._happen(id, Ticked())

    def _release_returning(self) -> None:
        settling = {fleet.model for fleet in self.by_name.values() if self._see(fleet).settling}
        for model in self._returning - settling:
            self._versions.release(_RETURNING, model)
        self._returning &= settling

    def _save_waits(self) -> None:
        """Store how long the waits of fleets have lasted."""
        now = self.clock()
        if self._files is None:
            return
        for fleet in self.by_name.values():
            if fleet.rest_left(now) or (fleet.move is not None and fleet.move.hold_left(now)):
                self._files.save(fleet, now)

    def close(self) -> None:
        """Stop the thread, end every stream, refuse further waits for a version, and store how long waits have lasted.

        Pins remain.
        """
        self._closed = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()
        with self.lock:
            for attachment in self._streams.values():
                attachment.put(None)
            try:
                self._save_waits()
            except OSError as error:
                _log.error("waits_not_saved", error=str(error))
            self.changed.emit()

    # Queries

    def server(self, id: str) -> Server:
        """Return a server. Raises ResourceNotFound (SERVER_UNKNOWN)."""
        found = self.by_id.get(id)
        if found is None:
            raise unknown_server(id)
        return found

    def servers(self, fleet: str = "") -> list[ServerView]:
        """Return views of all servers, or of those of one fleet, by id."""
        chosen = self._of_fleet(fleet) if fleet else list(self.by_id.values())
        return [self._server_view(server) for server in sorted(chosen, key=lambda server: server.id)]

    def _server_view(self, server: Server) -> ServerView:
        now = self.clock()
        to_wall = self._wall() - now
        reason = explain(server, now, self.settings)
        return ServerView(server, state_of(server), reason, server.seen + server.lease(self.settings) + to_wall, to_wall)

    def fleets(self) -> list[FleetView]:
        """Return views of all fleets by name. A model's default fleet is listed before it has a server."""
        models = self._versions.look_at_all()
        known = self.by_name
        missing = [self._default_fleet(model, model) for model in models if model not in known]
        return sorted(map(self._fleet_view, [*known.values(), *missing]), key=lambda view: view.fleet.name)

    def fleet(self, name: str) -> FleetView:
        """Return the view of a fleet. Raises ResourceNotFound (FLEET_UNKNOWN)."""
        views = {view.fleet.name: view for view in self.fleets()}
        if name not in views:
            raise ResourceNotFound("FLEET_UNKNOWN", f"there is no fleet {name!r}; the daemon has {list(views)}")
        return views[name]

    def _fleet_view(self, fleet: Fleet) -> FleetView:
        view = self._see(fleet)
        moving_for = view.now - fleet.moving.began if fleet.moving else 0.0
        wanted, servers = updates.wanted(fleet, view), tuple(sorted(view.servers))
        return FleetView(fleet, wanted, servers, explain_fleet(fleet, view), moving_for, self._awaited(fleet), view.base)

    def _awaited(self, fleet: Fleet) -> tuple[str, ...]:
        """Return the ids of a fleet's servers that have not returned since the daemon's restart, if they are still awaited."""
        return tuple(sorted(fleet.members - self.by_id.keys())) if self.clock() < self._settled_at else ()

    def boot_version(self, model: str, fleet: str) -> int:
        """Return the version that a server of a fleet of this model boots now; 0: none, or there is no such fleet yet."""
        with self.lock:
            found = self.by_name.get(fleet or model)
            return boots(found, self._see(found)) if found is not None and found.model == model else 0

    def awaiting(self, model: str, number: int) -> frozenset[str]:
        """Return the live servers that install a version next and can receive it over the direct path. Takes the lock."""
        self._versions.look(model)
        with self.lock:
            for server in [server for server in self.by_id.values() if server.model == model]:
                self._see_versions(server.id)
                self._steer(server.fleet)
            servers = [server for server in self.by_id.values() if server.model == model]
            return frozenset(server.id for server in servers if _installs_directly(server, number))

    def taking_ahead(self, model: str, number: int, reach: Reach) -> frozenset[str]:
        """Return the servers that would take a version before it is READY, as soon as every rank offers it. Takes the lock.

        They may still be busy with an earlier version.
        """
        self._versions.look(model)
        with self.lock:
            found = set[str]()
            for fleet in [fleet for fleet in self.by_name.values() if fleet.model == model and fleet.serves_ahead]:
                view = self._see(fleet)
                if updates.wanted(fleet, replace(view, ahead=view.ahead | ({number} - view.ready))) == number:
                    offered = Ahead("", staging=True, remote=fleet.serve_ahead is not None, reach=reach)
                    found |= {server.id for server in view.servers.values() if _takes_ahead(server, number, offered)}
            return frozenset(found)

    def hosts_of(self, server: str) -> frozenset[str]:
        """Return the hosts of a server's workers. Raises ResourceNotFound (SERVER_UNKNOWN)."""
        return frozenset(worker.host for worker in self.server(server).workers.values())

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
        return self._versions.only_model()

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
        fleets = [fleet for fleet in self.by_name.values() if fleet.model == model]
        away = sum(len({*self._awaited(fleet)} - fleet.drained) for fleet in fleets)
        live = [s for s in self.by_id.values() if s.model == model and s.lost_at is None and s.goal.in_service]
        return sum(1 for server in live if server.serving >= number), len(live) + away

    def processes(self, server: str) -> dict[int, str]:
        """Return the process nonce of every worker by rank; empty unless all are known.

        Raises ResourceNotFound (SERVER_UNKNOWN).
        """
        known = self.server(server)
        return {rank: worker.process for rank, worker in known.workers.items()} if known.complete else {}


def _misplaced(adapter: str, base: str, host: Server | None) -> str:
    """Return how the server that an adapter is loaded into follows another model than its base; empty if it does not."""
    if not base or host is None or host.model == base:
        return ""
    return f"{adapter} is an adapter of {base}, and server {host.id} follows {host.model}"


def check_name(what: str, name: str) -> None:
    """Raise InvalidArgument (NAME) unless `name` is a valid name of a `what`."""
    if not NAME.fullmatch(name):
        raise InvalidArgument("NAME", f"expected a {what} of at most 64 letters, digits, '.', '_' and '-', got {name!r}")


def _is_a_place(address: str) -> bool:
    """Return whether an address names one port of one host: it has a port, and is not of the loopback."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or host == "localhost":
        return False
    try:
        return not ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return True


def _installs_directly(server: Server, number: int) -> bool:
    """Return whether a server is about to install a version, without an earlier failure, into memory that ranks can write to."""
    wakes = server.goal.power not in ASLEEP and not (server.power in ASLEEP and server.change_failed is not None)
    return _reachable(server, number) and wakes and server.wanted == number != server.agreed


def _takes_ahead(server: Server, number: int, offered: Ahead) -> bool:
    """Return whether a server, which serves something, can take a version that is offered like this before it is READY."""
    awake = server.goal.power not in ASLEEP and server.power not in ASLEEP
    installs = server.install.version if server.install is not None and server.install.active else 0
    serves = server.serves(server.opened or installs)
    return _reachable(server, number) and awake and serves and server.agreed != number and not why_out_of_reach(server, offered)


def _reachable(server: Server, number: int) -> bool:
    """Return whether ranks can write into a server's memory, and a version has not failed on it."""
    up = server.lost_at is None and bool(server.controls) and server.complete
    return up and all(worker.memory for worker in server.workers.values()) and number not in server.failures
