"""Recordings of the workers of a vLLM server without the server: each model is built on the meta device, in one process.

vLLM's models only read ranks and sizes of their process groups while they are built, so this module
replaces the groups by objects with ranks and sizes. Read against vLLM 0.26, 0.28 and 0.32
(`distributed/parallel_state.py`).
"""

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from resharder.client.inference.recording.recorder import Recording, record
from resharder.client.inference.vllm.reload import defaults, original_loader
from resharder.converters.architectures.checkpoint import HFConfig
from resharder.converters.geometry.layout import TensorSpec
from torch.overrides import TorchFunctionMode
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models import utils as model_utils


@dataclass(frozen=True)
class ServerSizes:
    """Sizes of a server's parallel groups, which decide what each of its workers holds."""

    tp: int = 1
    """Tensor parallel size."""
    pp: int = 1
    """Number of pipeline stages."""
    dp: int = 1
    """Number of data parallel replicas."""
    ep: bool = False
    """Whether experts are distributed over all tensor and data parallel workers."""

    @property
    def workers(self) -> int:
        """Number of workers, over all replicas."""
        return self.tp * self.pp * self.dp


def worker_recording(
    config: HFConfig, specs: Mapping[str, TensorSpec], server: ServerSizes, worker: int, **options: Any
) -> Recording:
    """Record how one worker of a server would load a checkpoint.

    Errors of vLLM for a model or sizes that it does not support propagate.

    Args:
        config: The model's Hugging Face configuration.
        specs: The HF tensors of the checkpoint.
        server: The server's sizes.
        worker: The worker's number in vLLM's order: data parallel replicas outermost, then pipeline
            stages, then tensor parallel ranks.
        **options: Further options of vLLM's `EngineArgs`.
    """
    with worker_model(config, server, worker, **options) as model:
        return record(model, specs, original_loader, defaults)


@contextmanager
def worker_model(
    config: HFConfig, server: ServerSizes, worker: int, *, memory: bool = False, **options: Any
) -> Iterator[torch.nn.Module]:
    """Build the model of a worker, and set up vLLM's context for a call of its `load_weights`.

    Args:
        config: The model's Hugging Face configuration.
        server: The server's sizes.
        worker: The worker's number, as in `worker_recording`.
        memory: Whether parameters have memory; otherwise they are on the meta device.
        **options: Further options of vLLM's `EngineArgs`.
    """
    _inspect_here(config)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(dict(config)))
        vllm_config = EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            enforce_eager=True,
            tensor_parallel_size=server.tp,
            pipeline_parallel_size=server.pp,
            data_parallel_size=server.dp,
            enable_expert_parallel=server.ep,
            distributed_executor_backend="mp" if server.workers > 1 else None,
            **options,
        ).create_engine_config()
        replica, rest = divmod(worker, server.pp * server.tp)
        vllm_config.parallel_config.data_parallel_rank = replica
        vllm_config.parallel_config.rank = rest
        with _groups(server, worker), set_current_vllm_config(vllm_config, check_compile=False):
            dtype = torch.get_default_dtype()
            torch.set_default_dtype(vllm_config.model_config.dtype)
            try:
                with nullcontext() if memory else _WithoutMemory(), _kernels_of_any_cpu():
                    model = initialize_model(vllm_config)
            finally:
                torch.set_default_dtype(dtype)
            # The cache is keyed by the models' ids, which are reused: layers missing in an earlier worker's
            # stage would be skipped here.
            model_utils._model_to_pp_missing_layer_names.clear()
            yield model


def _inspect_here(config: HFConfig) -> None:
    """Register the model's class as loaded. vLLM would otherwise inspect it in a new process, which is slow."""
    for name in config.get("architectures") or ():
        if name in ModelRegistry.models:
            ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())


@contextmanager
def _kernels_of_any_cpu() -> Iterator[None]:
    """Let vLLM choose its CPU kernel for FP8 blocks on a CPU without AMX too: layouts do not depend on it."""
    try:
        from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUFp8BlockScaledMMKernel as Kernel
    except ImportError:  # vLLM 0.28, or a build for GPUs
        yield
        return
    supported = vars(Kernel)["is_supported"]
    Kernel.is_supported = classmethod(lambda cls, compute_capability=None: (True, None))
    try:
        yield
    finally:
        Kernel.is_supported = supported


class _WithoutMemory(TorchFunctionMode):
    """Create floating-point tensors on the meta device. Integer tensors are real, because loaders look up experts in them."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function in _FACTORIES and kwargs.get("device") is None:
            dtype = kwargs.get("dtype") or (None if function in _BY_VALUE else torch.get_default_dtype())
            if dtype is not None and dtype.is_floating_point:
                kwargs["device"] = "meta"
        if function is torch.Tensor.to and args[0].is_meta:  # Kimi-K2.5 moves its tower to the server's device
            kwargs.pop("device", None)
            args = tuple(arg for arg in args if not isinstance(arg, torch.device))
        return function(*args, **kwargs)


_BY_VALUE = {torch.arange, torch.full, torch.tensor, torch.as_tensor}  # without a dtype it follows from the arguments
_FACTORIES = _BY_VALUE | {torch.empty, torch.empty_strided, torch.zeros, torch.ones, torch.rand, torch.randn, torch.eye}


@contextmanager
def _groups(server: ServerSizes, worker: int) -> Iterator[None]:
    """Replace vLLM's groups by those of worker `worker`."""
    stage_size = server.pp * server.tp
    replica, rest = divmod(worker, stage_size)
    stage, rank = divmod(rest, server.tp)

    def ranks(dp: range, pp: range, tp: range) -> list[int]:
        return [d * stage_size + p * server.tp + t for d in dp for p in pp for t in tp]

    here = (range(replica, replica + 1), range(stage, stage + 1), range(rank, rank + 1))
    every = (range(server.dp), range(server.pp), range(server.tp))
    groups = {
        "_WORLD": ranks(*every),
        "_TP": ranks(here[0], here[1], every[2]),
        "_PP": ranks(here[0], every[1], here[2]),
        "_DP": ranks(every[0], here[1], here[2]),
        "_EP": ranks(every[0], here[1], every[2]),
        "_PCP": [worker],
        "_DCP": [worker],
    }
    present = {name: members for name, members in groups.items() if hasattr(parallel_state, name)}
    before = {name: getattr(parallel_state, name) for name in present}
    try:
        for name, members in present.items():
            setattr(parallel_state, name, _group(name, members, worker))
        yield
    finally:
        for name, group in before.items():
            setattr(parallel_state, name, group)


@dataclass(frozen=True)
class _Sizes:
    """The part of torch's process group that some models use."""

    ranks: int
    mine: int

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return self.mine


def _group(name: str, ranks: list[int], rank: int) -> Any:
    group = parallel_state.GroupCoordinator.__new__(parallel_state.GroupCoordinator)
    vars(group).update(
        unique_name=f"{name}:blueprint",
        rank=rank,
        ranks=ranks,
        local_rank=0,
        world_size=len(ranks),
        rank_in_group=ranks.index(rank),
        cpu_group=_Sizes(len(ranks), ranks.index(rank)),
        device_group=_Sizes(len(ranks), ranks.index(rank)),
        device=torch.device("cpu"),
        device_communicator=None,
        use_device_communicator=False,
        mq_broadcaster=None,
    )
    return group
