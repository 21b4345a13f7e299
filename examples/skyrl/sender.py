"""SkyRL's weight sync through vLLM's trainer factory, with the backend `resharder`; SkyRL 0.4.0.

SkyRL 0.4 has vLLM's factory build the sender of each training rank, and its own client calls the servers' routes. Import this
module in the process of each policy worker, before the first sync: it names another backend, and leaves SkyRL's source and client
as they are. Each sync then publishes a version. The servers are those of the model, `vllm serve` with the plugin and
`--weight-transfer-config '{"backend": "resharder"}'`.
"""

from collections.abc import Callable
from typing import Any

from resharder.client import ResharderTrainerInitInfo
from skyrl.backends.skyrl_train.weight_sync import weight_senders
from skyrl.backends.skyrl_train.weight_sync.control_plane import SkyrlWeightSyncClient
from skyrl.train.utils.utils import str_to_torch_dtype
from transformers import AutoConfig
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory


def build_trainer_engine(
    *,
    ie_cfg: Any,
    rank: int,
    source_factory: Callable[[Any, str], Any],
    server_urls: list[str],
    data_parallel_size: int,
    base_model_path: str,
    **_: Any,
) -> Any:
    """Return the sender of a rank. The daemon and the model are RESHARDER_ENDPOINT and RESHARDER_MODEL."""
    engine = WeightTransferTrainerFactory.trainer_init(
        ResharderTrainerInitInfo(rank=rank, config=AutoConfig.from_pretrained(base_model_path), tokenizer=base_model_path),
        client=SkyrlWeightSyncClient(server_urls, data_parallel_size),
        source=source_factory(str_to_torch_dtype(ie_cfg.model_dtype), "nccl"),
    )
    engine.skyrl_handles_prefix_cache_reset = True  # an install resets it
    engine.skyrl_force_disable_expandable_segments = False
    engine.skyrl_empty_cache_after_send = True
    return engine


weight_senders.build_trainer_engine = build_trainer_engine
