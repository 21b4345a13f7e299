"""Four real ranks train transformers' Qwen3-VL-MoE with FSDP2 on an image, and publish before and after the step.

`main(ENDPOINT, FOLDER)` under `tests.support.ranks`, with a checkpoint in FOLDER/source; writes the whole state dict as torch
gathers it, FOLDER/after.pt.
"""

import json
from pathlib import Path

import torch
import torch.distributed as dist
from resharder.client import connect
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.support.pictures import image
from tests.support.tiny_hf import load_model


def main(endpoint: str, path: str) -> None:
    folder = Path(path)
    dist.init_process_group("gloo")
    config = json.loads((folder / "source" / "config.json").read_text())
    model, mesh = load_model(folder / "source").train(), init_device_mesh("cpu", (4,))
    for layer in (*model.model.language_model.layers, *model.model.visual.blocks):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    given = image(config, seed=dist.get_rank())
    kinds = (given.tokens == config["image_token_id"]).int()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with connect(endpoint, model="eyes") as publisher:
        publisher.attach(model, config, folder / "source")
        first = publisher.publish(1)
        model(
            given.tokens, pixel_values=given.pixels, image_grid_thw=given.grid, mm_token_type_ids=kinds, labels=given.tokens
        ).loss.backward()
        optimizer.step()
        publisher.publish(2).wait_ready(120)
        first.wait_ready(120)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        torch.save(whole, folder / "after.pt")
    dist.destroy_process_group()
