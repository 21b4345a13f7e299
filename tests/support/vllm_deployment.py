"""A daemon and a vLLM server of two API servers that follows it."""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from resharder.client import connect
from resharder.client.trainer.publisher import Publisher

from tests.support.daemon import Daemon
from tests.support.tiny_hf import save_tokenizer, tiny_config
from tests.support.vllm_server import VllmServer
from tests.support.weights import random_weights

PROMPT = [5, 17, 42, 7, 300, 11]


@dataclass
class Deployment:
    daemon: Daemon
    publisher: Publisher
    server: VllmServer
    config: dict[str, Any]
    version: int = 0

    def publish(self) -> int:
        """Another version, different from all before; returns when it is READY."""
        self.version += 1
        self.publisher.publish_tensors(self.version, random_weights(self.config, self.version).items()).wait_ready(120)
        return self.version


@contextmanager
def deployment(folder: Path, *args: str, environment: Mapping[str, str] = MappingProxyType({})) -> Iterator[Deployment]:
    config = tiny_config("qwen3")
    save_tokenizer(folder, config["vocab_size"])
    (folder / "config.json").write_text(json.dumps(config))
    with ExitStack() as stack:
        daemon = stack.enter_context(Daemon(lease_seconds=LEASE))
        publisher = stack.enter_context(
            connect(daemon.endpoint, model="policy", job="j", rank=0, world_size=1, config=config, tokenizer=folder)
        )
        env = {"RESHARDER_ENDPOINT": daemon.endpoint, "VLLM_PLUGINS": "resharder", "RESHARDER_HOLD_SECONDS": "300", **environment}
        server = VllmServer(folder, ["--max-model-len", "2048", "--load-format", "resharder", *args], env, timeout=900)
        deployed = Deployment(daemon, publisher, server, config)
        deployed.publish()
        stack.enter_context(server)
        yield deployed


LEASE = 20.0  # a busy machine keeps the trainer from renewing its own for more than 8 s
