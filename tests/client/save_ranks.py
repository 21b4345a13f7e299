"""Four real Megatron ranks that save their model as training does: torch_dist, with an optimizer's states beside the weights.

`main(FOLDER)` under `tests.support.ranks`, with FOLDER/cases.json and the checkpoint of each case in
FOLDER/FAMILY, writes FOLDER/NAME/iter_0000005 and FOLDER/NAME/latest_checkpointed_iteration.txt.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.support.megatron_models import build_model, fill_from_hf

# isort: split
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from safetensors.torch import load_file


def save(source: Path, target: Path, layout: dict[str, Any], form: dict[str, bool], dtype: str) -> None:
    config = json.loads((source / "config.json").read_text())
    chunks = build_model(config, dtype=getattr(torch, dtype), **layout)
    fill_from_hf(chunks, config, load_file(source / "model.safetensors"), padding=3.0)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    weights = [chunk.sharded_state_dict(metadata={"dp_cp_group": group, **form}) for chunk in chunks]
    momenta = {
        f"{number}.{name}": replace(entry, key=f"optimizer.state.exp_avg.{entry.key}")
        for number, chunk in enumerate(weights)
        for name, entry in chunk.items()
        if isinstance(entry, ShardedTensor)
    }
    folder = target / "iter_0000005"
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
        (target / "latest_checkpointed_iteration.txt").write_text("5")
    dist.barrier()
    state = {f"model{number}": chunk for number, chunk in enumerate(weights)}
    dist_checkpointing.save(state | {"optimizer": momenta, "iteration": 5, "args": Path("of the trainer")}, str(folder))


def main(path: str) -> None:
    folder = Path(path)
    dist.init_process_group("gloo")
    for name, case in json.loads((folder / "cases.json").read_text()).items():
        save(folder / case["family"], folder / name, case["layout"], case["form"], case["dtype"])
    dist.destroy_process_group()
