"""Two Megatron ranks and one SGLang server of two scheduler processes, over gloo, over shared memory, and from the data port.

The processes divide each expert, or the experts.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from resharder.client.operator import Operator

from demo.trainer_job import TrainerJob
from tests.support.daemon import Daemon
from tests.support.direct_server import start_trainer
from tests.support.engine_kinds import SGLANG
from tests.support.engine_site import contents, write_config
from tests.support.observing import export, servers, wait_serving
from tests.support.sglang_server import STAND_INS, SGLangServer
from tests.support.tensor_hashes import PLUGINS, differing, hashes, new_socket
from tests.support.tiny_hf import tiny_config

CONFIG = tiny_config("qwen3_moe", num_hidden_layers=2)
TRAINER = {"config": CONFIG, "ep": 2, "connect": {"direct_wait": 60.0}}
DIVIDED = {"tensors": [], "experts": ["--ep-size", "2"]}


@dataclass
class System:
    daemon: Daemon
    trainer: TrainerJob
    server: SGLangServer
    arguments: list[str]

    def publish(self, step: int) -> int:
        version = int(self.trainer.ask(do="publish", step=step)["version"])
        wait_serving(self.daemon, version)
        return version

    def transfers(self) -> list[Any]:
        lines = [json.loads(line) for line in self.daemon.log.read_text().splitlines() if line.startswith("{")]
        return [line for line in lines if line["event"].startswith("direct_")]


@pytest.fixture(scope="module", params=DIVIDED)
def system(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    if request.param == "experts" and metadata.version("sglang") == "0.5.17":
        pytest.skip("expert parallelism is refused with 0.5.17")
    folder = tmp_path_factory.mktemp("config")
    write_config(folder, CONFIG)
    with Daemon(direct_seconds=60.0, log_format="json", data_listen="127.0.0.1:0") as daemon:
        arguments = DIVIDED[request.param]
        env = environment("resharder") | {"RESHARDER_ENDPOINT": daemon.endpoint, "RESHARDER_SERVER_ID": "two"}
        server = SGLangServer(folder, arguments, env, tp=2)
        trainer = start_trainer(daemon, folder, TRAINER, 0)
        try:
            server.start()
            trainer.ask(do="publish", step=1)
            server.wait_ready()
            with Operator(daemon.endpoint) as operator:
                operator.set_fleet("policy", serve_ahead=False)
            yield System(daemon, trainer, server, arguments)
        finally:
            trainer.kill()
            server.stop()


def environment(*plugins: str) -> dict[str, str | None]:
    """Environment of a server whose processes tell their tensors, and compute with some of a layer's experts."""
    given = {"SGLANG_PLUGINS": ",".join([*plugins, "local_experts", "tensor_hashes"]), "TENSOR_HASHES": new_socket()}
    return {"PYTHONPATH": f"{STAND_INS}:{PLUGINS}", **given}


def test_three_versions_go_from_the_ranks_memory_to_both_workers(system: System) -> None:
    wait_serving(system.daemon, 1)
    for step in (2, 3):
        version = system.publish(step)
        sent = [line for line in system.transfers() if line["event"] == "direct_transfer" and line["version"] == version]
        assert sent, system.transfers()
        assert system.server.generate([5, 17, 42], 4).version == str(version)
    (server,) = servers(system.daemon)
    assert {worker.path for worker in server.workers} == {"gloo"}


def test_a_version_that_its_ranks_do_not_offer_comes_from_the_store(system: System) -> None:
    system.trainer.ask(do="withhold")
    version = system.publish(4)
    (server,) = servers(system.daemon)
    assert [(worker.version, worker.path, worker.transport) for worker in server.workers] == [(version, "", "shared-memory")] * 2


def test_both_workers_hold_and_answer_what_a_fresh_servers_do(system: System, tmp_path: Path) -> None:
    version = system.publish(5)
    held, answered = hashes(str(system.server.env["TENSOR_HASHES"]), 2), contents(SGLANG, system.server)
    experts = {shape for one in held for name, shape in one.items() if "w13_weight" in name}
    assert all(f"[{CONFIG['num_local_experts'] // (2 if system.arguments else 1)}, " in shape for shape in experts)
    system.server.stop()
    export(system.daemon, f"models/policy/versions/{version}", tmp_path / "exported")
    with SGLangServer(tmp_path / "exported", system.arguments, environment() | {"RESHARDER_ENDPOINT": None}, tp=2) as fresh:
        assert differing(hashes(str(fresh.env["TENSOR_HASHES"]), 2), held) == []
        assert contents(SGLANG, fresh) == answered
