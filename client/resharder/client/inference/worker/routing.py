"""The route of each HF tensor into a running model, decided by evidence.

The first version always goes through `load_weights`. Then every recorded region of memory is compared with
the store's digest of the same box. If they are equal and no other tensor was derived from the region, later
versions are copied straight into it. The engine loads and processes all other modules (packed, quantised)
in each install.
"""

from collections import defaultdict
from collections.abc import Mapping, Set
from dataclasses import dataclass
from itertools import islice, pairwise, takewhile
from typing import NamedTuple

import numpy as np
import torch
from resharder.client.inference.engine import InstallError
from resharder.client.inference.recording import inventory
from resharder.client.inference.recording.places import sealed_modules
from resharder.client.inference.recording.recorder import Local, Recording
from resharder.client.inference.recording.wrappers import named_modules
from resharder.client.inference.worker.memory import live_tensors, read_all, strided
from resharder.client.inference.worker.source import VersionSource
from resharder.converters.geometry.layout import ITEM_SIZES, Box, Piece, box_index, box_size
from resharder.converters.storage.digest import Array

_SAMPLE = 4096  # elements that are compared before a whole tensor is


@dataclass(frozen=True)
class Route:
    """The route of all HF tensors into one model."""

    boxed: tuple[Piece, ...]
    """Pieces that are copied straight into memory."""
    loaded: frozenset[str]
    """HF tensors that go through `load_weights`."""
    modules: frozenset[str]
    """Paths of the modules that `load_weights` fills and the engine then processes."""
    readable: tuple[Piece, ...]
    """Pieces of loaded tensors that memory has unchanged, so that they can be verified in memory too."""
    boxed_bytes: int = 0
    """Bytes of all `boxed` pieces, computed once because an install has no time for a sum over thousands of pieces."""


def first_route(recording: Recording, model: torch.nn.Module, shared: frozenset[str]) -> Route:
    """Return the route of the first version: all tensors go through `load_weights`."""
    modules = frozenset(name for name, _ in named_modules(model, remove_duplicate=False))
    return Route((), frozenset(recording.needs), modules - shared, ())


class Evidence(NamedTuple):
    """Evidence from the memory of a model after a version went through `load_weights`."""

    unlike: frozenset[str]
    """Locals whose memory differs from what was recorded, or may."""
    derived: dict[str, frozenset[str]]
    """For each module that has derived tensors, the modules from which they may derive."""
    unproven: frozenset[str] = frozenset()
    """Locals of `unlike` that a version with other values may show to be as recorded."""

    def without(self, modules: frozenset[str], recording: Recording) -> "Evidence":
        """Return the evidence without `modules`; `recording` already excludes them."""
        derived = {module: below - modules for module, below in self.derived.items() if module not in modules}
        return Evidence(self.unlike & recording.locals.keys(), derived, self.unproven & recording.locals.keys())


def decide(recording: Recording, evidence: Evidence) -> Route:
    """Decide the route of all HF tensors."""
    sources: dict[str, set[str]] = defaultdict(set)  # module -> HF tensors that end in it
    holders: dict[str, set[str]] = defaultdict(set)  # HF tensor -> modules
    for tensor, locals_ in recording.reads.items():
        for module in (m for name in locals_ for m in recording.locals[name].modules):
            sources[module].add(tensor)
            holders[tensor].add(module)
    if "" in recording.impure:
        return Route((), frozenset(recording.needs), frozenset(sources) | frozenset(evidence.derived), ())
    # An install leaves modules that no HF tensor fills, such as those of a KV cache's scales, as they are.
    through = {m for name in evidence.unlike for m in recording.locals[name].modules if m in sources}
    through |= {module for tensor in recording.impure for module in holders[tensor]}
    for module, below in evidence.derived.items():
        fed = {m for m in below if m in sources}
        if fed:
            through |= fed | {module}
    todo = list(through)
    while todo:  # a fused module must be complete, and so must every module that shares a tensor with it
        for tensor in sources[todo.pop()]:
            todo += holders[tensor] - through
            through |= holders[tensor]
    loaded = frozenset(tensor for module in through for tensor in sources[module])
    boxed = tuple(p for p in recording.layout.pieces if p.tensor not in loaded)
    readable = tuple(p for p in recording.layout.pieces if p.tensor in loaded and p.local not in evidence.unlike)
    size = sum(box_size(p.box) * ITEM_SIZES[recording.layout.tensors[p.tensor].dtype] for p in boxed)
    return Route(boxed, loaded, frozenset(through), readable, size)


def gather_evidence(
    model: torch.nn.Module, recording: Recording, source: VersionSource, shared: frozenset[str] = frozenset()
) -> Evidence:
    """Compare the memory of a model with the version that was just loaded.

    Args:
        model: The model.
        recording: The model's recording.
        source: The version that went through `load_weights`.
        shared: Paths of modules to skip.

    Raises:
        InstallError: Loading made a tensor that cannot derive from any recorded HF tensor.
    """
    live = live_tensors(model)
    unlike = {name for name, local in recording.locals.items() if not is_like(local, live.get(name))}
    unlike |= _overlapping(recording)
    different, unproven = _compare(recording, live, source, recording.locals.keys() - unlike)
    return Evidence(frozenset(unlike | different | unproven), _derived(model, recording, live, shared), frozenset(unproven))


def renew_evidence(evidence: Evidence, model: torch.nn.Module, recording: Recording, source: VersionSource) -> Evidence:
    """Compare the unproven locals with a later version that went through `load_weights`."""
    different, unproven = _compare(recording, live_tensors(model), source, evidence.unproven)
    unlike = evidence.unlike - evidence.unproven | different | unproven
    return evidence._replace(unlike=unlike, unproven=frozenset(unproven))


def _compare(
    recording: Recording, live: Mapping[str, torch.Tensor], source: VersionSource, names: Set[str]
) -> tuple[set[str], set[str]]:
    """Return the locals among `names` whose memory differs from a version, and equal ones without evidence of places."""
    quantised = recording.quantised

    def packed(piece: Piece) -> bool:
        return not quantised.isdisjoint(recording.locals[piece.local].modules)

    pieces = [piece for piece in recording.layout.pieces if piece.local in names]
    different, uniform = set[str](), set[str]()
    for piece, found in zip(pieces, read_all(live, pieces, source.specs), strict=True):
        if found != source.expected[piece.tensor, piece.box]:
            different.add(piece.local)
        elif packed(piece) and _is_uniform(source.arrays[piece.tensor], piece.box):
            uniform.add(piece.local)
    return different, uniform - different


def _is_uniform(array: Array, box: Box) -> bool:
    """Return whether all elements are equal: such a tensor would be equal to itself in another order too."""
    part = array[box_index(box)]
    first = part.flat[0]
    return bool(np.all(part.flat[:_SAMPLE] == first)) and bool(np.all(part == first))


def is_like(local: Local, tensor: torch.Tensor | None) -> bool:
    """Return whether a tensor has the recorded dtype and its elements at the recorded places of its memory.

    A view of the recorded parameter has them too, such as the transpose that vLLM keeps of FP8 weights by channel.
    """
    return (
        tensor is not None
        and tensor.dtype == local.dtype
        and _steps(tuple(tensor.shape), tensor.stride()) == _steps(local.shape, local.strides)
        and tensor.device.type != "meta"
        and tensor.numel() > 0
    )


def _steps(shape: tuple[int, ...], strides: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return (stride, number of elements) of the fewest dimensions with the same places, from the largest stride on."""
    found: list[tuple[int, int]] = []
    for stride, n in sorted(((stride, n) for n, stride in zip(shape, strides, strict=True) if n > 1), reverse=True):
        if found and found[-1][0] == stride * n:
            found[-1] = stride, n * found[-1][1]
        else:
            found.append((stride, n))
    return found


def _overlapping(recording: Recording) -> set[str]:
    """Return the locals that have an element which more than one piece fills."""
    by_local: dict[str, list[Piece]] = defaultdict(list)
    for piece in recording.layout.pieces:
        by_local[piece.local].append(piece)
    return {name for name, pieces in by_local.items() if _overlap(pieces)}


def _overlap(pieces: list[Piece]) -> bool:
    if len(pieces) == 1:
        return False
    ends = [p.offset + sum((r.count - 1) * s for r, s in zip(p.box, p.strides, strict=True)) + 1 for p in pieces]
    spans = sorted((p.offset, end) for p, end in zip(pieces, ends, strict=True))
    if all(a[1] <= b[0] for a, b in pairwise(spans)):
        return False
    taken = np.zeros(max(ends), dtype=bool)
    for piece in pieces:
        part = strided(taken, piece.view(piece.box))
        if part.any():
            return True
        part[...] = True
    return False


def _derived(
    model: torch.nn.Module, recording: Recording, live: Mapping[str, torch.Tensor], shared: frozenset[str]
) -> dict[str, frozenset[str]]:
    notes = inventory.NOTES.get(model)
    if notes is None:
        raise InstallError(
            "Resharder cannot observe the loader that loaded this model: start the server with --load-format auto or dummy, or "
            "with its weights from the daemon"
        )
    paths = {id(module): path for path, module in named_modules(model)}
    modules = list(named_modules(model, remove_duplicate=False))  # a module's are together
    first = {path: i for i, (path, _) in enumerate(modules)}

    def below_of(path: str) -> frozenset[str]:
        inside = f"{path}." if path else ""
        found = takewhile(lambda each: each[0] == path or each[0].startswith(inside), islice(modules, first[path], None))
        return frozenset(paths[id(module)] for _, module in found)

    read = {name for locals_ in recording.reads.values() for name in locals_}
    owners = {tensor.untyped_storage()._cdata for name, tensor in live.items() if name in recording.locals and tensor.numel()}
    holds_weights = {module for local in recording.locals.values() for module in local.modules}
    # An object of C++ may have a packed copy of its module's weights.
    sealed = sealed_modules(model).difference(shared)
    result = {path: below_of(path) for path in sealed}
    refused = []
    for found in inventory.reachable(model):
        if found.path in read or found.module in shared or not (found.path in notes.made or found.parameter):
            continue
        if found.tensor.numel() == 0 or (found.path not in recording.locals and found.tensor.untyped_storage()._cdata in owners):
            continue  # empty, or an alias of a parameter
        result[found.module] = below = below_of(found.module)
        if not below & holds_weights:
            refused.append(found.path)
    if refused:
        raise InstallError(
            f"cannot determine the source weights of {refused[:8]}: every tensor that loading makes has to derive from a weight"
        )
    return result
