"""Counters and histograms of events: publishing, installs, moves, transfers, refusals."""

from collections.abc import Iterable
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram
from resharder.server.direct.direct import Cause
from resharder.server.fleets.fleets import Fleets
from resharder.server.infra.event_log import Event, Events, Kind
from resharder.server.ingest.intake import Intake, Phase
from resharder.server.state.fleet import Fleet
from resharder.server.state.server import Install, Server, Worker
from resharder.server.state.timing import Timing
from resharder.server.state.version import ABORTED, READY, RETIRED, UPLOADING
from resharder.v1 import resources_pb2

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
RATES = (1e6, 1e7, 1e8, 2.5e8, 5e8, 1e9, 2e9, 4e9, 8e9, 1.6e10, 3.2e10, 6.4e10, 1.28e11, 2.56e11, 5.12e11)
CONTROL_PHASES = ("pause", "reset", "resume")
InstallOutcome = Literal["committed", "failed", "given_up"]
TRANSPORTS = ("grpc", "http", "node", "shared-memory", "direct")
EVENTS: dict[Kind, tuple[str, ...]] = {
    "daemon": ("started", "store_lost", "store_back"),
    "version": tuple(state.lower() for state in (UPLOADING, READY, RETIRED, ABORTED)),
    "server": (*(name.lower() for name, state in resources_pb2.Server.State.items() if state), "left", "differs", "altered"),
    "move": tuple(name.lower() for name, state in resources_pb2.Move.State.items() if state),
    "archive": ("archived", "restored", "failed"),
    "node": ("joined", "left", "lost"),
}
"""Events whose series begin at 0. Those of operators are named after their calls, and begin when they happen."""


class Observed:
    """Counters of what ingest, fleets and the direct path emit. Thread-safe; no method blocks."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, help: str, *labels: str) -> Counter:
            return Counter(f"resharder_{name}", help, labels, registry=registry)

        def histogram(name: str, help: str, *labels: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
            return Histogram(f"resharder_{name}", help, labels, buckets=buckets, registry=registry)

        self._publish = histogram(
            "publish_phase_seconds",
            "Phases of publishing: registration (from a job's first call to the last rank's), upload (from a version's creation "
            "to its last slot's seal), verify (digests of all tensors), commit (manifest, fsync, rename)",
            "model",
            "phase",
        )
        self._received = counter("received_bytes", "Bytes received from ranks", "model", "transport")
        self._slot_rate = histogram(
            "slot_upload_bytes_per_second",
            "Upload rate of slots, from their version's creation to their seal",
            "transport",
            buckets=RATES,
        )
        self._install = histogram(
            "install_phase_seconds",
            "Phases of committed installs: stage (while serving), then pause, apply (copies and verification), reset (caches), "
            "resume; stage and apply are those of the slowest worker. verify is the part of apply that only verifies",
            "fleet",
            "phase",
        )
        self._pause = histogram(
            "install_pause_seconds", "Pauses of servers, from the request to pause to the end of resuming", "fleet"
        )
        self._installs = counter(
            "installs",
            "Ended installs: committed, failed (counts as an attempt to install the version), given_up (for other reasons: lease "
            "expired, target changed, worker replaced)",
            "fleet",
            "outcome",
        )
        self._torn = counter(
            "torn_installs_avoided",
            "Installs that failed after workers began to write; the server did not resume on a mix of versions",
            "fleet",
        )
        self._altered = counter(
            "altered_workers",
            "Workers whose memory differed from their version in a verification, because another program changed it",
            "fleet",
        )
        self._installed = counter("installed_bytes", "Bytes staged by workers for committed installs", "fleet", "transport")
        self._stage_rate = histogram(
            "stage_bytes_per_second", "Rate at which workers staged their slices of a version", "transport", buckets=RATES
        )
        self._moves = histogram("move_seconds", "Duration of moves of fleets, by outcome", "fleet", "strategy", "outcome")
        self._direct = histogram("direct_transfer_seconds", "Duration of successful transfers over the direct path")
        self._fallbacks = counter(
            "fallbacks",
            "Versions that a server received over the staged path instead of the direct path: not_offered (no publisher offers "
            "them), offer_over, layout, late, member_gone, member_failed",
            "reason",
        )
        self._leases = counter("leases_lost", "Expired leases of ranks with an open slot, and LOST servers", "model", "holder")
        self._refusals = counter("rpc_refusals", "Refused calls, by the reasons of docs/errors.md", "reason")
        self._events = counter("events", "Events of the journal (`resharder events`)", "kind", "what")
        self._begun = set[tuple[str, str]]()  # fleets and models whose series exist
        for cause in get_args(Cause):
            self._fallbacks.labels(cause)
        for kind, whats in EVENTS.items():
            for what in whats:
                self._events.labels(kind, what)

    def connect(self, intake: Intake, fleets: Fleets, events: Events) -> None:
        """Count everything that a daemon's parts emit from now on."""
        intake.phase_ended.connect(self.publish_phase)
        intake.received.connect(self.received)
        intake.slot_sealed.connect(self.slot_sealed)
        intake.rank_lost.connect(self.rank_lost)
        fleets.server_stepped.connect(self.server_stepped)
        fleets.fleet_stepped.connect(self.fleet_stepped)
        events.added.connect(self.happened)

    # Publishing

    def publish_phase(self, phase: Phase, model: str, seconds: float) -> None:
        """Record the duration of one phase of a publish."""
        self._publish.labels(model, phase).observe(seconds)

    def received(self, model: str, transport: str, size: int) -> None:
        """Count `size` bytes from a rank."""
        self._received.labels(model, transport).inc(size)

    def slot_sealed(self, transport: str, size: int, seconds: float) -> None:
        """Record the rate of a slot of `size` bytes."""
        if size and seconds > 0:
            self._slot_rate.labels(transport).observe(size / seconds)

    def rank_lost(self, model: str) -> None:
        """Count the expired lease of a rank with an open slot."""
        self._leases.labels(model, "rank").inc()

    # Fleets

    def server_stepped(self, before: Server, after: Server) -> None:
        """Count expired leases, altered workers and ended installs between two states of a server."""
        self._begin(after.fleet, after.model)
        if before.lost_at is None and after.lost_at is not None:
            self._leases.labels(after.model, "server").inc()
        self._altered.labels(after.fleet).inc(len(after.altered.keys() - before.altered.keys()))
        known, done = before.ended, after.ended
        if done is None or done is known:
            return
        if known is None or known.id != done.id:
            self._install_ended(before, after, done)
            self._phases(after.fleet, done, done.timings)
        else:  # a later report of its leader
            if done.pause_seconds:
                self._pause.labels(after.fleet).observe(done.pause_seconds)
            self._phases(after.fleet, done, done.timings[len(known.timings) :])

    def _begin(self, fleet: str, model: str) -> None:
        """Start a fleet's series at 0: `increase` does not count the first value of a series."""
        if (fleet, model) in self._begun:
            return
        self._begun.add((fleet, model))
        for ended in get_args(InstallOutcome):
            self._installs.labels(fleet, ended)
        for holder in ("rank", "server"):
            self._leases.labels(model, holder)
        self._torn.labels(fleet)

    def _install_ended(self, before: Server, after: Server, install: Install) -> None:
        self._installs.labels(after.fleet, outcome(before, after, install)).inc()
        if install.state != resources_pb2.Install.COMMITTED:
            if before.install is not None and before.install.state == resources_pb2.Install.APPLYING:
                self._torn.labels(after.fleet).inc()
            return
        workers = [worker for worker in after.workers.values() if worker.install == install.id]
        self._install.labels(after.fleet, "stage").observe(max(worker.stage_seconds for worker in workers))
        self._install.labels(after.fleet, "apply").observe(max(worker.apply_seconds for worker in workers))
        if durations := [seconds for worker in workers if (seconds := _verify_seconds(worker)) is not None]:
            self._install.labels(after.fleet, "verify").observe(max(durations))
        for worker in workers:
            transport = worker.transport if worker.transport in TRANSPORTS else "other"
            self._installed.labels(after.fleet, transport).inc(max(0, worker.needed_bytes))
            if worker.needed_bytes > 0 and worker.stage_seconds > 0:
                self._stage_rate.labels(transport).observe(worker.needed_bytes / worker.stage_seconds)

    def _phases(self, fleet: str, install: Install, timings: Iterable[Timing]) -> None:
        for timing in timings if install.state == resources_pb2.Install.COMMITTED else ():
            if timing.phase in CONTROL_PHASES:
                self._install.labels(fleet, timing.phase).observe(timing.seconds)

    def fleet_stepped(self, before: Fleet | None, after: Fleet) -> None:
        """Record the duration of a move that ended between two states of a fleet."""
        move = after.move
        if move is None or move.active or before is None or before.moving is None:
            return
        self._moves.labels(
            after.name,
            resources_pb2.UpdateStrategy.Kind.Name(move.strategy.kind).lower(),
            resources_pb2.Move.State.Name(move.state).lower(),
        ).observe(move.seconds)

    def transferred(self, seconds: float, cause: Cause | None) -> None:
        """Count a transfer over the direct path, or with a cause a fallback to the staged path."""
        if cause is None:
            self._direct.observe(seconds)
        else:
            self._fallbacks.labels(cause).inc()

    def refused(self, reason: str) -> None:
        """Count a refused call."""
        self._refusals.labels(reason).inc()

    def happened(self, event: Event) -> None:
        """Count an event of the journal."""
        self._events.labels(event.kind, event.what).inc()


def _verify_seconds(worker: Worker) -> float | None:
    """Return the seconds in which a worker only verified; None if it reported none."""
    durations = [timing.seconds for timing in worker.timings if timing.phase == "verify"]
    return sum(durations) if durations else None


def outcome(before: Server, after: Server, install: Install) -> InstallOutcome:
    """Return the outcome of an install that ended between two states of its server."""
    if install.state == resources_pb2.Install.COMMITTED:
        return "committed"
    return "failed" if after.attempts(install.version) > before.attempts(install.version) else "given_up"
