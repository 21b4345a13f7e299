"""NIXL with real parts: Megatron ranks, a daemon and a vLLM server of two workers, each on an emulated host, over TCP."""

from pathlib import Path

import pytest
from resharder.client.direct import nixl_agent

from tests.support.direct_server import PROMPT, running
from tests.support.namespaces import Hosts, unavailable
from tests.support.observing import servers
from tests.support.tiny_hf import tiny_config

REASON = unavailable() or nixl_agent.unavailable()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)
CONFIG = tiny_config("qwen3_moe")
TRAINER = {"config": CONFIG, "ep": 2, "connect": {"direct_wait": 60.0}}


@pytest.mark.full
def test_workers_that_read_five_versions_over_one_another_hold_what_a_fresh_server_holds(tmp_path: Path) -> None:
    with Hosts(2, rate="1gbit") as hosts, running(tmp_path, CONFIG, TRAINER, hosts=hosts) as system:
        for step in range(2, 7):
            version = system.publish(step)
            assert system.sent(version), system.transfers()
            assert [worker.path for worker in servers(system.daemon)[0].workers] == ["nixl", "nixl"]
        held, said = system.fingerprints(), system.server.generate(PROMPT, 12)
        assert len([line for line in system.transfers() if line["event"] == "direct_group"]) == 1
        system.server.stop()
        system.server.start()
        system.server.wait_ready()
        system.serves(version)
        assert system.fingerprints() == held
        assert system.server.generate(PROMPT, 12) == said
