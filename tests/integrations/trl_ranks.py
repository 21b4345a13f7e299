"""The lines of examples/trl on FSDP2 ranks without GPUs, which save the whole weights after each optimizer step.

`torchrun --nproc-per-node 2 -m tests.integrations.trl_ranks OUTPUT MODEL_DIR --server URL --steps N` writes OUTPUT/0.pt, 1.pt, …
"""

import sys
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from examples.trl import trainer


class Saver(TrainerCallback):  # type: ignore[misc]
    """Saves the state dict as torch gathers it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        assert any(isinstance(parameter, DTensor) for parameter in model.parameters())
        whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if dist.get_rank() == 0:
            torch.save(whole, self.folder / f"{state.global_step}.pt")

    on_train_begin = on_step_end = save


def shard_on_cpus() -> None:
    """Have accelerate shard with gloo: it takes an FSDP plugin for accelerators alone, and its code for FSDP2 runs on both."""
    original = AcceleratorState.__init__

    @wraps(original)
    def init(self: Any, *args: Any, fsdp_plugin: Any = None, **options: Any) -> None:
        original(self, *args, fsdp_plugin=fsdp_plugin, **options)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP  # as accelerate: each later state copies it

    AcceleratorState.__init__ = init


def main(folder: Path) -> None:
    shard_on_cpus()
    trainer.GRPOConfig = partial(
        trainer.GRPOConfig, fsdp=True, fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"]}
    )
    trainer.GRPOTrainer = partial(trainer.GRPOTrainer, callbacks=[Saver(folder)])
    trainer.main()


if __name__ == "__main__":
    main(Path(sys.argv.pop(1)))
