"""Megatron-Bridge's own LoRA modules over the megatron-core that is installed, and stand-ins for them of the same structure.

Its package imports megatron-core's newest release and half of NVIDIA's stack; the modules of `megatron.bridge.peft` do not.
RESHARDER_TEST_MEGATRON_BRIDGE names the folder that has `megatron/bridge`: `make .venv-megatron-bridge/.ready` gets one.
"""

import os
import sys
import zlib
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.support import megatron_shim  # noqa: F401

# isort: split
import megatron.core  # noqa: F401
import pytest
import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory

_ROOT = Path(__file__).parents[2]
_FOUND = [
    os.environ.get("RESHARDER_TEST_MEGATRON_BRIDGE", ""),
    *map(str, _ROOT.glob(".venv-megatron-bridge/lib/python3*/site-packages")),
]
FOLDER = next((path for path in map(Path, _FOUND) if (path / "megatron/bridge/peft/lora.py").is_file()), None)
needs_bridge = pytest.mark.skipif(FOLDER is None, reason="needs Megatron-Bridge's sources: make .venv-megatron-bridge/.ready")


LINEARS = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]


def apply_bridge(chunks: list[torch.nn.Module], dim: int, alpha: int, **options: Any) -> list[torch.nn.Module]:
    """Chunks with LoRA as Megatron-Bridge's recipes apply it."""
    adapted: list[torch.nn.Module] = bridge("lora").LoRA(dim=dim, alpha=alpha, target_modules=LINEARS, **options)(chunks)
    return adapted


def bridge(name: str) -> Any:
    """A module of `megatron.bridge.peft`."""
    assert FOLDER is not None
    if "megatron.bridge" not in sys.modules:
        for package in ("megatron.bridge", "megatron.bridge.peft", "megatron.bridge.utils"):
            module = ModuleType(package)
            module.__path__ = [str(FOLDER / package.replace(".", "/"))]
            sys.modules[package] = module
        utilities: Any = ModuleType("megatron.bridge.utils.common_utils")  # of which it takes one function
        utilities.print_rank_0 = print
        sys.modules[utilities.__name__] = utilities
        import_module("megatron.bridge.peft.base").maybe_enable_recompute_inputs_grad = lambda model: None  # of hybrid models
        import_module("megatron.bridge.peft.utils").version = lambda package: "2.9.0"  # of the stand-in for TransformerEngine
    return import_module(f"megatron.bridge.peft.{name}")


class StandInAdapter(torch.nn.Module):
    """As `ParallelLinearAdapter` (megatron/bridge/peft/utils.py) is built for a linear of megatron-core's own."""

    def __init__(self, linear: Any, name: str, dim: int, alpha: int) -> None:
        super().__init__()
        self.dim, self.alpha, self.activation = dim, alpha, torch.nn.Identity()
        self.by_rows, self.is_expert = isinstance(linear, RowParallelLinear), "experts." in name and "shared" not in name
        self.gated = name.endswith("linear_fc1") and linear.config.gated_linear_unit
        common: Any = {"config": linear.config, "bias": False, "is_expert": self.is_expert, "init_method": torch.nn.init.zeros_}
        group = linear.tp_group
        if self.by_rows:
            self.linear_in = RowParallelLinear(
                linear.input_size, dim, input_is_parallel=True, skip_bias_add=True, tp_group=group, **common
            )
        else:
            self.linear_in = ColumnParallelLinear(linear.input_size, dim, gather_output=True, tp_group=group, **common)
        self.linear_out = ColumnParallelLinear(dim, linear.output_size, gather_output=self.by_rows, tp_group=group, **common)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, _ = self.linear_in(x)
        x, _ = self.linear_out(x)
        return x * (self.alpha / self.dim)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None) -> Any:
        first = self.linear_in.sharded_state_dict(f"{prefix}linear_in.", sharded_offsets, metadata)
        second = self.linear_out.sharded_state_dict(f"{prefix}linear_out.", sharded_offsets, metadata)
        if self.gated:
            key = f"{prefix}linear_out.weight"
            second[key] = apply_swiglu_sharded_factory(second[key], sharded_offsets)
        if self.is_expert:  # as SequentialMLP marks its experts' replicas
            place = parallel_state.get_expert_data_parallel_rank()
            for value in (*first.values(), *second.values()):
                if hasattr(value, "replica_id"):
                    value.replica_id = (*value.replica_id[:2], place)
        return {**first, **second}


class StandInLinear(torch.nn.Module):
    """As `LoRALinear` (lora_layers.py) and `AdapterWrapper` (adapter_wrapper.py)."""

    def __init__(self, to_wrap: torch.nn.Module, adapter: StandInAdapter) -> None:
        super().__init__()
        self.to_wrap, self.adapter = to_wrap, adapter

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        output, bias = self.to_wrap(x, *args, **kwargs)
        return output + self.adapter(x).reshape(output.shape), bias

    def state_dict(self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:  # type: ignore[override]
        found = {} if destination is None else destination
        self.to_wrap.state_dict(destination=found, prefix=prefix, keep_vars=keep_vars)
        self.adapter.state_dict(destination=found, prefix=f"{prefix}adapter.", keep_vars=keep_vars)
        return found

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None) -> Any:
        base: Any = self.to_wrap
        found = base.sharded_state_dict(prefix, sharded_offsets, metadata)
        return found | self.adapter.sharded_state_dict(f"{prefix}adapter.", sharded_offsets, metadata)


def apply_stand_in(chunks: list[torch.nn.Module], dim: int, alpha: int) -> list[torch.nn.Module]:
    """Chunks of megatron-core's own layers with stand-ins around the linears of `LINEARS`."""
    for chunk in chunks:
        chunk.requires_grad_(False)
        for name, module in list(chunk.named_modules()):
            parent, _, leaf = name.rpartition(".")
            if leaf in LINEARS and isinstance(module, ColumnParallelLinear | RowParallelLinear):
                setattr(chunk.get_submodule(parent), leaf, StandInLinear(module, StandInAdapter(module, name, dim, alpha)))
    return chunks


APPLY: dict[str, Any] = {"stand-in": apply_stand_in, "bridge": apply_bridge}


def fill(chunks: Sequence[torch.nn.Module]) -> None:
    """Fill adapters as megatron-core's checkpoint loader does: from whole tensors, by the key and offset of each sharded tensor.

    The whole tensors follow from key and shape alone; those that experts share are equal for all of them.
    """
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    for chunk in chunks:
        state = inner(chunk).sharded_state_dict(metadata={"dp_cp_group": group, "non_homogeneous_layers": True})
        for key, value in state.items():
            if ".adapter." not in key or not isinstance(value, ShardedTensor | ShardedTensorFactory):
                continue
            for shard in [value] if isinstance(value, ShardedTensor) else flat(value.build()):
                fill_shard(shard, shared="experts" in key and isinstance(value, ShardedTensorFactory) and value.data.dim() == 2)


def flat(built: Any) -> list[ShardedTensor]:
    return [built] if isinstance(built, ShardedTensor) else [shard for each in built for shard in flat(each)]


def inner(chunk: Any) -> Any:
    return inner(chunk.module) if hasattr(chunk, "module") else chunk


@torch.no_grad()
def fill_shard(shard: ShardedTensor, shared: bool) -> None:
    shape = tuple(shard.global_shape)
    shared &= len(shape) == 3 and shard.prepend_axis_num == 1
    generator = torch.Generator().manual_seed(zlib.crc32(shard.key.encode()))
    whole = torch.randn(shape[1:] if shared else shape, generator=generator) * 0.3
    whole = whole.expand(shape) if shared else whole
    sizes = (1,) * (len(shape) - shard.data.dim()) + tuple(shard.data.shape)
    index = tuple(slice(first, first + size) for first, size in zip(shard.global_offset, sizes, strict=True))
    shard.data.copy_(whole[index].reshape(shard.data.shape))
