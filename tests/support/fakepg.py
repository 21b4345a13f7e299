"""Any rank of any world in one process: torch's "fake" process groups have ranks and sizes and move nothing."""

from tests.support import megatron_shim  # noqa: F401

# isort: split
import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed.tensor import debug
from torch.testing._internal.distributed.fake_pg import FakeStore


def enter(rank: int, world: int) -> None:
    """This process is rank `rank` of `world` from here on; Megatron's groups of an earlier life are gone."""
    leave()
    debug._clear_sharding_prop_cache()  # it remembers meshes, and with them another rank's place
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)


def leave() -> None:
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
