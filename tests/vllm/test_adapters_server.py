"""A real server whose base and adapter are versions of the daemon: requests name the adapter, and answers the versions of both."""

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from resharder.client.operator import Operator

from tests.support.adapters import RANK, save_adapter
from tests.support.daemon import Daemon
from tests.support.observing import servers, wait_until
from tests.support.tiny_hf import load_checkpoint
from tests.support.vllm_models import make_pair, publish, without_weights
from tests.support.vllm_server import Response, VllmServer, completion
from tests.vllm.test_adapters import publish_adapter

PROMPT = [5, 6, 7, 8, 9, 10]
ADAPTER = "policy-lora"


@dataclass
class Scene:
    daemon: Daemon
    server: VllmServer
    base: Path
    adapters: list[Path]

    def ask(self, model: str = ADAPTER, tokens: int = 6) -> Response:
        return self.server.request("POST", "/v1/completions", completion(PROMPT, tokens, model=model))

    def version(self) -> int:
        found = {server.name: server for server in servers(self.daemon)}
        return found[f"servers/one.{ADAPTER}"].version

    def publish(self, *folders: Path) -> None:
        publish_adapter(self.daemon, ADAPTER, "policy", *folders)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("adapters")
    base, _ = make_pair(folder, "qwen3", torch.float32)
    adapters = [save_adapter(folder / f"adapter{seed}", load_checkpoint(base), seed) for seed in (1, 2)]
    with Daemon() as daemon:
        publish(daemon, "policy", base)
        environment = {
            "RESHARDER_ENDPOINT": daemon.endpoint,
            "RESHARDER_MODEL": "policy",
            "RESHARDER_SERVER_ID": "one",
            "RESHARDER_ADAPTERS": ADAPTER,
            "VLLM_PLUGINS": "resharder",
        }
        args = ["--load-format", "resharder", "--enable-lora", "--max-loras", "2", "--max-lora-rank", str(RANK)]
        with VllmServer(without_weights(base, folder / "bare"), args=args, env=environment) as server:
            yield Scene(daemon, server, base, adapters)


def test_an_adapter_is_served_from_its_first_version_on(scene: Scene) -> None:
    refused = scene.ask()
    assert refused.status == 503, refused.body
    assert scene.ask("m").version == "1"
    scene.publish(scene.adapters[0])
    wait_until(lambda: scene.version() == 1, "the adapter serves")
    first = scene.ask()
    assert (first.status, first.version) == (200, f"1;{ADAPTER}=1"), first.body
    assert first.json()["choices"][0]["token_ids"] != scene.ask("m").json()["choices"][0]["token_ids"]
    names = [model["id"] for model in scene.server.request("GET", "/v1/models").json()["data"]]
    assert names == ["m", ADAPTER]


def test_a_stream_ends_on_the_version_that_it_began_with(scene: Scene) -> None:
    before = scene.ask(tokens=480).json()["choices"][0]["token_ids"]
    events: list[dict[str, str]] = []
    tokens: list[int] = []

    def read() -> None:
        body = completion(PROMPT, 480, model=ADAPTER, stream=True)
        with scene.server._send("POST", "/v1/completions", body, 300) as (_, _, answer):
            for line in answer:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    events.append(event)
                    tokens.extend(event["choices"][0]["token_ids"] or [])

    reader = threading.Thread(target=read)
    reader.start()
    wait_until(lambda: len(tokens) > 3, "the stream has begun")
    scene.publish(scene.adapters[0], scene.adapters[1])
    wait_until(lambda: scene.version() == 3, "the next version serves")
    assert reader.is_alive(), "published and installed beside the stream"
    assert scene.ask().version == f"1;{ADAPTER}=3"
    reader.join()
    assert tokens == before
    assert {event["resharder_versions"] for event in events if event["choices"][0]["token_ids"]} == {f"1;{ADAPTER}=1"}


def test_a_rollback_serves_the_version_of_before(scene: Scene) -> None:
    with Operator(scene.daemon.endpoint) as operator:
        operator.roll_back(ADAPTER)
    wait_until(lambda: scene.version() == 2, "it is back")
    assert scene.ask().version == f"1;{ADAPTER}=2"
