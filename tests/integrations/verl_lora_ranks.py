"""Ranks of verl's own FSDP2 engine with LoRA, on CPUs: each step trains, and sends by the checkpoint engine as verl's actor does.

`torchrun --nproc-per-node 2 -m tests.integrations.verl_lora_ranks MODEL_DIR DAEMON JOB STEPS OUTPUT` writes the adapter's
tensors after each step as torch gathers them, to OUTPUT/1.safetensors, ….
"""

import asyncio
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import get_peft_model_state_dict
from safetensors.torch import save_file

from tests.support import verl_cpu  # noqa: F401

# isort: split
from verl.checkpoint_engine import CheckpointEngineRegistry
from verl.trainer.config import CheckpointConfig
from verl.utils.import_utils import import_external_libs
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

TOKENS = torch.tensor([[5, 17, 300, 41, 8, 99, 2, 64]])


def main() -> None:
    folder, endpoint, job, steps, output = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), Path(sys.argv[5])
    dist.init_process_group("gloo")
    engine = training_engine(folder)
    import_external_libs("resharder.client.integrations.verl")
    arguments = {"model": "verl-lora", "base": "verl", "endpoint": endpoint, "follow": True}
    sender = CheckpointEngineRegistry.new("resharder", bucket_size=1 << 20, is_master=dist.get_rank() == 0, **arguments)
    for step in range(1, steps + 1):
        sender.init_process_group(dist.get_rank(), dist.get_world_size(), job, step)
        train(engine)
        weights, _ = engine.get_per_tensor_param()  # as verl's ActorRolloutRefWorker.update_weights
        asyncio.run(sender.send_weights(weights, global_steps=step))
        tensors = {name: tensor.full_tensor().clone() for name, tensor in get_peft_model_state_dict(engine.module).items()}
        if dist.get_rank() == 0:
            save_file(tensors, output / f"{step}.safetensors")
    dist.destroy_process_group()


def training_engine(folder: str) -> Any:
    model = HFModelConfig(
        path=folder,
        lora_rank=8,
        lora_alpha=16,
        target_modules="all-linear",
        enable_gradient_checkpointing=False,
        use_remove_padding=False,
        override_config={"attn_implementation": "eager"},
    )
    fsdp = FSDPEngineConfig(strategy="fsdp2", use_torch_compile=False)
    engine = FSDPEngineWithLMHead(model, fsdp, FSDPOptimizerConfig(lr=1e-2, total_training_steps=10), CheckpointConfig())
    engine.initialize()
    return engine


def train(engine: Any) -> None:
    engine.optimizer.zero_grad()
    engine.module(input_ids=TOKENS, labels=TOKENS).loss.backward()
    engine.optimizer.step()


if __name__ == "__main__":
    main()
