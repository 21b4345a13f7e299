"""Jobs and a server of the direct path, without vLLM's engine: a module as the model, and the plugin's comparison of configs."""

import json
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from resharder.client import Publisher, connect
from resharder.client.direct import sender as sender_module
from resharder.client.inference.vllm import boot_loader
from resharder.client.inference.vllm.hf_config import EngineConfig

from tests.failpoints.adapter_cycle import ADAPTER, adapter_weights
from tests.failpoints.adapter_cycle import CONFIG as ADAPTER_CONFIG
from tests.failpoints.light_server import Host, LightServer, fingerprint
from tests.failpoints.roles import weights


class Job:
    """One rank with the whole model, on the direct path. Its steps are the seeds of its weights."""

    preloaded = ("tests.failpoints.light_server",)  # which this module needs

    def __init__(
        self,
        endpoint: str,
        job: str,
        config: dict[str, Any],
        left_out: Collection[str] = (),
        added: str = "",
        frozen: Collection[str] = (),
        **options: Any,
    ) -> None:
        self._left_out, self._added, self._frozen = left_out, added, frozen
        self._model = torch.nn.Module()
        self.exchange(0)
        for name in frozen:
            self._model.get_parameter(name).requires_grad_(False)
        self._publisher: Publisher = connect(
            endpoint, **{"model": "policy", "job": job, "rank": 0, "world_size": 1, "direct_wait": 60, **options}
        )
        self._publisher.attach(self._model, config)

    def publish(self, step: int, exchange: bool) -> int:
        """Return the number of a READY version. `exchange` puts other parameters into the model."""
        if exchange:
            self.exchange(step)
        else:
            self._change(step)
        handle = self._publisher.publish(step)
        handle.wait_ready(120)
        return handle.version

    def timed(self, step: int) -> tuple[int, float]:
        """Return the number of a version, and the seconds for which its `publish` lasted."""
        self._change(step)
        began = time.monotonic()
        number = self._publisher.publish(step).version
        return number, time.monotonic() - began

    def offer(self, step: int) -> None:
        """Publish a version of which nothing is delivered to the daemon. Does not return."""
        self._publisher._delivery._send = lambda *arguments: threading.Event().wait()  # type: ignore[method-assign,assignment,return-value]
        self.publish(step, False)

    def generate(self, step: int, publish: bool) -> int:
        """Lend the GPUs for a generation, and return the version that it had."""
        if publish:
            self._change(step)
        with self._publisher.generation(step, publish=publish, timeout=120) as generation:
            return generation.version

    def order(self, step: int, slow: bool) -> tuple[int, list[str]]:
        """Publish, and return the version's number and the order of transfers that have ended and the delivery's begin.

        `slow`: the delivery lasts until a transfer has ended. The next one is then held as long as needed.
        """
        delivery, events, sent = self._publisher._delivery, list[str](), threading.Event()
        sender: Any = delivery._sender
        get, send = sender._links.get, delivery._send

        def delivered(*arguments: Any) -> None:
            events.append("delivery")
            assert not slow or sent.wait(60)
            send(*arguments)

        def link_of(group: str) -> Any:
            link = get(group)

            def run(**options: Any) -> Any:
                took = link.run(**options)
                events.append("transfer")  # the delivery may begin now, before the end is reported
                sent.set()
                return took

            return SimpleNamespace(run=run, shares_device=link.shares_device)

        sender._links.get = link_of
        delivery._send = delivered  # type: ignore[method-assign]
        try:
            return self.publish(step, False), events
        finally:
            sender._links.get, delivery._send = get, send  # type: ignore[method-assign]
            sender_module._HELD, sender._took = 60.0, dict.fromkeys(sender._took, 60.0)

    def _change(self, step: int) -> None:
        for name, tensor in self._weights(step).items():
            if name not in self._frozen:
                self._model.get_parameter(name).data.copy_(tensor)

    def alter(self, name: str) -> None:
        """Change a frozen parameter."""
        self._model.get_parameter(name).data.view(-1)[-1] += 1

    def memory(self) -> tuple[str, dict[str, int]]:
        """Fingerprint of the model's memory, and the bytes of each parameter."""
        found = dict(self._model.named_parameters())
        return fingerprint(found.items()), {name: each.nbytes for name, each in found.items()}

    def exchange(self, step: int) -> None:
        for name, tensor in self._weights(step).items():
            self._model.register_parameter(name, torch.nn.Parameter(tensor))

    def fingerprint(self, step: int) -> str:
        return fingerprint(self._weights(step).items())

    def _weights(self, step: int) -> dict[str, torch.Tensor]:
        found = {name: tensor for name, tensor in weights(step).items() if name not in self._left_out}
        return found | ({self._added: torch.ones(4)} if self._added else {})


class AdapterJob:
    """One rank with an adapter of the model, attached. Its steps are the seeds of its weights."""

    preloaded = ("tests.failpoints.adapter_cycle",)

    def __init__(self, endpoint: str, **options: Any) -> None:
        self._tensors = adapter_weights(0)
        self._publisher = connect(endpoint, model=ADAPTER, base="policy", job="adapter", rank=0, world_size=1, **options)
        self._publisher.attach(self._tensors, ADAPTER_CONFIG)

    def timed(self, step: int) -> tuple[int, float]:
        """Return the number of a version, and the seconds for which its `publish` lasted."""
        for name, tensor in adapter_weights(step).items():
            self._tensors[name].copy_(tensor)
        began = time.monotonic()
        return self._publisher.publish(step).version, time.monotonic() - began


@dataclass(frozen=True)
class ConfiguredHost(Host):
    """A host whose engine was started on the config.json of a folder."""

    engine_config: Any = None

    def config_differences(self, version: bytes) -> list[Any]:
        return list(self.engine_config.differences(version))


class ConfiguredServer(LightServer):
    """`LightServer` that compares the versions' configs with its own."""

    def __init__(self, served: str, config: dict[str, Any]) -> None:
        super().__init__(served)
        folder = Path(served).parent / "model"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        plain = {"hf_config_path": None, "revision": None, "trust_remote_code": False, "hf_overrides": {}, "hf_config": None}
        model = SimpleNamespace(model=str(folder), **plain)
        engine_config = EngineConfig(SimpleNamespace(model_config=model, speculative_config=None))

        class Configured(ConfiguredHost):
            of_loader = classmethod(lambda cls, vllm_config: cls(vllm_config, torch.device("cpu"), engine_config=engine_config))

        boot_loader.VLLMHost = Configured  # type: ignore[attr-defined,misc]

    def memory(self) -> str:
        """Fingerprint of the model's memory."""
        return fingerprint(self._model.named_parameters())
