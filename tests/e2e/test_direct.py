"""The direct path with real parts: two Megatron ranks, a daemon, one vLLM server of two workers, over gloo.

The tests share the server and run in order; each leaves it serving. vLLM's linear layers and experts are plain ones here, so that
boxes reach their parameters.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from resharder.client.operator import Operator
from resharder.client.operator.states import ServeAhead
from resharder.v1 import resources_pb2

from demo.trainer_job import TrainerJob
from tests.support.daemon import Daemon
from tests.support.metrics import read
from tests.support.observing import SERVING, servers, versions, wait_serving, wait_until
from tests.support.ports import free_port
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
    shares: bool = False  # whether the trainer's ranks share their memory

    def start_trainer(self) -> None:
        self.trainer, self.shares = start_trainer(self.daemon, self.folder, len(self.steps)), False

    def share_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Ranks that share their memory, from now on."""
        if not self.shares:
            self.trainer.kill()
            monkeypatch.setenv("RESHARDER_PEER_MEMORY", "cpu")
            self.start_trainer()
            self.shares = True

    def publish(self, step: int) -> int:
        """A version with weights of its own, served; its number."""
        version = int(self.trainer.ask(do="publish", step=step)["version"])
        self.steps[version] = step
        self.serves(version)
        return version

    def serves(self, version: int) -> None:
        wait_serving(self.daemon, version)
        assert self.server.generate(PROMPT, 12).version == str(version)
        assert self.server.request("GET", "/weight_info").json() == {"weight_version": str(version)}

    def fingerprints(self) -> list[dict[str, int]]:
        """Return the fingerprints of every tensor that each worker reads."""
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

    def happened(self, what: str) -> list[str]:
        """What the journal says of the server's last events of a kind."""
        with Operator(self.daemon.endpoint) as operator:
            return [event.reason for event in operator.events(last=200, subject="servers/direct") if event.what == what]

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """The fleet serves ahead of READY meanwhile, by default."""
        with Operator(self.daemon.endpoint) as operator:
            assert operator.set_fleet("policy", serve_ahead=ServeAhead.AUTO).serve_ahead
            try:
                yield
            finally:
                operator.set_fleet("policy", serve_ahead=False)

    def publish_held(self, step: int, change: bool = False) -> tuple[int, int, Path]:
        """Begins to publish; one rank's delivery waits for a file. The version, the request and the file."""
        go = self.folder / f"go-{step}"
        self.trainer.ask(do="hold", rank=1, until=str(go), change=change)
        version = max(self.steps) + 1
        self.steps[version] = step
        return version, self.trainer.requests.send(do="publish", step=step), go

    def wait_proven(self, version: int) -> resources_pb2.Server:
        """Until it serves a version that is READY, and that it has found to be the store's."""

        def proven() -> bool:
            (server,) = servers(self.daemon)
            return (server.state, server.version, server.ahead) == (SERVING, version, False)

        wait_until(proven, f"version {version} is served, and the store's")
        assert versions(self.daemon)[version] == "READY"
        return servers(self.daemon)[0]

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
    with Daemon(direct_seconds=SECONDS, log_format="json", web_listen=f"127.0.0.1:{free_port()}") as daemon:
        environment = {
            "RESHARDER_ENDPOINT": daemon.endpoint,
            "RESHARDER_SERVER_ID": "direct",  # the same after a restart
            "RESHARDER_PEER_MEMORY": "cpu",  # ranks share theirs only if they have the same setting
            "VLLM_PLUGINS": "resharder,raw_mode,raw_experts",
            "PYTHONPATH": os.pathsep.join(filter(None, (str(PLUGINS), os.environ.get("PYTHONPATH")))),
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
            with Operator(daemon.endpoint) as operator:
                operator.set_fleet("policy", serve_ahead=False)  # where a test is about READY versions
            yield built
        finally:
            built.trainer.kill()
            server.stop()


def test_a_version_goes_from_the_ranks_memory_to_the_workers(system: System) -> None:
    version = system.publish(2)
    assert system.sent(version), system.transfers()
    value = read(system.daemon)
    assert value("install_phase_seconds_count", fleet="policy", phase="verify") == 1
    assert (
        0
        < value("install_phase_seconds_sum", fleet="policy", phase="verify")
        < (  # type: ignore[operator]
            value("install_phase_seconds_sum", fleet="policy", phase="apply")
        )
    )


def test_the_next_version_goes_over_the_same_group(system: System) -> None:
    version = system.publish(3)
    assert system.sent(version), system.transfers()
    assert len([line for line in system.transfers() if line["event"] == "direct_group"]) == 1


def test_a_version_that_its_ranks_do_not_offer_is_not_waited_for(system: System) -> None:
    system.trainer.ask(do="withhold")
    version = system.publish(4)
    assert not system.sent(version)
    assert f"versions/{version} is installed from the store" in system.server.log_text()


def test_weights_that_change_before_they_are_sent_are_noticed_and_come_from_the_store(system: System) -> None:
    system.trainer.ask(do="fault", rank=1, what="change")
    version = system.publish(5)
    assert not system.sent(version)
    assert "expected the digests of the store" in system.failures()[-1]
    assert system.sent(system.publish(6)), system.transfers()


def test_a_rank_that_hangs_costs_its_servers_no_more_than_the_bound(system: System) -> None:
    system.trainer.ask(do="fault", rank=0, what="sleep")
    failed = len(system.failures())
    version = system.publish(7)
    assert not system.sent(version)
    assert len(system.failures()) > failed
    assert system.sent(system.publish(8)), system.transfers()


def test_a_version_is_served_before_it_is_ready_where_the_fleet_says_so(system: System) -> None:
    with system.ahead():
        version, asked, go = system.publish_held(20)
        server = wait_serving(system.daemon, version)
        assert versions(system.daemon)[version] == "UPLOADING"
        assert server.ahead
        assert "ahead of READY" in server.reason
        held, answer = system.fingerprints(), system.server.generate(PROMPT, 24)
        assert answer.version == str(version)
        go.touch()
        assert system.trainer.requests.reply(asked)["version"] == version
        assert system.wait_proven(version).install.id == server.install.id  # nothing was installed anew
        assert system.fingerprints() == held
        again = system.server.generate(PROMPT, 24)
        assert (again.token_ids, again.logprobs, again.version) == (answer.token_ids, answer.logprobs, answer.version)


def test_weights_that_change_before_they_are_delivered_are_noticed_and_the_stores_are_served(system: System) -> None:
    with system.ahead():
        version, asked, go = system.publish_held(21, change=True)
        server = wait_serving(system.daemon, version)
        held = system.fingerprints()
        go.touch()
        assert system.trainer.requests.reply(asked)["version"] == version
        assert system.wait_proven(version).install.id != server.install.id
        assert system.fingerprints() != held
        assert "expected the digests of the store" in system.happened("differs")[-1]


def test_a_transfer_ahead_that_fails_leaves_what_was_served_before(system: System) -> None:
    with system.ahead():
        before, held = max(system.steps), system.fingerprints()
        system.trainer.ask(do="fault", rank=1, what="change")
        version, asked, go = system.publish_held(22)
        wait_until(
            lambda: len(system.failures()) > 0 and "expected the digests of the ranks" in system.failures()[-1], "it is noticed"
        )
        server = wait_serving(system.daemon, before)
        assert "the direct transfer failed" in server.reason
        assert system.fingerprints() == held
        go.touch()
        assert system.trainer.requests.reply(asked)["version"] == version
        system.wait_proven(version)
        assert not system.sent(version)


def test_a_publisher_killed_before_its_version_is_complete_brings_the_one_before_back(system: System) -> None:
    before = system.publish(23)
    held, answer = system.fingerprints(), system.server.generate(PROMPT, 24)
    with system.ahead():
        version, _, _ = system.publish_held(24)
        wait_serving(system.daemon, version)
        assert system.fingerprints() != held
        system.trainer.kill()
        wait_until(lambda: versions(system.daemon).get(version) == "ABORTED", "the lease of its ranks ends")
        system.wait_proven(before)
        assert system.fingerprints() == held
        again = system.server.generate(PROMPT, 24)
        assert (again.token_ids, again.logprobs, again.version) == (answer.token_ids, answer.logprobs, str(before))
    system.start_trainer()
    assert system.sent(system.publish(25)), system.transfers()


def test_a_rank_killed_in_mid_transfer_leaves_the_server_serving_what_the_store_has(system: System) -> None:
    system.trainer.ask(do="fault", rank=1, what="die")
    system.trainer.tell(do="publish", step=29)
    version = max(system.steps) + 1
    system.steps[version] = 29
    system.serves(version)
    assert not system.sent(version)
    held = system.fingerprints()
    system.trainer.kill()
    system.start_trainer()
    assert system.sent(system.publish(30)), system.transfers()
    assert system.fingerprints() != held


def test_a_worker_killed_in_mid_transfer_leaves_the_trainer_as_it_was(system: System) -> None:
    system.trainer.ask(do="fault", rank=0, what="sleep")
    version = max(system.steps) + 1
    asked = system.trainer.requests.send(do="publish", step=31)
    wait_until(lambda: system.began() == version, "the transfer has begun")
    system.server.kill()
    assert system.trainer.requests.reply(asked)["version"] == version
    system.steps[version] = 31
    system.server.start()
    system.server.wait_ready()
    system.serves(version)


def test_workers_hold_what_a_fresh_server_holds_and_answer_the_same(system: System) -> None:
    """The server before has just booted with the weights of step 31."""
    held, answer = system.fingerprints(), system.server.generate(PROMPT, 24)
    assert system.sent(system.publish(32)), system.transfers()
    assert system.fingerprints() != held
    system.trainer.ask(do="reseed", step=33, seed=31)
    assert system.sent(system.publish(33)), system.transfers()
    assert system.fingerprints() == held
    again = system.server.generate(PROMPT, 24)
    assert (again.token_ids, again.logprobs) == (answer.token_ids, answer.logprobs)


def test_ranks_of_the_same_host_share_their_memory_where_it_is_asked_for(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [worker.path for worker in servers(system.daemon)[0].workers] != ["peer-memory", "peer-memory"]
    system.share_memory(monkeypatch)
    assert system.sent(system.publish(34)), system.transfers()
    assert [worker.path for worker in servers(system.daemon)[0].workers] == ["peer-memory", "peer-memory"]
    held = system.fingerprints()
    assert system.sent(system.publish(35)), system.transfers()
    assert system.fingerprints() != held
    with system.ahead():
        assert system.sent(system.publish(36)), system.transfers()
    system.trainer.ask(do="reseed", step=37, seed=34)
    assert system.sent(system.publish(37)), system.transfers()
    assert system.fingerprints() == held


def test_a_generation_installs_from_the_ranks_memory_while_the_kv_cache_sleeps(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    system.share_memory(monkeypatch)
    with Operator(system.daemon.endpoint) as operator:
        operator.sleep("policy", level=2)
        wait_until(lambda: servers(system.daemon)[0].power == resources_pb2.ASLEEP_2, "the server sleeps")
        version = max(system.steps) + 1
        for step in (40, 41):
            go, system.steps[version] = system.folder / f"go-{step}", step
            asked = system.trainer.requests.send(do="generate", step=step, until=str(go))
            system.serves(version)
            assert system.sent(version), system.transfers()
            assert [worker.path for worker in servers(system.daemon)[0].workers] == ["peer-memory", "peer-memory"]
            held = system.fingerprints()
            go.touch()
            assert system.trainer.requests.reply(asked) == {"version": version, "kept": True}
            assert servers(system.daemon)[0].power == resources_pb2.ASLEEP_2
            version += 1
        operator.wake("policy")
        system.serves(version - 1)
        assert system.fingerprints() == held, "installed from the store"
    assert system.sent(system.publish(42)), system.transfers()


def test_a_rank_killed_while_its_memory_is_read_leaves_what_the_store_has(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    system.share_memory(monkeypatch)
    system.trainer.ask(do="fault", rank=1, what="die")
    system.trainer.tell(do="publish", step=48)
    version = max(system.steps) + 1
    system.steps[version] = 48
    system.serves(version)
    assert not system.sent(version)
    system.trainer.kill()
    system.start_trainer()
    assert system.sent(system.publish(49)), system.transfers()
