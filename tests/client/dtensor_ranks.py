"""Four real ranks train transformers' Qwen3 with FSDP2 over tensor parallelism, two by two, and publish before and after a step.

`main(ENDPOINT, FOLDER)` under `tests.support.ranks`, with a checkpoint in FOLDER/source; writes the whole state dicts as torch
gathers them, FOLDER/before.pt, after.pt and exchanged.pt, and FOLDER/again.pt after filling from the first version.
"""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from resharder.client import connect, fill
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import Qwen3ForCausalLM

COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWS = ("self_attn.o_proj", "mlp.down_proj")
PLAN: dict[str, Any] = {name: ColwiseParallel() for name in COLUMNS} | {name: RowwiseParallel() for name in ROWS}


def main(endpoint: str, path: str) -> None:
    folder = Path(path)
    dist.init_process_group("gloo")
    config = json.loads((folder / "source" / "config.json").read_text())
    model: Any = Qwen3ForCausalLM.from_pretrained(folder / "source", attn_implementation="eager")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
    for layer in model.model.layers:
        parallelize_module(layer, mesh["tp"], PLAN)
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with connect(endpoint, model="policy") as publisher:
        publisher.attach(model, config)
        first = publisher.publish(1)
        gather(model, folder / "before.pt")
        tokens = torch.randint(0, config["vocab_size"], (2, 16), generator=torch.Generator().manual_seed(dist.get_rank() // 2))
        model(input_ids=tokens, labels=tokens).loss.backward()
        for name, parameter in model.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight")):  # each tensor-parallel rank has seen its own heads only
                dist.all_reduce(parameter.grad.to_local(), group=mesh["tp"].get_group())
        optimizer.step()
        publisher.publish(2).wait_ready(120)
        gather(model, folder / "after.pt")
        first.wait_ready(120)
        exchanged = {name: tensor.clone() * 2 for name, tensor in model.state_dict().items()}
        model.load_state_dict(exchanged, assign=True)  # as a job that resumes: the parameters are other objects now
        model(input_ids=tokens)  # leaves the root's parameters whole
        publisher.publish(3).wait_ready(120)
        gather(model, folder / "exchanged.pt")
        fill(model, config, f"resharder://{endpoint}/{first.name}", shared=dist.get_rank() % 2 == 0)
        gather(model, folder / "again.pt")
    dist.destroy_process_group()


def gather(model: torch.nn.Module, file: Path) -> None:
    """torch's own way to the whole state dict, on rank 0."""
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        torch.save(whole, file)
