"""vLLM's worker process as the host of a model (`engine.Host`); read against 0.26, 0.28 and 0.32."""

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from resharder.client.inference.engine import Loader, ModelConfig
from resharder.client.inference.vllm import reload
from resharder.client.inference.vllm.hf_config import EngineConfig
from resharder.client.inference.vllm.refusals import refuse_unsupported
from resharder.converters.hf_config import Difference


@dataclass(frozen=True)
class VLLMHost:
    """The worker process in which a model runs."""

    vllm_config: Any
    device: torch.device
    rank: int
    """The rank over all data parallel replicas of the server."""
    engine_config: EngineConfig | None = None
    """The config.json that the engine was started with."""

    @classmethod
    def of_worker(cls, worker: Any) -> "VLLMHost":
        """Create the host of one of vLLM's workers (`WorkerBase`)."""
        config = worker.vllm_config
        known = getattr(worker, "resharder_engine_config", None)
        return cls(config, device_here(worker.device), rank_in_server(config, worker.rank), known)

    @classmethod
    def of_loader(cls, vllm_config: Any) -> "VLLMHost":
        """Create the host of a model that vLLM is about to load, from its configuration."""
        rank = rank_in_server(vllm_config, vllm_config.parallel_config.rank)
        return cls(vllm_config, device_here(vllm_config.device_config.device), rank, EngineConfig(vllm_config))

    @property
    def neighbours(self) -> int:
        """Number of workers of this replica."""
        return int(self.vllm_config.parallel_config.world_size)

    def refusal(self) -> str:
        """Return why vLLM's configuration is not supported; empty if it is."""
        return refuse_unsupported(self.vllm_config)

    def config_differences(self, version: bytes) -> list[Difference]:
        """Return how the engine's config.json differs from a version's, with the engine's values first."""
        return self.engine_config.differences(version) if self.engine_config is not None else []

    def model_config(self, *, drafter: bool) -> ModelConfig:
        """Return vLLM's `ModelConfig` of the model or of its drafter."""
        config = self.vllm_config
        found: ModelConfig = config.speculative_config.draft_model_config if drafter else config.model_config
        return found

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Set vLLM's configuration and the device, and disable gradients."""
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config), self.device, torch.no_grad():
            yield

    def recordable(self, model: torch.nn.Module) -> AbstractContextManager[None]:
        """Give the parameters their shapes before loading, on the meta device."""
        return reload.format_of_load(model)

    @property
    def cannot_reload_quantised(self) -> str:
        """Return nothing: vLLM's layerwise reload processes quantised weights as a load does."""
        return ""

    def original_loader(self, tensor: torch.Tensor) -> Loader:
        """Return the tensor's own weight loader."""
        return reload.original_loader(tensor)

    def defaults(self, module: torch.nn.Module) -> Collection[str]:
        """Return the parameters that vLLM sets itself if a checkpoint lacks them."""
        return reload.defaults(module)

    def reloading(
        self, model: torch.nn.Module, model_config: ModelConfig, modules: frozenset[str]
    ) -> AbstractContextManager[None]:
        """Reload `modules` with vLLM's layerwise reload."""
        return reload.reloading(model, model_config, modules)


def device_here(device: Any) -> torch.device:
    """Return the device with its index.

    vLLM's configuration has `cuda` without an index (`DeviceConfig`; 0.26), and the current device of a new
    thread is the first GPU.
    """
    found = torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if found.type == "cuda" and found.index is None else found


def rank_in_server(vllm_config: Any, rank: int) -> int:
    """Return the rank over all data parallel replicas.

    For dense models, vLLM provides the replica only in `data_parallel_index` (0.28 and later).
    """
    parallel = vllm_config.parallel_config
    replica = getattr(parallel, "data_parallel_index", parallel.data_parallel_rank)
    return int(replica) * int(parallel.world_size) + rank
