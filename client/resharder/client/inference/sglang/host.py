"""SGLang's scheduler process as the host of a model (`engine.Host`); read against 0.5.17 and 0.5.23."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from resharder.client.inference.engine import InstallError, Loader, ModelConfig
from resharder.client.inference.sglang.hf_config import EngineConfig
from resharder.client.inference.sglang.refusals import refuse_unsupported
from resharder.converters.hf_config import Difference
from sglang.srt import runtime_context
from sglang.srt.layers.quantization.kv_cache import BaseKVCacheMethod
from sglang.srt.model_loader.loader import device_loading_context
from sglang.srt.model_loader.utils import set_default_torch_dtype
from sglang.srt.model_loader.weight_utils import default_weight_loader
from sglang.srt.runtime_context import get_parallel, get_server_args


def server_config(server_args: Any = None) -> Any:
    """Return a server's `ServerArgs`, by default this process's, with the values that SGLang has resolved."""
    from sglang.srt.arg_groups import overrides

    view = getattr(overrides, "resolving_view", None) or overrides.resolved_view  # 0.5.17
    return view(server_args or get_server_args())


REPLICAS = hasattr(runtime_context, "SpawnRanks")
"""Whether a scheduler process knows of which data parallel replica it is: not in 0.5.17."""


def rank() -> int:
    """Return this scheduler process's rank over all data parallel replicas of the server."""
    parallel = get_parallel()
    return int(parallel.tp_rank) + int(parallel.tp_size) * ((parallel.dp_rank or 0) if REPLICAS else 0)


@dataclass(frozen=True)
class SGLangHost:
    """The scheduler process in which a model runs."""

    config: Any
    """SGLang's `ModelConfig`."""
    device: torch.device
    rank: int
    neighbours: int
    """Number of scheduler processes of the server."""
    engine_config: EngineConfig

    @classmethod
    def of(cls, model_config: Any, device: Any) -> "SGLangHost":
        """Create the host of a model that SGLang loads or has loaded into this process.

        Args:
            model_config: SGLang's `ModelConfig`.
            device: The model's device.
        """
        found, parallel, server = torch.device(device), get_parallel(), server_config()
        if found.type == "cuda" and found.index is None:
            found = torch.device("cuda", torch.cuda.current_device())
        known = EngineConfig(model_config.model_path, server.json_model_override_args, server.context_length)
        return cls(model_config, found, rank(), int(parallel.tp_size) * int(server.dp_size), known)

    def refusal(self) -> str:
        """Return why SGLang's configuration is not supported; empty if it is."""
        return refuse_unsupported(server_config(), self.config, replicas=REPLICAS)

    def config_differences(self, version: bytes) -> list[Difference]:
        """Return how the engine's config.json differs from a version's, with the engine's values first."""
        return self.engine_config.differences(version)

    def model_config(self, *, drafter: bool) -> ModelConfig:
        """Return SGLang's `ModelConfig`. Drafters are refused."""
        found: ModelConfig = self.config
        return found

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Set the default dtype and the device, and disable gradients, without inference mode, in which schedulers run."""
        with torch.inference_mode(False), torch.no_grad(), set_default_torch_dtype(self.config.dtype), self.device:
            yield

    def recordable(self, model: torch.nn.Module) -> AbstractContextManager[None]:
        """Return a no-op: parameters keep their shapes, and a recording writes constants alone, as a load does.

        FP8 weights whose shapes post-processing has changed do not fit the version's, which ends the recording.
        """
        return nullcontext()

    @property
    def cannot_reload_quantised(self) -> str:
        """Return what to do: SGLang does not undo what its kernels did to FP8 weights, so only unchanged ones can be written."""
        return _PLAIN_KERNELS

    def original_loader(self, tensor: torch.Tensor) -> Loader:
        """Return the tensor's own weight loader; for a scale of a KV cache, one that raises `InstallError`."""
        found: Loader = getattr(tensor, "weight_loader", default_weight_loader)
        return _refuse_scale if getattr(tensor, _OF_KV_CACHE, False) else found

    def defaults(self, module: torch.nn.Module) -> Collection[str]:
        """Return the scales of KV caches, which SGLang sets itself if a checkpoint lacks them."""
        return frozenset(module._parameters) if isinstance(getattr(module, "quant_method", None), BaseKVCacheMethod) else ()

    @contextmanager
    def reloading(self, model: torch.nn.Module, model_config: ModelConfig, modules: frozenset[str]) -> Iterator[None]:
        """Prepare `modules` for `model.load_weights` as SGLang's own update does, and post-process them at exit."""
        methods = [(module, method) for name, module, method in _methods(model) if name in modules]
        for module, method in methods:
            if restore := getattr(method, "restore_weights_before_loading", None):  # 0.5.17 has none; nor have AMX's
                with device_loading_context(module, self.device):
                    restore(module)
            if isinstance(method, BaseKVCacheMethod):  # as made, for which post-processing sets defaults
                for scale in module.parameters(recurse=False):
                    scale.fill_(-1.0)
        try:
            yield
        finally:
            _process(methods, self.device)


_OF_KV_CACHE = "_skip_weight_check"  # SGLang's mark of the scales of KV caches
_IN_UE8M0 = "format_ue8m0"  # its mark of scales that are cast, or taken for such, and are not cast again
_PLAIN_KERNELS = (
    "SGLang cannot load them again: start it with kernels that read FP8 blocks as they are (--fp8-gemm-backend triton, "
    "--moe-runner-backend triton)"
)


def _refuse_scale(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    raise InstallError(
        "the version has scales of a KV cache, which are not supported with SGLang, since it also keeps them outside of tensors: "
        "publish the checkpoint without them"
    )


def post_process(model: torch.nn.Module, device: torch.device) -> None:
    """Post-process a model whose weights were loaded, as SGLang does."""
    _process([(module, method) for _, module, method in _methods(model)], device)


def _methods(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, Any]]:
    for name, module in model.named_modules():
        if (method := getattr(module, "quant_method", None)) is not None:
            yield name, module, method


def _process(methods: Sequence[tuple[torch.nn.Module, Any]], device: torch.device) -> None:
    for module, method in methods:
        with device_loading_context(module, device):
            method.process_weights_after_loading(module)
        if any(getattr(parameter, _IN_UE8M0, False) for parameter in module.parameters(recurse=False)):
            raise InstallError(f"SGLang has cast scales of FP8 weights to UE8M0 for its kernels. {_PLAIN_KERNELS}")
