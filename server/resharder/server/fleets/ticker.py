"""Passage of time in the fleets: a thread that applies changes of the store, expired leases and ended waits."""

import threading

import structlog
from resharder.server.fleets.persistence import FleetFiles
from resharder.server.fleets.pins import FleetPins
from resharder.server.fleets.roster import Roster
from resharder.server.fleets.seen_versions import SeenVersions
from resharder.server.fleets.sessions import Sessions
from resharder.server.fleets.steering import Steering
from resharder.server.infra.medium import medium_error
from resharder.server.state.server_events import Ticked

_RETURNING = "servers that may come back"
_CHECKPOINT = 30.0  # seconds of a wait that a killed daemon may lose
_log = structlog.get_logger("resharder.fleet")


class FleetTicker:
    """Thread that ticks every `tick_seconds` and after `wake`. With 0 seconds there is no thread, and the caller ticks.

    After a restart of the daemon, all READY versions of a model stay pinned until the fleet's servers have returned or their
    leases have expired, since they may return with any version.
    """

    def __init__(
        self,
        roster: Roster,
        seen: SeenVersions,
        pins: FleetPins,
        steering: Steering,
        sessions: Sessions,
        files: FleetFiles | None,
        tick_seconds: float,
    ) -> None:
        self._roster, self._seen, self._pins, self._steering = roster, seen, pins, steering
        self._sessions, self._files = sessions, files
        self._checkpointed = roster.clock()
        self._returning = {fleet.model for fleet in roster.by_name.values() if fleet.members}
        for fleet in roster.by_name.values():
            steering.pin_versions(fleet)
        for model in self._returning:
            pins.pin(_RETURNING, model, seen.look(model))
        self._wake, self._closed = threading.Event(), False
        self._thread = threading.Thread(target=self._run, args=(tick_seconds,), name="fleets", daemon=True)
        if tick_seconds:
            self._thread.start()

    def wake(self) -> None:
        """Request a tick as soon as possible. Never blocks."""
        self._wake.set()

    def close(self) -> None:
        """Stop the thread, end all sessions, and store how long waits have lasted. Pins remain."""
        self._closed = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()
        with self._roster.lock:
            self._sessions.close()
            try:
                self._save_waits()
            except OSError as error:
                _log.error("waits_not_saved", error=str(error))
            self._roster.changed.notify()

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
        self._seen.look_at_all()
        roster = self._roster
        with roster.lock:
            now = roster.clock()
            for id, fleet in roster.missing():
                self._sessions.miss(id, fleet, roster.started)
            for server in list(roster.by_id.values()):
                if server.left and now > server.seen + server.lease(roster.settings):
                    self._sessions.leave(server)
                    continue
                self._steering.see_versions(server.id)
                if roster.by_name[server.fleet].strict:  # a step may open a gate, on which other servers' goals depend
                    self._steering.happen(server.id, Ticked())
                else:
                    self._steering.step(server.id, Ticked())
                server = roster.by_id[server.id]
                if server.lost_at is not None and now > server.lost_at + max(roster.settings.forget, roster.settings.grace):
                    self._sessions.forget(server)
            for name in list(roster.by_name):
                self._steering.steer(name)
            self._release_returning()
            roster.changed.notify()
            if now >= self._checkpointed + _CHECKPOINT:
                self._checkpointed = now
                self._save_waits()

    def _save_waits(self) -> None:
        """Store how long the waits of fleets have lasted."""
        now = self._roster.clock()
        if self._files is None:
            return
        for fleet in self._roster.by_name.values():
            if fleet.rest_left(now) or (fleet.move is not None and fleet.move.hold_left(now)):
                self._files.save(fleet, now)

    def _release_returning(self) -> None:
        settling = {fleet.model for fleet in self._roster.by_name.values() if self._roster.see(fleet).settling}
        for model in self._returning - settling:
            self._pins.release(_RETURNING, model)
        self._returning &= settling
