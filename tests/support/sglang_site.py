"""A daemon, a publisher in the test's process and one SGLang server that follows it, for tests in `.venv-sglang`."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from resharder.client import Publisher, connect
from resharder.client.operator import Operator

from tests.support.daemon import Daemon
from tests.support.observing import wait_serving
from tests.support.sglang_server import SGLangServer
from tests.support.tiny_hf import save_tokenizer
from tests.support.weights import Reference, random_weights

PROMPT = [5, 17, 42, 7, 300, 11]
PROMPTS = (PROMPT, [800, 2, 9], [77] * 12)


@dataclass
class Site:
    folder: Path
    config: Mapping[str, Any]
    daemon: Daemon
    publisher: Publisher
    server: SGLangServer
    operator: Operator
    seeds: dict[int, int] = field(default_factory=dict)  # of each version's weights

    def publish(self, seed: int | None = None) -> int:
        """A version with weights of its own, READY; its number."""
        step = len(self.seeds) + 1
        seed = seed or step
        handle = self.publisher.publish_tensors(step, random_weights(self.config, seed).items())
        handle.wait_ready(120)
        self.seeds[handle.version] = seed
        return handle.version

    def serve(self, seed: int | None = None) -> int:
        version = self.publish(seed)
        wait_serving(self.daemon, version)
        return version

    def reference(self, version: int) -> Reference:
        return Reference(self.config, random_weights(self.config, self.seeds[version]))

    def check_answers(self, version: int) -> None:
        """The server answers with this version's weights, and says so."""
        answer = self.server.generate(PROMPT, 12)
        assert answer.version == str(version)
        logprobs = self.reference(version).logprobs([*PROMPT, *answer.token_ids])[len(PROMPT) - 1 :]
        assert list(answer.token_ids) == logprobs.argmax(-1).tolist()
        chosen = logprobs.gather(-1, torch.tensor(answer.token_ids)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(answer.logprobs), chosen, atol=1e-4)
        info = self.server.request("GET", "/model_info").json()
        assert info["weight_version"] == str(version)


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Files of a server's model folder: config and tokenizer, no weights."""
    save_tokenizer(folder, config["vocab_size"])
    (folder / "config.json").write_text(json.dumps(config))


@contextmanager
def running(
    folder: Path,
    config: Mapping[str, Any],
    environment: Mapping[str, str] | None = None,
    arguments: Sequence[str] = (),
    **options: Any,
) -> Iterator[Site]:
    """Start it; the server serves version 1. `environment`, `arguments`: of the server. `options`: the daemon's."""
    write_config(folder, config)
    job: dict[str, Any] = {"job": "j", "rank": 0, "world_size": 1, "config": dict(config), "tokenizer": folder}
    with (
        Daemon(data_listen="127.0.0.1:0", **options) as daemon,
        connect(daemon.endpoint, model="policy", **job) as publisher,
        Operator(daemon.endpoint) as operator,
    ):
        given = {"RESHARDER_ENDPOINT": daemon.endpoint, "RESHARDER_SERVER_ID": "one", **(environment or {})}
        server = SGLangServer(folder, arguments, given)
        site = Site(folder, config, daemon, publisher, server, operator)
        site.publish()
        with server:
            wait_serving(daemon, 1)
            yield site


def checksums(server: SGLangServer) -> list[dict[str, str]]:
    """SGLang's own checksum of each tensor of its model, of each rank. That of 0.5.17 needs a GPU: without, nothing."""
    response = server.request("POST", "/weights_checker", {"action": "checksum"})
    if b"Torch not compiled with CUDA" in response.body or b"No CUDA GPUs" in response.body or b"NVIDIA driver" in response.body:
        return []
    assert response.status == 200, response.body
    return [rank["checksums"] for rank in response.json()["ranks"]]


def contents(server: SGLangServer) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    """Tokens and log-probabilities after each prompt, without a prefix in the cache: with one, other sums are computed."""
    assert server.request("POST", "/flush_cache").status == 200
    found = [server.generate(prompt, 12) for prompt in PROMPTS]
    return [(answer.token_ids, answer.logprobs) for answer in found]


def alone(folder: Path, tp: int = 1) -> SGLangServer:
    """A server that loads a folder itself and knows nothing of Resharder."""
    return SGLangServer(folder, env={"RESHARDER_ENDPOINT": None, "SGLANG_PLUGINS": "none"}, tp=tp)
