"""Tiny checkpoints with linear layers and experts in FP8, in blocks of 128 by 128 or by channel, as released."""

import json
from pathlib import Path
from typing import Any

import torch
from resharder.converters.quantization.cast import quantise_whole
from resharder.converters.quantization.scheme import Scheme
from safetensors.torch import save_file

from tests.support.tiny_hf import save_tokenizer, tiny_config
from tests.support.weights import random_weights

BLOCK = 128
_HEADS = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3": _HEADS | {"intermediate_size": 512},
    "qwen3_moe": _HEADS | {"moe_intermediate_size": 256},
    "deepseek_v3": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "moe_intermediate_size": 256,
        "n_shared_experts": 1,
        "q_lora_rank": 128,
        "kv_lora_rank": 512,  # vLLM's MLA takes no smaller heads
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_nextn_predict_layers": 0,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    },
}
"""Changes of each family's tiny config; blocks fit at TP 1 and 2."""


def fp8_config(family: str, **changes: Any) -> dict[str, Any]:
    """Return a config with `quantization_config`; routers and the head stay in bf16."""
    config = tiny_config(family, num_hidden_layers=2, dtype="bfloat16", **SHAPES[family] | changes)
    gates = [f"model.layers.{layer}.mlp.gate" for layer in range(2)]
    return config | {
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": ["lm_head", *gates],
        }
    }


def fp8_weights(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Return random weights; projections have a `weight_scale_inv`."""
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    found: dict[str, torch.Tensor] = {}
    for name, weight in random_weights(plain, seed, torch.bfloat16).items():
        if name.endswith(("proj.weight", "with_mqa.weight")):
            found[name], found[f"{name}_scale_inv"] = quantised(weight)
        else:
            found[name] = weight.float() if "correction_bias" in name else weight
    return found


def quantised(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weight in FP8 and the scale of each block."""
    rows, columns = weight.shape
    blocks = torch.nn.functional.pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    scales = blocks.abs().view(-(-rows // BLOCK), BLOCK, -1, BLOCK).amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
    whole = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return (blocks / whole).to(torch.float8_e4m3fn)[:rows, :columns].contiguous(), scales


def save_channels(folder: Path, family: str, seed: int) -> Path:
    """Write a checkpoint in FP8 by channel."""
    scheme, config = Scheme(channels=True), fp8_config(family)
    del config["quantization_config"]
    found: dict[str, torch.Tensor] = {}
    weights = random_weights(config, seed, torch.bfloat16)
    for name, weight in weights.items():
        if scheme.converts(name, tuple(weight.shape)):
            found[name], found[scheme.scale_of(name)] = quantise_whole(name, weight, scheme)
        else:
            found[name] = weight
    config["quantization_config"] = scheme.config({name: tuple(weight.shape) for name, weight in weights.items()})
    save_tokenizer(folder, config["vocab_size"])
    (folder / "config.json").write_text(json.dumps(config))
    save_file(found, folder / "model.safetensors", {"format": "pt"})
    return folder


def save_fp8(folder: Path, family: str, seed: int, **changes: Any) -> Path:
    """Write a checkpoint."""
    config = fp8_config(family, **changes)
    save_tokenizer(folder, config["vocab_size"])
    (folder / "config.json").write_text(json.dumps(config))
    save_file(fp8_weights(config, seed), folder / "model.safetensors", {"format": "pt"})
    return folder
