"""Servers and the fleets they form: the thread-safe shell around the reconciler.

Everything that happens to a server goes through `_happen`: one step of the reconciler, then the versions it now needs are held in
the store, then its orders go to the control sides' queues. A version that is gone by then changes the step, not the
promise: what is in use is held before anyone is told to use it.
"""

import queue
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import structlog
from resharder.server.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable
from resharder.server.explain import explain, state_of
from resharder.server.manifest import READY, VersionRecord
from resharder.server.reconciler import (
    Attached,
    Claimed,
    Detached,
    Event,
    Order,
    Reported,
    Server,
    Settings,
    Ticked,
    VersionsChanged,
    Worker,
    WorkerReported,
    in_use,
    step,
)

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
MAX_WORLD_SIZE = 65536
MAX_WAIT = 3600.0
_TICK = 0.5
_FORGET = 3600.0  # a LOST server stays in lists for so long
_log = structlog.get_logger("resharder.fleet")


class Versions(Protocol):
    """What fleets need of the store."""

    def models(self) -> list[str]: ...
    def versions(self, name: str) -> list[VersionRecord]: ...
    def hold(self, name: str, number: int, holder: str) -> VersionRecord: ...
    def release(self, name: str, number: int, holder: str) -> None: ...
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
    name: str
    model: str
    wanted_version: int
    servers: tuple[str, ...]


class Attachment:
    """One control side's stream: `orders` is filled by the reconciler, None ends it."""

    def __init__(self, fleets: "Fleets", server: str, first: Attached) -> None:
        self.server, self.first = server, first
        self.orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self._fleets = fleets

    def report(self, report: Reported) -> None:
        """Raises NotFound (SERVER_UNKNOWN) where the daemon has forgotten the server meanwhile."""
        self._fleets._control_reported(self, report)

    def close(self) -> None:
        self._fleets._detach(self)


class Fleets:
    """Thread-safe. Its lock comes before the intake's and the store's: a subscriber of the store must not wait for it.

    `serving_changed` is called, with the lock held, when `serving` may answer otherwise; the intake sets it.
    """

    def __init__(
        self,
        store: Versions,
        *,
        settings: Settings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings or Settings()
        self._store, self._clock = store, clock
        self._life = secrets.token_hex(4)
        self.serving_changed: Callable[[], None] = lambda: None
        self._changed = threading.Condition(threading.RLock())
        self._servers: dict[str, Server] = {}
        self._held: dict[str, frozenset[int]] = {}
        self._attachments: dict[tuple[str, str], Attachment] = {}
        self._wake = threading.Event()
        self._closed = False
        store.subscribe(lambda _: self._wake.set())
        self._thread = threading.Thread(target=self._run, name="fleets", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends every stream; what is held stays held."""
        self._closed = True
        self._wake.set()
        self._thread.join()
        with self._changed:
            for attachment in self._attachments.values():
                attachment.orders.put(None)
            self._changed.notify_all()

    def _run(self) -> None:
        while not self._closed:
            self._wake.wait(_TICK)
            self._wake.clear()
            try:
                self.tick()
            except Exception as error:
                _log.error("tick_failed", exc_info=error)

    def tick(self) -> None:
        """Brings in what has changed in the store, and the time."""
        ready = {name: self._ready(name) for name in self._store.models()}
        with self._changed:
            now = self._clock()
            for server in list(self._servers.values()):
                versions = ready.get(server.model, {}) | self._held_of(server)
                if versions != server.ready:
                    self._happen(server.id, VersionsChanged(versions))
                self._happen(server.id, Ticked())
                server = self._servers[server.id]
                if server.lost_at is not None and now > server.lost_at + max(_FORGET, self.settings.grace):
                    del self._servers[server.id], self._held[server.id]
            self._changed.notify_all()

    def _ready(self, model: str) -> dict[int, str]:
        """READY versions and their fingerprints."""
        try:
            return {record.number: record.fingerprint for record in self._store.versions(model) if record.state == READY}
        except NotFound:
            return {}

    def _held_of(self, server: Server) -> dict[int, str]:
        """Versions only ever leave READY when nobody holds them; a view of the store may be older than a hold."""
        return {number: server.ready[number] for number in self._held.get(server.id, frozenset())}

    # What processes of servers say

    def claim(self, server: str, model: str, fleet: str, *, wait_seconds: float, boot: bool) -> Server:
        """The server with its boot version fixed.

        Raises Unavailable (NO_VERSION after `wait_seconds`, DRAINING), InvalidArgument (NAME, WAIT_SECONDS, MODEL_AMBIGUOUS),
        FailedPrecondition (SERVER_ELSEWHERE, FLEET_MODEL).
        """
        for what, name in (("server", server), ("model", model), ("fleet", fleet)):
            if not NAME.fullmatch(name) and (name or what == "server"):
                raise InvalidArgument("NAME", f"expected a {what} of at most 64 letters, digits, '.', '_' and '-', got {name!r}")
        if not 0 <= wait_seconds <= MAX_WAIT:
            raise InvalidArgument("WAIT_SECONDS", f"expected wait_seconds between 0 and {MAX_WAIT:g}, got {wait_seconds:g}")
        deadline = time.monotonic() + wait_seconds
        while True:
            name = model or self.only_model()
            ready = self._ready(name) if name else {}
            with self._changed:
                if name and (ready or not boot):
                    self._enter(server, name, fleet or name, ready)
                    self._happen(server, Claimed(boot))
                    if not boot or self._servers[server].boot_version:
                        return self._servers[server]
                left = deadline - time.monotonic()
                if self._closed:
                    raise Unavailable("DRAINING", "the daemon is going down and gives out no versions")
                if left <= 0:
                    what = f"model {name} has no READY version" if name else "no model has been published"
                    raise Unavailable("NO_VERSION", f"{what} after {wait_seconds:g} s")
                self._changed.wait(min(left, _TICK))

    def only_model(self) -> str:
        """The name of the one model there is; empty where there is none. Raises InvalidArgument (MODEL_AMBIGUOUS)."""
        models = self._store.models()
        if len(models) > 1:
            raise InvalidArgument("MODEL_AMBIGUOUS", f"expected the name of one of the models {models}, got none")
        return models[0] if models else ""

    def _enter(self, id: str, model: str, fleet: str, ready: dict[int, str]) -> None:
        known = self._servers.get(id)
        if known is not None and (known.model, known.fleet) != (model, fleet):
            raise FailedPrecondition(
                "SERVER_ELSEWHERE", f"server {id} follows {known.model} in fleet {known.fleet}, not {model} in {fleet}"
            )
        other = next((s for s in self._servers.values() if s.fleet == fleet and s.model != model), None)
        if other is not None:
            raise FailedPrecondition("FLEET_MODEL", f"fleet {fleet} follows model {other.model}, not {model}")
        if known is None:
            self._servers[id] = Server(id, model, fleet, f"{self._life}-{secrets.token_hex(2)}", self._clock(), ready)
        elif ready.keys() - known.ready.keys():
            self._happen(id, VersionsChanged(ready | self._held_of(known)))

    def attach(self, server: str, first: Attached) -> Attachment:
        """Raises NotFound (SERVER_UNKNOWN): claim first; InvalidArgument or FailedPrecondition (WORLD_SIZE)."""
        if not first.control:
            raise InvalidArgument("CONTROL", "expected a nonce of the control side in its first report, got none")
        if not 1 <= first.world_size <= MAX_WORLD_SIZE:
            raise InvalidArgument("WORLD_SIZE", f"expected 1 to {MAX_WORLD_SIZE} workers, got {first.world_size}")
        attachment = Attachment(self, server, first)
        with self._changed:
            known = self.server(server)
            others = [c for c in known.controls if c.nonce != first.control]
            if others and known.world_size != first.world_size:
                raise FailedPrecondition(
                    "WORLD_SIZE",
                    f"server {server} has {known.world_size} workers by its other control sides, got {first.world_size}",
                )
            self._take_over(attachment)
            self._happen(server, first)
        return attachment

    def _take_over(self, attachment: Attachment) -> None:
        key = (attachment.server, attachment.first.control)
        former = self._attachments.get(key)
        if former is not None and former is not attachment:
            former.orders.put(None)
        self._attachments[key] = attachment

    def _control_reported(self, attachment: Attachment, report: Reported) -> None:
        key = (attachment.server, report.control)
        with self._changed:
            known = self.server(attachment.server)
            if self._attachments.get(key) is not attachment:
                return
            if all(control.nonce != report.control for control in known.controls):
                # It had been silent for too long and was let go.
                self._happen(known.id, Attached(report.control, attachment.first.world_size, attachment.first.address))
            self._happen(known.id, report)

    def _detach(self, attachment: Attachment) -> None:
        key = (attachment.server, attachment.first.control)
        with self._changed:
            if self._attachments.get(key) is attachment:
                del self._attachments[key]
                if attachment.server in self._servers:
                    self._happen(attachment.server, Detached(attachment.first.control))

    def report_worker(self, server: str, worker: Worker) -> ServerView:
        """Raises NotFound (SERVER_UNKNOWN): claim first; InvalidArgument (WORKER)."""
        with self._changed:
            known = self.server(server)
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
        with self._changed:
            if id not in self._servers:
                raise NotFound("SERVER_UNKNOWN", f"server {id!r} is not known here; it has to claim its id first")
            return self._servers[id]

    def servers(self, fleet: str = "") -> list[ServerView]:
        with self._changed:
            chosen = [server for server in self._servers.values() if not fleet or server.fleet == fleet]
            return [self._view(server) for server in sorted(chosen, key=lambda s: s.id)]

    def _view(self, server: Server) -> ServerView:
        now = self._clock()
        to_wall = time.time() - now
        lease = self.settings.lease if server.attached else self.settings.boot
        reason = explain(server, now, self.settings)
        return ServerView(server, state_of(server), reason, server.seen + lease + to_wall, to_wall)

    def fleets(self) -> list[FleetView]:
        """A model's default fleet, of the model's name, is there even before any server."""
        models = self._store.models()
        with self._changed:
            named = {name: name for name in models} | {server.fleet: server.model for server in self._servers.values()}
            members = {name: tuple(sorted(s.id for s in self._servers.values() if s.fleet == name)) for name in named}
        return [
            FleetView(name, model, max(self._ready(model), default=0), members[name]) for name, model in sorted(named.items())
        ]

    def serving(self, model: str, number: int) -> tuple[int, int]:
        """(live servers that serve this version or a newer one, live servers that follow the model)."""
        with self._changed:
            live = [s for s in self._servers.values() if s.model == model and s.lost_at is None]
            return sum(1 for server in live if server.serving >= number), len(live)

    def wait_change(self, timeout: float) -> None:
        """Until a server may have changed, or the time is over."""
        with self._changed:
            self._changed.wait(timeout)

    # One step

    def _happen(self, id: str, event: Event) -> None:
        now, before = self._clock(), self._servers[id]
        after, orders = step(before, event, now, self.settings)
        while gone := self._hold(id, after.model, in_use(after, now, self.settings) - self._held.get(id, frozenset())):
            ready = {number: fingerprint for number, fingerprint in before.ready.items() if number not in gone}
            before, first = step(before, VersionsChanged(ready), now, self.settings)
            after, orders = step(before, event, now, self.settings)
            orders = (*first, *orders)
        self._servers[id] = after
        for order in orders:
            attachment = self._attachments.get((id, order.control))
            if attachment is not None:
                attachment.orders.put(order)
        self._release(id, after.model, self._held.get(id, frozenset()) - in_use(after, now, self.settings))
        self._log_change(before, after)
        self._changed.notify_all()
        if (before.serving, before.lost_at is None) != (after.serving, after.lost_at is None):
            self.serving_changed()

    def _hold(self, id: str, model: str, numbers: Iterable[int]) -> frozenset[int]:
        """Holds them in the store; those that are no longer READY are returned."""
        gone = set()
        for number in numbers:
            try:
                self._store.hold(model, number, f"servers/{id}")
                self._held[id] = self._held.get(id, frozenset()) | {number}
            except NotFound:
                gone.add(number)
        return frozenset(gone)

    def _release(self, id: str, model: str, numbers: frozenset[int]) -> None:
        self._held[id] = self._held.get(id, frozenset()) - numbers
        for number in numbers:
            self._store.release(model, number, f"servers/{id}")

    def _log_change(self, before: Server, after: Server) -> None:
        if state_of(before) != state_of(after) or before.opened != after.opened:
            reason = explain(after, self._clock(), self.settings)
            _log.info("server", server=after.id, state=state_of(after), version=after.opened, reason=reason)
