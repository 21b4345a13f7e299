"""LoRA adapters of tiny models, as PEFT's folders."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

RANK, ALPHA = 8, 16


def save_adapter(folder: Path, base: Mapping[str, torch.Tensor], seed: int, *targets: str) -> Path:
    """A random adapter of the base's modules whose names end in one of `targets`; without any, of all linear layers."""
    draw, tensors, modules = torch.Generator().manual_seed(seed), dict[str, torch.Tensor](), set[str]()
    for name, weight in sorted(base.items()):
        module = name.removesuffix(".weight")
        if module == name or not module.endswith(targets or "proj"):
            continue
        modules.add(module.rpartition(".")[2])
        a = torch.randn(RANK, weight.shape[1], generator=draw) * 0.1
        b = torch.randn(weight.shape[0], RANK, generator=draw) * 0.1
        tensors[f"base_model.model.{module}.lora_A.weight"] = a.to(weight.dtype)
        tensors[f"base_model.model.{module}.lora_B.weight"] = b.to(weight.dtype)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": sorted(modules),
        "bias": "none",
        "use_rslora": False,
    }
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
