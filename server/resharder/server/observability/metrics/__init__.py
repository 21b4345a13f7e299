"""What Prometheus gets: numbers that add up as things happen (observed.py), and how things stand when it asks (states.py).

    registry, observed = metrics.make(release)
    intake.observer = observed
    fleets.observers.append(observed)
    metrics.show(registry, lambda: snapshot.take(intake, fleets))
    metrics.text(registry)

Labels are models, fleets, transports, phases, states and reasons: few, and none is a version or a server.
"""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector
from prometheus_client.exposition import choose_encoder
from resharder.server.observability.metrics.counters import Observed
from resharder.server.observability.metrics.gauges import States
from resharder.server.observability.snapshot import Snapshot


def make(release: str) -> tuple[CollectorRegistry, Observed]:
    registry = CollectorRegistry(auto_describe=True)
    ProcessCollector(registry=registry)
    Gauge("resharder_build_info", "The daemon's release; always 1", ["release"], registry=registry).labels(release).set(1)
    return registry, Observed(registry)


def show(registry: CollectorRegistry, look: Callable[[], Snapshot]) -> None:
    """Has the states of a daemon collected whenever the registry is."""
    registry.register(States(look))


def text(registry: CollectorRegistry, accept: str = "") -> tuple[bytes, str]:
    """The exposition and its content type, in the format that `accept` asks for."""
    encode, kind = choose_encoder(accept)
    return encode(registry), kind
