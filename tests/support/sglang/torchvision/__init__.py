"""Stand-in for torchvision, whose build for CUDA fails beside a CPU torch: SGLang imports names of it, for models with images."""

import importlib.machinery
import sys
from types import ModuleType
from typing import Any

__version__ = "0.28.0"


class _Placeholder:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("torchvision is a stand-in")

    def __getattr__(self, name: str) -> Any:
        return placeholder(name)


def placeholder(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Placeholder()


__getattr__ = placeholder

for path in ("io", "transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional"):
    module = ModuleType(f"{__name__}.{path}")
    module.__dict__.update(__getattr__=placeholder, __path__=[], __spec__=importlib.machinery.ModuleSpec(module.__name__, None))
    sys.modules[module.__name__] = module
    parent, _, child = module.__name__.rpartition(".")
    setattr(sys.modules[parent], child, module)


class _Modes:
    NEAREST, NEAREST_EXACT, BILINEAR, BICUBIC, BOX, HAMMING, LANCZOS = (
        "nearest", "nearest-exact", "bilinear", "bicubic", "box", "hamming", "lanczos",
    )  # fmt: skip


sys.modules[f"{__name__}.transforms"].InterpolationMode = _Modes  # type: ignore[attr-defined]
