"""The control side's metrics, on the engine's own /metrics.

vLLM serves prometheus_client's default registry or, with several API servers, the values that all their
processes wrote to PROMETHEUS_MULTIPROC_DIR (`v1/metrics/prometheus.py`; 0.26 to 0.32); SGLang always the latter. Metrics of
this module appear in both, because the API server creates them with the library's plain types. Each gauge has
the mode in which the values of several processes are combined.
"""

import functools
import importlib.metadata
import time

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from resharder.client.inference.control.gate import Gate, Position
from resharder.client.inference.control.orders import Outcome
from resharder.v1.server_pb2 import Order

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Numbers:
    """The metrics of one API server.

    The lease's thread calls `renewed`; all other methods are called on the event loop.

    Args:
        registry: The registry of the metrics.
        engine: The engine's name in the metrics' names.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY, engine: str = "vllm") -> None:
        name = f"resharder_{engine}_{{}}".format
        self._served = Gauge(
            name("served_version"),
            "Version in service; 0 for none and for the engine's own weights. The lowest of several API servers",
            registry=registry,
            multiprocess_mode="livemin",
        )
        self._position = Gauge(
            name("gate_position"),
            "API servers by position of their gate: open, held (requests wait for an install), shut (503)",
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
            "End of the API server's lease, in seconds since 1970; the earliest of several API servers",
            registry=registry,
            multiprocess_mode="livemin",
        )
        info = Gauge(
            name("build_info"), "The plugin's release; always 1", ["release"], registry=registry, multiprocess_mode="livemax"
        )
        info.labels(importlib.metadata.version("resharder")).set(1)
        self._last: dict[Order.Kind, Outcome] = {}

    def connect(self, gate: Gate) -> None:
        """Count everything that a gate and its lease emit from now on, beginning with the current position."""
        gate.moved.connect(self.moved)
        gate.refused.connect(self.refused)
        gate.waited.connect(self.waited)
        gate.lease.renewed.connect(self.renewed)
        self.moved(gate.position, gate.version)

    def moved(self, position: Position, version: int) -> None:
        """Update the gauges of the version in service and the gate's position."""
        self._served.set(0 if position is Position.SHUT else version)
        for each in Position:
            self._position.labels(each.value).set(each is position)

    def refused(self, reason: str) -> None:
        """Count a refused request."""
        self._refused.labels(reason).inc()

    def waited(self, seconds: float) -> None:
        """Observe a request's wait."""
        self._waited.observe(seconds)

    def renewed(self, seconds: float) -> None:
        """Set the lease's end to `seconds` from now."""
        self._lease.set(time.time() + seconds)

    def carried_out(self, outcome: Outcome) -> None:
        """Count the outcome of an order. The same outcome object, reported for a repeated order, is not counted again."""
        if outcome is self._last.get(outcome.kind):
            return
        self._last[outcome.kind] = outcome
        for timing in outcome.timings:
            self._phase.labels("apply" if timing.phase == "workers" else timing.phase).observe(timing.seconds)
        if outcome.kind == Order.APPLY:
            self._installs.labels("applied" if outcome.ok else "failed").inc()
        if outcome.kind == Order.RESUME and outcome.ok and outcome.pause_seconds:
            self._pause.observe(outcome.pause_seconds)


@functools.cache
def numbers(engine: str = "vllm") -> Numbers:
    """Return the metrics of this process."""
    return Numbers(engine=engine)
