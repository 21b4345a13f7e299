"""Inventory of the tensors that a model can read when it runs, divided by whether loading created or changed them.

A model also has weights outside its parameters: in attributes, in closures of packed kernels, in objects
of quantisation methods. The inventory is taken before the weights are loaded and again after
post-processing. Tensors of the second inventory are the model's; those without a change are constant.
Tensors that appear later (KV cache, workspaces) are not weights.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
import xxhash
from resharder.client.inference.recording.places import places, put_back
from resharder.converters.geometry.chunking import cut_chunks
from resharder.converters.geometry.layout import box_index, full_box
from resharder.converters.storage.digest import MASK, digest, digest_torch


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
    """The inventories of a model, without parameters that are not small."""

    before: dict[str, int] = field(default_factory=dict)
    """Fingerprint of each tensor before loading, by path; empty after loading."""
    own: frozenset[str] = frozenset()
    """Paths of small parameters and of other tensors that the engine has loaded from a checkpoint of its own."""
    constant: frozenset[str] = frozenset()
    """Paths of tensors that loading did not change."""
    made: dict[str, str] = field(default_factory=dict)
    """Module of each tensor that loading created or changed, by path."""


_SMALL = 64  # elements of a parameter; scales of a KV cache have one, or one for each head
NOTES: WeakKeyDictionary[torch.nn.Module, Notes] = WeakKeyDictionary()


def before_loading(model: torch.nn.Module) -> None:
    """Take the inventory of a model whose weights are not loaded."""
    NOTES[model] = Notes({f.path: fingerprint(f.tensor) for f in reachable(model) if _is_small(f)})


def after_own_checkpoint(model: torch.nn.Module) -> None:
    """Take the inventory of a model whose weights the engine has loaded from a checkpoint of its own, before post-processing."""
    notes = NOTES.get(model, Notes())
    before = notes.before
    notes.own = frozenset(f.path for f in reachable(model) if f.path in before and before[f.path] != fingerprint(f.tensor))


def _is_small(found: Found) -> bool:
    """Return whether to fingerprint a tensor before it is loaded. A large parameter's memory is not touched before."""
    return not found.parameter or found.tensor.numel() <= _SMALL


def after_loading(model: torch.nn.Module) -> None:
    """Take the inventory of a loaded and post-processed model."""
    notes = NOTES.setdefault(model, Notes())
    found = [f for f in reachable(model) if not f.parameter]
    notes.constant = frozenset(f.path for f in found if notes.before.get(f.path) == fingerprint(f.tensor))
    notes.made = {f.path: f.module for f in found if f.path not in notes.constant}
    notes.before = {}


@contextmanager
def observed_reload(model: torch.nn.Module) -> Iterator[None]:
    """Reload modules in the block. At exit, kernels' objects have their tensors from before, with the new values.

    A tensor that the reload created and that cannot be put back counts as made by loading, so that its module
    is loaded in each install.

    Raises:
        ValueError: A tensor has another shape or dtype than before.
    """
    before = list(places(model))
    yield
    created = put_back(model, before)
    notes = NOTES.get(model)
    if notes is not None:
        notes.constant -= created.keys()
        notes.made |= created


def reachable(model: torch.nn.Module) -> list[Found]:
    """Return each tensor once: parameters and buffers first, then tensors in other attributes of modules."""
    found: dict[int, Found] = {}
    for place in places(model):
        found.setdefault(id(place.tensor), Found(*place[:4]))
    return list(found.values())


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
