"""LoRA adapters of tiny models: PEFT's folders, and versions of them."""

import json
import uuid
from collections.abc import Mapping
from pathlib import Path

import torch
from resharder.client.trainer import connect
from safetensors.torch import load_file, save_file

from tests.support.daemon import Daemon

RANK, ALPHA = 8, 16


def random_adapter(base: Mapping[str, torch.Tensor], seed: int, *targets: str, rank: int = RANK) -> dict[str, torch.Tensor]:
    """A random adapter of the base's modules whose names end in one of `targets`; without any, of all linear layers."""
    draw, tensors = torch.Generator().manual_seed(seed), dict[str, torch.Tensor]()
    for name, weight in sorted(base.items()):
        module = name.removesuffix(".weight")
        if module == name or not module.endswith(targets or "proj"):
            continue
        a = torch.randn(rank, weight.shape[1], generator=draw) * 0.1
        b = torch.randn(weight.shape[0], rank, generator=draw) * 0.1
        tensors[f"base_model.model.{module}.lora_A.weight"] = a.to(weight.dtype)
        tensors[f"base_model.model.{module}.lora_B.weight"] = b.to(weight.dtype)
    return tensors


def save_adapter(folder: Path, base: Mapping[str, torch.Tensor], seed: int, *targets: str, rank: int = RANK) -> Path:
    """A folder with a `random_adapter`."""
    tensors = random_adapter(base, seed, *targets, rank=rank)
    modules = {name.removesuffix(".lora_A.weight").rpartition(".")[2] for name in tensors if ".lora_A." in name}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": ALPHA,
        "target_modules": sorted(modules),
        "bias": "none",
        "use_rslora": False,
    }
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def publish_adapter(daemon: Daemon, model: str, base: str, *folders: Path, base_version: int | None = None) -> list[str]:
    """The names of the versions that these PEFT folders became."""
    config = json.loads((folders[0] / "adapter_config.json").read_text()) | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
    }
    job = uuid.uuid4().hex
    publisher = connect.connect(daemon.endpoint, model=model, base=base, job=job, rank=0, world_size=1, config=config)
    try:
        found = [load_file(folder / "adapter_model.safetensors") for folder in folders]
        handles = [
            publisher.publish_tensors(step, tensors.items(), base_version=base_version) for step, tensors in enumerate(found, 1)
        ]
        for handle in handles:
            handle.wait_ready(60)
        return [handle.name for handle in handles]
    finally:
        publisher.close()
