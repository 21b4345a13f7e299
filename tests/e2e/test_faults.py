"""One server of two workers (TP=2) while everything around it dies: what clients see, and what comes back.

The tests share the server and run in order; each leaves it serving.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from resharder.client import Publisher

from tests.support.daemon import Daemon
from tests.support.observing import versions, wait_serving, wait_until
from tests.support.single_rank_job import CONFIG, job
from tests.support.tiny_hf import save_tokenizer
from tests.support.vllm_server import VllmServer
from tests.support.weights import Reference, random_weights

PROMPT = [5, 17, 42, 7, 300, 11]
LEASE = 10.0  # longer than a busy machine keeps anybody from saying that it is alive


@dataclass
class System:
    daemon: Daemon
    folder: Path
    server: VllmServer
    publisher: Publisher
    jobs: int = 0
    steps: list[int] = field(default_factory=list)  # step of each published version, in order

    def publish(self) -> int:
        """A version with weights of its own, READY; its number. Its step is its seed."""
        step = len(self.steps) + 1
        handle = self.publisher.publish_tensors(step, random_weights(CONFIG, step).items())
        handle.wait_ready(120)
        self.steps.append(step)
        return handle.version

    def new_publisher(self) -> None:
        self.publisher.close()
        self.jobs += 1
        self.publisher = job(self.daemon, self.folder, f"job-{self.jobs}")

    def newest(self) -> Reference:
        return Reference(CONFIG, random_weights(CONFIG, self.steps[-1]))


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("config")
    save_tokenizer(folder, CONFIG["vocab_size"])
    with Daemon(lease_seconds=LEASE) as daemon:
        (folder / "config.json").write_text(json.dumps(CONFIG))
        environment = {"RESHARDER_ENDPOINT": daemon.endpoint, "VLLM_PLUGINS": "resharder"}
        server = VllmServer(folder, ["--load-format", "resharder", "--tensor-parallel-size", "2"], environment)
        built = System(daemon, folder, server, job(daemon, folder, "job-0"))
        built.publish()
        with server:
            yield built
        built.publisher.close()


def check_answers(system: System, version: int) -> None:
    """The server answers with this version's weights and says so."""
    answer = system.server.generate(PROMPT, 12)
    assert answer.version == str(version)
    logprobs = system.newest().logprobs([*PROMPT, *answer.token_ids])[len(PROMPT) - 1 :]
    assert list(answer.token_ids) == logprobs.argmax(-1).tolist()
    chosen = logprobs.gather(-1, torch.tensor(answer.token_ids)[:, None])[:, 0]
    assert torch.tensor(answer.logprobs) == pytest.approx(chosen, abs=1e-4)


INTERRUPTED = """
import os, sys
from tests.support.single_rank_job import CONFIG, job
from tests.support.weights import random_weights
class Endpoint: endpoint = sys.argv[1]
def half():
    for i, item in enumerate(random_weights(CONFIG, 99).items()):
        if i == 20:
            print("half-way", flush=True)
            os.kill(os.getpid(), 9)
        yield item
from pathlib import Path
publisher = job(Endpoint, Path(sys.argv[2]), "killed")
publisher.attach_tensors([(n, t.dtype, tuple(t.shape)) for n, t in random_weights(CONFIG, 99).items()])
publisher.publish_tensors(99, half())
"""


@pytest.mark.full
def test_a_trainer_killed_in_mid_publish_leaves_nothing_and_the_next_one_publishes(system: System) -> None:
    before = versions(system.daemon)
    serving = max(n for n, state in before.items() if state == "READY")
    command = [sys.executable, "-c", INTERRUPTED, system.daemon.endpoint, str(system.folder)]
    killed = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert killed.returncode == -9, killed.stderr
    assert "half-way" in killed.stdout
    check_answers(system, serving)
    wait_until(lambda: "UPLOADING" not in versions(system.daemon).values(), "the version is aborted")
    after = versions(system.daemon)
    assert [state for n, state in after.items() if n not in before] == ["ABORTED"]
    check_answers(system, serving)
    system.new_publisher()
    version = system.publish()
    wait_serving(system.daemon, version)
    check_answers(system, version)


def test_a_killed_daemon_comes_back_with_its_versions_and_the_server_never_stops(system: System) -> None:
    ready = {n for n, state in versions(system.daemon).items() if state == "READY"}
    system.daemon.kill()
    check_answers(system, max(ready))
    system.daemon.start()
    assert {n for n, state in versions(system.daemon).items() if state == "READY"} == ready
    server = wait_serving(system.daemon, max(ready))
    assert server.install.version == 0, "nothing had to be installed again"
    check_answers(system, max(ready))
    version = system.publish()
    wait_serving(system.daemon, version)
    check_answers(system, version)
