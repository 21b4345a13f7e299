"""Weights of the benchmarks' models, made from a seed alone, so that every process and every layout has the same.

They are a hash of each element's tensor, position and seed, small enough for a model to run with, and of other sizes in each
block of 128 by 128: of equal scales, a worker cannot observe where they are. `python -m benchmarks.weights MODEL FOLDER SEED
DEVICE` writes a checkpoint of the model whose config.json is in MODEL.
"""

import json
import shutil
import sys
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from resharder.converters.architectures.checkpoint import expected_shapes
from resharder.converters.geometry.layout import Box, full_box
from safetensors.torch import save_file

SHARD = 4 << 30  # bytes of a file
_FIRST, _SECOND = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9


def values(name: str, box: Box, shape: tuple[int, ...], seed: int, device: torch.device) -> torch.Tensor:
    """Return the elements of a box of the HF tensor `name`, which has this shape, as float32."""
    place = torch.zeros((), dtype=torch.int64, device=device)
    block = torch.zeros((), dtype=torch.float32, device=device)
    for r, n in zip(box, shape, strict=True):
        indices = torch.arange(r.start, r.last + 1, r.step, device=device)
        place, block = place.unsqueeze(-1) * n + indices, block.unsqueeze(-1) + indices // 128
    place.bitwise_xor_(int.from_bytes(blake2b(f"{name} {seed}".encode(), digest_size=7).digest(), "little"))
    place.mul_(_FIRST).bitwise_xor_(place >> 32).mul_(_SECOND).bitwise_right_shift_(40).bitwise_and_(0xFFFF)
    return (place.to(torch.float32) / 65536 - 0.5).mul_(block.remainder_(7).add_(7).mul_(0.04 / 13))


class Checkpoint:
    """All tensors of a model, whole, in bfloat16 on a device, by their HF names."""

    def __init__(self, config: Mapping[str, Any], device: torch.device) -> None:
        self.tensors = {
            name: torch.empty(shape, dtype=torch.bfloat16, device=device) for name, shape in expected_shapes(dict(config)).items()
        }

    def fill(self, seed: int) -> None:
        for name, tensor in self.tensors.items():
            tensor.copy_(values(name, full_box(tuple(tensor.shape)), tuple(tensor.shape), seed, tensor.device))

    def write(self, folder: Path, model: Path) -> None:
        """Write a checkpoint of files of 4 GiB, with the files of the folder `model`."""
        for file in model.iterdir():
            if file.is_file():
                shutil.copy(file, folder)
        shards, size = [dict[str, torch.Tensor]()], 0
        for name, tensor in self.tensors.items():
            if size + tensor.nbytes > SHARD and shards[-1]:
                shards.append({})
                size = 0
            shards[-1][name] = tensor
            size += tensor.nbytes
        for number, shard in enumerate(shards, 1):
            save_file(shard, folder / f"model-{number:05}-of-{len(shards):05}.safetensors", metadata={"format": "pt"})


def main() -> None:
    model, folder, seed, device = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), torch.device(sys.argv[4])
    checkpoint = Checkpoint(json.loads((model / "config.json").read_text()), device)
    checkpoint.fill(seed)
    checkpoint.write(folder, model)


if __name__ == "__main__":
    main()
