"""Layouts of all ranks of a trainer of any size, computed in one process without weights.

Megatron places tensors by coordinates. Ranks with the same tensor and pipeline coordinates have the same dense tensors; ranks
with the same expert, expert-tensor and pipeline coordinates have the same experts. Only the first data-parallel replica is
built, on the meta device, under torch's "fake" process groups. The layouts of other ranks are composed of its parts, as replicas.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from resharder.converters.architectures.checkpoint import HFConfig
from resharder.converters.errors import UnsupportedModel
from resharder.converters.geometry.layout import Layout, Piece, TensorSpec
from resharder.converters.models.megatron.build import build_chunks
from resharder.converters.models.megatron.layout import local_layout
from torch.testing._internal.distributed.fake_pg import FakeStore


@dataclass(frozen=True)
class Parallel:
    """Sizes of a trainer's parallel layout, in ranks. `etp` defaults to `tp` without expert parallelism and to 1 with it."""

    world: int
    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    cp: int = 1
    ep: int = 1
    etp: int | None = None

    @property
    def expert_tp(self) -> int:
        """Number of expert-tensor-parallel ranks, Megatron's default included."""
        return self.etp or (1 if self.ep > 1 else self.tp)

    @property
    def stage(self) -> int:
        """Number of ranks of one pipeline stage. Raises UnsupportedModel if the sizes do not divide the world."""
        dense, expert = self.tp * self.cp * self.pp, self.expert_tp * self.ep * self.pp
        if self.world % dense or self.world % expert:
            raise UnsupportedModel(
                f"expected a world size that tp x cp x pp = {dense} and etp x ep x pp = {expert} divide, got {self.world}"
            )
        return self.world // self.pp


@contextmanager
def fake_rank(rank: int, world: int) -> Iterator[None]:
    """Run a block as rank `rank` of a world whose process groups have ranks and sizes and transfer nothing.

    Raises RuntimeError if torch.distributed is initialised already.
    """
    if dist.is_initialized():
        raise RuntimeError("this needs a process without process groups, and torch.distributed is initialised")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def world_layouts(config: HFConfig, parallel: Parallel, **options: Any) -> Iterator[tuple[int, Layout]]:
    """Yield (rank, layout) of every rank.

    Args:
        config: Content of config.json.
        parallel: Sizes of the parallel layout.
        **options: Arguments of `build_chunks`: spec, dtype, vocab_multiple, those of TransformerConfig.

    Raises UnsupportedModel and LayoutError as `local_layout` does, and the errors of megatron-core for sizes that it refuses.
    """
    stage, dense, expert = parallel.stage, parallel.tp, parallel.expert_tp * parallel.ep
    for first in range(0, parallel.world, stage):
        parts = [_parts(config, first + i, parallel, options) for i in range(max(dense, expert))]
        for i in range(stage):
            mine, experts = parts[i % dense].dense, parts[i % expert].expert
            pieces = (*(mine if i < dense else _replicas(mine)), *(experts if i < expert else _replicas(experts)))
            specs = parts[i % dense].specs | parts[i % expert].specs
            yield first + i, Layout({piece.tensor: specs[piece.tensor] for piece in pieces}, pieces)


# None of these affects placement; with Megatron's defaults, building a model needs a GPU.
WITHOUT_CUDA = {
    "use_cpu_initialization": True,
    "init_model_with_meta_device": False,
    "moe_token_dispatcher_type": "allgather",
}


@dataclass(frozen=True)
class _Parts:
    specs: dict[str, TensorSpec]
    dense: tuple[Piece, ...]
    expert: tuple[Piece, ...]


def _parts(config: HFConfig, rank: int, parallel: Parallel, options: Mapping[str, Any]) -> _Parts:
    sizes = {"tp": parallel.tp, "pp": parallel.pp, "vpp": parallel.vpp, "cp": parallel.cp, "ep": parallel.ep, "etp": parallel.etp}
    with fake_rank(rank, parallel.world):
        local = options.get("spec", "local") == "local"  # TransformerEngine needs CUDA anyway
        without_cuda = WITHOUT_CUDA if local else {}
        chunks = build_chunks(config, device="meta", **sizes | without_cuda | dict(options))  # type: ignore[arg-type]
        layout, tensors = local_layout(chunks, config)
    expert = {name for name, tensor in tensors.items() if _is_expert(tensor)}
    return _Parts(
        layout.tensors,
        tuple(piece for piece in layout.pieces if piece.local not in expert),
        tuple(piece for piece in layout.pieces if piece.local in expert),
    )


def _is_expert(tensor: torch.Tensor) -> bool:
    """Return whether megatron-core 0.16.1 marks a parameter as an expert's (`allreduce`, transformer/moe/experts.py)."""
    return getattr(tensor, "allreduce", True) is False


def _replicas(pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
    return tuple(piece._replace(replica=True) for piece in pieces)
