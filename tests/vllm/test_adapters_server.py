"""A real server whose base and adapter are versions of the daemon: requests name the adapter, answers the versions of both."""

import json
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from resharder.client.operator import Operator
from resharder.client.operator.answers import BaseBinding, PauseMode
from resharder.v1 import resources_pb2

from tests.support.adapter_server import RAW_MODE
from tests.support.adapters import RANK, publish_adapter, save_adapter
from tests.support.command import resharder
from tests.support.daemon import Daemon
from tests.support.observing import SERVING, servers, wait_until
from tests.support.tiny_hf import load_checkpoint
from tests.support.vllm_models import make_pair, publish, without_weights
from tests.support.vllm_server import Response, VllmServer, completion

pytestmark = pytest.mark.compat("other")
PROMPT = [5, 6, 7, 8, 9, 10]
ADAPTER = "policy-lora"
LONG = 450


@dataclass
class Scene:
    daemon: Daemon
    server: VllmServer
    base: Path
    other: Path
    adapters: list[Path]
    hand: Path

    def ask(self, model: str = ADAPTER, tokens: int = 6) -> Response:
        return self.server.request("POST", "/v1/completions", completion(PROMPT, tokens, model=model))

    def serves(self, version: int) -> bool:
        """Whether requests for the adapter are admitted, and answered by this version."""
        state = self.state()
        return (state.state, state.version) == (SERVING, version)

    def state(self) -> resources_pb2.Server:
        return next(server for server in servers(self.daemon) if server.name == f"servers/one.{ADAPTER}")

    def publish(self, *folders: Path, base_version: int | None = None) -> None:
        publish_adapter(self.daemon, ADAPTER, "policy", *folders, base_version=base_version)


STEPS = [pytest.param("resharder", id="one step"), pytest.param("resharder,two_steps", id="two", marks=pytest.mark.full)]
"""Plugins with which the engine has one step in progress at a time, or two."""


@pytest.fixture(scope="module", params=STEPS)
def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
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
            "VLLM_PLUGINS": f"{request.param},other_hand",
            "OTHER_HAND": str(folder / "hand"),
            "PYTHONPATH": os.pathsep.join([str(RAW_MODE), os.environ.get("PYTHONPATH", "")]),
            "VLLM_SERVER_DEV_MODE": "1",
        }
        args = ["--load-format", "resharder", "--enable-lora", "--max-loras", "3", "--max-lora-rank", str(RANK)]
        with VllmServer(without_weights(base, folder / "bare"), args=args, env=environment) as server:
            yield Scene(daemon, server, base, other, adapters, folder / "hand")


def test_an_adapter_is_served_from_its_first_version_on(scene: Scene) -> None:
    refused = scene.ask()
    assert refused.status == 503, refused.body
    assert scene.ask("m").version == "1"
    scene.publish(scene.adapters[0])
    wait_until(lambda: scene.serves(1), "the adapter serves")
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
    wait_until(lambda: scene.serves(3), "the last version serves")
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
    wait_until(lambda: scene.serves(2), "it is back")
    assert scene.ask().version == f"1;{ADAPTER}=2"


def test_a_slot_that_another_hand_has_changed_is_found_and_written_again(scene: Scene) -> None:
    before = whole(scene, 2, PROMPT, 6)
    verified = resharder("verify", f"servers/one.{ADAPTER}", "--endpoint", scene.daemon.endpoint, "--json")
    assert verified.code == 0, verified.err
    (found,) = json.loads(verified.out)["verifications"]
    assert (found["skipped"], found["tensors"] > 0, found["covered_bytes"]) == ("", True, found["total_bytes"])
    scene.hand.write_text(f"1 0 {ADAPTER}")
    wait_until(lambda: scene.hand.with_name("hand.0").exists(), "the other hand's change", 20)
    verified = resharder("verify", f"servers/one.{ADAPTER}", "--endpoint", scene.daemon.endpoint, "--json")
    assert verified.code == 1, verified.out
    (found,) = json.loads(verified.out)["verifications"]
    assert len(found["different"]) == 1, found
    wait_until(lambda: scene.serves(2), "the version is installed again")
    assert whole(scene, 2, PROMPT, 6) == before
    verified = resharder("verify", f"servers/one.{ADAPTER}", "--endpoint", scene.daemon.endpoint, "--json")
    assert verified.code == 0, verified.out
    with Operator(scene.daemon.endpoint) as operator:
        assert any(
            event.what == "altered" and "1 tensors in memory differ" in event.reason for event in operator.events(last=200)
        )


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
    wait_until(lambda: scene.serves(4), "its base is there")
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


@dataclass
class Stream:
    """A stream's tokens, the adapter's version that each event of them names, and how it ended."""

    tokens: list[int] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    finish_reason: str = ""

    def read(self, scene: Scene, begun: threading.Event) -> None:
        body = completion(PROMPT, LONG, model=ADAPTER, stream=True)
        with scene.server._send("POST", "/v1/completions", body, 300) as (_, _, answer):
            for event in (json.loads(line[6:]) for line in answer if line.startswith(b"data: {")):
                made = event["choices"][0]["token_ids"] or []
                self.tokens += made
                self.versions += [event["resharder_versions"].partition("=")[2]] * len(made) if made else []
                self.finish_reason = event["choices"][0]["finish_reason"] or self.finish_reason
                if made:
                    begun.set()


def stream_over(scene: Scene, *versions: int) -> Stream:
    """A stream that begins before the fleet goes to these versions, one after the other."""
    stream, begun = Stream(), threading.Event()
    reader = threading.Thread(target=stream.read, args=(scene, begun))
    reader.start()
    assert begun.wait(60)
    with Operator(scene.daemon.endpoint) as operator:
        for version in versions:
            operator.update(ADAPTER, version)
            wait_until(lambda version=version: scene.serves(version), "the fleet is there")
    reader.join()
    return stream


def whole(scene: Scene, version: int, prompt: list[int], tokens: int) -> list[int]:
    """The tokens of a request that one version computes from its beginning to its end."""
    answer = scene.server.request("POST", "/v1/completions", completion(prompt, tokens, model=ADAPTER))
    assert (answer.version or "").endswith(f"{ADAPTER}={version}")
    found: list[int] = answer.json()["choices"][0]["token_ids"]
    return found


@pytest.fixture(scope="module")
def two(scene: Scene) -> tuple[int, int]:
    """Two versions with other tensors, at the first of which the fleet is."""
    scene.publish(*scene.adapters)
    with Operator(scene.daemon.endpoint) as operator:
        second = max(version.number for version in operator.versions(ADAPTER))
        operator.update(ADAPTER, second - 1)
    wait_until(lambda: scene.serves(second - 1), "the fleet is at the first")
    return second - 1, second


def test_requests_in_progress_go_on_with_the_new_version_where_the_fleet_keeps_them(scene: Scene, two: tuple[int, int]) -> None:
    first, second = two
    before = whole(scene, first, PROMPT, LONG)
    with Operator(scene.daemon.endpoint) as operator:
        assert operator.fleet(ADAPTER).pause_mode is PauseMode.WAIT, "requests end on their version by default"
        operator.set_fleet(ADAPTER, pause_mode=PauseMode.KEEP)
    stream = stream_over(scene, second)
    kept = stream.versions.count(str(first))
    assert stream.versions == [str(first)] * kept + [str(second)] * (LONG - kept)
    assert 0 < kept < LONG
    assert stream.tokens[:kept] == before[:kept]
    assert stream.tokens[kept:] == whole(scene, second, [*PROMPT, *stream.tokens[:kept]], LONG - kept)
    assert stream.tokens[kept:] != before[kept:]
    assert stream.finish_reason == "length"


def test_no_request_finds_blocks_of_another_version_in_the_prefix_cache(scene: Scene, two: tuple[int, int]) -> None:
    first, second = two
    stream = stream_over(scene, first)
    kept = stream.versions.count(str(second))
    again = whole(scene, first, [*PROMPT, *stream.tokens[:-1]], 1)
    assert scene.server.request("POST", "/reset_prefix_cache").status == 200
    assert again == whole(scene, first, [*PROMPT, *stream.tokens[:-1]], 1) == stream.tokens[-1:]
    assert stream.tokens[kept:] == whole(scene, first, [*PROMPT, *stream.tokens[:kept]], LONG - kept)


def test_a_request_is_cut_over_as_often_as_there_are_versions_without_further_slots(scene: Scene, two: tuple[int, int]) -> None:
    first, second = two
    stream = stream_over(scene, second, first, second)
    named = list(dict.fromkeys(stream.versions))
    changes = [version for at, version in enumerate(stream.versions) if not at or version != stream.versions[at - 1]]
    assert set(named) == {str(first), str(second)}
    assert len(changes) == 4, changes
    assert scene.ask().version == f"4;{ADAPTER}={second}"


def test_requests_in_progress_end_with_the_tokens_that_they_have_where_the_fleet_aborts_them(
    scene: Scene, two: tuple[int, int]
) -> None:
    first, second = two
    with Operator(scene.daemon.endpoint) as operator:
        operator.set_fleet(ADAPTER, pause_mode=PauseMode.ABORT)
    before = whole(scene, second, PROMPT, LONG)
    stream = stream_over(scene, first)
    assert stream.finish_reason == "abort"
    assert set(stream.versions) == {str(second)}
    assert stream.tokens == before[: len(stream.tokens)]
    assert len(stream.tokens) < LONG
    assert scene.ask().version == f"4;{ADAPTER}={first}"
