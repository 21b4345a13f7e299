"""Megatron's distributed optimizer over FP8 primary weights, on a CPU.

Weights are of the stand-in's class (`fake_te`). DDP, the optimizer and their collectives are Megatron's own; the optimizer takes
CUDA parameters alone, so its calls see CPU tensors as CUDA ones.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

from tests.support import megatron_shim  # noqa: F401

# isort: split
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, param_and_grad_buffer
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from torch.overrides import TorchFunctionMode
from transformer_engine.pytorch.tensor import Float8BlockwiseQTensor

DIVIDED = DistributedDataParallelConfig(
    use_distributed_optimizer=True, overlap_grad_reduce=True, bucket_size=50_000, fp8_param_gather=True
)
"""Several buckets for each buffer of a small model, whose boundaries cut parameters."""


def put_in_fp8(chunks: Sequence[torch.nn.Module]) -> list[Any]:
    """Put the matrices of linear layers in FP8 blocks, as under Megatron's `fp8_param_gather`, and return them.

    Each keeps its values as `high_precision`, which become the master weight.
    """
    found: list[Any] = []
    for chunk in chunks:
        for name, module in list(chunk.named_modules()):
            for kind, weight in list(module.named_parameters(recurse=False)):
                if ".linear_" in name and kind.startswith("weight") and weight.dim() == 2:
                    taken: Any = torch.nn.Parameter(Float8BlockwiseQTensor(weight.detach()), requires_grad=False)
                    taken.__dict__ |= vars(weight)  # Megatron's marks, as of experts
                    taken.high_precision = weight.detach()
                    setattr(module, kind, taken)
                    found.append(taken)
    return found


def wrap_divided(chunks: Sequence[torch.nn.Module]) -> list[Any]:
    """Wrap chunks in DDP for a distributed optimizer, with buckets that divide parameters."""
    for parameter in (parameter for chunk in chunks for parameter in chunk.parameters()):
        parameter.requires_grad_()
    wrapped = [DistributedDataParallel(chunk.config, DIVIDED, chunk) for chunk in chunks]
    for wrapper in wrapped:
        assert all(len(buffer.buckets) > 1 for buffer in (*wrapper.buffers, *wrapper.expert_parallel_buffers))
    return wrapped


class _CpuAsCuda(TorchFunctionMode):
    """Puts tensors on the CPU that are asked for on CUDA, and names CPU types as those of CUDA, which the optimizer asks for."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if given.get("device") == "cuda":
            given["device"] = "cpu"
        found = function(*args, **given)
        return found.replace("torch.", "torch.cuda.") if function is torch.Tensor.type and isinstance(found, str) else found


class Training:
    """Chunks in DDP with their optimizer, whose ranks of data parallelism divide the master weights. All ranks make one."""

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        for weight in put_in_fp8(chunks):
            weight.get_high_precision_init_val = lambda values=weight.high_precision: values
            weight.clear_high_precision_init_val = lambda: None
        self.chunks = wrap_divided(chunks)
        settings = {"optimizer": "adam", "lr": 0.01, "weight_decay": 0.0, "clip_grad": 0.0}
        config = OptimizerConfig(**settings, bf16=True, use_distributed_optimizer=True, fp8_recipe="blockwise")
        with _CpuAsCuda():
            (self.optimizer,) = get_megatron_optimizer(config, self.chunks, use_gloo_process_groups=False).chained_optimizers

    def step(self) -> None:
        """Update the weights with other gradients on each rank of data parallelism, which DDP averages."""
        generator = torch.Generator().manual_seed(parallel_state.get_data_parallel_rank())  # tensor-parallel replicas stay equal
        for parameter in self._parameters().values():
            parameter.main_grad.normal_(generator=generator)
        for chunk in self.chunks:
            chunk.start_grad_sync()
            chunk.finish_grad_sync()
        with _CpuAsCuda(), patch.object(param_and_grad_buffer, "_coalescing_manager", lambda *args, **kwargs: nullcontext()):
            updated, _, _ = self.optimizer.step()  # gloo mixes up coalesced gathers of several dtypes
        assert updated

    def masters(self) -> dict[str, torch.Tensor]:
        """Return the whole master weights of this rank's chunks in float32, gathered from the ranks that divide them."""
        group = parallel_state.get_data_parallel_group()
        parts: list[Any] = [None] * group.size()
        dist.all_gather_object(parts, dict(self._parts()), group)
        found = {name: torch.full(p.shape, torch.nan).flatten() for name, p in self._parameters().items()}
        for name, (start, values) in (each for part in parts for each in part.items()):
            found[name][start : start + values.numel()] = values
        return {name: found[name].view(p.shape) for name, p in self._parameters().items()}

    def _parts(self) -> Iterator[tuple[str, tuple[int, torch.Tensor]]]:
        for name, parameter in self._parameters().items():
            if parameter.main_param is not None:
                start = self.optimizer._get_model_param_range_map(parameter)["param"].start
                yield name, (start, parameter.main_param.detach().clone())

    def _parameters(self) -> dict[str, Any]:
        return {f"{n}.{name}": p for n, chunk in enumerate(self.chunks) for name, p in chunk.module.named_parameters()}
