"""The adapter of a storm: its trainer, which publishes random weights by step, and what they make of the base's."""

from collections.abc import Mapping
from typing import Any

import torch
from resharder.client import Publisher, connect
from resharder.client.errors import ResharderError
from resharder.client.rpc.tls import Tls

from tests.support.adapters import ALPHA, RANK, random_adapter
from tests.support.weights import random_weights

ADAPTER = "policy-lora"
READY_SECONDS = 60.0


def adapter_weights(config: Mapping[str, object], step: int) -> dict[str, torch.Tensor]:
    """The tensors of a step, by PEFT's names."""
    return random_adapter(random_weights(dict(config), 1), 10_000 + step)


def merged(weights: Mapping[str, torch.Tensor], adapter: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The base's weights with an adapter's added."""
    found = dict(weights)
    for name, a in adapter.items():
        if ".lora_A." in name:
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            b = adapter[name.replace(".lora_A.", ".lora_B.")]
            found[f"{module}.weight"] = found[f"{module}.weight"] + ALPHA / RANK * (b @ a)
    return found


class AdapterTrainer:
    """A job of one rank. After a refusal the next call registers again.

    Attributes:
        steps: {version: step}.
    """

    def __init__(self, endpoint: str, config: Mapping[str, object], tls: Tls | None) -> None:
        self._endpoint, self._config, self._tls, self._step = endpoint, config, tls, 0
        self._publisher: Publisher | None = None
        self.steps: dict[int, int] = {}

    def publish(self) -> int:
        """Publish the next step, and return its version. Raises ResharderError."""
        self._step += 1
        if self._publisher is None:
            modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
            content = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": modules, "bias": "none"}
            options: dict[str, Any] = {"connect_timeout": 10.0, "staging_timeout": 30.0, "register_timeout": 30.0}
            self._publisher = connect(
                self._endpoint,
                model=ADAPTER,
                base="policy",
                job="adapter",
                rank=0,
                world_size=1,
                config=content,
                tls=self._tls,
                **options,
            )
        try:
            handle = self._publisher.publish_tensors(self._step, adapter_weights(self._config, self._step).items())
            self.steps.setdefault(handle.version, self._step)
            handle.wait_ready(READY_SECONDS)
        except ResharderError:
            self.close()
            raise
        return handle.version

    def close(self) -> None:
        """End the job."""
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            publisher.close()
