"""Four real Megatron ranks publish the adapters of a mixture of experts, whose values change as soon as they are published.

`main(ENDPOINT, APPLY)` under `tests.support.ranks`.
"""

from tests.support.bridge_lora import APPLY, fill
from tests.support.megatron_models import build_model, wrap_ddp, wrap_float16

# isort: split
import torch
import torch.distributed as dist
from resharder.client import connect

from tests.support.tiny_hf import tiny_config

FAMILY = "qwen3_moe"
LAYOUT = {"tp": 2, "ep": 2}
DIM, ALPHA = 4, 12


def main(endpoint: str, apply: str) -> None:
    dist.init_process_group("gloo")
    config = tiny_config(FAMILY)
    chunks = wrap_ddp(wrap_float16(APPLY[apply](build_model(config, dtype=torch.bfloat16, **LAYOUT), DIM, ALPHA)))
    fill(chunks)
    with connect(endpoint, model=f"{apply}-lora", base="policy") as publisher:
        publisher.attach(chunks, config, check_replicas=True)
        handle = publisher.publish(1, base_version=3)
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.data.fill_(9)
        handle.wait_ready(120)
        publisher.publish(2).wait_ready(120)
    dist.destroy_process_group()
