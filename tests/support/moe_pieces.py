"""A fused expert parameter and the thousands of pieces that fill it, as vLLM's MoE layers have them; no engine."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from resharder.converters.geometry.layout import Piece, TensorSpec, full_box
from resharder.converters.storage.digest import digest

EXPERTS, FFN, HIDDEN = 64, 24, 40


def moe_pieces(device: str) -> tuple[dict[str, torch.Tensor], list[Piece], Any, torch.Tensor]:
    """(live tensors, the pieces of each expert's gate and up, the source they come from, what `w13` has to become)."""
    live = {"w13": torch.zeros(EXPERTS, 2 * FFN, HIDDEN, dtype=torch.bfloat16, device=device)}
    values = torch.randn(EXPERTS, 2, FFN, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()
    box = full_box((FFN, HIDDEN))
    pieces, arrays, specs, expected = [], {}, {}, {}
    for expert in range(EXPERTS):
        for half, name in enumerate(("gate", "up")):
            tensor = f"experts.{expert}.{name}"
            pieces.append(Piece(tensor, box, "w13", (2 * expert + half) * FFN * HIDDEN, (HIDDEN, 1)))
            arrays[tensor] = np.asarray(values[expert, half].view(torch.uint16).numpy())
            specs[tensor] = TensorSpec(tensor, "BF16", (FFN, HIDDEN))
            expected[tensor, box] = digest(arrays[tensor], box, (FFN, HIDDEN))
    source = SimpleNamespace(arrays=arrays, specs=specs, expected=expected, copyable=lambda array: array)
    return live, pieces, source, values.reshape(EXPERTS, 2 * FFN, HIDDEN)
