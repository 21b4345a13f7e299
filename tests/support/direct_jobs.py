"""Jobs and a server of the direct path, without vLLM's engine: a module as the model, and the plugin's comparison of configs."""

import json
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from resharder.client import Publisher, connect
from resharder.client.inference.vllm import boot_loader
from resharder.client.inference.vllm.hf_config import EngineConfig

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
        **options: Any,
    ) -> None:
        self._left_out, self._added = left_out, added
        self._model = torch.nn.Module()
        self.exchange(0)
        self._publisher: Publisher = connect(
            endpoint, **{"model": "policy", "job": job, "rank": 0, "world_size": 1, "direct_wait": 60, **options}
        )
        self._publisher.attach(self._model, config)

    def publish(self, step: int, exchange: bool) -> int:
        """Return the number of a READY version. `exchange` puts other parameters into the model."""
        if exchange:
            self.exchange(step)
        else:
            for name, tensor in self._weights(step).items():
                self._model.get_parameter(name).data.copy_(tensor)
        handle = self._publisher.publish(step)
        handle.wait_ready(120)
        return handle.version

    def timed(self, step: int) -> tuple[int, float]:
        """Return the number of a version, and the seconds for which its `publish` lasted once the version was created.

        Before that, on any path, the daemon may wait 5 s for files of a retired version that a hanging server has mapped.
        """
        for name, tensor in self._weights(step).items():
            self._model.get_parameter(name).data.copy_(tensor)
        session, created = self._publisher._session, list[float]()
        begun = session.begun
        session.begun = lambda *version: (created.append(time.monotonic()), begun(*version))[1]  # type: ignore[method-assign,func-returns-value]
        try:
            number = self._publisher.publish(step).version
        finally:
            session.begun = begun  # type: ignore[method-assign]
        return number, time.monotonic() - created[-1]

    def exchange(self, step: int) -> None:
        for name, tensor in self._weights(step).items():
            self._model.register_parameter(name, torch.nn.Parameter(tensor))

    def fingerprint(self, step: int) -> str:
        return fingerprint(self._weights(step).items())

    def _weights(self, step: int) -> dict[str, torch.Tensor]:
        found = {name: tensor for name, tensor in weights(step).items() if name not in self._left_out}
        return found | ({self._added: torch.ones(4)} if self._added else {})


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
