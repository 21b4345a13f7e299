"""Four Megatron ranks on two emulated hosts with a node each: ranks 0 and 1 read the first folder alone, 2 and 3 the second.

`main(ENDPOINT, FOLDER)` under `tests.support.ranks`, with FOLDER/nodes.json, the folder of each node, and a checkpoint in
FOLDER/policy; writes FOLDER/transports-RANK.json. Needs root.
"""

import json
import os
from pathlib import Path

from tests.support.hidden import hide


def main(endpoint: str, path: str) -> None:
    folder = Path(path)
    hide([json.loads((folder / "nodes.json").read_text())[1 - int(os.environ["RANK"]) // 2]])
    import resharder.client.trainer.connect as resharder
    import torch
    import torch.distributed as dist

    from tests.support.fp8_reference import FP8
    from tests.support.megatron_models import build_model, fill_from_hf
    from tests.support.tiny_hf import load_checkpoint

    dist.init_process_group("gloo")
    config = json.loads((folder / "policy" / "config.json").read_text())
    chunks = build_model(config, tp=2, pp=2, dtype=torch.bfloat16)
    fill_from_hf(chunks, config, load_checkpoint(folder / "policy"))
    also = {"policy-fp8": FP8}
    with resharder.connect(endpoint, model="policy", also=also) as publisher:
        publisher.attach(chunks, config, tokenizer=folder / "policy")
        handles = [publisher.publish(step) for step in (1,)]
        for parameter in (parameter for chunk in chunks for parameter in chunk.parameters()):
            parameter.data.mul_(3)
        handles.append(publisher.publish(2))
        for handle in handles:
            handle.wait_ready(120)
    found = [handle.transport for handle in handles]
    (folder / f"transports-{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
