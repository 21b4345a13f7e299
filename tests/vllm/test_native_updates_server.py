"""A program written against vLLM's own weight transfer API, a real server with the backend `resharder`, and a real daemon."""

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm.distributed.weight_transfer.clients", reason="this vLLM has no factory for trainers")

from resharder.client import NotServed, Operator, ResharderTrainerInitInfo, VersionTarget
from resharder.client.integrations.vllm import ResharderTrainerEngine
from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient, ModuleSource, WeightTransferTrainerFactory

from tests.support.api_sides import SHOW_SIDES, at_each_side
from tests.support.daemon import Daemon
from tests.support.observing import expect_leaving, wait_serving
from tests.support.tiny_hf import greedy_answer, load_model, save_checkpoint, tiny_config
from tests.support.vllm_server import Response, VllmServer, completion

pytestmark = [pytest.mark.full, pytest.mark.compat("weight transfer")]
EXAMPLE = Path(__file__).parents[2] / "examples" / "vllm_api" / "trainer.py"
RAW_MODE = Path(__file__).parents[1] / "support" / "raw_mode"
PROMPTS = ([5, 17, 42, 7], [11, 2, 9], [77, 77, 77])  # the example's
MODEL = "policy"


@dataclass
class Scene:
    daemon: Daemon
    server: VllmServer
    folder: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"

    def trainer(self, model: torch.nn.Module, name: str = MODEL) -> ResharderTrainerEngine:
        info = ResharderTrainerInitInfo(rank=0, model=name, endpoint=self.daemon.endpoint, tokenizer=self.folder)
        return WeightTransferTrainerFactory.trainer_init(
            info, client=HTTPVLLMWeightSyncClient(self.url), source=ModuleSource(model)
        )

    def answer(self) -> tuple[list[tuple[int, ...]], str]:
        """Greedy answers to all prompts, and the version of all of them, on which vLLM agrees."""
        answers = [self.server.generate(prompt, 8) for prompt in PROMPTS]
        info = self.server.request("GET", "/weight_info").json()["weight_version"]
        assert {answer.version for answer in answers} == {info}
        return [answer.token_ids for answer in answers], info


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """A server with two API servers and two workers. It begins with dummy weights, before any trainer."""
    folder = save_checkpoint(tmp_path_factory.mktemp("model"), tiny_config("qwen3", num_hidden_layers=2), seed=3)
    config = tmp_path_factory.mktemp("config") / "model"
    shutil.copytree(folder, config, ignore=shutil.ignore_patterns("*.safetensors"))
    with Daemon(lease_seconds=20.0) as daemon:
        environment = {
            "RESHARDER_ENDPOINT": daemon.endpoint,
            "RESHARDER_MODEL": MODEL,
            "RESHARDER_UNREACHABLE": "prefer",
            "VLLM_PLUGINS": "resharder",
            "VLLM_SERVER_DEV_MODE": "1",
            "PYTHONPATH": str(RAW_MODE),
        }
        options = ["--load-format", "dummy", "--weight-transfer-config", json.dumps({"backend": "resharder"})]
        options += ["--tensor-parallel-size", "2", "--api-server-count", "2", "--shutdown-timeout", "20", *SHOW_SIDES]
        with VllmServer(config, options, environment, timeout=900) as server:
            yield Scene(daemon, server, folder)


def test_vllms_example_with_the_backends_name_exchanged_moves_the_server(scene: Scene) -> None:
    environment = {**os.environ, "RESHARDER_ENDPOINT": scene.daemon.endpoint, "RESHARDER_MODEL": MODEL, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(EXAMPLE), str(scene.folder), "--server", scene.url]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:] + scene.server.log_tail()
    before, after = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    assert (before["header"], before["weight_version"]) == (["none"], "none"), "vLLM's dummy weights are no version"
    assert (after["header"], after["weight_version"]) == (["1"], "1")
    model = load_model(scene.folder)
    assert after["tokens"] == [list(greedy_answer(model, prompt)) for prompt in PROMPTS] != before["tokens"]


def test_every_send_is_a_version_to_which_the_fleet_can_return(scene: Scene) -> None:
    model = load_model(scene.folder)
    engine = scene.trainer(model)
    served = {}
    for factor in (1.0, -1.0):
        with torch.no_grad():
            model.lm_head.weight.mul_(factor)
        engine.send_weights()
        assert engine.handle is not None
        tokens, version = scene.answer()
        assert version == str(engine.handle.version), "send_weights returns when the version is served"
        assert tokens == [greedy_answer(model, prompt) for prompt in PROMPTS]
        served[engine.handle.version] = tokens
    first, second = served
    assert served[first] != served[second]
    with Operator(scene.daemon.endpoint) as operator:
        operator.rollback(MODEL, first)
    wait_serving(scene.daemon, first)
    assert scene.answer() == (served[first], str(first))
    engine.send_weights()
    assert scene.answer()[0] == served[second]
    engine.shutdown()


def test_each_call_of_an_update_may_reach_another_api_server(scene: Scene) -> None:
    engine = scene.trainer(load_model(scene.folder))
    engine.send_weights()
    assert engine.handle is not None
    version, fingerprint = engine.handle.version, engine.handle.get().fingerprint
    calls = [
        ("/init_weight_transfer_engine", {"init_info": {"model": MODEL}}),
        ("/start_weight_update", {}),
        ("/update_weights", {"update_info": {"version": version, "fingerprint": fingerprint}}),
        ("/finish_weight_update", {"weight_version": str(version)}),
    ]
    for path, body in calls:
        answers = at_each_side(lambda path=path, body=body: scene.server.request("POST", path, body))
        assert {answer.status for answer in answers} == {200}, [(path, answer.body) for answer in answers]
    engine.shutdown()


def test_a_version_that_the_fleet_does_not_take_is_one_clear_error_and_the_next_one_works(scene: Scene) -> None:
    engine = scene.trainer(load_model(scene.folder))
    engine.send_weights()
    assert engine.handle is not None
    before = engine.handle.version
    with Operator(scene.daemon.endpoint) as operator:
        operator.set_fleet(MODEL, target=VersionTarget(VersionTarget.Kind.NUMBER, before))
        with pytest.raises(NotServed) as error:
            engine.send_weights()
        # After a wait for a version that no one will order, it is "expected ... to be served within".
        pinned = f"expected version {before + 1} to be served, got version {before}: fleet {MODEL} is pinned to version {before}"
        assert pinned in str(error.value)
        assert scene.answer()[1] == str(before)
        operator.set_fleet(MODEL, target=VersionTarget(VersionTarget.Kind.LATEST))
    engine.send_weights()
    assert scene.answer()[1] == str(engine.handle.version) == str(before + 2)
    engine.shutdown()


def test_a_trainer_of_another_model_or_another_backend_is_refused_by_name(scene: Scene) -> None:
    with pytest.raises(NotServed, match=f"this server follows model '{MODEL}', and the trainer publishes model 'x'"):
        scene.trainer(load_model(scene.folder), "x")
    answer = scene.server.request("POST", "/init_weight_transfer_engine", {"init_info": {"master_port": 1, "world_size": 2}})
    assert answer.status == 400, answer.body
    assert "expected init_info of backend resharder (model), got master_port, world_size" in answer.json()["error"]["message"]
    assert scene.server.request("POST", "/update_weight_version", {"new_version": "9"}).status == 409


def test_a_trainers_pause_holds_requests_until_it_resumes(scene: Scene) -> None:
    assert scene.server.request("POST", "/pause").status == 200
    assert scene.server.request("GET", "/is_paused").json() == {"is_paused": True}
    answers: list[Response] = []
    asked = threading.Thread(
        target=lambda: answers.append(scene.server.request("POST", "/v1/completions", completion(PROMPTS[0], 4)))
    )
    asked.start()
    asked.join(2)
    assert not answers
    assert scene.server.request("POST", "/resume").status == 200
    asked.join(120)
    assert [answer.status for answer in answers] == [200]


def test_two_api_servers_that_are_given_time_leave_by_sigterm_and_are_never_lost(scene: Scene) -> None:
    """The last test. Without --shutdown-timeout, vLLM kills several API servers at once."""
    with expect_leaving(scene.daemon):
        scene.server.stop()
