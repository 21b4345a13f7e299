"""Tiny checkpoints in the formats of the OCP: MXFP8 as compressed-tensors writes it, and gpt-oss' MXFP4."""

import json
import zlib
from pathlib import Path
from typing import Any

import torch
from resharder.converters.quantization.scheme import Scheme
from safetensors.torch import save_file
from vllm.model_executor.layers.quantization.utils.mxfp8_utils import _mxfp8_e4m3_quantize_torch

from tests.support.fp8_checkpoint import SHAPES
from tests.support.tiny_hf import save_tokenizer, tiny_config
from tests.support.weights import random_weights

GROUP = 32
_EIGHT_BITS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "group", "group_size": GROUP}
MXFP8 = {
    "quant_method": "compressed-tensors",
    "format": "mxfp8-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": _EIGHT_BITS | {"dynamic": False, "scale_dtype": "torch.uint8"},
            "input_activations": _EIGHT_BITS | {"dynamic": True},
        }
    },
    "ignore": ["lm_head"],
}


def save_mxfp8(folder: Path, seed: int) -> Path:
    """Write a Qwen3 whose projections are in MXFP8."""
    config = tiny_config("qwen3", num_hidden_layers=2, dtype="bfloat16", **SHAPES["qwen3"])
    found: dict[str, torch.Tensor] = {}
    for name, weight in random_weights(config, seed, torch.bfloat16).items():
        found[name] = weight
        if Scheme().converts(name, tuple(weight.shape)):
            found[name], found[f"{name}_scale"] = _mxfp8_e4m3_quantize_torch(weight)
    return _save(folder, config | {"quantization_config": MXFP8}, found)


def save_mxfp4(folder: Path, seed: int) -> Path:
    """Write a gpt-oss whose experts are in MXFP4, of random elements."""
    config = tiny_config("gpt_oss", num_hidden_layers=2, dtype="bfloat16")
    found: dict[str, torch.Tensor] = {}
    for name, weight in random_weights(config, seed, torch.bfloat16).items():
        if weight.dim() < 3:
            found[name] = weight
            continue
        experts, inner, outer = weight.shape
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        blocks = (experts, outer, inner // GROUP)
        found[f"{name}_blocks"] = torch.randint(0, 256, (*blocks, GROUP // 2), dtype=torch.uint8, generator=generator)
        found[f"{name}_scales"] = torch.randint(120, 125, blocks, dtype=torch.uint8, generator=generator)
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    return _save(folder, config | {"quantization_config": quantization}, found)


def _save(folder: Path, config: dict[str, Any], found: dict[str, torch.Tensor]) -> Path:
    save_tokenizer(folder, config["vocab_size"])
    (folder / "config.json").write_text(json.dumps(config))
    save_file(found, folder / "model.safetensors", {"format": "pt"})
    return folder
