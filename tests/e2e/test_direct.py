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
SECONDS = 12.0  # for members to meet, and for a transfer
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

    def failures(self) -> list[str]:
        return [line["reason"] for line in self.transfers() if line["event"] == "direct_failed"]

    def began(self) -> int:
        """The version of the last transfer that began."""
        return max((line["version"] for line in self.transfers() if line["event"] == "direct_turn"), default=0)

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
    with Daemon(direct_seconds=SECONDS, log_format="json") as daemon:
        environment = {
            "RESHARDER_ENDPOINT": daemon.endpoint,
            "RESHARDER_SERVER_ID": "direct",  # the same after a restart
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


def test_weights_that_change_before_they_are_sent_are_noticed_and_come_from_the_store(system: System) -> None:
    system.trainer.ask(do="fault", rank=1, what="change")
    version = system.publish(5)
    assert not system.sent(version)
    assert "are not what the store holds" in system.failures()[-1]
    assert system.sent(system.publish(6)), system.transfers()


def test_a_rank_that_hangs_costs_its_servers_no_more_than_the_bound(system: System) -> None:
    system.trainer.ask(do="fault", rank=0, what="sleep")
    failed = len(system.failures())
    version = system.publish(7)
    assert not system.sent(version)
    assert len(system.failures()) > failed
    assert system.sent(system.publish(8)), system.transfers()


def test_a_rank_killed_in_mid_transfer_leaves_the_server_serving_what_the_store_has(system: System) -> None:
    system.trainer.ask(do="fault", rank=1, what="die")
    system.trainer.tell(do="publish", step=9)
    version = max(system.steps) + 1
    system.steps[version] = 9
    system.serves(version)
    assert not system.sent(version)
    held = system.fingerprints()
    system.trainer.kill()
    system.start_trainer()
    assert system.sent(system.publish(10)), system.transfers()
    assert system.fingerprints() != held


def test_a_worker_killed_in_mid_transfer_leaves_the_trainer_as_it_was(system: System) -> None:
    system.trainer.ask(do="fault", rank=0, what="sleep")
    version = max(system.steps) + 1
    asked = system.trainer.requests.send(do="publish", step=11)
    wait_until(lambda: system.began() == version, "the transfer has begun")
    system.server.kill()
    assert system.trainer.requests.reply(asked)["version"] == version
    system.steps[version] = 11
    system.server.start()
    system.server.wait_ready()
    system.serves(version)


def test_workers_hold_what_a_fresh_server_holds_and_answer_the_same(system: System) -> None:
    """The server before has just booted with the weights of step 11."""
    held, answer = system.fingerprints(), system.server.generate(PROMPT, 24)
    assert system.sent(system.publish(12)), system.transfers()
    assert system.fingerprints() != held
    system.trainer.ask(do="reseed", step=13, seed=11)
    assert system.sent(system.publish(13)), system.transfers()
    assert system.fingerprints() == held
    again = system.server.generate(PROMPT, 24)
    assert (again.token_ids, again.logprobs) == (answer.token_ids, answer.logprobs)
