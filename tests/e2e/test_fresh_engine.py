"""Versions over every path, against an engine that has loaded the version's folder and knows nothing of Resharder.

Two Megatron ranks, a daemon and a vLLM server of two workers. Over each path, five versions are installed over one another, the
last of the same weights; then every tensor that a worker's model reaches is hashed, and compared with those of a server without
the plugin that loaded the exported version.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import vllm
from packaging.version import Version
from resharder.v1 import resources_pb2

from tests.support import hidden
from tests.support.direct_server import PROMPT, System, alone, running
from tests.support.kinds import KINDS
from tests.support.observing import export, servers, wait_serving
from tests.support.tensor_hashes import Held, differing, hashes, new_socket

pytestmark = pytest.mark.full

OLD = Version(vllm.__version__) < Version("0.32")
LAST = 99  # seed of the last version over each path


@pytest.mark.parametrize("kind", KINDS)
def test_five_versions_over_one_another_leave_what_an_engine_without_the_plugin_loads(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "fp8 blocks" and OLD:
        pytest.skip("older CPU builds have no FP8 blocks")
    made = KINDS[kind]
    monkeypatch.setenv("TENSOR_HASHES", new_socket())
    options: dict[str, Any] = {"plugins": f"{made.plugins},tensor_hashes", "dtype": made.dtype}
    with running(tmp_path, made.config, made.trainer(direct_wait=60.0), *made.arguments, **options) as system:
        found: dict[str, Held] = {}
        found["shared memory"] = five(system, lambda: system.trainer.ask(do="withhold"), "store", "shared-memory")
        found["direct"] = five(system, lambda: None, "gloo", "shared-memory")
        with system.ahead():
            found["ahead of READY"] = five(system, lambda: None, "gloo", "shared-memory")
        system.share_memory(monkeypatch)
        found["peer memory"] = five(system, lambda: None, "peer-memory", "shared-memory")
        if not hidden.unavailable():
            elsewhere(system)
            found["data port"] = five(system, lambda: system.trainer.ask(do="withhold"), "store", "http")
        said = system.server.generate(PROMPT, 12)
        export(system.daemon, f"models/policy/versions/{max(system.steps)}", tmp_path / "exported")
        wanted, fresh = alone(tmp_path / "exported", system.server, made.plugins)
    assert {path: differing(held, wanted) for path, held in found.items()} == {path: [] for path in found}
    assert (said.token_ids, said.logprobs) == fresh


def five(system: System, before: Callable[[], object], path: str, transport: str) -> Held:
    """Publish five versions, and return what the workers hold then. All have come over `path`."""
    first = max(system.steps.values()) + 1
    for step in range(first, first + 5):
        if step == first + 4:
            system.trainer.ask(do="reseed", step=step, seed=LAST)
        before()
        version = system.publish(step)
        (server,) = servers(system.daemon)
        assert [(worker.path or "store", worker.transport) for worker in server.workers] == [(path, transport)] * 2
    system.wait_proven(version)
    return hashes(os.environ["TENSOR_HASHES"], workers=2)


def elsewhere(system: System) -> None:
    """Start the server again as on another host: the daemon's store is empty to it."""
    system.server.stop()
    system.server.hidden = [system.daemon.store]
    system.server.start()
    system.server.wait_ready()
    assert wait_serving(system.daemon, max(system.steps)).state == resources_pb2.Server.SERVING
