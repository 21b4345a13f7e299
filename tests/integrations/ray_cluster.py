"""A Ray cluster of this host for tests."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import ray

ROOT = Path(__file__).parents[2]
ATTEMPTS = 5
CALM = {"RAY_memory_monitor_refresh_ms": "0"}
"""Ray counts the memory of all processes of the host, and ends actors if others use it."""


@contextmanager
def start(cpus: int, environment: Mapping[str, str]) -> Iterator[None]:
    """Run a cluster while the block runs. `environment` is that of its workers, which can import the tests."""
    variables = dict(environment) | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    os.environ |= variables | {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", **CALM}
    for attempt in range(1, ATTEMPTS + 1):
        try:
            ray.init(num_cpus=cpus, include_dashboard=False, runtime_env={"env_vars": variables})
            break
        except Exception:  # Ray's daemon gives its agents 15 s to start, too short for a busy box
            if attempt == ATTEMPTS:
                raise
            ray.shutdown()
    try:
        yield
    finally:
        ray.shutdown()
