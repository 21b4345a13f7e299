"""Stand-in for torchvision, whose build for CUDA fails beside a CPU torch: what transformers' processors call.

Computed by torch, as torchvision does for tensors. A process has it with this file's parent folder in PYTHONPATH.
"""

import enum
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

__version__ = "0.28.0"


class InterpolationMode(enum.Enum):
    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def pil_to_tensor(image: Any) -> torch.Tensor:
    """[channels, rows, columns] of uint8."""
    width, height = image.size
    return (
        torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).reshape(height, width, -1).permute(2, 0, 1).contiguous()
    )


def resize(image: torch.Tensor, size: Sequence[int], interpolation: Any = None, antialias: bool = True, **kwargs: Any) -> Any:
    if tuple(image.shape[-2:]) == tuple(size):
        return image
    mode = InterpolationMode(interpolation or "bilinear").value
    found = torch.nn.functional.interpolate(image.float(), tuple(size), mode=mode, antialias=antialias)
    return found.round().clamp(0, 255).to(image.dtype)


def normalize(image: torch.Tensor, mean: Any, std: Any, inplace: bool = False) -> torch.Tensor:
    middle, deviation = (torch.as_tensor(each, dtype=image.dtype).view(-1, 1, 1) for each in (mean, std))
    return (image.sub_(middle) if inplace else image.sub(middle)).div_(deviation)


def grayscale_to_rgb(image: torch.Tensor) -> torch.Tensor:
    return image if image.shape[-3] == 3 else image.expand(*image.shape[:-3], 3, *image.shape[-2:])


def _absent(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def call(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"torchvision is a stand-in without {name}")

    return call


_FOUND = {each.__name__: each for each in (InterpolationMode, pil_to_tensor, resize, normalize, grayscale_to_rgb)}
for path in ("io", "transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional"):
    module = ModuleType(f"{__name__}.{path}")
    module.__dict__.update(_FOUND, __getattr__=_absent, __path__=[], __spec__=ModuleSpec(module.__name__, None, is_package=True))
    sys.modules[module.__name__] = module
    parent, _, child = module.__name__.rpartition(".")
    setattr(sys.modules[parent], child, module)
