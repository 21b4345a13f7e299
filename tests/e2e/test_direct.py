"""The direct path with real parts: two Megatron ranks, a daemon, one vLLM server of two workers, over gloo.

The tests share the server and run in order; each leaves it serving. vLLM's linear layers are plain ones here, so that boxes reach
their parameters.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from demo.trainer_job import TrainerJob

from tests.support.daemon import Daemon
from tests.support.operating import wait_serving, wait_until
from tests.support.tiny_hf import save_tokenizer, tiny_config
from tests.support.vllm_server import VllmServer

CONFIG = tiny_config("qwen3_moe")
PLUGINS = Path(__file__).parents[1] / "support" / "raw_mode"
PROMPT = [5, 17, 42, 7, 300, 11]
SECONDS = 6.0  # for one transfer
TRAINER = {"config": CONFIG, "ep": 2, "connect": {"direct_wait": 60.0}}


@dataclass
class System:
    daemon: Daemon
    folder: Path
    server: VllmServer
    trainer: TrainerJob
    steps: dict[int, int] = field(default_factory=dict)  # {version: step}

    def start_trainer(self) -> None:
        self.trainer = start_trainer(self.daemon, self.folder, len(self.steps))

    def publish(self, step: int) -> int:
        """A version with weights of its own, served; its number."""
        version = int(self.trainer.ask(do="publish", step=step)["version"])
        self.steps[version] = step
        self.serves(version)
        return version

    def serves(self, version: int) -> None:
        wait_serving(self.daemon, version)
        assert self.server.generate(PROMPT, 12).version == str(version)

    def fingerprints(self) -> list[dict[str, int]]:
        """Of every tensor that each worker reads when it runs."""
        said = self.server.request("POST", "/collective_rpc", {"method": "resharder_fingerprint"}).json()["results"]
        assert all(one["ok"] for one in said), said
        return [one["tensors"] for one in said]

    def transfers(self) -> list[dict[str, Any]]:
        """What the daemon's log says of them."""
        lines = [json.loads(line) for line in self.daemon.log.read_text().splitlines() if line.startswith("{")]
        return [line for line in lines if line["event"].startswith("direct_")]

    def sent(self, version: int) -> bool:
        return any(line["event"] == "direct_transfer" and line["version"] == version for line in self.transfers())


def start_trainer(daemon: Daemon, folder: Path, number: int) -> TrainerJob:
    own = folder / f"trainer-{number}"
    own.mkdir()
    return TrainerJob(daemon.endpoint, "policy", own, TRAINER, ranks=2, module="tests.e2e.direct_trainer")


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("config")
    save_tokenizer(folder, CONFIG["vocab_size"])
    (folder / "config.json").write_text(json.dumps(CONFIG))
    with Daemon(lease_seconds=10.0, direct_seconds=SECONDS, log_format="json") as daemon:
        environment = {
            "RESHARDER_ENDPOINT": daemon.endpoint,
            "VLLM_PLUGINS": "resharder,raw_mode",
            "PYTHONPATH": str(PLUGINS),
            "VLLM_SERVER_DEV_MODE": "1",
        }
        server = VllmServer(folder, ["--load-format", "resharder", "--tensor-parallel-size", "2"], environment)
        built = System(daemon, folder, server, start_trainer(daemon, folder, 0))
        try:
            server.start()
            version = int(built.trainer.ask(do="publish", step=1)["version"])
            built.steps[version] = 1
            server.wait_ready()
            built.serves(version)
            yield built
        finally:
            built.trainer.kill()
            server.stop()


def test_a_version_goes_from_the_ranks_memory_to_the_workers(system: System) -> None:
    version = system.publish(2)
    assert system.sent(version), system.transfers()


def test_the_next_version_goes_over_the_same_group(system: System) -> None:
    version = system.publish(3)
    assert system.sent(version), system.transfers()
    assert len([line for line in system.transfers() if line["event"] == "direct_group"]) == 1


def test_workers_then_hold_what_a_fresh_server_holds_and_answer_the_same(system: System) -> None:
    version = system.publish(4)
    assert system.sent(version), system.transfers()
    held, answer = system.fingerprints(), system.server.generate(PROMPT, 24)
    system.server.kill()
    system.server.start()
    system.server.wait_ready()
    system.serves(version)
    assert system.fingerprints() == held
    assert system.server.generate(PROMPT, 24) == answer
