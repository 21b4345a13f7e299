"""Import before megatron.core: lets megatron-core build, run and train on a torch without CUDA.

It puts the stand-in for TransformerEngine (`fake_te`) on the path, so that both of Megatron's layer specs can be built, and
replaces the few calls that megatron-core makes to CUDA whatever the device. Gated delta nets get megatron-core's own torch
maths where they would need flash-linear-attention. Two of gloo's habits are mended as well.
"""

import contextlib
import os
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
import torch.nn.functional as F

torch._dynamo.config.disable = True  # Megatron's fused functions would be compiled by gcc, at each shape and in each rank

FAKE_TE = str(Path(__file__).parent / "fake_te")


class _Stream:
    """Both a stream and an event that are always done."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def wait_stream(self, other: object) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, *args: object) -> "_Stream":
        return self

    def wait_event(self, event: object) -> None: ...

    def record(self, *args: object) -> None: ...

    def wait(self, *args: object) -> None: ...


def _as_list(sizes: Any) -> Any:
    return sizes.tolist() if isinstance(sizes, torch.Tensor) else sizes


def _patch_torch() -> None:
    cuda: Any = torch.cuda
    cuda.current_device = torch.get_default_device  # so that a model can be built on the meta device too
    cuda.synchronize = lambda *args: None
    cuda.Stream = cuda.Event = _Stream
    cuda.current_stream = lambda *args: _Stream()
    cuda.stream = lambda *args: contextlib.nullcontext()
    tensor: Any = torch.Tensor
    tensor.record_stream = lambda self, *args: None
    tensor.cuda = lambda self, *args, **kwargs: self


def _patch_gloo() -> None:
    """Split sizes stay tensors on a CPU; and gloo's scatter mis-copies inputs that are not contiguous, in silence."""
    all_to_all, scatter = dist.all_to_all_single, dist.scatter

    def all_to_all_single(
        output: Any, input: Any, output_split_sizes: Any = None, input_split_sizes: Any = None, **kwargs: Any
    ) -> Any:
        return all_to_all(output, input, _as_list(output_split_sizes), _as_list(input_split_sizes), **kwargs)

    def contiguous_scatter(tensor: Any, scatter_list: Any = None, *args: Any, **kwargs: Any) -> Any:
        return scatter(tensor, [x.contiguous() for x in scatter_list] if scatter_list else scatter_list, *args, **kwargs)

    dist.all_to_all_single, dist.scatter = all_to_all_single, contiguous_scatter


def _outside_window(queries: int, keys: int, window: tuple[int, int]) -> torch.Tensor:
    """Which keys a query does not see; megatron-core's own makes its mask on a GPU."""
    inside = torch.ones(queries, keys, dtype=torch.bool)
    return ~inside.triu(keys - queries - window[0]).tril(keys - queries + window[1])


def _l2norm(x: torch.Tensor) -> torch.Tensor:
    """As flash-linear-attention has it."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _causal_conv1d(x: torch.Tensor, weight: torch.Tensor, bias: Any, activation: str, **kwargs: Any) -> tuple[torch.Tensor, None]:
    """As flash-linear-attention has it: a filter for each channel of [batch, sequence, channels], over tokens until then."""
    channels, width = weight.shape
    padded = F.pad(x.transpose(1, 2), (width - 1, 0))
    return F.silu(F.conv1d(padded, weight[:, None], bias, groups=channels)).transpose(1, 2), None


def _patch_megatron() -> None:
    import megatron.core.fusions.fused_softmax as softmax
    import megatron.core.ssm.gated_delta_net as delta
    import megatron.core.tensor_parallel.random as rng

    rng.CudaRNGStatesTracker.fork = lambda self, name=None: contextlib.nullcontext()
    softmax.get_sliding_window_causal_mask = _outside_window
    if not delta.HAVE_FLA:  # not as a package, which transformers would take for its own forward too
        for module in [delta, *(part for part in vars(delta).values() if isinstance(part, ModuleType))]:  # a package since 0.19
            vars(module).update(HAVE_FLA=True, l2norm=_l2norm, chunk_gated_delta_rule=delta.torch_chunk_gated_delta_rule)
            vars(module).update(causal_conv1d=_causal_conv1d)  # since 0.18


if not torch.cuda.is_available() and FAKE_TE not in sys.path:
    sys.path.insert(0, FAKE_TE)
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    warnings.filterwarnings("ignore", module="megatron")
    _patch_torch()
    _patch_gloo()
    _patch_megatron()
