"""Master weights that a distributed optimizer divides among the data-parallel ranks.

Facts about megatron-core 0.16.1:

- optimizer/distrib_optimizer.py, `_build_model_gbuf_range`: each bucket of DDP's buffers is cut into as many equal ranges as its
  data-parallel group has ranks. A rank has the master weights of the elements in its own range, as a flat `main_param` with
  `main_param_sharded`; of a parameter outside of its range it has None.
- `sharded_param_state_fs_model_space`: the last entry of a replica id is the data-parallel rank, which does not matter for
  optimizer states, because no other rank of the group has the same elements.
"""

from collections.abc import Iterable

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from megatron.core.distributed import DistributedDataParallel
from resharder.converters.models.blockwise import MasterPart


def master_part(
    parameter: torch.Tensor, shards: Iterable[ShardedTensor], wrappers: Iterable[DistributedDataParallel]
) -> MasterPart | None:
    """Return the elements of a parameter whose master weights this rank has.

    Args:
        parameter: A parameter of the wrapped chunk.
        shards: Its shards in `sharded_state_dict`.
        wrappers: Megatron's DDP around the chunk.

    Returns:
        The part; None without a distributed optimizer, or with several instances of one.
    """
    if not getattr(parameter, "main_param_sharded", False):
        return None
    for wrapper in wrappers:
        if wrapper.ddp_config.num_distributed_optimizer_instances > 1:
            return None
        for buffer in (*wrapper.buffers, *wrapper.expert_parallel_buffers):
            if parameter in buffer.param_index_map:
                start, end, number = buffer.param_index_map[parameter]
                bucket, group = buffer.buckets[number], buffer.data_parallel_group
                size = bucket.grad_data.numel() // group.size()
                first = bucket.offset + group.rank() * size
                low, high = max(start, first), min(end, first + size)
                owned = all(is_main_replica(shard.replica_id[:2]) for shard in shards)
                return MasterPart(low - start, max(low, high) - start, owned)
    return None
