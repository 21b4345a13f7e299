"""Access to the memory of a running model: find tensors, write boxes into them, compute digests of them, and inject the faults
(`RESHARDER_FAULT`) that verification must detect."""

import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from resharder.client.inference.engine import Host, InstallError
from resharder.client.inference.recording import inventory
from resharder.client.inference.recording.wrappers import join, named_modules
from resharder.client.inference.worker.source import VersionSource
from resharder.client.settings import FAULT
from resharder.converters.geometry.chunking import cut_chunks
from resharder.converters.geometry.layout import ITEM_SIZES, Piece, StridedView, TensorSpec, box_index, box_size
from resharder.converters.models.tensor_io import tensor_of_bits
from resharder.converters.storage.digest import MASK, Array, digest, digest_on_device

_BLOCK_BYTES = 1 << 20  # each block is written, then read back while it is in the CPU's cache
_PARALLEL_BYTES = 64 << 20  # smaller installs are faster without threads
Digest = int | torch.Tensor
"""A digest: an integer, or one int64 on a device before synchronisation."""


def live_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return all tensors that the model can read, by path."""
    return {f.path: f.tensor for f in inventory.reachable(model)}


def live_now(model: torch.nn.Module, names: frozenset[str]) -> dict[str, torch.Tensor]:
    """Return at least the tensors `names`, by path. Fast if all of them are parameters or buffers."""
    found = {
        join(path, name): tensor
        for path, module in named_modules(model)
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None
    }
    if names <= found.keys():
        return found
    return live_tensors(model)


def strided(flat: Array, view: StridedView) -> Array:
    """Return a view of a one-dimensional array."""
    size = flat.itemsize
    return np.lib.stride_tricks.as_strided(flat[view.offset :], view.shape, tuple(s * size for s in view.strides))


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a tensor, from its first element to its last, as one dimension of unsigned integers."""
    length = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return inventory.bits(torch.as_strided(tensor.detach(), (length,), (1,), tensor.storage_offset()))


def _on_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def _region(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    view = piece.view(piece.box)
    return torch.as_strided(tensor.detach(), view.shape, view.strides, tensor.storage_offset() + view.offset)


def _read(tensor: torch.Tensor, piece: Piece, specs: Mapping[str, TensorSpec]) -> Digest:
    """Return the digest of the memory that `piece` describes."""
    shape = specs[piece.tensor].shape
    if _on_host(tensor):
        return digest(strided(_flat(tensor).numpy(), piece.view(piece.box)), piece.box, shape)
    return digest_on_device(_region(tensor, piece), piece.box, shape)


def read_all(live: Mapping[str, torch.Tensor], pieces: Iterable[Piece], specs: Mapping[str, TensorSpec]) -> list[int]:
    """Return the digest of each piece, read from memory. Synchronises the device once."""
    return _numbers([_read(live[piece.local], piece, specs) for piece in pieces])


def _numbers(digests: list[Digest]) -> list[int]:
    """Convert digests to integers, with one synchronisation for all of them."""
    on_device = [found for found in digests if isinstance(found, torch.Tensor)]
    numbers = iter(torch.stack(on_device).tolist() if on_device else ())
    return [next(numbers) & MASK if isinstance(found, torch.Tensor) else found for found in digests]


def _write(tensor: torch.Tensor, piece: Piece, array: Array, spec: TensorSpec) -> Digest:
    """Copy the piece's box of `array` (the whole HF tensor) into memory and return the digest, read back from memory.

    On a device, both are only enqueued on the current stream.
    """
    if not _on_host(tensor):
        region = _region(tensor, piece)
        region.copy_(tensor_of_bits(array[box_index(piece.box)], spec.dtype), non_blocking=True)
        return digest_on_device(region, piece.box, spec.shape)
    flat, total = _flat(tensor).numpy(), 0
    for chunk in cut_chunks([piece.box], [ITEM_SIZES[spec.dtype]], _BLOCK_BYTES):
        for _, box in chunk:
            target = strided(flat, piece.view(box))
            np.copyto(target, array[box_index(box)])
            total += digest(target, box, spec.shape)
    return total & MASK


@dataclass(frozen=True)
class Fault:
    """A fault to inject: `skip:NAME`, `misplace:NAME`, `swap:NAME,NAME` or `half-way`."""

    kind: str = ""
    names: tuple[str, ...] = ()

    @staticmethod
    def from_environment() -> "Fault":
        """Read the fault from `RESHARDER_FAULT`."""
        return Fault(*FAULT.read())

    def applied(self, name: str, source: VersionSource) -> Array | None:
        """Return the array to install for the HF tensor `name`; `None` to skip it."""
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
        """Raise `InstallError` if the fault is `half-way`."""
        if self.kind == "half-way":
            raise InstallError("stopped half-way: RESHARDER_FAULT is half-way")


def write_all(
    host: Host, live: Mapping[str, torch.Tensor], pieces: Iterable[Piece], source: VersionSource, fault: Fault
) -> list[tuple[Piece, int]]:
    """Write pieces of `source` into memory.

    On a device, all copies are enqueued before the first synchronisation. `source` must stay mapped until this returns.

    Args:
        host: The worker process.
        live: The model's tensors, by path.
        pieces: The pieces to write.
        source: The version.
        fault: A fault to inject.

    Returns:
        Each piece, largest first, and its digest, read back from memory.
    """

    def one(piece: Piece) -> Digest:
        array = fault.applied(piece.tensor, source)
        if array is None:
            return _read(live[piece.local], piece, source.specs)
        if not _on_host(live[piece.local]):
            array = source.copyable(array)
        return _write(live[piece.local], piece, array, source.specs[piece.tensor])

    return _each(host, pieces, source.specs, one)


def find_unchanged(
    host: Host, live: Mapping[str, torch.Tensor], pieces: Iterable[Piece], source: VersionSource
) -> list[tuple[Piece, int]]:
    """Return the pieces, with their digests, that memory has as in `source` already. Nothing is written."""
    found = _each(host, pieces, source.specs, lambda piece: _read(live[piece.local], piece, source.specs))
    return [(piece, value) for piece, value in found if value == source.expected[piece.tensor, piece.box]]


def _each(
    host: Host, pieces: Iterable[Piece], specs: Mapping[str, TensorSpec], one: Callable[[Piece], Digest]
) -> list[tuple[Piece, int]]:
    """Return each piece, largest first, and its digest from `one`, which is called on several threads for many bytes of a CPU."""
    pieces = sorted(pieces, key=lambda p: -box_size(p.box))
    total = sum(box_size(p.box) * ITEM_SIZES[specs[p.tensor].dtype] for p in pieces)
    cores = len(os.sched_getaffinity(0)) // host.neighbours
    if total < _PARALLEL_BYTES or cores < 2 or host.device.type != "cpu":
        try:
            return list(zip(pieces, _numbers([one(piece) for piece in pieces]), strict=True))
        except BaseException:
            synchronize(host)
            raise
    with ThreadPoolExecutor(min(4, cores), "resharder-copy") as pool:
        return list(zip(pieces, _numbers(list(pool.map(one, pieces))), strict=True))


def synchronize(host: Host) -> None:
    """Wait for all streams of the host's GPU. A no-op on a CPU."""
    if host.device.type == "cuda":
        torch.cuda.synchronize(host.device)
