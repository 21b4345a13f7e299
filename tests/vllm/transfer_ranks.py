"""Four Megatron ranks that send by vLLM's weight transfer API: by shards, then as streams of which each rank has a part."""

import json
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.support.megatron_models import build_model, fill_from_hf

# isort: split
import torch
import torch.distributed as dist
from resharder.client import ResharderTrainerInitInfo, ShardSource
from vllm.distributed.weight_transfer import ParamMeta, WeightSource, WeightTransferTrainerFactory

from tests.support.tiny_hf import load_checkpoint

HAS_OWNERS = hasattr(WeightSource, "iter_full")  # vLLM 0.33


def owners(ranks: tuple[int, ...]) -> dict[str, Any]:
    return {"owners": ranks} if HAS_OWNERS else {}


class Server:
    """A server that accepts every call."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...
    def start_weight_update(self) -> None: ...
    def update_weights(self, update_info: dict[str, Any]) -> None: ...
    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


class Stages(WeightSource):
    """Whole tensors, each after a collective, of which a rank of a pipeline has those of its stage."""

    def __init__(self, tensors: dict[str, torch.Tensor], stage: int) -> None:
        self.tensors, self.held = tensors, set(sorted(tensors)[stage::2])

    def _metadata(self) -> list[ParamMeta]:
        first = set(sorted(self.tensors)[::2])
        return [
            ParamMeta(name, tensor.dtype, tuple(tensor.shape), **owners((0, 1) if name in first else (2, 3)))
            for name, tensor in self.tensors.items()
        ]

    metadata = cached_property(_metadata) if HAS_OWNERS else _metadata  # type: ignore[assignment]

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self:
            if tensor is not None:
                yield name, tensor

    def held_names(self) -> set[str]:
        return self.held

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        for name, tensor in self.tensors.items():
            dist.barrier()
            yield name, tensor if name in self.held else None


def main(endpoint: str, folder: str) -> None:
    dist.init_process_group("gloo")
    checkpoint, config = load_checkpoint(Path(folder)), json.loads((Path(folder) / "config.json").read_text())
    chunks = build_model(config, tp=2, pp=2)
    fill_from_hf(chunks, config, checkpoint)
    for name, source in {"shards": ShardSource(chunks), "stages": Stages(checkpoint, dist.get_rank() // 2)}.items():
        info = ResharderTrainerInitInfo(rank=dist.get_rank(), model=name, endpoint=endpoint, config=config, tokenizer=folder)
        engine = WeightTransferTrainerFactory.trainer_init(info, client=Server(), source=source)
        for _ in range(2):
            engine.send_weights()
        dist.barrier()
        engine.shutdown()
    dist.destroy_process_group()
