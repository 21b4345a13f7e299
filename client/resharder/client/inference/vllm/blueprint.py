"""What each worker of a vLLM server would load, without the server: models built on the meta device and recorded, one process.

vLLM's models ask their process groups for ranks and sizes alone while they are built; here groups are just that. Read against
vLLM 0.26, 0.28 and 0.32 (distributed/parallel_state.py).
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
from resharder.client.inference.vllm.reload import original_loader
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
    """A server's sizes, in workers; `ep`: experts are spread over all tensor and data parallel workers."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: bool = False

    @property
    def workers(self) -> int:
        return self.tp * self.pp * self.dp


def worker_recording(
    config: HFConfig, specs: Mapping[str, TensorSpec], server: ServerSizes, worker: int, **options: Any
) -> Recording:
    """What worker `worker` of the server would load of a checkpoint of `specs`. `options` go to vLLM's EngineArgs.

    Workers count as vLLM counts them: data parallel replicas outermost, then pipeline stages, then tensor parallel ranks.
    Raises what vLLM raises for a model or sizes that it does not serve.
    """
    with worker_model(config, server, worker, **options) as model:
        return record(model, specs, original_loader)


@contextmanager
def worker_model(
    config: HFConfig, server: ServerSizes, worker: int, *, memory: bool = False, **options: Any
) -> Iterator[torch.nn.Module]:
    """The model of that worker, in the state in which vLLM calls its `load_weights`, and vLLM's surroundings for doing so. With
    `memory` its parameters are real, without on the meta device."""
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
                with nullcontext() if memory else _WithoutMemory():
                    model = initialize_model(vllm_config)
            finally:
                torch.set_default_dtype(dtype)
            # By the models' ids, which are used again: what an earlier worker's stage lacked would be left out here.
            model_utils._model_to_pp_missing_layer_names.clear()
            yield model


def _inspect_here(config: HFConfig) -> None:
    """Has vLLM look at the model's class in this process: by itself it starts one for each, which takes longer than the rest."""
    for name in config.get("architectures") or ():
        if name in ModelRegistry.models:
            ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())


class _WithoutMemory(TorchFunctionMode):
    """Inside, new tensors of floating point are on the meta device. Those of integers are real: loaders look experts up there."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function in _FACTORIES and kwargs.get("device") is None:
            dtype = kwargs.get("dtype") or (None if function in _BY_VALUE else torch.get_default_dtype())
            if dtype is not None and dtype.is_floating_point:
                kwargs["device"] = "meta"
        return function(*args, **kwargs)


_BY_VALUE = {torch.arange, torch.full, torch.tensor, torch.as_tensor}  # without a dtype it follows from the arguments
_FACTORIES = _BY_VALUE | {torch.empty, torch.empty_strided, torch.zeros, torch.ones, torch.rand, torch.randn, torch.eye}


@contextmanager
def _groups(server: ServerSizes, worker: int) -> Iterator[None]:
    """vLLM's groups as worker `worker` sees them."""
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
    known = {name: members for name, members in groups.items() if hasattr(parallel_state, name)}
    before = {name: getattr(parallel_state, name) for name in known}
    try:
        for name, members in known.items():
            setattr(parallel_state, name, _group(name, members, worker))
        yield
    finally:
        for name, group in before.items():
            setattr(parallel_state, name, group)


@dataclass(frozen=True)
class _Sizes:
    """What some models ask of torch's group under vLLM's."""

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
