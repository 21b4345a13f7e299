"""Inventory of the tensors that a model can read when it runs, divided by whether loading created or changed them.

A model also has weights outside its parameters: in attributes, in closures of packed kernels, in objects
of quantisation methods. The inventory is taken before the weights are loaded and again after
post-processing. Tensors of the second inventory are the model's; those without a change are constant.
Tensors that appear later (KV cache, workspaces) are not weights.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
import xxhash
from resharder.converters.geometry.chunking import cut_chunks
from resharder.converters.geometry.layout import box_index, full_box
from resharder.converters.storage.digest import MASK, digest, digest_torch

_DEPTH = 6
_NO_WEIGHTS = ("_parameters", "_buffers", "_modules", "kv_cache")
_SKIPPED_PACKAGES = ("vllm.config", "vllm.distributed", "vllm.compilation", "vllm.platforms", "vllm.transformers_utils")


class Found(NamedTuple):
    """A tensor of a model."""

    path: str
    """Path from the model, e.g. `layers.0.weight`; tensors outside of parameters have the keys and names on the way."""
    module: str
    """Path of the module that has the tensor."""
    tensor: torch.Tensor
    parameter: bool
    """Whether it is a parameter."""


@dataclass
class Notes:
    """The inventories of a model, without parameters."""

    before: dict[str, int] = field(default_factory=dict)
    """Fingerprint of each tensor before loading, by path; empty after loading."""
    constant: frozenset[str] = frozenset()
    """Paths of tensors that loading did not change."""
    made: dict[str, str] = field(default_factory=dict)
    """Module of each tensor that loading created or changed, by path."""


NOTES: WeakKeyDictionary[torch.nn.Module, Notes] = WeakKeyDictionary()


def before_loading(model: torch.nn.Module) -> None:
    """Take the inventory of a model whose weights are not loaded."""
    NOTES[model] = Notes({f.path: fingerprint(f.tensor) for f in reachable(model) if not f.parameter})


def after_loading(model: torch.nn.Module) -> None:
    """Take the inventory of a loaded and post-processed model."""
    notes = NOTES.setdefault(model, Notes())
    found = [f for f in reachable(model) if not f.parameter]
    notes.constant = frozenset(f.path for f in found if notes.before.get(f.path) == fingerprint(f.tensor))
    notes.made = {f.path: f.module for f in found if f.path not in notes.constant}
    notes.before = {}


def reachable(model: torch.nn.Module) -> list[Found]:
    """Return each tensor once: parameters and buffers first, then tensors in other attributes of modules."""
    seen: set[int] = set()
    found = []
    for path, module in model.named_modules():
        for kind in (module._parameters, module._buffers):
            for name, tensor in kind.items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    found.append(Found(_join(path, name), path, tensor, kind is module._parameters))
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in _NO_WEIGHTS:
                found += [Found(p, path, tensor, False) for p, tensor in _inside(value, _join(path, name), seen, _DEPTH)]
    return found


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _inside(value: Any, path: str, seen: set[int], depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    if depth == 0 or id(value) in seen or isinstance(value, torch.nn.Module | str | int | float | type | None):
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield path, value
        return
    for name, inner in _parts(value):
        yield from _inside(inner, f"{path}{name}", seen, depth - 1)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", inner) for key, inner in list(value.items()))
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"[{i}]", inner) for i, inner in enumerate(list(value)))
    elif isinstance(value, FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                yield f"<{name}>", cell.cell_contents
            except ValueError:  # an empty cell
                continue
        yield from ((f"<default {i}>", inner) for i, inner in enumerate(value.__defaults__ or ()))
    elif isinstance(value, MethodType):
        yield "<self>", value.__self__
    elif type(value).__module__.startswith("vllm.") and not type(value).__module__.startswith(_SKIPPED_PACKAGES):
        yield from ((f".{name}", inner) for name, inner in list(getattr(value, "__dict__", {}).items()))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory as a tensor of unsigned integers of the same item size."""
    kind = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}[tensor.element_size()]
    return tensor.detach().view(kind)


def fingerprint(tensor: torch.Tensor) -> int:
    """Return a 64-bit fingerprint of shape, dtype and bytes; equal in all processes."""
    return header_fingerprint(tensor) ^ (sum(slices(tensor)) & MASK)


def header_fingerprint(tensor: torch.Tensor) -> int:
    """Return the fingerprint of shape and dtype."""
    return xxhash.xxh3_64_intdigest(f"{tuple(tensor.shape)} {tensor.dtype}".encode())


def slices(tensor: torch.Tensor, slice_bytes: int = 1 << 62) -> Iterator[int]:
    """Yield digests of parts of at most `slice_bytes` bytes; their sum, modulo 2**64, is the digest of the whole tensor."""
    if tensor.device.type == "meta" or tensor.numel() == 0:
        return
    plain = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).detach()
    shape = tuple(plain.shape)
    for chunk in cut_chunks([full_box(shape)], [plain.element_size()], slice_bytes):
        for _, box in chunk:
            part = plain[box_index(box)]
            if plain.device.type == "cpu":
                yield digest(np.asarray(bits(part).numpy()), box, shape)
            else:
                yield digest_torch(part, box, shape)
