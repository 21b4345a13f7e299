"""vLLM's own cast of whole checkpoints to FP8 blocks."""

import threading
from collections.abc import Mapping
from typing import Any

import pytest
import torch

_EAGER = threading.Lock()
"""Held while `torch.compile` is off, which is a setting of the process."""

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def cast(found: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Every matrix cast, except those of modules that the config lists as unconverted. Without vLLM, the test is skipped."""
    deep_gemm = pytest.importorskip("vllm.utils.deep_gemm", reason="the reference of a cast is vLLM's own")
    kept, made = config["quantization_config"]["modules_to_not_convert"], dict[str, torch.Tensor]()
    with _EAGER, torch.compiler.set_stance("force_eager"):
        for name, tensor in found.items():
            if tensor.dim() != 2 or name.removesuffix(".weight") in kept:
                made[name] = tensor
            else:
                made[name], made[f"{name}_scale_inv"] = deep_gemm.per_block_cast_to_fp8(tensor, [128, 128], use_ue8m0=False)
    return made
