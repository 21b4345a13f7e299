"""Four real ranks train transformers' Qwen3 with FSDP2 over tensor parallelism, two by two, with dropout and frozen embeddings.

They publish before and after two steps, and from a new job that resumes from the saved state and trains on.

`main(ENDPOINT, FOLDER)` under `tests.support.ranks`, with a checkpoint in FOLDER/source; writes the whole state dicts as torch
gathers them, FOLDER/before.pt, after.pt, resumed.pt and exchanged.pt, and FOLDER/again.pt after filling from the first version.
"""

import json
from copy import deepcopy
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


STEPS = 2


def main(endpoint: str, path: str) -> None:
    folder = Path(path)
    dist.init_process_group("gloo")
    config = json.loads((folder / "source" / "config.json").read_text())
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
    model, optimizer = built(folder, mesh)
    torch.manual_seed(dist.get_rank() // 2)  # ranks of a tensor-parallel group drop out the same
    tokens = torch.randint(0, config["vocab_size"], (2, 16))
    with connect(endpoint, model="policy") as publisher:
        publisher.attach(model, config)
        first = publisher.publish(1)
        gather(model, folder / "before.pt")
        for _ in range(STEPS):
            train(model, optimizer, tokens, mesh["tp"])
        publisher.publish(2).wait_ready(120)
        gather(model, folder / "after.pt")
        first.wait_ready(120)
    saved = deepcopy(model.state_dict()), deepcopy(optimizer.state_dict())
    model, optimizer = built(folder, mesh)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    with connect(endpoint, model="policy") as publisher:
        publisher.attach(model, config)
        train(model, optimizer, tokens, mesh["tp"])
        publisher.publish(3).wait_ready(120)
        gather(model, folder / "resumed.pt")
        exchanged = {name: tensor.clone() * 2 for name, tensor in model.state_dict().items()}
        model.load_state_dict(exchanged, assign=True)  # the parameters are other objects now
        model(input_ids=tokens)  # leaves the root's parameters whole
        publisher.publish(4).wait_ready(120)
        gather(model, folder / "exchanged.pt")
        fill(model, config, f"resharder://{endpoint}/{first.name}", shared=dist.get_rank() % 2 == 0)
        gather(model, folder / "again.pt")
    dist.destroy_process_group()


def built(folder: Path, mesh: Any) -> tuple[Any, torch.optim.Optimizer]:
    model: Any = Qwen3ForCausalLM.from_pretrained(folder / "source", attn_implementation="eager", attention_dropout=0.1)
    model.train().model.embed_tokens.requires_grad_(False)
    for layer in model.model.layers:
        parallelize_module(layer, mesh["tp"], PLAN)
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    return model, torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.01)


def train(model: Any, optimizer: torch.optim.Optimizer, tokens: torch.Tensor, tp: Any) -> None:
    model(input_ids=tokens, labels=tokens).loss.backward()
    for name, parameter in model.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):  # each tensor-parallel rank has seen its own heads only
            dist.all_reduce(parameter.grad.to_local(), group=tp.get_group())
    optimizer.step()
    optimizer.zero_grad()


def gather(model: torch.nn.Module, file: Path) -> None:
    """torch's own way to the whole state dict, on rank 0."""
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        torch.save(whole, file)
