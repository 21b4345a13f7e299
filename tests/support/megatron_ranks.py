"""Logits of four real Megatron ranks (gloo, CPU).

`main(FOLDER, CASE, ...)` under `tests.support.ranks`, with FOLDER holding a checkpoint of `FAMILY`
and of each case's family, writes the findings of rank 0 to FOLDER/found.json.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.megatron_models import UNBUILT, build_model, fill_from_hf, wrap_ddp

# isort: split
import torch
import torch.distributed as dist
from megatron.core import parallel_state as state
from megatron.core.distributed.param_and_grad_buffer import shard_buffer
from resharder.converters.errors import ReplicasDiffer
from resharder.converters.geometry.layout import Layout
from resharder.converters.models.megatron.layout import local_layout, stale_parameters
from resharder.converters.models.replicas import check_replicas

from tests.support import reference, tiny_hf

FORWARD: dict[str, tuple[str, dict[str, Any]]] = {
    "tied, padded, pipeline": ("qwen3_tied", {"tp": 2, "pp": 2, "vocab_multiple": 128}),
    "virtual stages": ("qwen3_tied", {"tp": 2, "pp": 2, "vpp": 2, "spec": "te"}),
    "biases": ("qwen2", {"tp": 2, "pp": 2, "spec": "te"}),
    "fewer key-value heads than ranks": ("qwen2", {"tp": 4}),
    "experts": ("qwen3_moe", {"tp": 2, "ep": 2}),
    "experts in pipeline": ("qwen3_moe", {"tp": 2, "ep": 2, "pp": 2, "spec": "te"}),
    "latent attention": ("deepseek_v2", {"tp": 4, "spec": "te", "moe_token_dispatcher_type": "allgather"}),
    "latent attention, no low rank": ("deepseek_v2_lite", {"tp": 2, "ep": 2, "pp": 2}),
    "latent attention, dense layers by their kinds": ("glm4_moe_lite", {"tp": 2, "ep": 2, "pp": 2}),
    "biases and a layer that predicts": ("glm4_moe", {"tp": 2, "ep": 4}),
    "halves of a projection": ("mimo", {"tp": 4}),
    "a layer that predicts": ("deepseek_v3", {"tp": 2, "ep": 2, "pp": 2, "spec": "te"}),
    "sinks, biases, stacked experts": ("gpt_oss", {"tp": 2, "ep": 4, "spec": "te"}),
    "delta nets and experts": ("qwen3_next", {"tp": 2, "ep": 2, "pp": 2, "spec": "te"}),
    "delta nets": ("qwen3_5", {"tp": 4, "spec": "te"}),
    "norms after attention, windows": ("gemma3", {"tp": 2, "pp": 2, "vocab_multiple": 64, "spec": "te"}),
    "norms over the heads of all ranks": ("minimax_m2", {"tp": 2, "ep": 2}),
    "a shared expert with a gate": ("qwen2_moe", {"tp": 2, "ep": 2, "pp": 2, "spec": "te"}),
    "plain": ("llama", {"tp": 4}),
    "biases everywhere": ("llama_biased", {"tp": 2, "pp": 2, "spec": "te"}),
    "windows": ("mistral", {"tp": 2, "pp": 2}),
    "experts under other names": ("mixtral", {"tp": 2, "ep": 2, "pp": 2, "spec": "te"}),
    "untied": ("qwen3", {"tp": 2, "pp": 2, "spec": "te"}),
    "caps and norms after attention": ("gemma2", {"tp": 2, "pp": 2}),
    "gate and up as one": ("glm", {"tp": 2, "pp": 2, "spec": "te"}),
    "gate and up as one, norms after attention": ("glm4", {"tp": 2, "pp": 2}),
    "gains around zero, scaled embeddings": ("gemma", {"tp": 2, "pp": 2, "spec": "te"}),
    "experts under Hy3's names": ("hy_v3", {"tp": 2, "ep": 2, "pp": 2, "spec": "te"}),
    "an MLP without a gate": ("nemotron", {"tp": 4, "spec": "te"}),
    "norms over all heads": ("olmoe", {"tp": 2, "ep": 2, "spec": "te"}),
    "latent attention, many experts": ("kimi_k2", {"tp": 2, "ep": 4}),
    "delta nets, experts cut": ("qwen3_5_moe", {"tp": 2, "ep": 2, "pp": 2, "spec": "te"}),
    "a tower of Megatron's": ("qwen3_vl", {"tp": 4, "spec": "te"}),
    "a tower of Megatron's, stacked and transposed experts": ("qwen3_vl_moe", {"tp": 2, "ep": 2, "pp": 2, "spec": "te"}),
    "a tower of transformers'": ("qwen2_5_vl", {"tp": 2, "pp": 2}),
    "a tower and delta nets": ("qwen3_5_vl", {"tp": 2, "pp": 2, "spec": "te"}),
    "a tower, delta nets and stacked experts": ("qwen3_5_moe_vl", {"tp": 2, "ep": 2, "pp": 2, "spec": "te"}),
    "a tower, a projector and windows": ("gemma3_vl", {"tp": 2, "pp": 2, "vocab_multiple": 64, "spec": "te"}),
    "a tower, biases and experts": ("glm4v_moe", {"tp": 2, "ep": 4}),
    "a tower, latent attention and experts": ("kimi_k25", {"tp": 2, "ep": 2, "pp": 2}),
    "experts cut by tensor parallelism": (  # the all-to-all dispatcher gathers unevenly there, which gloo cannot
        "qwen3_moe",
        {"tp": 4, "ep": 2, "etp": 2, "spec": "te", "moe_token_dispatcher_type": "allgather"},
    ),
}
FORWARD = {name: case for name, case in FORWARD.items() if case[0] not in UNBUILT}
FAMILY = "qwen3_tied"
"""What is tested of one family alone."""


def forward_difference(folder: Path, layout: dict[str, Any]) -> float:
    """Largest difference of a logit to transformers' over all ranks, after filling every parameter through the layout."""
    config = json.loads((folder / "config.json").read_text())
    tokens = torch.randint(0, tiny_hf.words(config), (2, 31), generator=torch.Generator().manual_seed(7))
    chunks = build_model(config, **layout)
    fill_from_hf(chunks, config, tiny_hf.load_checkpoint(folder))
    worst = torch.tensor(reference.difference(chunks, config, folder, tokens))
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return float(worst)


def late_gather(folder: Path) -> dict[str, Any]:
    """One step with parameters that are gathered in the next forward pass: how many are stale, and whether ranks differ."""
    config = json.loads((folder / "config.json").read_text())
    (chunk,) = build_model(config, spec="te")
    fill_from_hf([chunk], config, tiny_hf.load_checkpoint(folder))
    wrapped: Any = wrap_ddp([chunk.train()], overlap=True)[0]
    found: dict[str, Any] = {"at first": len(stale_parameters([wrapped]))}
    tokens = torch.randint(0, config["vocab_size"], (1, 16), generator=torch.Generator().manual_seed(dist.get_rank()))
    wrapped(tokens, torch.arange(16)[None], None, labels=tokens).mean().backward()
    wrapped.finish_grad_sync()
    step(wrapped)
    found["after the step"], found["parameters"] = len(stale_parameters([wrapped])), len(list(chunk.parameters()))
    found["ranks differ"] = spread(chunk)
    wrapped.start_param_sync(force_sync=True)
    return found | {"after the gather": len(stale_parameters([wrapped])), "ranks differ then": spread(chunk)}


def replicas(folder: Path) -> dict[str, str]:
    """What is said of replicas: when all are equal, and after one value of one rank was changed. By pipeline stage, the tied
    output layer is a replica on another stage."""
    config, results = json.loads((folder / "config.json").read_text()), {}
    for case, layout, local, rank in (
        ("data parallel", {"tp": 2}, "0.decoder.layers.2.mlp.linear_fc2.weight", 3),
        ("tied", {"tp": 2, "pp": 2}, "0.output_layer.weight", 2),
    ):
        chunks = build_model(config, **layout)
        fill_from_hf(chunks, config, tiny_hf.load_checkpoint(folder))
        held, tensors = local_layout(chunks, config)
        results[f"{case}, equal"] = complaint(held, tensors)
        if dist.get_rank() == rank:
            tensors[local].detach()[-1, 5] += 1e-7
        results[f"{case}, changed"] = complaint(held, tensors)
    return results


def complaint(held: Layout, tensors: Mapping[str, torch.Tensor]) -> str:
    """Error of `check_replicas` on this rank, the same as on every other."""
    message, everyone = "", [""] * dist.get_world_size()
    try:
        check_replicas(held, tensors)
    except ReplicasDiffer as error:
        message = str(error)
    dist.all_gather_object(everyone, message)
    return message if set(everyone) == {message} else f"ranks say different things: {everyone}"


def step(wrapped: Any) -> None:
    """As Megatron's distributed optimizer (which needs CUDA) does: each data-parallel rank updates its shard of a bucket."""
    group = state.get_data_parallel_group()
    with torch.no_grad():
        for bucket in (bucket for bucket_group in wrapped.bucket_groups for bucket in bucket_group.buckets):
            parameters, gradients = (
                shard_buffer(data, group.size())[group.rank()] for data in (bucket.param_data, bucket.grad_data)
            )
            parameters -= 0.1 * gradients


def spread(chunk: torch.nn.Module) -> bool:
    """Whether data-parallel ranks hold different parameters."""
    flat = torch.cat([parameter.detach().flatten() for parameter in chunk.parameters()])
    low, high = flat.clone(), flat.clone()
    group = state.get_data_parallel_group()
    dist.all_reduce(low, dist.ReduceOp.MIN, group=group)
    dist.all_reduce(high, dist.ReduceOp.MAX, group=group)
    return not torch.equal(low, high)


def main(path: str, *cases: str) -> None:
    folder = Path(path)
    dist.init_process_group("gloo")
    by_sizes = sorted(
        ((case, FORWARD[case]) for case in cases),
        key=lambda case: [case[1][1].get(size, 0) for size in ("tp", "pp", "ep", "etp")],
    )
    found: dict[str, Any] = {name: forward_difference(folder / family, layout) for name, (family, layout) in by_sizes}
    found["late gather"] = late_gather(folder / FAMILY)
    found["replicas"] = replicas(folder / FAMILY)
    if dist.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()
