"""vLLM's worker process as the host of a model (`engine.Host`); read against 0.26, 0.28 and 0.32."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from resharder.client.inference.engine import Loader, ModelConfig
from resharder.client.inference.vllm import reload
from resharder.client.inference.vllm.refusals import refuse_unsupported


@dataclass(frozen=True)
class VLLMHost:
    """The worker process a model lives in; `rank` counts over all data parallel replicas of the server."""

    vllm_config: Any
    device: torch.device
    rank: int

    @classmethod
    def of_worker(cls, worker: Any) -> "VLLMHost":
        """The host around one of vLLM's workers (WorkerBase)."""
        return cls(worker.vllm_config, device_here(worker.device), rank_in_server(worker.vllm_config, worker.rank))

    @classmethod
    def of_loader(cls, vllm_config: Any) -> "VLLMHost":
        """The host of a model that vLLM is about to load, when there is no worker to ask yet."""
        rank = rank_in_server(vllm_config, vllm_config.parallel_config.rank)
        return cls(vllm_config, device_here(vllm_config.device_config.device), rank)

    @property
    def neighbours(self) -> int:
        return int(self.vllm_config.parallel_config.world_size)

    def refusal(self) -> str:
        return refuse_unsupported(self.vllm_config)

    def model_config(self, *, drafter: bool) -> ModelConfig:
        config = self.vllm_config
        found: ModelConfig = config.speculative_config.draft_model_config if drafter else config.model_config
        return found

    @contextmanager
    def calling(self) -> Iterator[None]:
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config), self.device, torch.no_grad():
            yield

    def recordable(self, model: torch.nn.Module) -> AbstractContextManager[None]:
        return reload.format_of_load(model)

    def original_loader(self, tensor: torch.Tensor) -> Loader:
        return reload.original_loader(tensor)

    def reloading(
        self, model: torch.nn.Module, model_config: ModelConfig, modules: frozenset[str]
    ) -> AbstractContextManager[None]:
        return reload.reloading(model, model_config, modules)


def device_here(device: Any) -> torch.device:
    """The device with its index. vLLM's configuration gives `cuda` alone (DeviceConfig; 0.26), and threads other than the
    worker's own begin with the first GPU as their current one."""
    found = torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if found.type == "cuda" and found.index is None else found


def rank_in_server(vllm_config: Any, rank: int) -> int:
    """The rank over all data parallel replicas. vLLM hides them from dense models, except for `data_parallel_index` (0.28 and
    later)."""
    parallel = vllm_config.parallel_config
    replica = getattr(parallel, "data_parallel_index", parallel.data_parallel_rank)
    return int(replica) * int(parallel.world_size) + rank
