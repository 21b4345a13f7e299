"""prime-rl's trainer, which publishes to a Resharder daemon where it would write checkpoints for the servers;
prime-rl 0.8.1.dev67.

prime-rl's broadcast over a shared filesystem gathers whole tensors, each on one rank, which writes them to files. Here each rank
publishes its own. Set `weight_broadcast.type = "filesystem"`, and in place of `torchrun … -m prime_rl.trainer.rl.train @ …`:

    export RESHARDER_ENDPOINT=127.0.0.1:7677 RESHARDER_MODEL=policy
    torchrun --nproc-per-node 8 -m examples.prime_rl.trainer @ trainer.toml
"""

import os
from pathlib import Path
from typing import Any

import prime_rl.transports.weights as weights
import torch.distributed as dist
from prime_rl.transports.weights.filesystem import FileSystemWeightBroadcast
from prime_rl.utils.utils import get_broadcast_dir, get_step_path
from prime_rl.utils.weights import convert_state_dict_to_hf, gather_weights_parallel
from resharder.client import Publisher, connect


class PublishingBroadcast(FileSystemWeightBroadcast):  # type: ignore[misc]
    """Publishes a version for each policy version; its step is prime-rl's."""

    publisher: Publisher | None = None

    def broadcast_weights(self, model: Any, step: int) -> None:
        """Return when this rank's part is delivered. The marker for the orchestrator follows when the version is READY."""
        dist.barrier()
        mine = convert_state_dict_to_hf(model, gather_weights_parallel(model))
        if self.publisher is None:
            self.publisher = connect(model=os.environ["RESHARDER_MODEL"])
            self.publisher.attach_config(model.config, model.config.name_or_path)
        handle = self.publisher.publish_tensors(step, mine.items)
        if self.world.is_master:
            handle.wait_ready()
            marker: Path = get_step_path(get_broadcast_dir(self.output_dir), step)
            marker.mkdir(parents=True, exist_ok=True)
            self._notify_orchestrator(marker)


weights.FileSystemWeightBroadcast = PublishingBroadcast

if __name__ == "__main__":
    from prime_rl.entrypoints.trainer import main

    main()
