"""Four real ranks train a LoRA adapter of transformers' Qwen3 with PEFT, and publish it before and after a step: with FSDP2,
whose matrices of 6 rows leave one rank without any, then as replicas of DistributedDataParallel.

`main(ENDPOINT, FOLDER)` under `tests.support.ranks`, with a checkpoint in FOLDER/source; writes what PEFT itself gathers,
FOLDER/{fsdp,ddp}-{1,2}.pt.
"""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from resharder.client import connect
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import Qwen3ForCausalLM

TARGETS = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]


def main(endpoint: str, path: str) -> None:
    folder = Path(path)
    dist.init_process_group("gloo")
    config = json.loads((folder / "source" / "config.json").read_text())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for kind in ("fsdp", "ddp"):
        model = adapted(folder)
        wrapped: Any = sharded(model, mesh) if kind == "fsdp" else DistributedDataParallel(model)
        with connect(endpoint, model=f"{kind}-lora", base="policy") as publisher:
            publisher.attach(wrapped, config, check_replicas=True)
            for step in (1, 2):
                handle = publisher.publish(step, base_version=step)
                write(model, folder / f"{kind}-{step}.pt")
                handle.wait_ready(120)
                train(wrapped, config["vocab_size"])
    dist.destroy_process_group()


def adapted(folder: Path) -> Any:
    torch.manual_seed(0)
    base: Any = Qwen3ForCausalLM.from_pretrained(folder / "source", attn_implementation="eager")
    model = get_peft_model(base, LoraConfig(r=6, lora_alpha=12, target_modules=TARGETS, init_lora_weights=False))
    return model.train()


def sharded(model: Any, mesh: Any) -> Any:
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(model: Any, vocabulary: int) -> None:
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.01)
    torch.manual_seed(dist.get_rank())
    tokens = torch.randint(0, vocabulary, (2, 16))
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()


def write(model: Any, file: Path) -> None:
    """What PEFT makes of torch's own whole state dict, on rank 0."""
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        torch.save(get_peft_model_state_dict(model, whole), file)
