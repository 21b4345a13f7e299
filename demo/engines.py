"""Servers that the demo can start. SGLang is in a venv of its own, `.venv-sglang`, in which the demo then runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.sglang_server import SGLangServer
from tests.support.vllm_server import Answer, ServerFailed, VllmServer


@dataclass(frozen=True)
class Engine:
    """`arguments`, `environment`: what makes a server follow the daemon. `flush`: a route that drops cached prefixes."""

    name: str
    server: type[VllmServer]
    arguments: Sequence[str]
    environment: Mapping[str, str]
    flush: str = ""

    def following(self, folder: Path, endpoint: str) -> VllmServer:
        """Return a server, not started, that boots from the daemon. `folder`: config and tokenizer."""
        return self.server(folder, self.arguments, {**self.environment, "RESHARDER_ENDPOINT": endpoint})

    def alone(self, folder: Path) -> VllmServer:
        """Return a server, not started, that loads a checkpoint folder by itself."""
        return self.server(folder, env={"RESHARDER_ENDPOINT": None})

    def answer(self, server: VllmServer, prompt: Sequence[int], tokens: int) -> Answer:
        """Return an answer without a prefix in the cache, so that a fresh server's can equal it exactly. Raises ServerFailed."""
        if self.flush:
            response = server.request("POST", self.flush)
            if response.status != 200:
                raise ServerFailed(f"expected 200 of {self.flush}, got {response.status}: {response.body[:200]!r}")
        return server.generate(prompt, tokens)


ENGINES = {  # vLLM caches whole blocks, of which the demo's prompt has none; SGLang caches single tokens
    "vllm": Engine("vLLM", VllmServer, ("--load-format", "resharder"), {"VLLM_PLUGINS": "resharder"}),
    "sglang": Engine("SGLang", SGLangServer, (), {"SGLANG_PLUGINS": "resharder"}, "/flush_cache?timeout=30"),
}
