"""What the control side counts, on vLLM's own /metrics.

vLLM serves prometheus_client's default registry there or, with several API servers, what all their processes wrote into
PROMETHEUS_MULTIPROC_DIR (v1/metrics/prometheus.py; 0.26 to 0.32). Both have what is made here, as long as it is made in the API
server, with the library's plain types; each gauge says how the values of several processes come together.
"""

import functools
import importlib.metadata
import time

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from resharder.client.inference.control.gate import Position, Watcher
from resharder.client.inference.control.orders import Kind, Outcome

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Numbers(Watcher):
    """`carried_out` and the gate's words come on the event loop, `renewed` on the lease's thread."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        name = "resharder_vllm_{}".format
        self._served = Gauge(
            name("served_version"),
            "The version that requests get; 0: none is confirmed, or vLLM's own weights. Of several API servers the lowest",
            registry=registry,
            multiprocess_mode="livemin",
        )
        self._position = Gauge(
            name("gate_position"),
            "API servers by where their gate stands: open, held (requests wait for an install), shut (503)",
            ["position"],
            registry=registry,
            multiprocess_mode="livesum",
        )
        self._refused = Counter(
            name("requests_refused"),
            "Requests that the gate answered 503: shut, late (held for longer than RESHARDER_HOLD_SECONDS), lease_ended",
            ["reason"],
            registry=registry,
        )
        self._waited = Histogram(
            name("request_wait_seconds"),
            "Time that requests waited at the gate for an install",
            registry=registry,
            buckets=_SECONDS,
        )
        self._phase = Histogram(
            name("install_phase_seconds"),
            "Phases of installs while the engine is paused: pause, apply (copies and verification, in all workers), reset "
            "(caches), resume. The daemon's metrics have the stage phase",
            ["phase"],
            registry=registry,
            buckets=_SECONDS,
        )
        self._pause = Histogram(
            name("pause_seconds"),
            "Pauses of the engine for installs, from the request to pause to the end of resuming",
            registry=registry,
            buckets=_SECONDS,
        )
        self._installs = Counter(name("installs"), "Orders to apply a version: applied, failed", ["outcome"], registry=registry)
        self._lease = Gauge(
            name("lease_expiry_timestamp_seconds"),
            "End of the API server's lease, in seconds since 1970; of several API servers the earliest",
            registry=registry,
            multiprocess_mode="livemin",
        )
        info = Gauge(
            name("build_info"), "The plugin's release; always 1", ["release"], registry=registry, multiprocess_mode="livemax"
        )
        info.labels(importlib.metadata.version("resharder")).set(1)
        self._last: dict[Kind, Outcome] = {}

    def moved(self, position: Position, version: int) -> None:
        self._served.set(0 if position is Position.SHUT else version)
        for each in Position:
            self._position.labels(each.value).set(each is position)

    def refused(self, reason: str) -> None:
        self._refused.labels(reason).inc()

    def waited(self, seconds: float) -> None:
        self._waited.observe(seconds)

    def renewed(self, seconds: float) -> None:
        self._lease.set(time.time() + seconds)

    def carried_out(self, outcome: Outcome) -> None:
        """An order that came again is answered with the outcome that it had, and not counted."""
        if outcome is self._last.get(outcome.kind):
            return
        self._last[outcome.kind] = outcome
        for timing in outcome.timings:
            self._phase.labels("apply" if timing.phase == "workers" else timing.phase).observe(timing.seconds)
        if outcome.kind is Kind.APPLY:
            self._installs.labels("applied" if outcome.ok else "failed").inc()
        if outcome.kind is Kind.RESUME and outcome.ok and outcome.pause_seconds:
            self._pause.observe(outcome.pause_seconds)


@functools.cache
def numbers() -> Numbers:
    """Those of this process."""
    return Numbers()
