"""SkyRL's policy worker with servers that follow a Resharder daemon; skyrl 0.3.0.

SkyRL's own senders broadcast gathered weights over NCCL or pass CUDA IPC handles. This one publishes: every rank hands over its
own shards, and the servers of the model, started by `vllm serve` with the plugin, install the version. Make the worker of it:

    class Worker(Publishes, FSDPPolicyWorkerBase): ...
    PolicyWorker = ray.remote(num_gpus=1)(Worker)
"""

import asyncio
import itertools
import os
from collections.abc import Iterable
from typing import Any

from resharder.client import connect
from skyrl.backends.skyrl_train.weight_sync import WeightChunk, WeightTransferSender
from transformers import AutoConfig, AutoTokenizer


class PublishingSender(WeightTransferSender):
    """Publishes a version for each update. The daemon and the model are RESHARDER_ENDPOINT and RESHARDER_MODEL."""

    def __init__(self, module: Any, folder: str) -> None:
        self.publisher, self.steps = connect(model=os.environ["RESHARDER_MODEL"]), itertools.count()
        self.publisher.attach(module, AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder))

    async def send_chunks(self, chunks: Iterable[WeightChunk], weight_metadata: dict[str, list[Any]] | None = None) -> None:
        """Return when all servers serve the version. The gathered chunks are not iterated."""
        await asyncio.to_thread(self.publisher.publish(next(self.steps)).wait_serving)

    def teardown(self) -> None:
        self.publisher.close()


class Publishes:
    """Mixin before SkyRL's policy worker."""

    cfg: Any
    model: Any

    async def init_weight_sync_state(self, inference_engine_client: Any, inference_engine_cfg: Any) -> None:
        module = self.model.model  # FSDP2's; a Megatron worker has chunks, `self.actor_module`
        self._weight_transfer_sender = await asyncio.to_thread(PublishingSender, module, self.cfg.policy.model.path)
