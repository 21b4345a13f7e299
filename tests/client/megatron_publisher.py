"""What each rank of a real Megatron trainer does: fill its model from FOLDER/source, publish it.

`torchrun --nproc-per-node 4 -m tests.client.megatron_publisher ENDPOINT FOLDER` with FOLDER/layout.json
as `build_model` takes it.
"""

import json
import sys
from pathlib import Path

from tests.support.megatron_models import build_model, fill_from_hf, wrap_ddp, wrap_float16

# isort: split
import resharder.client.trainer as resharder
import torch
import torch.distributed as dist

from tests.support.tiny_hf import load_checkpoint


def main(endpoint: str, folder: Path) -> None:
    dist.init_process_group("gloo")
    case = json.loads((folder / "layout.json").read_text())
    source = folder / "source"
    config = json.loads((source / "config.json").read_text())
    chunks = build_model(config, **case["layout"], dtype=torch.bfloat16 if case["wrapped"] else torch.float32)
    fill_from_hf(chunks, config, load_checkpoint(source))
    if case["wrapped"]:
        chunks = wrap_ddp(wrap_float16(chunks))
    with resharder.connect(endpoint, model="policy") as publisher:
        publisher.attach(chunks, config, tokenizer=source, check_replicas=True)
        handle = publisher.publish(step=1)
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.data.fill_(9)
        handle.wait_ready(120)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
