"""Workers of verl's checkpoint engine test (`tests/checkpoint_engine/test_utils.py` of verl 0.9.1), for a tiny model on CPUs.

The classes of verl are its own, the manager and the base of the rollout workers among them. The trainer's training engine stands
for verl's Megatron or FSDP engine, both of which need CUDA; it has the attributes of theirs that a checkpoint engine can see.
"""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from verl.checkpoint_engine import CheckpointEngineRegistry, CheckpointEngineWorker
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup
from verl.utils.import_utils import import_external_libs
from verl.workers.config import CheckpointEngineConfig, HFModelConfig, RolloutConfig
from verl.workers.engine import BaseEngine
from verl.workers.rollout import BaseRollout, RolloutReplica

from tests.support.tiny_hf import load_checkpoint


class TinyEngine(BaseEngine):
    """Training engine whose weights are those of a checkpoint, times a factor."""

    def __init__(self, model_config: HFModelConfig) -> None:
        super().__init__()
        self.model_config = model_config
        self.checkpoint = load_checkpoint(Path(model_config.local_path))

    @property
    def is_param_offload_enabled(self) -> bool:
        return False

    @property
    def is_optimizer_offload_enabled(self) -> bool:
        return False

    def scale(self, factor: float) -> None:
        for tensor in self.checkpoint.values():
            tensor.mul_(factor)


class TinyStreamEngine(TinyEngine):
    """Yields whole tensors, each after a collective, as verl's FSDP engine does."""

    def get_per_tensor_param(self, **_: Any) -> tuple[Iterator[tuple[str, torch.Tensor]], None]:
        def gathered() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in self.checkpoint.items():
                whole = tensor.clone() if dist.get_rank() == 0 else torch.zeros_like(tensor)
                dist.broadcast(whole, src=0)
                yield name, whole

        return gathered(), None


class TinyMegatronEngine(TinyEngine):
    """Actor with Megatron chunks, tensor parallel over all ranks. Iterating its stream is an error."""

    def __init__(self, model_config: HFModelConfig) -> None:
        super().__init__(model_config)
        from tests.support.megatron_models import build_model, fill_from_hf

        config = model_config.hf_config.to_dict()
        self.module = build_model(config, tp=dist.get_world_size())
        fill_from_hf(self.module, config, self.checkpoint)

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        for chunk in self.module:
            for parameter in chunk.parameters():
                parameter.mul_(factor)

    def get_per_tensor_param(self, **_: Any) -> tuple[Iterator[tuple[str, torch.Tensor]], None]:
        def gathered() -> Iterator[tuple[str, torch.Tensor]]:
            raise AssertionError("expected no gather")
            yield

        return gathered(), None


class TrainerWorker(Worker):
    """verl's TrainingWorkerTest, with a tiny engine."""

    def __init__(self, engine: str, model_config: HFModelConfig, config: CheckpointEngineConfig) -> None:
        super().__init__()
        dist.init_process_group("gloo", rank=self.rank, world_size=self.world_size)
        self.engine = {"megatron": TinyMegatronEngine, "stream": TinyStreamEngine}[engine](model_config)
        import_external_libs(config.custom_backend_module)
        arguments = config.engine_kwargs[config.backend] | {"is_master": self.rank == 0}
        bucket_size = config.update_weights_bucket_megabytes << 20
        self.checkpoint_engine = CheckpointEngineRegistry.new(config.backend, bucket_size=bucket_size, **arguments)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def scale(self, factor: float) -> None:
        self.engine.scale(factor)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> Any:
        weights, _ = self.engine.get_per_tensor_param()
        return await self.checkpoint_engine.send_weights(weights, global_steps=global_steps)

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.checkpoint_engine, method)(*args, **kwargs)


class Adapter(BaseRollout):
    """verl's MockServerAdapter: keeps what it receives."""

    def __init__(self, config: RolloutConfig, model_config: HFModelConfig) -> None:
        super().__init__(config, model_config, device_mesh=None)
        self.received: dict[str, torch.Tensor] = {}

    async def resume(self, tags: list[str]) -> None:
        raise NotImplementedError

    async def release(self) -> None:
        raise NotImplementedError

    async def update_weights(self, weights: AsyncIterator[tuple[str, torch.Tensor]], **_: Any) -> None:
        async for name, weight in weights:
            self.received[name] = weight.clone()


class RolloutWorker(CheckpointEngineWorker):
    """verl's CheckpointEngineWorkerTest."""

    def __init__(self, rollout_config: RolloutConfig, model_config: HFModelConfig) -> None:
        super().__init__(rollout_config, model_config, Adapter(rollout_config, model_config))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def differing(self, factor: float) -> list[str]:
        """Return the tensors that are not those of the checkpoint, times a factor, bit for bit; then forget all."""
        received, self.server_adapter.received = self.server_adapter.received, {}
        expected = load_checkpoint(Path(self.model_config.local_path))
        names = expected.keys() | received.keys()
        return [name for name in sorted(names) if not _equal(received.get(name), expected.get(name), factor)]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def count(self) -> int:
        """Return the number of tensors that were received."""
        return len(self.server_adapter.received)


class Replica(RolloutReplica):
    """verl's MockReplica: a replica without servers."""

    async def init_hybrid(self, worker_group: RayWorkerGroup) -> None:
        first = self.world_size * self.replica_rank
        self.workers = worker_group.workers[first : first + self.world_size]

    def get_ray_class_with_init_args(self) -> RayClassWithInitArgs:
        raise NotImplementedError

    async def launch_servers(self) -> None:
        raise NotImplementedError


def _equal(received: torch.Tensor | None, expected: torch.Tensor | None, factor: float) -> bool:
    if received is None or expected is None:
        return False
    return received.dtype == expected.dtype and torch.equal(received, expected * factor)
