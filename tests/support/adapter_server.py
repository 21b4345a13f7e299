"""A daemon, and real servers whose base and adapters are its versions."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from resharder.client.operator import Operator
from resharder.client.operator.answers import Server

from tests.support.adapters import RANK, publish_adapter, save_adapter
from tests.support.daemon import Daemon
from tests.support.observing import wait_until
from tests.support.tiny_hf import load_checkpoint
from tests.support.vllm_engine import Engine
from tests.support.vllm_models import make_pair, publish, without_weights
from tests.support.vllm_server import Response, VllmServer, completion

PROMPT = [5, 6, 7, 8, 9, 10]
TOKENS = 6
ADAPTER = "policy-lora"
RAW_MODE = Path(__file__).parent / "raw_mode"


class AdapterSite:
    """A daemon with version 1 of `policy`, three adapters of it in folders, and servers that follow them.

    Args:
        folder: For checkpoints.
        adapters: RESHARDER_ADAPTERS of each server.
        targets: The modules of the adapters, and `--lora-target-modules`; empty for all linear layers.
        args, environment: More of them for each server.
        lease: Seconds of a server's lease.
    """

    def __init__(
        self,
        folder: Path,
        adapters: str = ADAPTER,
        targets: Sequence[str] = (),
        args: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        lease: float = 60.0,
    ) -> None:
        self.folder, self._adapters, self._lease = folder, adapters, lease
        self._args, self._environment, self._targets = list(args), dict(environment or {}), targets
        self._stack = ExitStack()
        self.servers: dict[str, VllmServer] = {}
        self.tokens: dict[str, list[int]] = {}
        """The tokens of each version, by its label."""

    def __enter__(self) -> Self:
        self.base, self.other = make_pair(self.folder, "qwen3", torch.float32)
        checkpoint = load_checkpoint(self.base)
        self.folders = [save_adapter(self.folder / f"adapter{seed}", checkpoint, seed, *self._targets) for seed in range(3)]
        options = {"enable_lora": True, "max_loras": 1, "max_lora_rank": RANK, "dtype": "float32"}
        with Engine(self.base, environment={"VLLM_PLUGINS": ""}, **options) as fresh:
            answers = [fresh.logprobs(PROMPT, TOKENS, each) for each in (None, *self.folders)]
        self.of_base, *self.expected = [[token for token, _ in answer] for answer in answers]
        assert len({tuple(tokens) for tokens in (self.of_base, *self.expected)}) == 4
        try:
            self.daemon = self._stack.enter_context(Daemon(lease_seconds=self._lease))
            self.operator = self._stack.enter_context(Operator(self.daemon.endpoint))
            publish(self.daemon, "policy", self.base)
            self.bare = without_weights(self.base, self.folder / "bare")
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    def serve(self, name: str, **environment: str) -> VllmServer:
        """Start a server, in place of one of its name that has ended."""
        args = ["--load-format", "resharder", "--enable-lora", "--max-lora-rank", str(RANK), "--max-loras", "4", *self._args]
        args += ["--lora-target-modules", *self._targets] if self._targets else []
        server = VllmServer(self.bare, args=args, env=self.environment(name) | environment)
        self.servers[name] = self._stack.enter_context(server)
        return server

    def environment(self, name: str) -> dict[str, str]:
        """The variables of a server."""
        own = {
            "RESHARDER_ENDPOINT": self.daemon.endpoint,
            "RESHARDER_MODEL": "policy",
            "RESHARDER_SERVER_ID": name,
            "RESHARDER_ADAPTERS": self._adapters,
            "VLLM_PLUGINS": "resharder,dropping_sleep,faulty_adapters",
            "PYTHONPATH": str(RAW_MODE),
        }
        return own | self._environment

    def ask(self, server: str, model: str = ADAPTER, tokens: int = TOKENS, timeout: float = 300) -> Response:
        body = completion(PROMPT, tokens, model=model)
        return self.servers[server].request("POST", "/v1/completions", body, timeout)

    def answer(self, server: str, model: str = ADAPTER) -> tuple[str, list[int]]:
        """The label and the tokens of an answer."""
        found = self.ask(server, model)
        assert found.status == 200, found.body
        return str(found.version), found.json()["choices"][0]["token_ids"]

    def state(self, server: str, adapter: str = ADAPTER) -> Server:
        return self.operator.server(f"{server}.{adapter}")

    def versions(self, adapter: str = ADAPTER) -> list[int]:
        """The version in service on each server; 0 for none, also before the daemon knows the server."""
        found = {server.name: server.version for server in self.operator.servers()}
        return [found.get(f"servers/{name}.{adapter}", 0) for name in self.servers]

    def wait_versions(self, *versions: int, adapter: str = ADAPTER, timeout: float = 60) -> None:
        """Wait until the servers serve these versions of an adapter, and each its base."""
        wait_until(lambda: self.versions(adapter) == list(versions), f"{adapter} is at {versions}", timeout)
        wait_until(lambda: all(self._serves(name) for name in self.servers), "the base is served", timeout)

    def _serves(self, server: str) -> bool:
        return self.operator.server(server).state == Server.State.SERVING

    def publish(self, *which: int, adapter: str = ADAPTER) -> int:
        """Publish some of the three adapters as versions, and return the number of the last one."""
        names = publish_adapter(self.daemon, adapter, "policy", *(self.folders[each] for each in which))
        for name, each in zip(names, which, strict=True):
            self.tokens[f"{adapter}={name.rpartition('/')[2]}"] = self.expected[each]
        return int(names[-1].rpartition("/")[2])

    def is_right(self, label: str, tokens: list[int]) -> bool:
        """Whether these are the tokens of a label's version, beside version 1 of the base."""
        base, _, adapter = label.partition(";")
        return base == "1" and self.tokens.get(adapter) == tokens

    def publish_folder(self, folder: Path, adapter: str = ADAPTER) -> None:
        publish_adapter(self.daemon, adapter, "policy", folder)

    def adapter(self, name: str, *, targets: Sequence[str], rank: int = RANK) -> Path:
        """A folder with another adapter of the base."""
        return save_adapter(self.folder / name, load_checkpoint(self.base), 9, *targets, rank=rank)
