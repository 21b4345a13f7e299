"""NIXL with real parts: Megatron ranks, a daemon and a vLLM server of two workers, each on an emulated host, over TCP."""

from pathlib import Path
from typing import Any

import pytest
from resharder.client.direct import nixl_agent

from tests.support.direct_server import PROMPT, alone, running
from tests.support.kinds import KINDS
from tests.support.namespaces import Hosts, unavailable
from tests.support.observing import export, servers
from tests.support.tensor_hashes import differing, hashes, new_socket

REASON = unavailable() or nixl_agent.unavailable()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_five_versions_that_workers_read_over_one_another_leave_what_an_engine_without_the_plugin_loads(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = KINDS[kind]
    monkeypatch.setenv("TENSOR_HASHES", socket := new_socket())
    options: dict[str, Any] = {"plugins": f"{made.plugins},tensor_hashes", "dtype": made.dtype}
    with (
        Hosts(2, rate="1gbit") as hosts,
        running(tmp_path, made.config, made.trainer(direct_wait=60.0), *made.arguments, hosts=hosts, **options) as system,
    ):
        for step in range(2, 7):
            version = system.publish(step)
            assert system.sent(version), system.transfers()
            assert [worker.path for worker in servers(system.daemon)[0].workers] == ["nixl", "nixl"]
        held, said = hashes(socket, workers=2), system.server.generate(PROMPT, 12)
        assert len([line for line in system.transfers() if line["event"] == "direct_group"]) == 1
        export(system.daemon, f"models/policy/versions/{version}", tmp_path / "exported")
        wanted, fresh = alone(tmp_path / "exported", system.server, made.plugins)
    assert differing(held, wanted) == []
    assert (said.token_ids, said.logprobs) == fresh
