"""Metrics for Prometheus: counters of events (`counters.py`), and gauges computed at each scrape (`gauges.py`).

    registry, observed = metrics.make(release)
    observed.connect(intake, fleets, events)
    metrics.show(registry, lambda: snapshot.take(intake, fleets))
    metrics.text(registry)

Labels are models, fleets, transports, phases, states and reasons, never versions or servers.
"""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector
from prometheus_client.exposition import choose_encoder
from resharder.server.observability.metrics.counters import Observed
from resharder.server.observability.metrics.gauges import States
from resharder.server.observability.snapshot import Snapshot


def make(release: str) -> tuple[CollectorRegistry, Observed]:
    """Return a registry and the counters in it."""
    registry = CollectorRegistry(auto_describe=True)
    ProcessCollector(registry=registry)
    Gauge("resharder_build_info", "The daemon's release; always 1", ["release"], registry=registry).labels(release).set(1)
    return registry, Observed(registry)


def show(registry: CollectorRegistry, look: Callable[[], Snapshot]) -> None:
    """Add the gauges of a daemon's state to a registry."""
    registry.register(States(look))


def text(registry: CollectorRegistry, accept: str = "") -> tuple[bytes, str]:
    """Return the exposition and its content type, in the format that an `Accept` header prefers."""
    encode, kind = choose_encoder(accept)
    return encode(registry), kind
