"""Images in prompts of tiny models, in the form of transformers' processors."""

from types import SimpleNamespace
from typing import Any

import torch


def image(config: dict[str, Any], seed: int = 0) -> SimpleNamespace:
    """A picture in a prompt of Qwen's models: token ids, pixel values and grid."""
    vision = config["vision_config"]
    grid = torch.tensor([[1, 4, 4]])
    merged = int(grid.prod()) // vision["spatial_merge_size"] ** 2
    start, end, pad = (config[f"{name}_token_id"] for name in ("vision_start", "vision_end", "image"))
    tokens = torch.tensor([[5, 6, start, *[pad] * merged, end, 7, 8, 9, 10, 11]])
    width = vision["in_channels"] * vision["temporal_patch_size"] * vision["patch_size"] ** 2
    pixels = torch.randn(int(grid.prod()), width, generator=torch.Generator().manual_seed(seed))
    return SimpleNamespace(tokens=tokens, pixels=pixels, grid=grid)
