"""A real server with two API servers, one of which misses a version: every answer names the versions that made its tokens."""

import json
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from resharder.client.operator import Operator
from resharder.client.operator.answers import PauseMode
from vllm.v1.engine.core import EngineCore

from tests.support.api_sides import SHOW_SIDES, at_each_side
from tests.support.observing import servers, wait_serving, wait_until
from tests.support.vllm_deployment import PROMPT, Deployment, deployment
from tests.support.vllm_places import cli_args
from tests.support.vllm_server import Response, VllmServer, completion
from tests.support.weights import Reference, random_weights

pytestmark = [pytest.mark.full, pytest.mark.compat("labels")]
RAW_MODE = Path(__file__).parents[1] / "support" / "raw_mode"
STAMPS = hasattr(EngineCore, "_attach_weight_version")  # vLLM stamps tokens with its own weight version
_NEAR = 3e-2 if torch.cuda.is_available() else 1e-3  # of log-probabilities; TensorFloat-32 rounds to 2^-11


@dataclass
class Scene:
    deployed: Deployment
    deaf: Path  # while it exists, the second API server does not attend the daemon
    references: dict[int, Reference] = field(default_factory=dict)

    @property
    def server(self) -> VllmServer:
        return self.deployed.server

    def miss(self) -> int:
        """The daemon ends and comes back, and a version is published at once; the second API server is told of none of it."""
        self.deployed.daemon.kill()
        self.deaf.touch()
        self.deployed.daemon.start()
        return self.publish()

    def publish(self) -> int:
        reached = self.deployed.publish()
        wait_serving(self.deployed.daemon, reached)
        return reached

    def attend(self) -> None:
        self.deaf.unlink(missing_ok=True)
        wait_until(lambda: servers(self.deployed.daemon)[0].control_sides == 2, "both API servers attend")
        ask = lambda: self.server.request("POST", "/v1/completions", completion(PROMPT, 1))  # noqa: E731
        wait_until(lambda: all(answer.status == 200 for answer in at_each_side(ask)), "both gates are open")

    def made(self, version: int, token_ids: list[int], logprobs: list[float]) -> list[bool]:
        """Which tokens the weights of `version` would have given, with these log-probabilities."""
        if version not in self.references:
            self.references[version] = Reference(self.deployed.config, random_weights(self.deployed.config, version))
        found = self.references[version].logprobs([*PROMPT, *token_ids])[len(PROMPT) - 1 :]
        chosen = found.gather(-1, torch.tensor(token_ids)[:, None])[:, 0]
        near, best = (chosen - torch.tensor(logprobs)).abs() < _NEAR, found.max(-1).values - chosen < _NEAR
        return [bool(one) for one in near & best]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("sides")
    deaf = folder / "deaf"
    path = os.pathsep.join([str(RAW_MODE), os.environ.get("PYTHONPATH", "")])
    environment = {"VLLM_PLUGINS": "resharder,deaf_side", "DEAF_SIDE": str(deaf), "PYTHONPATH": path, "VLLM_SERVER_DEV_MODE": "1"}
    options = ["--api-server-count", "2", *SHOW_SIDES, "--trust-request-chat-template"]
    if hasattr(cli_args().BaseFrontendArgs, "enable_scale_out"):  # since 0.30, token-in-token-out is off by default
        options.append("--enable-scale-out")
    with deployment(folder, *options, environment=environment) as deployed:
        found = Scene(deployed, deaf)
        found.attend()
        yield found


def events(answer: Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in answer.body.decode().splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_an_api_server_that_was_told_of_no_version_names_the_one_that_made_its_tokens(scene: Scene) -> None:
    before = scene.deployed.version
    for answer in at_each_side(lambda: scene.server.request("POST", "/v1/completions", completion(PROMPT, 8))):
        assert answer.version == str(before), answer.headers
    reached = scene.miss()
    try:
        several = completion(PROMPT, 8, n=2, temperature=1.0)
        for answer in at_each_side(lambda: scene.server.request("POST", "/v1/completions", several)):
            assert (answer.version, len(answer.json()["choices"])) == (str(reached), 2), answer.headers
        for answer in at_each_side(lambda: scene.server.request("POST", "/v1/completions", completion(PROMPT, 8))):
            (choice,) = answer.json()["choices"]
            assert all(scene.made(reached, choice["token_ids"], choice["logprobs"]["token_logprobs"]))
            assert answer.version == str(reached), answer.headers
        chat = {"model": "m", "messages": [{"role": "user", "content": "a"}], "max_tokens": 4, "chat_template": "{{ messages }}"}
        for path, body in [("/v1/chat/completions", chat), ("/inference/v1/generate", token_in_token_out())]:
            for answer in at_each_side(lambda path=path, body=body: scene.server.request("POST", path, body)):
                assert (answer.status, answer.version) == (200, str(reached)), (path, answer.headers, answer.body)
                if STAMPS and "generate" in path:
                    assert answer.json()["choices"][0]["weight_versions"] == [{"version": str(reached), "start": 0, "end": 8}]
        for answer in (
            at_each_side(lambda: scene.server.request("GET", "/weight_info")) if hasattr(EngineCore, "get_weight_version") else ()
        ):
            assert (answer.version, answer.json()) == (str(reached), {"weight_version": str(reached)}), answer.headers
        for answer in at_each_side(lambda: scene.server.request("GET", "/v1/models")):
            assert answer.version == str(reached), answer.headers
        for answer in at_each_side(lambda: scene.server.request("POST", "/v1/completions", completion(PROMPT, 8, stream=True))):
            assert answer.version == "streamed", answer.headers
            assert {event["resharder_versions"] for event in events(answer)} == {str(reached)}
    finally:
        scene.attend()


def token_in_token_out(tokens: int = 8) -> dict[str, Any]:
    settings = {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True, "logprobs": 1}
    return {"model": "m", "token_ids": PROMPT, "sampling_params": settings}


def test_answers_over_an_install_name_the_versions_of_their_tokens_in_order(scene: Scene) -> None:
    with Operator(scene.deployed.daemon.endpoint) as operator:
        operator.set_fleet("policy", pause_mode=PauseMode.KEEP)
    before = scene.miss()
    asked = [("/v1/completions", completion(PROMPT, 1500, stream=stream)) for stream in (False, True)] * 2
    asked += [("/inference/v1/generate", token_in_token_out(1500))] * 2 * STAMPS
    answers: list[Response] = []
    threads = [
        threading.Thread(target=lambda path=path, body=body: answers.append(scene.server.request("POST", path, body)))
        for path, body in asked
    ]
    for thread in threads:
        thread.start()
    try:
        next(scene.server.stream(PROMPT, 4))  # once it has begun, the others have
        reached = scene.publish()
        for thread in threads:
            thread.join(300)
        assert len(answers) == len(asked)
        mixed = 0
        for answer in answers:
            tokens = labelled(answer)
            ids, logprobs = [token[0] for token in tokens], [token[1] for token in tokens]
            made = {version: scene.made(version, ids, logprobs) for version in (before, reached)}
            assert all(any(made[version][at] for version in token[2]) for at, token in enumerate(tokens))
            if answer.version != "streamed":
                truth = [version for version, which in made.items() if not all(made[reached + before - version])]
                assert answer.version == ",".join(map(str, truth)), "the header names the versions of its tokens"
            mixed += len({version for token in tokens for version in token[2]}) == 2
        assert mixed, "an answer has to have been made by both versions"
    finally:
        scene.attend()


def labelled(answer: Response) -> list[tuple[int, float, tuple[int, ...]]]:
    """(token, log-probability, versions that may have made it)."""
    found = []
    for part in events(answer) if answer.version == "streamed" else [answer.json() | {"resharder_versions": answer.version}]:
        for choice in part["choices"]:
            if choice.get("weight_versions"):
                return labelled_by_vllm(choice, answer.version)
            for token, logprob in zip(choice["token_ids"] or [], choice["logprobs"]["token_logprobs"], strict=True):
                found.append((token, logprob, tuple(map(int, part["resharder_versions"].split(",")))))
    return found


def labelled_by_vllm(choice: dict[str, Any], header: str | None) -> list[tuple[int, float, tuple[int, ...]]]:
    """The same of vLLM's own spans: they leave no token out, and name the header's versions in its order."""
    spans = choice["weight_versions"]
    assert ",".join(span["version"] for span in spans) == header
    versions = [(int(span["version"]),) for span in spans for _ in range(span["start"], span["end"])]
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    return list(zip(choice["token_ids"], logprobs, versions, strict=True))
