"""A fault finds the processes of a server by their titles, also of one that is about to end."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.kept_server import KeptServer

ALONE = "import time; time.sleep(60)"
WITH_AN_ENGINE = f"import subprocess, sys; subprocess.run([sys.executable, '-c', '{ALONE}', 'VLLM::' + 'EngineCore'])"


@pytest.fixture(params=[ALONE, WITH_AN_ENGINE], ids=["no engine", "engine"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[KeptServer]:
    found = KeptServer("right", "daemon:1", tmp_path, tmp_path, [], "", {})
    found.server.process = subprocess.Popen([sys.executable, "-c", request.param], start_new_session=True)
    yield found
    found.end()


def test_a_part_without_a_process_is_empty_and_the_engine_stands_for_a_worker(server: KeptServer) -> None:
    assert server.server.process is not None
    alone = server.server.process.args[-1] == ALONE  # type: ignore[index]
    while len(server.part("all")) < 2 - alone:
        pass
    names = {part: [process.pid for process in server.part(part)] for part in ("api", "engine", "worker")}
    every = [process.pid for process in server.part("all")]
    assert names == {"api": every[:1], "engine": every[1:], "worker": every[1:]}
