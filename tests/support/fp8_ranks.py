"""Ranks of a Megatron job in one process, each with a real model built as the rank that it is."""

from typing import Any

from tests.support import fakepg
from tests.support.megatron_models import build_model, fill_from_hf

# isort: split
import torch
from resharder.client.trainer.connect import Publisher, connect

from tests.client.models import together
from tests.support.daemon import Daemon


class Ranks:
    """Publishers of all ranks of a layout, as threads, with their models."""

    def __init__(
        self, daemon: Daemon, model: str, config: dict[str, Any], world: int, layout: dict[str, Any], **options: Any
    ) -> None:
        self.config, self.layout, self.chunks, self.publishers = config, layout, list[Any](), list[Publisher]()
        for rank in range(world):
            fakepg.enter(rank, world)
            self.chunks.append(self.build())
            self.publishers.append(connect(daemon.endpoint, model=model, job=model, rank=rank, world_size=world, **options))
            self.publishers[-1].attach(self.chunks[-1], config, wait=False)
        self.world = world

    def build(self) -> list[Any]:
        """Build a rank's model, within its process group."""
        return build_model(self.config, **self.layout, dtype=torch.bfloat16)

    def fill(self, weights: dict[str, torch.Tensor]) -> None:
        for rank, chunks in enumerate(self.chunks):
            fakepg.enter(rank, self.world)
            build_model(self.config, **self.layout, dtype=torch.bfloat16)  # sets up the rank's groups
            fill_from_hf(chunks, self.config, weights)

    def publish(self, step: int) -> int:
        handles = together(lambda rank: self.publishers[rank].publish(step), self.world)
        handles[0].wait_ready(60)
        return int(handles[0].version)

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *error: object) -> None:
        fakepg.leave()
        for publisher in self.publishers:
            publisher.close()
