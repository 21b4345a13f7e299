"""Sessions of inference servers: claims, streams of control sides, reports of workers."""

import ipaddress
import re
import secrets
from dataclasses import replace

from resharder.server.fleets.attachments import Attachment, Attachments
from resharder.server.fleets.pins import FleetPins
from resharder.server.fleets.ports import Note, no_note
from resharder.server.fleets.roster import Roster, ServerView, without_server
from resharder.server.fleets.seen_versions import SeenVersions
from resharder.server.fleets.steering import Steering
from resharder.server.infra.change_signal import Waiting
from resharder.server.state.errors import FailedPrecondition, InvalidArgument, Unavailable
from resharder.server.state.fleet import Fleet, FleetStrategyKind
from resharder.server.state.server import Server, Worker, WorkerState, processes
from resharder.server.state.server_events import Attached, Claimed, Detached, Reported, Ticked, WorkerReported

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
MAX_WORLD_SIZE = 65536
MAX_WAIT = 3600.0
"""Bound on the seconds that a claim may wait."""
MAX_TERM = 1 << 62
_LOOK = 0.5  # longest pause of a waiting claim, in seconds


def is_a_place(address: str) -> bool:
    """Return whether an address names one port of one host: it has a port, and is not of the loopback."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or host == "localhost":
        return False
    try:
        return not ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return True


def check_name(what: str, name: str) -> None:
    """Raise InvalidArgument (NAME) unless `name` is a valid name of a `what`."""
    if not NAME.fullmatch(name):
        raise InvalidArgument("NAME", f"expected a {what} of at most 64 letters, digits, '.', '_' and '-', got {name!r}")


class Sessions:
    """Calls of servers. Thread-safe.

    Args:
        first_term: Term of new servers, above every term of the store so far.
        note: Recorder of servers that leave.
    """

    def __init__(
        self,
        roster: Roster,
        seen: SeenVersions,
        pins: FleetPins,
        steering: Steering,
        attachments: Attachments,
        first_term: int,
        note: Note = no_note,
    ) -> None:
        self._roster, self._seen, self._pins = roster, seen, pins
        self._steering, self._attachments = steering, attachments
        self._term, self._life = first_term, secrets.token_hex(4)
        self._note, self._closed = note, False
        self._left: dict[str, frozenset[str]] = {}  # processes of servers that have left, by id

    def claim(
        self, server: str, model: str, fleet: str, *, wait_seconds: float, boot: bool, renews: bool = False
    ) -> Waiting[Server]:
        """Register a server, and return it. With `boot`, wait for a READY version and assign the boot version.

        Args:
            server: Id that the processes of the server share.
            model: Model to follow; empty for the only one.
            fleet: Fleet to join; empty for the model's default fleet.
            wait_seconds: Bound on the wait, 0 to 3600.
            boot: Whether the server boots from the daemon.
            renews: Whether the claim is repeated within every lease.

        Raises:
            Unavailable: NO_VERSION after `wait_seconds`, or DRAINING.
            InvalidArgument: NAME, WAIT_SECONDS, MODEL_AMBIGUOUS.
            FailedPrecondition: SERVER_ELSEWHERE, FLEET_MODEL.
        """
        for what, name in (("server", server), ("model", model), ("fleet", fleet)):
            if name or what == "server":
                check_name(what, name)
        if not 0 <= wait_seconds <= MAX_WAIT:
            raise InvalidArgument("WAIT_SECONDS", f"expected wait_seconds between 0 and {MAX_WAIT:g}, got {wait_seconds:g}")
        roster = self._roster
        deadline = roster.clock() + wait_seconds
        while True:
            changes = roster.changed.count
            name = model or self._seen.only_model()
            ready = self._seen.look(name) if name else {}
            with roster.lock:
                if name and (ready or not boot):
                    self._enter(server, name, fleet or name)
                    self._steering.happen(server, Claimed(boot, renews))
                    if not boot or roster.by_id[server].boot_version:
                        return roster.by_id[server]
                left = deadline - roster.clock()
                if self._closed:
                    raise Unavailable("DRAINING", "the daemon is shutting down and assigns no versions")
                if left <= 0:
                    what = f"model {name} has no READY version" if name else "no model has been published"
                    if ready:
                        what = f"fleet {fleet or name} has no version to serve"
                    raise Unavailable("NO_VERSION", f"{what} after {wait_seconds:g} s")
            yield roster.changed.pause(changes, min(left, _LOOK))

    def _enter(self, id: str, model: str, fleet: str) -> None:
        roster = self._roster
        known = roster.by_id.get(id)
        if known is not None and (known.model, known.fleet) != (model, fleet):
            raise FailedPrecondition(
                "SERVER_ELSEWHERE", f"server {id} follows {known.model} in fleet {known.fleet}, not {model} in {fleet}"
            )
        found = roster.by_name.get(fleet) or roster.new_fleet(fleet, model)
        if found.model != model:
            raise FailedPrecondition("FLEET_MODEL", f"fleet {fleet} follows model {found.model}, not {model}")
        if id not in found.members:
            self._steering.store(replace(found, members=found.members | {id}))
        if known is None:
            life, left = f"{self._life}-{secrets.token_hex(2)}", self._left.pop(id, frozenset())
            ready = self._seen.ready(model)
            roster.put_server(Server(id, model, fleet, life, roster.clock(), ready, gone=left, term=self._term))
        else:
            self._steering.see_versions(id)
        self._steering.steer(fleet)

    def attach(self, server: str, first: Attached) -> Attachment:
        """Begin the stream of a control side with its first report.

        Raises:
            ResourceNotFound: SERVER_UNKNOWN, if the server has not claimed its id.
            InvalidArgument: CONTROL, WORLD_SIZE.
            FailedPrecondition: WORLD_SIZE, KV_FLEET.
        """
        if not first.control:
            raise InvalidArgument("CONTROL", "expected a nonce of the control side in its first report, got none")
        if not 0 <= first.term <= MAX_TERM:
            raise InvalidArgument("CONTROL", f"expected a term of at most {MAX_TERM}, got {first.term}")
        if not 1 <= first.world_size <= MAX_WORLD_SIZE:
            raise InvalidArgument("WORLD_SIZE", f"expected 1 to {MAX_WORLD_SIZE} workers, got {first.world_size}")
        attachment = Attachment(server, first, self._reported, self._detach)
        with self._roster.lock:
            known = self._roster.server(server)
            others = [c for c in known.controls if c.nonce != first.control]
            if others and known.world_size != first.world_size:
                raise FailedPrecondition(
                    "WORLD_SIZE",
                    f"server {server} has {known.world_size} workers by its other control sides, got {first.world_size}",
                )
            strategy = self._roster.by_name[known.fleet].strategy.kind
            if first.passes_kv and strategy != FleetStrategyKind.ATOMIC:
                raise FailedPrecondition(
                    "KV_FLEET",
                    f"server {server} transfers KV caches: expected fleet {known.fleet} to update atomically "
                    f"(`fleet set --atomic`), got {strategy.name}",
                )
            self._attachments.add(attachment)
            self._steering.happen(server, first)
            self._replace_lost(self._roster.by_id[server])
        return attachment

    def _replace_lost(self, server: Server) -> None:
        """Forget servers that are LOST, or end to start again, whose place another server has taken under an id of its own."""
        for lost in self._roster.of_fleet(server.fleet):
            gone = lost.lost_at is not None or (lost.ending and not lost.controls)
            if gone and lost.id != server.id and is_a_place(lost.address) and lost.address == server.address:
                self._note("server", f"servers/{lost.id}", "replaced", f"by {server.id} at {lost.address}", fleet=lost.fleet)
                self.forget(lost)
                self._steering.steer(server.fleet)

    def _reported(self, attachment: Attachment, report: Reported) -> None:
        with self._roster.lock:
            known = self._roster.server(attachment.server)
            if not self._attachments.has(attachment, report.control):
                return
            if all(control.nonce != report.control for control in known.controls):
                # Its lease expired. A new lease must not revive orders that it has not begun: they are dropped with the
                # stream, and the next stream starts over.
                attachment.put(None)
                return
            self._steering.happen(known.id, report)
            if not report.leaving and not report.failure:
                return
            attachment.put(None)
            left = self._roster.by_id[known.id]
            # Clients may still reach a server that only the daemon lost sight of: a strict fleet waits for its lease.
            if left.left and not self._roster.by_name[left.fleet].strict:
                self.leave(left)

    def _detach(self, attachment: Attachment) -> None:
        with self._roster.lock:
            if self._attachments.remove(attachment) and attachment.server in self._roster.by_id:
                self._steering.happen(attachment.server, Detached(attachment.first.control))

    def report_worker(self, server: str, worker: Worker) -> ServerView:
        """Process a worker's report, and return the server's view.

        Raises:
            ResourceNotFound: SERVER_UNKNOWN, if the server has not claimed its id.
            FailedPrecondition: SERVER_LEFT, if the server has left and this process remains.
            InvalidArgument: WORKER.
        """
        if server not in self._roster.by_id and worker.process in self._left.get(server, ()):
            raise FailedPrecondition("SERVER_LEFT", f"server {server} has left: its API servers have ended")
        known = self._roster.server(server)
        loaded = worker.state in (WorkerState.BOOTED, WorkerState.APPLIED)
        if loaded and worker.fingerprint != known.ready.get(worker.version):
            self._seen.look(known.model)  # the version may have become READY since the last tick
        with self._roster.lock:
            known = self._roster.server(server)
            self._steering.see_versions(server)
            size = known.world_size or MAX_WORLD_SIZE
            if not 0 <= worker.rank < size or not worker.process:
                raise InvalidArgument(
                    "WORKER", f"expected a rank below {size} and a process nonce, got {worker.rank} and {worker.process!r}"
                )
            self._steering.happen(server, WorkerReported(worker))
            return self._roster.server_view(self._roster.by_id[server])

    def miss(self, id: str, fleet: Fleet, since: float) -> None:
        """List a member of a fleet as LOST: it has not come back since the daemon's restart.

        Callers hold the roster's lock. Raises OSError.
        """
        life = f"{self._life}-{secrets.token_hex(2)}"
        ready, missed = self._seen.ready(fleet.model), "it has not come back since the daemon's restart"
        server = Server(id, fleet.model, fleet.name, life, since, ready, renews=True, term=self._term, failure=missed)
        self._roster.put_server(server)
        self._steering.happen(id, Ticked())

    def leave(self, server: Server) -> None:
        """Forget a server that has left. Its workers may end later; until it returns, their reports are refused.

        Callers hold the roster's lock. Raises OSError.
        """
        self._note("server", f"servers/{server.id}", "left", "its API servers have ended", fleet=server.fleet)
        self._left[server.id] = processes(server)
        self.forget(server)
        self._steering.steer(server.fleet)
        self._roster.changed.notify()

    def forget(self, server: Server) -> None:
        """Remove a server, its pins and its membership. Callers hold the roster's lock. Raises OSError."""
        self._roster.remove(server=server.id)
        self._term = max(self._term, server.term)
        self._pins.release(f"servers/{server.id}", server.model)
        self._steering.store(without_server(self._roster.by_name[server.fleet], server.id))

    def close(self) -> None:
        """End every stream and refuse further waits for a version. Callers hold the roster's lock."""
        self._closed = True
        self._attachments.end_all()
