"""Four real Megatron ranks: fill from FOLDER/FAMILY, publish; build anew under another layout, fill from that version, compare
the logits with transformers'.

`torchrun --nproc-per-node 4 -m tests.client.fill_ranks ENDPOINT FOLDER` with FOLDER/cases.json; writes FOLDER/found.json.
"""

import json
import sys
from pathlib import Path
from typing import Any

from tests.support.megatron_models import build_model, logits

# isort: split
import resharder.client.trainer as resharder
import torch
import torch.distributed as dist
from resharder.client.filling import fill
from resharder.converters.models import local_layout
from transformers import AutoModelForCausalLM


def go_on(endpoint: str, source: Path, published: dict[str, Any], filled: dict[str, Any]) -> dict[str, float]:
    config, name = json.loads((source / "config.json").read_text()), f"real-{source.name}"
    chunks = build_model(config, **published)
    fill(chunks, config, source)
    with resharder.connect(endpoint, model=name) as publisher:
        publisher.attach(chunks, config)
        publisher.publish(step=1).wait_ready(120)
    chunks = build_model(config, **filled)
    version = f"resharder://{endpoint}/models/{name}/versions/latest"
    proven = fill(chunks, config, version, shared=dist.get_rank() % 2 == 0).proven
    boxes = len({(piece.tensor, piece.box) for piece in local_layout(chunks, config)[0].pieces})
    tokens = torch.randint(0, config["vocab_size"], (2, 31), generator=torch.Generator().manual_seed(7))
    found, worst = logits(chunks, config, tokens), torch.zeros(())
    if found is not None:
        reference = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager")
        with torch.no_grad():
            worst = (found - reference(tokens).logits).abs().max()
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return {"difference": float(worst), "proven": proven, "boxes": boxes}


def main(endpoint: str, folder: Path) -> None:
    dist.init_process_group("gloo")
    cases = json.loads((folder / "cases.json").read_text())
    found = {family: go_on(endpoint, folder / family, **case) for family, case in cases.items()}
    if dist.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
