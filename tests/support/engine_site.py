"""A daemon, a publisher in the test's process and one server of either engine that follows it."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from resharder.client import Publisher, connect
from resharder.client.operator import Operator

from tests.support.daemon import Daemon
from tests.support.engine_kinds import EngineKind, Environment
from tests.support.observing import wait_serving
from tests.support.tiny_hf import save_tokenizer
from tests.support.vllm_server import Answer, VllmServer
from tests.support.weights import Reference, random_weights

PROMPT = [5, 17, 42, 7, 300, 11]
PROMPTS = (PROMPT, [800, 2, 9], [77] * 12)


@dataclass
class Site:
    kind: EngineKind
    folder: Path
    config: Mapping[str, Any]
    daemon: Daemon
    publisher: Publisher
    server: VllmServer
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

    def made_by(self, version: int, answer: Answer) -> torch.Tensor:
        """Which tokens of an answer to `PROMPT` this version's weights could have made."""
        logprobs = self.reference(version).logprobs([*PROMPT, *answer.token_ids])[len(PROMPT) - 1 :]
        chosen = logprobs.gather(-1, torch.tensor(answer.token_ids)[:, None])[:, 0]
        return (torch.tensor(answer.logprobs) - chosen).abs() < 1e-3

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
        assert self.kind.weight_version(self.server) == str(version)


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Files of a server's model folder: config and tokenizer, no weights."""
    save_tokenizer(folder, config["vocab_size"])
    (folder / "config.json").write_text(json.dumps(config))


@contextmanager
def running(
    kind: EngineKind,
    folder: Path,
    config: Mapping[str, Any],
    environment: Environment | None = None,
    arguments: Sequence[str] = (),
    server: Callable[[VllmServer], object] = lambda made: None,
    **options: Any,
) -> Iterator[Site]:
    """Start it; the server serves version 1.

    `environment`, `arguments`: of the server, which `server` may change. `options`: the daemon's.
    """
    write_config(folder, config)
    job: dict[str, Any] = {"job": "j", "rank": 0, "world_size": 1, "config": dict(config), "tokenizer": folder}
    with (
        Daemon(data_listen="127.0.0.1:0", **options) as daemon,
        connect(daemon.endpoint, model="policy", **job) as publisher,
        Operator(daemon.endpoint) as operator,
    ):
        given = {"RESHARDER_ENDPOINT": daemon.endpoint, "RESHARDER_SERVER_ID": "one", **(environment or {})}
        made = kind.follower(folder, arguments, given)
        server(made)
        site = Site(kind, folder, config, daemon, publisher, made, operator)
        site.publish()
        with made:
            wait_serving(daemon, 1)
            yield site


def contents(kind: EngineKind, server: VllmServer) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    """Tokens and log-probabilities after each prompt, without a prefix in the cache: with one, other sums are computed."""
    kind.forget(server)
    found = [server.generate(prompt, 12) for prompt in PROMPTS]
    return [(answer.token_ids, answer.logprobs) for answer in found]
