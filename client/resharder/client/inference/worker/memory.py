"""The memory of a running model: finding its tensors, writing boxes into them, and digesting what lies there."""

import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import numpy as np
import torch
from resharder.client.inference.engine import Host
from resharder.client.inference.recording import inventory
from resharder.client.inference.worker.faults import Fault
from resharder.client.inference.worker.source import VersionSource, as_torch
from resharder.converters.geometry.chunking import cut_chunks
from resharder.converters.geometry.layout import ITEM_SIZES, Piece, StridedView, TensorSpec, box_index, box_size
from resharder.converters.storage.digest import MASK, Array, digest, digest_on_device

_BLOCK_BYTES = 1 << 20  # written, then read back while it is in the cache
_PARALLEL_BYTES = 64 << 20  # below, threads cost more than they bring
Digest = int | torch.Tensor  # one int64 on a device, which the host has not waited for


def live_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {f.path: f.tensor for f in inventory.reachable(model)}


def live_now(model: torch.nn.Module, names: frozenset[str]) -> dict[str, torch.Tensor]:
    """Some of them, without a walk through everything where they are parameters and buffers, as they mostly are."""
    found = dict(chain(model.named_parameters(), model.named_buffers()))
    if names <= found.keys():
        return found
    return live_tensors(model)


def strided(flat: Array, view: StridedView) -> Array:
    size = flat.itemsize
    return np.lib.stride_tricks.as_strided(flat[view.offset :], view.shape, tuple(s * size for s in view.strides))


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor in one dimension, from its first element to its last."""
    length = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return inventory.bits(torch.as_strided(tensor.detach(), (length,), (1,), tensor.storage_offset()))


def _on_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def _region(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    view = piece.view(piece.box)
    return torch.as_strided(tensor.detach(), view.shape, view.strides, tensor.storage_offset() + view.offset)


def _read(tensor: torch.Tensor, piece: Piece, specs: Mapping[str, TensorSpec]) -> Digest:
    """The digest of what lies in memory where `piece` says."""
    shape = specs[piece.tensor].shape
    if _on_host(tensor):
        return digest(strided(_flat(tensor).numpy(), piece.view(piece.box)), piece.box, shape)
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
            target = strided(flat, piece.view(box))
            np.copyto(target, array[box_index(box)])
            total += digest(target, box, spec.shape)
    return total & MASK


def write_all(
    host: Host, live: Mapping[str, torch.Tensor], pieces: Iterable[Piece], source: VersionSource, fault: Fault
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
            synchronize(host)
            raise
    with ThreadPoolExecutor(min(4, cores), "resharder-copy") as pool:
        return list(zip(pieces, _numbers(list(pool.map(one, pieces))), strict=True))


def synchronize(host: Host) -> None:
    if host.device.type == "cuda":
        torch.cuda.synchronize(host.device)
