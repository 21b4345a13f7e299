"""Servers and the fleets they form: the thread-safe shell around the reconciler and the moves.

Everything that happens to a server goes through `_step`: one step of its reconciler, then the versions it now needs are held in
the store, then its orders go to the control sides' queues. Then `_steer` brings its fleet forward and tells every server of it
what it is to do now, until nothing changes. A fleet is on its medium before anything follows from it. A version that is gone by
then changes the step, not the promise: what is in use is held before anyone is told to use it.
"""

import queue
import re
import secrets
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Protocol

import structlog
from resharder.server.fleets import updates
from resharder.server.fleets.explain import explain, explain_fleet, state_of
from resharder.server.fleets.persistence import FleetFiles
from resharder.server.fleets.pins import Holds, Pinnable
from resharder.server.fleets.reconciler import step
from resharder.server.infra.change_signal import ChangeSignal, Waiting
from resharder.server.infra.event_log import Kind
from resharder.server.infra.medium import medium_error
from resharder.server.state.errors import FailedPrecondition, InvalidArgument, ResourceNotFound, Unavailable
from resharder.server.state.fleet import Fleet, FleetStrategyKind, PauseMode, View
from resharder.server.state.server import (
    Ahead,
    Attached,
    Claimed,
    Detached,
    Event,
    Order,
    Reinstalled,
    Reported,
    Server,
    Settings,
    Ticked,
    VersionsChanged,
    Wanted,
    Worker,
    WorkerReported,
    WorkerState,
    in_use,
)
from resharder.server.state.version import READY, UPLOADING, VersionRecord
from resharder.v1 import resources_pb2

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
MAX_WORLD_SIZE = 65536
MAX_WAIT = 3600.0
MAX_TERM = 1 << 62
_TERM_BITS = 32  # of a term, for the leaders of one server in one life of the daemon
_TICK = 0.5
_FORGET = 3600.0  # a LOST server stays in lists for so long
_SETTLE = 2.0  # beyond a lease: how long servers may take to come back to a daemon that was started again
_RETURNING = "servers that may come back"
_CHECKPOINT = 30.0  # how much of a wait a daemon that is killed may forget
_ROUNDS = 1000  # of steering: a bound against what must not be, a loop
_log = structlog.get_logger("resharder.fleet")


class Versions(Protocol):
    """Records of the versions in the store."""

    def models(self) -> list[str]: ...
    def versions(self, name: str) -> list[VersionRecord]: ...
    def subscribe(self, callback: Callable[[VersionRecord], None]) -> None: ...


@dataclass(frozen=True)
class ServerView:
    """A server as others see it; times are in seconds since 1970."""

    server: Server
    state: int
    reason: str
    lease_expires: float
    to_wall: float  # to be added to the reconciler's times


@dataclass(frozen=True)
class FleetView:
    fleet: Fleet
    wanted_version: int
    servers: tuple[str, ...]
    reason: str
    moving_for: float = 0.0  # seconds, of the move that goes on


class Note(Protocol):
    """Where events go."""

    def __call__(self, kind: Kind, subject: str, what: str, reason: str = "", **details: object) -> object: ...


def _no_note(kind: Kind, subject: str, what: str, reason: str = "", **details: object) -> None:
    pass


class FleetObserver:
    """Hears of every step of a server and of a fleet. Called with the lock held, so it must not wait."""

    def server_stepped(self, before: Server, after: Server) -> None: ...
    def fleet_stepped(self, before: Fleet | None, after: Fleet) -> None: ...


class Attachment:
    """One control side's stream: `orders` holds those it has not been sent, None ends it. `changed` signals new ones."""

    def __init__(self, fleets: "Fleets", server: str, first: Attached) -> None:
        self.server, self.first = server, first
        self.orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self.changed = ChangeSignal()
        self._fleets = fleets

    def put(self, order: Order | None) -> None:
        self.orders.put(order)
        self.changed.notify()

    def report(self, report: Reported) -> None:
        """Raises NotFound (SERVER_UNKNOWN) where the daemon has forgotten the server meanwhile."""
        self._fleets._control_reported(self, report)

    def close(self) -> None:
        self._fleets._detach(self)


class Fleets:
    """Thread-safe. Its lock comes before the intake's and the store's: a subscriber of the store must not wait for it. Who only
    looks takes none: `_servers` and `_fleets` are replaced, never changed, and so is all that is in them.

    `serving_changed` is called, with the lock held, when `serving` may answer otherwise; the intake sets it. `check` is called,
    with the lock held too, when a canary's check has to run: `checked` says how it ended. `offered(model)` are the
    versions that every rank has offered for the direct path, `at_once(model)` how many servers its ranks can send to at the same
    time. `observers` hear of every step.
    """

    def __init__(
        self,
        store: Versions,
        pins: Pinnable,
        *,
        settings: Settings | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        files: FleetFiles | None = None,
        pause_mode: PauseMode = PauseMode.KEEP,
        note: Note | None = None,
        tick_seconds: float = _TICK,
    ) -> None:
        self.settings = settings or Settings()
        self._store, self._clock, self._wall, self._files, self._pause_mode = store, clock, wall, files, pause_mode
        self._holds = Holds(pins)
        self._life, self._started = secrets.token_hex(4), clock()
        self._checkpointed = self._started
        self.serving_changed: Callable[[], None] = lambda: None
        self.check: Callable[[Fleet], None] = lambda fleet: None
        self.offered: Callable[[str], Collection[int]] = lambda model: ()
        self.at_once: Callable[[str], int] = lambda model: 1
        self.observers: list[FleetObserver] = []
        self._note = note or _no_note
        self._fleets = files.load(clock()) if files else {}
        self._term = files.next_start() << _TERM_BITS if files else 0  # above every one of this store so far
        self._ready: dict[str, dict[int, str]] = {}  # of each model, as of the last look
        self._ahead: dict[str, dict[int, Ahead]] = {}
        self._lock, self.changed = threading.RLock(), ChangeSignal()
        self._servers: dict[str, Server] = {}
        self._attachments: dict[tuple[str, str], Attachment] = {}
        self._wake = threading.Event()
        self._closed = False
        self._returning: set[str] = set()  # models whose servers may come back with any version after a restart of the daemon
        for fleet in self._fleets.values():
            self._hold_versions(fleet)
            if fleet.members and fleet.model not in self._returning:
                self._returning.add(fleet.model)
                self._holds.hold(_RETURNING, fleet.model, self._look(fleet.model))
        store.subscribe(lambda _: self.wake())
        self._thread = threading.Thread(target=self._run, args=(tick_seconds,), name="fleets", daemon=True)
        if tick_seconds:  # else whoever made it ticks
            self._thread.start()

    def close(self) -> None:
        """Ends every stream; what is held stays held."""
        self._closed = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()
        with self._lock:
            for attachment in self._attachments.values():
                attachment.put(None)
            try:
                self._save_waits()
            except OSError as error:
                _log.error("waits_not_saved", error=str(error))
            self.changed.notify()

    def wake(self) -> None:
        """Has it look at the store and at what is offered, soon."""
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
        """Brings in what has changed in the store, and the time."""
        for model in self._store.models():
            self._look(model)
        with self._lock:
            now = self._clock()
            for server in list(self._servers.values()):
                self._see_versions(server.id)
                if self._fleets[server.fleet].strict:  # a step may open a gate that the next goals must know of
                    self._happen(server.id, Ticked())
                else:
                    self._step(server.id, Ticked())
                server = self._servers[server.id]
                if server.lost_at is not None and now > server.lost_at + max(_FORGET, self.settings.grace):
                    self._forget(server)
            for name in list(self._fleets):
                self._steer(name)
            self._release_returning()
            self.changed.notify()
            if now >= self._checkpointed + _CHECKPOINT:
                self._checkpointed = now
                self._save_waits()

    def _save_waits(self) -> None:
        """Of fleets that wait for a time, how much of it has passed."""
        now = self._clock()
        if self._files is None:
            return
        for fleet in self._fleets.values():
            if fleet.rest_left(now) or (fleet.move is not None and fleet.move.hold_left(now)):
                self._files.save(fleet, now)

    def _release_returning(self) -> None:
        settling = {fleet.model for fleet in self._fleets.values() if self._see(fleet).settling}
        for model in self._returning - settling:
            self._holds.release(_RETURNING, model)
        self._returning &= settling

    def _forget(self, server: Server) -> None:
        self._servers = {id: other for id, other in self._servers.items() if id != server.id}
        self._term = max(self._term, server.term)
        self._holds.release(f"servers/{server.id}", server.model)
        fleet = self._fleets[server.fleet]
        gone = frozenset({server.id})
        self._keep(replace(fleet, members=fleet.members - gone, drained=fleet.drained - gone))

    def _look(self, model: str) -> dict[int, str]:
        """READY versions and their fingerprints. Called without the lock: what it finds may be older than a hold."""
        try:
            records = self._store.versions(model)
        except ResourceNotFound:
            records = []
        offered = self.offered(model)
        found = {record.number: record.fingerprint for record in records if record.state == READY}
        ahead = {r.number: Ahead(r.ahead_fingerprint, r.state == UPLOADING) for r in records if r.number in offered}
        self._ready[model], self._ahead[model] = found, ahead
        return found

    def _ahead_of(self, fleet: Fleet) -> dict[int, Ahead]:
        ahead = self._ahead.get(fleet.model, {})
        return ahead if fleet.serve_ahead else {number: replace(one, staging=False) for number, one in ahead.items()}

    def _see_versions(self, id: str) -> None:
        server = self._servers[id]
        versions = self._ready.get(server.model, {}) | self._held_of(server)
        ahead = self._ahead_of(self._fleets[server.fleet])
        if (versions, ahead) != (server.ready, server.ahead):
            self._step(id, VersionsChanged(versions, ahead))

    def _held_of(self, server: Server) -> dict[int, str]:
        """Versions only ever leave READY when nobody holds them; a view of the store may be older than a hold."""
        return {number: server.ready[number] for number in self._holds.of(f"servers/{server.id}", server.model)}

    # What processes of servers say

    def claim(
        self, server: str, model: str, fleet: str, *, wait_seconds: float, boot: bool, renews: bool = False
    ) -> Waiting[Server]:
        """The server with its boot version fixed.

        Raises Unavailable (NO_VERSION after `wait_seconds`, DRAINING), InvalidArgument (NAME, WAIT_SECONDS, MODEL_AMBIGUOUS),
        FailedPrecondition (SERVER_ELSEWHERE, FLEET_MODEL).
        """
        for what, name in (("server", server), ("model", model), ("fleet", fleet)):
            if not NAME.fullmatch(name) and (name or what == "server"):
                raise InvalidArgument("NAME", f"expected a {what} of at most 64 letters, digits, '.', '_' and '-', got {name!r}")
        if not 0 <= wait_seconds <= MAX_WAIT:
            raise InvalidArgument("WAIT_SECONDS", f"expected wait_seconds between 0 and {MAX_WAIT:g}, got {wait_seconds:g}")
        deadline = self._clock() + wait_seconds
        while True:
            seen = self.changed.count
            name = model or self.only_model()
            ready = self._look(name) if name else {}
            with self._lock:
                if name and (ready or not boot):
                    self._enter(server, name, fleet or name)
                    self._happen(server, Claimed(boot, renews))
                    if not boot or self._servers[server].boot_version:
                        return self._servers[server]
                left = deadline - self._clock()
                if self._closed:
                    raise Unavailable("DRAINING", "the daemon is going down and gives out no versions")
                if left <= 0:
                    what = f"model {name} has no READY version" if name else "no model has been published"
                    if ready:
                        what = f"fleet {fleet or name} wants no version yet"
                    raise Unavailable("NO_VERSION", f"{what} after {wait_seconds:g} s")
            yield self.changed.pause(seen, min(left, _TICK))

    def only_model(self) -> str:
        """The name of the one model there is; empty where there is none. Raises InvalidArgument (MODEL_AMBIGUOUS)."""
        models = self._store.models()
        if len(models) > 1:
            raise InvalidArgument("MODEL_AMBIGUOUS", f"expected the name of one of the models {models}, got none")
        return models[0] if models else ""

    def _enter(self, id: str, model: str, fleet: str) -> None:
        known = self._servers.get(id)
        if known is not None and (known.model, known.fleet) != (model, fleet):
            raise FailedPrecondition(
                "SERVER_ELSEWHERE", f"server {id} follows {known.model} in fleet {known.fleet}, not {model} in {fleet}"
            )
        found = self._fleets.get(fleet) or Fleet(fleet, model, self._pause_mode)
        if found.model != model:
            raise FailedPrecondition("FLEET_MODEL", f"fleet {fleet} follows model {found.model}, not {model}")
        if id not in found.members:
            self._keep(replace(found, members=found.members | {id}))
        if known is None:
            life = f"{self._life}-{secrets.token_hex(2)}"
            new = Server(id, model, fleet, life, self._clock(), self._ready.get(model, {}), term=self._term)
            self._servers = self._servers | {id: new}
        else:
            self._see_versions(id)
        self._steer(fleet)

    def attach(self, server: str, first: Attached) -> Attachment:
        """Raises NotFound (SERVER_UNKNOWN): claim first; InvalidArgument or FailedPrecondition (WORLD_SIZE, KV_FLEET)."""
        if not first.control:
            raise InvalidArgument("CONTROL", "expected a nonce of the control side in its first report, got none")
        if not 0 <= first.term <= MAX_TERM:
            raise InvalidArgument("CONTROL", f"expected a term of at most {MAX_TERM}, got {first.term}")
        if not 1 <= first.world_size <= MAX_WORLD_SIZE:
            raise InvalidArgument("WORLD_SIZE", f"expected 1 to {MAX_WORLD_SIZE} workers, got {first.world_size}")
        attachment = Attachment(self, server, first)
        with self._lock:
            known = self.server(server)
            others = [c for c in known.controls if c.nonce != first.control]
            if others and known.world_size != first.world_size:
                raise FailedPrecondition(
                    "WORLD_SIZE",
                    f"server {server} has {known.world_size} workers by its other control sides, got {first.world_size}",
                )
            if first.passes_kv and self._fleets[known.fleet].strategy.kind != FleetStrategyKind.ATOMIC:
                raise FailedPrecondition(
                    "KV_FLEET",
                    f"server {server} passes its KV cache on or takes that of others: fleet {known.fleet} must move atomically "
                    f"(`fleet set --atomic`); it moves {self._fleets[known.fleet].strategy.kind.name}",
                )
            self._take_over(attachment)
            self._happen(server, first)
        return attachment

    def _take_over(self, attachment: Attachment) -> None:
        key = (attachment.server, attachment.first.control)
        former = self._attachments.get(key)
        if former is not None and former is not attachment:
            former.put(None)
        self._attachments[key] = attachment

    def _control_reported(self, attachment: Attachment, report: Reported) -> None:
        key = (attachment.server, report.control)
        with self._lock:
            known = self.server(attachment.server)
            if self._attachments.get(key) is not attachment:
                return
            if all(control.nonce != report.control for control in known.controls):
                # It had been silent for too long and was let go. Orders that it has not begun must not come to life with a new
                # lease: the end of the stream takes them with it, and the next one begins anew.
                attachment.put(None)
                return
            self._happen(known.id, report)

    def _detach(self, attachment: Attachment) -> None:
        key = (attachment.server, attachment.first.control)
        with self._lock:
            if self._attachments.get(key) is attachment:
                del self._attachments[key]
                if attachment.server in self._servers:
                    self._happen(attachment.server, Detached(attachment.first.control))

    def report_worker(self, server: str, worker: Worker) -> ServerView:
        """Raises NotFound (SERVER_UNKNOWN): claim first; InvalidArgument (WORKER)."""
        known = self.server(server)
        holds = worker.state in (WorkerState.BOOTED, WorkerState.APPLIED)
        if holds and worker.fingerprint != known.ready.get(worker.version):
            self._look(known.model)  # it may have heard that the version is READY before the next tick
        with self._lock:
            known = self.server(server)
            self._see_versions(server)
            size = known.world_size or MAX_WORLD_SIZE
            if not 0 <= worker.rank < size or not worker.process:
                raise InvalidArgument(
                    "WORKER", f"expected a rank below {size} and a process nonce, got {worker.rank} and {worker.process!r}"
                )
            self._happen(server, WorkerReported(worker))
            return self._view(self._servers[server])

    # What others ask

    def server(self, id: str) -> Server:
        """Raises NotFound (SERVER_UNKNOWN)."""
        found = self._servers.get(id)
        if found is None:
            raise ResourceNotFound("SERVER_UNKNOWN", f"server {id!r} is not known here; it has to claim its id first")
        return found

    def servers(self, fleet: str = "") -> list[ServerView]:
        chosen = [server for server in self._servers.values() if not fleet or server.fleet == fleet]
        return [self._view(server) for server in sorted(chosen, key=lambda s: s.id)]

    def _view(self, server: Server) -> ServerView:
        now = self._clock()
        to_wall = self._wall() - now
        reason = explain(server, now, self.settings)
        return ServerView(server, state_of(server), reason, server.seen + server.lease(self.settings) + to_wall, to_wall)

    def fleets(self) -> list[FleetView]:
        """A model's default fleet, of the model's name, is there even before any server."""
        models = self._store.models()
        for model in models:
            self._look(model)
        known = self._fleets
        missing = [Fleet(model, model, self._pause_mode) for model in models if model not in known]
        return sorted(map(self._fleet_view, [*known.values(), *missing]), key=lambda view: view.fleet.name)

    def fleet(self, name: str) -> FleetView:
        """Raises NotFound (FLEET_UNKNOWN)."""
        found = [view for view in self.fleets() if view.fleet.name == name]
        if not found:
            raise ResourceNotFound(
                "FLEET_UNKNOWN", f"fleet {name!r} is not known; there are {[v.fleet.name for v in self.fleets()]}"
            )
        return found[0]

    def _fleet_view(self, fleet: Fleet) -> FleetView:
        view = self._see(fleet)
        moving_for = view.now - fleet.moving.began if fleet.moving else 0.0
        return FleetView(fleet, updates.wanted(fleet, view), tuple(sorted(view.servers)), explain_fleet(fleet, view), moving_for)

    def model_of(self, server: str) -> str:
        """Empty for a server that is not known."""
        known = self._servers.get(server)
        return known.model if known else ""

    def fleet_of(self, server: str) -> str:
        """Empty for a server that is not known."""
        known = self._servers.get(server)
        return known.fleet if known else ""

    def following(self) -> dict[str, str]:
        """The model of every fleet. A model's default fleet may not be there yet."""
        return {fleet.name: fleet.model for fleet in self._fleets.values()}

    def policy(self, server: str) -> tuple[PauseMode, bool]:
        """What an install does to requests, and whether leases are strict. Raises NotFound (SERVER_UNKNOWN)."""
        fleet = self._fleets[self.server(server).fleet]
        return fleet.pause_mode, fleet.strict

    def change(self, name: str, act: Callable[[Fleet, View], Fleet], model: str = "") -> FleetView:
        """What an operator wants of a fleet: on its medium, and begun, when this returns. `model`: of a fleet that is new.

        Raises NotFound (FLEET_UNKNOWN, MODEL_UNKNOWN), InvalidArgument (NAME), what `act` raises.
        """
        if not NAME.fullmatch(name):
            raise InvalidArgument("NAME", f"expected a fleet of at most 64 letters, digits, '.', '_' and '-', got {name!r}")
        models = self._store.models()
        for known in models:
            self._look(known)
        with self._lock:
            fleet = self._fleets.get(name)
            if fleet is None:
                model = model or (name if name in models else "")
                if not model:
                    there = sorted({*self._fleets, *models})
                    raise ResourceNotFound(
                        "FLEET_UNKNOWN", f"fleet {name!r} is not known, there are {there}; a new one needs a model"
                    )
                if model not in models:
                    raise ResourceNotFound("MODEL_UNKNOWN", f"model {model!r} is not known; there are {models}")
                fleet = Fleet(name, model, self._pause_mode)
            self._keep(act(fleet, self._see(fleet)))
            for server in [server for server in self._servers.values() if server.fleet == name]:
                self._see_versions(server.id)
            self._steer(name)
            self.changed.notify()
            return self._fleet_view(self._fleets[name])

    def reinstall(self, server: str) -> tuple[str, int]:
        """Has it install what it serves once more, under a profiler; the install's id and the number of its workers.

        Raises NotFound (SERVER_UNKNOWN), FailedPrecondition (NOT_SERVING).
        """
        with self._lock:
            known = self.server(server)
            fleet = self._fleets[known.fleet]
            if fleet.moving is None:
                self._happen(server, Reinstalled())
            install = self._servers[server].install
            if install is None or install is known.install or not install.profiled:
                why = f"fleet {fleet.name} moves" if fleet.moving else explain(known, self._clock(), self.settings)
                raise FailedPrecondition("NOT_SERVING", f"server {server} does not just serve what it should: {why}")
            self._note("operator", f"servers/{server}", "profile", version=install.version, install=install.id)
            return install.id, known.world_size

    def checked(self, name: str, move: int, passed: bool, message: str) -> None:
        """How the check of a canary ended."""
        with self._lock:
            if name in self._fleets:
                fleet = self._fleets[name]
                self._keep(updates.checked(fleet, move, passed, message, self._see(fleet)))
                self._steer(name)

    def serving(self, model: str, number: int) -> tuple[int, int]:
        """(live servers that serve this version or a newer one, live servers of the model that are to be in service)."""
        live = [s for s in self._servers.values() if s.model == model and s.lost_at is None and s.goal.in_service]
        return sum(1 for server in live if server.serving >= number), len(live)

    def awaiting(self, model: str, number: int) -> frozenset[str]:
        """Live servers whose workers can be written to by the direct path and that are to install this version next, as far as
        nothing has gone wrong with it there."""
        self._look(model)
        with self._lock:
            for server in [server for server in self._servers.values() if server.model == model]:
                self._see_versions(server.id)
                self._steer(server.fleet)
            return frozenset(
                id for id, server in self._servers.items() if server.model == model and _is_to_install(server, number)
            )

    def processes(self, server: str) -> dict[int, str]:
        """The process of every worker, by rank; empty where not all of them are known. Raises NotFound (SERVER_UNKNOWN)."""
        known = self.server(server)
        return {rank: worker.process for rank, worker in known.workers.items()} if known.complete else {}

    # One step

    def _happen(self, id: str, event: Event) -> None:
        self._step(id, event)
        self._steer(self._servers[id].fleet)

    def _step(self, id: str, event: Event) -> None:
        now, before, holder = self._clock(), self._servers[id], f"servers/{id}"
        after, orders = step(before, event, now, self.settings)
        while gone := self._holds.hold(holder, after.model, in_use(after, now, self.settings)):
            ready = {number: fingerprint for number, fingerprint in before.ready.items() if number not in gone}
            before, first = step(before, VersionsChanged(ready, before.ahead), now, self.settings)
            after, orders = step(before, event, now, self.settings)
            orders = (*first, *orders)
        self._servers = self._servers | {id: after}
        for order in orders:
            attachment = self._attachments.get((id, order.control))
            if attachment is not None:
                attachment.put(replace(order, term=after.term))
        self._holds.release(holder, after.model, keep=in_use(after, now, self.settings))
        self._note_change(before, after)
        for observer in self.observers:
            observer.server_stepped(before, after)
        self.changed.notify()
        if (before.serving, before.lost_at is None) != (after.serving, after.lost_at is None):
            self.serving_changed()

    def _see(self, fleet: Fleet) -> View:
        servers = {server.id: server for server in self._servers.values() if server.fleet == fleet.name}
        ready = self._ready.get(fleet.model, {}).keys() | self._holds.of(f"fleets/{fleet.name}", fleet.model)
        here = {id for id, server in servers.items() if server.lost_at is not None or server.complete}
        settling = self._clock() < self._started + self.settings.lease + _SETTLE and not fleet.members <= here
        ahead = frozenset(number for number, one in self._ahead_of(fleet).items() if one.staging) - ready
        at_once = self.at_once(fleet.model)
        return View(servers, ready, self._clock(), self.settings, settling, ahead, self._wall(), at_once)

    def _steer(self, name: str) -> None:
        """Moves the fleet on, and its servers with it, until nothing follows."""
        self._hold_versions(self._fleets[name])
        for _ in range(_ROUNDS):
            fleet = self._fleets[name]
            view = self._see(fleet)
            after = updates.advance(fleet, view)
            if after != fleet:
                self._keep(after)
                continue
            changed = [(id, goal) for id, goal in updates.goals(fleet, view).items() if goal != view.servers[id].goal]
            if not changed:
                break
            for id, goal in changed[:1] if fleet.strict else changed:  # which gates are open counts for the next
                self._step(id, Wanted(goal))
        else:
            _log.error("fleet_unsteady", fleet=name)
        if fleet.moving is not None and fleet.moving.checking:
            self.check(fleet)

    def _keep(self, fleet: Fleet) -> None:
        """On its medium first; then its versions are held."""
        before = self._fleets.get(fleet.name)
        if fleet == before:
            return
        if self._files is not None:
            self._files.save(fleet, self._clock())
        self._fleets = self._fleets | {fleet.name: fleet}
        self._hold_versions(fleet)
        self._note_move(before, fleet)
        for observer in self.observers:
            observer.fleet_stepped(before, fleet)

    def _needs(self, fleet: Fleet) -> frozenset[int]:
        """Where it serves ahead, also the way back."""
        newest = max(self._ready.get(fleet.model, {}), default=0) if fleet.serve_ahead else 0
        return (fleet.needs() | {newest}) - {0}

    def _hold_versions(self, fleet: Fleet) -> None:
        holder, needed = f"fleets/{fleet.name}", self._needs(fleet)
        self._holds.hold(holder, fleet.model, needed)
        self._holds.release(holder, fleet.model, keep=needed)

    def _note_move(self, before: Fleet | None, after: Fleet) -> None:
        move = after.move
        known = before.move if before is not None else None
        if move is None or (known is not None and (known.id, known.state) == (move.id, move.state)):
            return
        what, subject = move.state.name.lower(), f"fleets/{after.name}"
        self._note("move", subject, what, move.reason, to=move.to, back_to=move.back_to, strategy=move.strategy.kind.name)

    def _note_change(self, before: Server, after: Server) -> None:
        if after.differs and not before.differs:
            self._note("server", f"servers/{after.id}", "differs", after.differs, version=after.opened, fleet=after.fleet)
        for rank in sorted(after.altered.keys() - before.altered.keys()):
            self._note("server", f"servers/{after.id}", "altered", after.altered[rank], rank=rank, fleet=after.fleet)
        if state_of(before) != state_of(after) or before.opened != after.opened:
            reason = explain(after, self._clock(), self.settings)
            state = resources_pb2.Server.State.Name(state_of(after))
            self._note("server", f"servers/{after.id}", state.lower(), reason, version=after.opened, fleet=after.fleet)


def _is_to_install(server: Server, number: int) -> bool:
    """By boxes that come from other memory than the store's."""
    reachable = server.complete and all(worker.memory for worker in server.workers.values())
    up = server.lost_at is None and bool(server.controls) and not server.power.asleep and not server.goal.power.asleep
    return reachable and up and server.wanted == number != server.agreed and number not in server.failures
