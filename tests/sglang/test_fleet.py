"""One fleet with a vLLM and an SGLang server: one model, one version, one proof."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest
import torch
from resharder.client import connect
from resharder.client.operator import Operator
from resharder.client.operator.answers import Move, UpdateStrategy
from resharder.client.trainer.publisher import Publisher

from tests.support.daemon import Daemon
from tests.support.engine_site import PROMPT, write_config
from tests.support.observing import servers, wait_serving, wait_until
from tests.support.sglang_server import SGLangServer
from tests.support.tiny_hf import tiny_config
from tests.support.vllm_server import VllmServer
from tests.support.weights import Reference, random_weights

CONFIG = tiny_config("qwen3", num_hidden_layers=2)


@dataclass
class Fleet:
    daemon: Daemon
    operator: Operator
    publisher: Publisher
    servers: dict[str, VllmServer]
    version: int = 0

    def publish(self) -> int:
        self.version += 1
        self.publisher.publish_tensors(self.version, random_weights(CONFIG, self.version).items()).wait_ready(120)
        return self.version

    def check(self, version: int) -> None:
        """Both answer with this version's weights."""
        reference = Reference(CONFIG, random_weights(CONFIG, version))
        for name, server in self.servers.items():
            answer = server.generate(PROMPT, 8)
            assert answer.version == str(version), name
            logprobs = reference.logprobs([*PROMPT, *answer.token_ids])[len(PROMPT) - 1 :]
            chosen = logprobs.gather(-1, torch.tensor(answer.token_ids)[:, None])[:, 0]
            assert torch.allclose(torch.tensor(answer.logprobs), chosen, atol=1e-4), name


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("config")
    write_config(folder, CONFIG)
    with Daemon() as daemon, ExitStack() as stack:
        publisher = stack.enter_context(
            connect(daemon.endpoint, model="policy", job="j", rank=0, world_size=1, config=CONFIG, tokenizer=folder)
        )
        operator = stack.enter_context(Operator(daemon.endpoint))
        of_all = {"RESHARDER_ENDPOINT": daemon.endpoint}
        one = VllmServer(
            folder, ["--load-format", "resharder"], of_all | {"RESHARDER_SERVER_ID": "vllm", "VLLM_PLUGINS": "resharder"}
        )
        other = SGLangServer(folder, env=of_all | {"RESHARDER_SERVER_ID": "sglang"})
        built = Fleet(daemon, operator, publisher, {"vllm": one, "sglang": other})
        built.publish()
        for server in built.servers.values():
            stack.callback(server.stop)
            server.start()
            server.wait_ready()
        operator.set_fleet("policy", strategy=UpdateStrategy(UpdateStrategy.Kind.ATOMIC))
        yield built


def test_it_moves_atomically(fleet: Fleet) -> None:
    wait_serving(fleet.daemon, 1)
    fleet.check(1)
    for _ in range(2):
        version = fleet.publish()
        wait_serving(fleet.daemon, version)
        fleet.check(version)
    move = fleet.operator.fleet("policy").move
    assert move is not None
    assert (move.state, move.to_version) == (Move.State.DONE, fleet.version)
    assert {server.name for server in servers(fleet.daemon)} == {"servers/vllm", "servers/sglang"}


def test_it_rolls_back(fleet: Fleet) -> None:
    fleet.operator.rollback("policy", 2, reason="too talkative")
    wait_serving(fleet.daemon, 2)
    fleet.check(2)
    listed = json.loads(json.dumps([server.name for server in fleet.operator.servers("policy")]))
    assert sorted(listed) == ["servers/sglang", "servers/vllm"]
    wait_until(lambda: all(server.version == 2 for server in fleet.operator.servers("policy")), "both are on version 2", 30)
