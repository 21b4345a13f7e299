"""Counters and histograms, fed by the intake, the fleets, the journal and refused calls as things happen."""

from collections.abc import Iterable
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Histogram
from resharder.server.direct.coordinator import Cause
from resharder.server.fleets import fleets
from resharder.server.infra.event_log import Event
from resharder.server.ingest import coordinator
from resharder.server.state.fleet import Fleet
from resharder.server.state.server import Install, InstallState, Server, Worker
from resharder.server.state.timing import Timing

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
RATES = (1e6, 1e7, 1e8, 2.5e8, 5e8, 1e9, 2e9, 4e9, 8e9, 1.6e10, 3.2e10, 6.4e10, 1.28e11, 2.56e11, 5.12e11)
CONTROL_PHASES = ("pause", "reset", "resume")
TRANSPORTS = ("grpc", "shared-memory", "direct")


class Observed(coordinator.IngestObserver, fleets.FleetObserver):
    """Thread-safe; nothing in it waits for long."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, help: str, *labels: str) -> Counter:
            return Counter(f"resharder_{name}", help, labels, registry=registry)

        def histogram(name: str, help: str, *labels: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
            return Histogram(f"resharder_{name}", help, labels, buckets=buckets, registry=registry)

        self._publish = histogram(
            "publish_phase_seconds",
            "Phases of publishing: registration (from a job's first call to the last rank's), upload (from a version's creation "
            "to its last slot's seal), proof (digests of all tensors), commit (manifest, fsync, rename)",
            "model",
            "phase",
        )
        self._received = counter("received_bytes", "Bytes that ranks delivered", "model", "transport")
        self._slot_rate = histogram(
            "slot_upload_bytes_per_second",
            "How fast slots arrived, from their version's creation to their seal",
            "transport",
            buckets=RATES,
        )
        self._install = histogram(
            "install_phase_seconds",
            "Phases of installs that were committed: stage (while serving), then pause, apply (copies and their proof), reset "
            "(caches), resume; stage and apply are the slowest worker's. prove is the part of apply that is proof alone, where "
            "there is one: over the direct path, and of what went through vLLM's loader. Boxes of the staged path are proven "
            "while they are copied, and that is not told apart",
            "fleet",
            "phase",
        )
        self._pause = histogram(
            "install_pause_seconds", "How long servers were paused, from asking for the pause to the end of resuming", "fleet"
        )
        self._installs = counter(
            "installs",
            "Installs that ended: committed, failed (counts as a try of the version), given_up (for reasons that are not the "
            "version's: lease over, another version wanted, worker replaced)",
            "fleet",
            "outcome",
        )
        self._torn = counter(
            "torn_installs_avoided",
            "Installs that went wrong after workers had begun to write: the server was not resumed on a mix of versions",
            "fleet",
        )
        self._altered = counter(
            "altered_workers",
            "Workers whose memory a verification found to differ from the version that they held: it was changed by another hand",
            "fleet",
        )
        self._installed = counter(
            "installed_bytes", "Bytes that workers staged for installs that were committed", "fleet", "transport"
        )
        self._stage_rate = histogram(
            "stage_bytes_per_second", "How fast workers staged what they needed of a version", "transport", buckets=RATES
        )
        self._moves = histogram("move_seconds", "How long moves of fleets took, by how they ended", "fleet", "motion", "outcome")
        self._direct = histogram(
            "direct_transfer_seconds", "How long transfers over the direct path took, of those that ended well"
        )
        self._fallbacks = counter(
            "fallbacks",
            "Versions that a server took over the staged path instead of the direct one: not_offered (no publisher offers it), "
            "offer_over, layout, late, member_gone, member_failed",
            "reason",
        )
        self._leases = counter("leases_lost", "Leases that ended: of ranks with an open slot, of servers", "model", "holder")
        self._refusals = counter("rpc_refusals", "Calls that were refused, by the reason of docs/protocol.md", "reason")
        self._events = counter("events", "Events of the journal (`resharder events`)", "kind", "what")

    # Publishing

    def publish_phase(self, phase: coordinator.Phase, model: str, seconds: float) -> None:
        self._publish.labels(model, phase).observe(seconds)

    def received(self, model: str, transport: str, size: int) -> None:
        self._received.labels(model, transport).inc(size)

    def slot_sealed(self, transport: str, size: int, seconds: float) -> None:
        if size and seconds > 0:
            self._slot_rate.labels(transport).observe(size / seconds)

    def rank_lost(self, model: str) -> None:
        self._leases.labels(model, "rank").inc()

    # Fleets

    def server_stepped(self, before: Server, after: Server) -> None:
        if before.lost_at is None and after.lost_at is not None:
            self._leases.labels(after.model, "server").inc()
        self._altered.labels(after.fleet).inc(len(after.altered.keys() - before.altered.keys()))
        known, done = before.ended, after.ended
        if done is None or done is known:
            return
        if known is None or known.id != done.id:
            self._install_ended(before, after, done)
            self._phases(after.fleet, done, done.timings)
        else:  # its leader has said how it went on
            if done.pause_seconds:
                self._pause.labels(after.fleet).observe(done.pause_seconds)
            self._phases(after.fleet, done, done.timings[len(known.timings) :])

    def _install_ended(self, before: Server, after: Server, install: Install) -> None:
        self._installs.labels(after.fleet, outcome(before, after, install)).inc()
        if install.state != InstallState.COMMITTED:
            if before.install is not None and before.install.state == InstallState.APPLYING:
                self._torn.labels(after.fleet).inc()
            return
        workers = [worker for worker in after.workers.values() if worker.install == install.id]
        self._install.labels(after.fleet, "stage").observe(max(worker.stage_seconds for worker in workers))
        self._install.labels(after.fleet, "apply").observe(max(worker.apply_seconds for worker in workers))
        if proofs := [proof for worker in workers if (proof := _proof(worker)) is not None]:
            self._install.labels(after.fleet, "prove").observe(max(proofs))
        for worker in workers:
            transport = worker.transport if worker.transport in TRANSPORTS else "other"
            self._installed.labels(after.fleet, transport).inc(max(0, worker.needed_bytes))
            if worker.needed_bytes > 0 and worker.stage_seconds > 0:
                self._stage_rate.labels(transport).observe(worker.needed_bytes / worker.stage_seconds)

    def _phases(self, fleet: str, install: Install, timings: Iterable[Timing]) -> None:
        for timing in timings if install.state == InstallState.COMMITTED else ():
            if timing.phase in CONTROL_PHASES:
                self._install.labels(fleet, timing.phase).observe(timing.seconds)

    def fleet_stepped(self, before: Fleet | None, after: Fleet) -> None:
        move = after.move
        if move is None or move.active or before is None or before.moving is None:
            return
        self._moves.labels(after.name, move.motion.kind.name.lower(), move.state.name.lower()).observe(move.seconds)

    # The rest

    def transferred(self, seconds: float, cause: Cause | None) -> None:
        """Over the direct path, or not."""
        if cause is None:
            self._direct.observe(seconds)
        else:
            self._fallbacks.labels(cause).inc()

    def refused(self, reason: str) -> None:
        self._refusals.labels(reason).inc()

    def happened(self, event: Event) -> None:
        self._events.labels(event.kind, event.what).inc()


def _proof(worker: Worker) -> float | None:
    """How long it did nothing but prove; None where it did not say."""
    proofs = [timing.seconds for timing in worker.timings if timing.phase == "prove"]
    return sum(proofs) if proofs else None


def outcome(before: Server, after: Server, install: Install) -> Literal["committed", "failed", "given_up"]:
    """Of an install that has ended between the two."""
    if install.state == InstallState.COMMITTED:
        return "committed"
    return "failed" if _tries(after, install.version) > _tries(before, install.version) else "given_up"


def _tries(server: Server, version: int) -> int:
    return server.failures[version].count if version in server.failures else 0
