"""Putting a version into a running model: boxes straight into parameters, the rest through vLLM's loader, and the proof.

How each HF tensor goes is decided by evidence. The first version always goes through `load_weights`. Then every recorded region
of live memory is compared with the store's digest of the same box: where it is equal, and nothing else was made from it, boxes go
straight into memory from then on; modules where it is not (packed, quantised) are loaded and processed by vLLM each time.
"""

import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from resharder.client.gpu.host_to_device import Placed
from resharder.client.inference.engine import Host, ModelConfig
from resharder.client.inference.recording import inventory
from resharder.client.inference.recording.recorder import Local, Recording
from resharder.client.inference.settings import fault as asked_fault
from resharder.client.inference.worker.source import Source, as_torch
from resharder.client.tracing import Timings, timed
from resharder.converters.geometry.chunking import cut_chunks
from resharder.converters.geometry.layout import ITEM_SIZES, Box, Piece, TensorSpec, View, box_index, box_size, format_box
from resharder.converters.storage.digest import MASK, Array, digest, digest_on_device
from torch.profiler import record_function

_BLOCK_BYTES = 1 << 20  # written, then read back while it is in the cache
_PARALLEL_BYTES = 64 << 20  # below, threads cost more than they bring


class InstallError(Exception):
    """The message names the tensors and what was expected of them."""


@dataclass(frozen=True)
class Route:
    """`boxed` pieces go straight into memory, `loaded` HF tensors through `load_weights`, which then processes `modules`.

    `readable`: the loaded pieces that lie in memory as they were loaded, so that they can be proven there as well. `boxed_bytes`:
    of all `boxed` pieces, added up here since an install has no time for thousands of them.
    """

    boxed: tuple[Piece, ...]
    loaded: frozenset[str]
    modules: frozenset[str]
    readable: tuple[Piece, ...]
    boxed_bytes: int = 0


def first_route(recording: Recording, model: torch.nn.Module, shared: frozenset[str]) -> Route:
    modules = frozenset(name for name, _ in model.named_modules(remove_duplicate=False))
    return Route((), frozenset(recording.needs), modules - shared, ())


class Evidence(NamedTuple):
    """After a version went through `load_weights`: locals whose memory is not what was recorded, and for each module that holds
    derived tensors the modules they may be made from."""

    unlike: frozenset[str]
    derived: dict[str, frozenset[str]]

    def without(self, modules: frozenset[str], recording: Recording) -> "Evidence":
        """What is left of it with `modules` out of the picture; `recording` is already without them."""
        derived = {module: below - modules for module, below in self.derived.items() if module not in modules}
        return Evidence(self.unlike & recording.locals.keys(), derived)


def decide(recording: Recording, evidence: Evidence) -> Route:
    """Raises InstallError for derived tensors that come from nothing recorded."""
    sources: dict[str, set[str]] = defaultdict(set)  # module -> HF tensors that end in it
    holders: dict[str, set[str]] = defaultdict(set)  # HF tensor -> modules
    for tensor, locals_ in recording.reads.items():
        for module in (m for name in locals_ for m in recording.locals[name].modules):
            sources[module].add(tensor)
            holders[tensor].add(module)
    if "" in recording.impure:
        return Route((), frozenset(recording.needs), frozenset(sources) | frozenset(evidence.derived), ())
    through = {m for name in evidence.unlike for m in recording.locals[name].modules}
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
    model: torch.nn.Module, recording: Recording, source: Source, shared: frozenset[str] = frozenset()
) -> Evidence:
    """Looks at a model into which `source` was just loaded, all of it but the modules in `shared`. Raises InstallError, with its
    name, for a tensor that loading made and that no recorded HF tensor can have been the source of."""
    live = live_tensors(model)
    unlike = {name for name, local in recording.locals.items() if not is_like(local, live.get(name))}
    unlike |= _overlapping(recording)
    pieces = [piece for piece in recording.layout.pieces if piece.local not in unlike]
    for piece, found in zip(pieces, read_all(live, pieces, source.specs), strict=True):
        if found != source.expected[piece.tensor, piece.box]:
            unlike.add(piece.local)
    return Evidence(frozenset(unlike), _derived(model, recording, live, shared))


def is_like(local: Local, tensor: torch.Tensor | None) -> bool:
    return (
        tensor is not None
        and (tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype) == local[:3]
        and tensor.device.type != "meta"
        and tensor.numel() > 0
    )


def _overlapping(recording: Recording) -> set[str]:
    """Locals of which some element is filled by more than one piece."""
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
        part = _strided(taken, piece.view(piece.box))
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
            "this model was loaded by a loader that Resharder could not watch; expected --load-format auto, dummy or resharder"
        )
    paths = {id(module): path for path, module in model.named_modules()}
    read = {name for locals_ in recording.reads.values() for name in locals_}
    owners = {tensor.untyped_storage()._cdata for name, tensor in live.items() if name in recording.locals and tensor.numel()}
    holds_weights = {module for local in recording.locals.values() for module in local.modules}
    result: dict[str, frozenset[str]] = {}
    refused = []
    for found in inventory.reachable(model):
        if found.path in read or found.module in shared or not (found.path in notes.made or found.parameter):
            continue
        if found.tensor.numel() == 0 or (found.path not in recording.locals and found.tensor.untyped_storage()._cdata in owners):
            continue  # nothing in it, or another name of a parameter
        below = frozenset(paths[id(m)] for m in model.get_submodule(found.module).modules())
        result[found.module] = below
        if not below & holds_weights:
            refused.append(found.path)
    if refused:
        raise InstallError(
            f"expected every tensor that loading makes to come from a weight; of what are these made: {refused[:8]}?"
        )
    return result


def live_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {f.path: f.tensor for f in inventory.reachable(model)}


def live_now(model: torch.nn.Module, names: frozenset[str]) -> dict[str, torch.Tensor]:
    """Some of them, without a walk through everything where they are parameters and buffers, as they mostly are."""
    found = dict(chain(model.named_parameters(), model.named_buffers()))
    if names <= found.keys():
        return found
    return live_tensors(model)


# --- memory


def _strided(flat: Array, view: View) -> Array:
    size = flat.itemsize
    return np.lib.stride_tricks.as_strided(flat[view.offset :], view.shape, tuple(s * size for s in view.strides))


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor in one dimension, from its first element to its last."""
    length = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return inventory.bits(torch.as_strided(tensor.detach(), (length,), (1,), tensor.storage_offset()))


Digest = int | torch.Tensor  # one int64 on a device, which the host has not waited for


def _on_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def _region(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    view = piece.view(piece.box)
    return torch.as_strided(tensor.detach(), view.shape, view.strides, tensor.storage_offset() + view.offset)


def _read(tensor: torch.Tensor, piece: Piece, specs: Mapping[str, TensorSpec]) -> Digest:
    """The digest of what lies in memory where `piece` says."""
    shape = specs[piece.tensor].shape
    if _on_host(tensor):
        return digest(_strided(_flat(tensor).numpy(), piece.view(piece.box)), piece.box, shape)
    return digest_on_device(_region(tensor, piece), piece.box, shape)


def read_all(live: Mapping[str, torch.Tensor], pieces: Iterable[Piece], specs: Mapping[str, TensorSpec]) -> list[int]:
    return _numbers([_read(live[piece.local], piece, specs) for piece in pieces])


def _numbers(digests: list[Digest]) -> list[int]:
    """Waits for the device once, however many digests are there."""
    there = [found for found in digests if isinstance(found, torch.Tensor)]
    arrived = iter(torch.stack(there).tolist() if there else ())
    return [next(arrived) & MASK if isinstance(found, torch.Tensor) else found for found in digests]


def _write(tensor: torch.Tensor, piece: Piece, array: Array, spec: TensorSpec) -> Digest:
    """Copies the piece's box of `array` (the whole HF tensor) into memory and returns the digest of what then lies there. On a
    device both are only begun, one after the other on the current stream."""
    if not _on_host(tensor):
        region = _region(tensor, piece)
        region.copy_(as_torch(array[box_index(piece.box)], spec.dtype), non_blocking=True)
        return digest_on_device(region, piece.box, spec.shape)
    flat, total = _flat(tensor).numpy(), 0
    for chunk in cut_chunks([piece.box], [ITEM_SIZES[spec.dtype]], _BLOCK_BYTES):
        for _, box in chunk:
            target = _strided(flat, piece.view(box))
            np.copyto(target, array[box_index(box)])
            total += digest(target, box, spec.shape)
    return total & MASK


# --- installing


@dataclass(frozen=True)
class Installed:
    """`proven`: boxes whose digest was compared and equal; `boxed_bytes` went straight into parameters."""

    proven: int
    boxed_bytes: int
    seconds: float

    def __add__(self, other: "Installed") -> "Installed":
        return Installed(self.proven + other.proven, self.boxed_bytes + other.boxed_bytes, self.seconds + other.seconds)


class Prepared(NamedTuple):
    """A copy of all of a route's boxes that was made ready while clients were served, and the digests that it has to find."""

    copy: Placed
    expected: list[int]

    def is_for(self, route: Route, live: Mapping[str, torch.Tensor]) -> bool:
        return self.copy.layout.pieces is route.boxed and self.copy.is_at(live)


def install(
    host: Host,
    model: torch.nn.Module,
    model_config: ModelConfig,
    recording: Recording,
    route: Route,
    source: Source,
    arrived: bool = False,
    prepared: Prepared | None = None,
    timings: Timings | None = None,
) -> Installed:
    """Brings `model` to the version of `source`, or raises InstallError; then it may hold a mix, but never an empty parameter.

    `arrived`: the route's boxes are in place and proven; they came over the direct path. `prepared`: copies them to a GPU from
    registered pages of the source; without it CUDA copies them through buffers of its own. `timings` get how long the proof of
    what `load_weights` brought took; boxes are proven while they are copied.
    """
    started = time.perf_counter()
    _synchronize(host)
    fault = Fault.from_environment()
    wrong: list[str] = []
    proven: set[tuple[str, Box]] = set()
    at_once = len(route.boxed) if arrived else 0  # boxes that were all proven together

    def check(tensor: str, box: Box, found: int, where: str) -> None:
        if found == source.expected[tensor, box]:
            proven.add((tensor, box))
        else:
            wrong.append(_difference(tensor, box, source.expected[tensor, box], found, where))

    with host.calling():
        if not arrived:
            with record_function("resharder: copy and digest"):
                live = live_now(model, frozenset(p.local for p in route.boxed))
                if prepared is not None and prepared.is_for(route, live) and not fault.kind:
                    found_there = prepared.copy.run()
                    at_once = len(found_there) if found_there == prepared.expected else 0
                    written = [] if at_once else list(zip(route.boxed, found_there, strict=True))
                else:
                    written = _write_all(host, live, route.boxed, source, fault)
            for piece, found in written:
                check(piece.tensor, piece.box, found, f"in {piece.local}")
        fault.half_way()
        if route.loaded:
            names = [name for name in source.specs if name in route.loaded]
            fed = Feed(source, names, recording, fault)
            with host.reloading(model, model_config, route.modules), record_function("resharder: load_weights"):
                cast(Any, model).load_weights(iter(fed))
            wrong += fed.differences()
            proven |= fed.boxes
            if route.readable:
                _synchronize(host)
                with timed(timings if timings is not None else [], "prove"), record_function("resharder: digest"):
                    read = read_all(live_tensors(model), route.readable, source.specs)
                for piece, found in zip(route.readable, read, strict=True):
                    check(piece.tensor, piece.box, found, f"in {piece.local}")
    _synchronize(host)
    refuse(wrong)
    return Installed(len(proven) + at_once, route.boxed_bytes, time.perf_counter() - started)


def _synchronize(host: Host) -> None:
    if host.device.type == "cuda":
        torch.cuda.synchronize(host.device)


def _write_all(
    host: Host, live: Mapping[str, torch.Tensor], pieces: Iterable[Piece], source: Source, fault: "Fault"
) -> list[tuple[Piece, int]]:
    """What then lies in memory, piece by piece. On a device all copies are begun before the first is waited for; `source` stays
    mapped until the last has ended."""

    def one(piece: Piece) -> Digest:
        array = fault.applied(piece.tensor, source)
        if array is None:
            return _read(live[piece.local], piece, source.specs)
        return _write(live[piece.local], piece, array, source.specs[piece.tensor])

    pieces = sorted(pieces, key=lambda p: -box_size(p.box))
    total = sum(box_size(p.box) * ITEM_SIZES[source.specs[p.tensor].dtype] for p in pieces)
    cores = len(os.sched_getaffinity(0)) // host.neighbours
    if total < _PARALLEL_BYTES or cores < 2 or host.device.type != "cpu":
        try:
            return list(zip(pieces, _numbers([one(piece) for piece in pieces]), strict=True))
        except BaseException:
            _synchronize(host)
            raise
    with ThreadPoolExecutor(min(4, cores), "resharder-copy") as pool:
        return list(zip(pieces, _numbers(list(pool.map(one, pieces))), strict=True))


class Feed:
    """What `load_weights` gets: HF tensors whole. `digests` has those that it took, as they were when it was done with them."""

    def __init__(self, source: Source, names: list[str], recording: Recording, fault: "Fault") -> None:
        self._source, self._names, self._recording, self._fault = source, names, recording, fault
        self.digests: dict[str, dict[Box, int]] = {}

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        needs, impure = self._recording.needs, self._recording.impure
        for name in self._names:
            array = self._fault.applied(name, self._source)
            if array is None:
                continue
            spec = self._source.specs[name]
            tensor = as_torch(array, spec.dtype)
            # A loader that computes may do so in place, and the store's memory is read-only.
            yield name, tensor.clone() if name in impure or "" in impure else tensor
            self.digests[name] = {box: digest(array[box_index(box)], box, spec.shape) for box in needs[name]}

    @property
    def boxes(self) -> set[tuple[str, Box]]:
        return {(name, box) for name, digests in self.digests.items() for box in digests}

    def differences(self) -> list[str]:
        """What the loader did not take, or took with other bytes than the store's."""
        missing = [f"{name}: did not go into load_weights" for name in self._names if name not in self.digests]
        return missing + [
            _difference(name, box, self._source.expected[name, box], found, "as it went into load_weights")
            for name, digests in self.digests.items()
            for box, found in digests.items()
            if found != self._source.expected[name, box]
        ]


def _difference(tensor: str, box: Box, expected: int, found: int, where: str) -> str:
    return f"{tensor}{format_box(box)} {where}: expected digest {expected:016x}, found {found:016x}"


def refuse(wrong: list[str]) -> None:
    """Raises InstallError if there is anything."""
    if wrong:
        raise InstallError(f"{len(wrong)} boxes are not what the store holds: {'; '.join(wrong[:4])}")


@dataclass(frozen=True)
class Fault:
    """What tests ask for by RESHARDER_FAULT: `skip:NAME`, `misplace:NAME`, `swap:NAME,NAME`, `half-way`. Each must be noticed."""

    kind: str = ""
    names: tuple[str, ...] = ()

    @staticmethod
    def from_environment() -> "Fault":
        return Fault(*asked_fault())

    def applied(self, name: str, source: Source) -> Array | None:
        array = source.arrays[name]
        if name not in self.names:
            return array
        if self.kind == "skip":
            return None
        if self.kind == "misplace":
            return np.roll(array, 1)
        other = self.names[1 - self.names.index(name)]
        return source.arrays[other]

    def half_way(self) -> None:
        if self.kind == "half-way":
            raise InstallError("stopped half-way, as RESHARDER_FAULT says")
