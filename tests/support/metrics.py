"""Samples of a daemon's `/metrics`."""

import http.client
from collections.abc import Callable

from prometheus_client.parser import text_string_to_metric_families

from tests.support.daemon import Daemon


def exposition(daemon: Daemon, accept: str = "") -> str:
    connection = http.client.HTTPConnection(str(daemon.options["web_listen"]), timeout=60)
    try:
        connection.request("GET", "/metrics", headers={"Accept": accept})
        return connection.getresponse().read().decode()
    finally:
        connection.close()


def read(daemon: Daemon) -> Callable[..., float | None]:
    """`read(daemon)(name, **labels)`: the sample, as it is now; None where there is none."""
    samples = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(exposition(daemon))
        for sample in family.samples
    }
    return lambda name, **labels: samples.get((f"resharder_{name}", frozenset(labels.items())))
