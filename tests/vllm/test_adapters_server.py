"""A real server whose base and adapter are versions of the daemon: requests name the adapter, answers the versions of both."""

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from resharder.client.operator import Operator
from resharder.client.operator.answers import BaseBinding, Server

from tests.support.adapters import RANK, publish_adapter, save_adapter
from tests.support.daemon import Daemon
from tests.support.observing import servers, wait_until
from tests.support.tiny_hf import load_checkpoint
from tests.support.vllm_models import make_pair, publish, without_weights
from tests.support.vllm_server import Response, VllmServer, completion

pytestmark = pytest.mark.compat("other")
PROMPT = [5, 6, 7, 8, 9, 10]
ADAPTER = "policy-lora"


@dataclass
class Scene:
    daemon: Daemon
    server: VllmServer
    base: Path
    other: Path
    adapters: list[Path]

    def ask(self, model: str = ADAPTER, tokens: int = 6) -> Response:
        return self.server.request("POST", "/v1/completions", completion(PROMPT, tokens, model=model))

    def version(self) -> int:
        return self.state().version

    def state(self) -> Server:
        return next(server for server in servers(self.daemon) if server.name == f"servers/one.{ADAPTER}")

    def publish(self, *folders: Path, base_version: int | None = None) -> None:
        publish_adapter(self.daemon, ADAPTER, "policy", *folders, base_version=base_version)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("adapters")
    base, other = make_pair(folder, "qwen3", torch.float32)
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
            yield Scene(daemon, server, base, other, adapters)


def test_an_adapter_is_served_from_its_first_version_on(scene: Scene) -> None:
    refused = scene.ask()
    assert refused.status == 503, refused.body
    assert scene.ask("m").version == "1"
    scene.publish(scene.adapters[0])
    wait_until(lambda: scene.version() == 1, "the adapter serves")
    first = scene.ask()
    assert (first.status, first.version) == (200, f"1;{ADAPTER}=1"), first.body
    assert first.json()["model"] == f"{ADAPTER}@1"
    assert first.json()["choices"][0]["token_ids"] != scene.ask("m").json()["choices"][0]["token_ids"]
    names = [model["id"] for model in scene.server.request("GET", "/v1/models").json()["data"]]
    assert names == ["m", ADAPTER]


def test_streams_end_on_the_version_that_they_began_with(scene: Scene) -> None:
    found: list[tuple[list[int], set[str]]] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            tokens, labels = list[int](), set[str]()
            body = completion(PROMPT, 300, model=ADAPTER, stream=True)
            with scene.server._send("POST", "/v1/completions", body, 300) as (_, _, answer):
                for event in (json.loads(line[6:]) for line in answer if line.startswith(b"data: {")):
                    made = event["choices"][0]["token_ids"] or []
                    tokens += made
                    labels |= {event["resharder_versions"]} if made else set()
            found.append((tokens, labels))

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    scene.publish(scene.adapters[0], scene.adapters[1])
    wait_until(lambda: scene.version() == 3, "the last version serves")
    assert scene.ask().version == f"1;{ADAPTER}=3"
    count = len(found)
    wait_until(lambda: len(found) > count + len(readers), "streams that began with the last version end")
    done.set()
    for reader in readers:
        reader.join()
    answers = {label: tokens for tokens, (label,) in found}
    assert all(tokens == answers[label] for tokens, (label,) in found)
    assert {f"1;{ADAPTER}=1", f"1;{ADAPTER}=3"} <= answers.keys()
    assert answers[f"1;{ADAPTER}=1"] != answers[f"1;{ADAPTER}=3"]


def test_a_rollback_serves_the_version_of_before(scene: Scene) -> None:
    with Operator(scene.daemon.endpoint) as operator:
        operator.rollback(ADAPTER)
    wait_until(lambda: scene.version() == 2, "it is back")
    assert scene.ask().version == f"1;{ADAPTER}=2"


def test_the_base_moves_under_an_adapter_that_is_not_bound_to_a_version(scene: Scene) -> None:
    publish(scene.daemon, "policy", scene.other)
    wait_until(lambda: scene.ask("m").version == "2", "the base's next version serves")
    answer = scene.ask()
    assert (answer.status, answer.version) == (200, f"2;{ADAPTER}=2")


def test_an_adapter_bound_to_another_version_of_the_base_is_held_back(scene: Scene) -> None:
    with Operator(scene.daemon.endpoint) as operator:
        operator.pin("policy")
    publish(scene.daemon, "policy", scene.base)
    scene.publish(scene.adapters[0], base_version=3)
    wait_until(lambda: "is staged" in scene.state().reason, "it waits")
    assert scene.state().reason.endswith("; version 4 is staged; version 4 was trained on version 3 of its base, which is at 2")
    assert scene.ask().version == f"2;{ADAPTER}=2"
    with Operator(scene.daemon.endpoint) as operator:
        operator.update("policy")
    wait_until(lambda: scene.version() == 4, "its base is there")
    assert scene.ask().version == f"3;{ADAPTER}=4"


def test_an_adapter_leaves_service_when_its_base_moves_on_unless_its_fleet_only_warns(scene: Scene) -> None:
    publish(scene.daemon, "policy", scene.other)
    wait_until(lambda: scene.ask("m").version == "4", "the base's next version serves")
    refused = scene.ask()
    assert refused.status == 503
    wait_until(lambda: "may not serve it yet" in scene.state().reason, "the daemon knows")
    why = "version 4 was trained on version 3 of its base, which is at 4"
    assert why in scene.state().reason
    assert why in str(scene.ask().json())
    with Operator(scene.daemon.endpoint) as operator:
        operator.set_fleet(ADAPTER, base_binding=BaseBinding.WARN)
    wait_until(lambda: scene.ask().status == 200, "it is served all the same")
    assert scene.ask().version == f"4;{ADAPTER}=4"
    assert scene.state().reason.endswith(why)
