"""Real servers that end by SIGTERM leave the daemon: no operator sees them LOST."""

from pathlib import Path

import pytest
from resharder.client.operator import Operator
from resharder.client.operator.states import ServerState

from tests.support.observing import wait_until
from tests.support.vllm_deployment import deployment


# With several API servers, vLLM kills them at once, unless it is given time.
@pytest.mark.parametrize("arguments", [(), ("--api-server-count", "2", "--shutdown-timeout", "20")], ids=["one", "two"])
def test_a_server_that_ends_by_sigterm_leaves_and_is_never_lost(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    with deployment(tmp_path, *arguments) as deployed, Operator(deployed.daemon.endpoint) as operator:
        wait_until(lambda: [server.state for server in operator.servers()] == [ServerState.SERVING], "it serves")
        deployed.server.stop()
        wait_until(lambda: operator.servers() == [], "it has left")
        said = [event.what for event in operator.events(last=100) if event.kind == "server"]
        assert said[-1] == "left"
        assert "lost" not in said
