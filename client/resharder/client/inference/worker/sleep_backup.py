"""Host backup of the memory that a sleep at level 2 drops and no install restores.

vLLM drops all memory that was allocated while the model was loaded, and itself saves the model's
`named_buffers()` (`Worker.sleep` in `v1/worker/gpu_worker.py`; from 0.28 also the drafter's, in 0.32 also
parameters that an option names). This module saves other tensors of modules (in attributes and closures),
parameters that no HF tensor fills, padding rows, and the adapters that are loaded. It does not save memory that an install
writes: boxes, and tensors that vLLM derives from HF tensors in `load_weights`.

Addresses do not change over a sleep, and routes name tensors by path, so both stay valid.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from resharder.client.inference.recording import inventory
from resharder.client.inference.recording.places import adapter_tensors
from resharder.client.inference.worker.model_part import ModelPart, Models, shared_modules
from resharder.converters.geometry.layout import Piece, box_size


@dataclass(frozen=True)
class SleepBackup:
    """Copies of device memory on the host."""

    copies: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    """(device memory, host copy), both as bytes."""

    @property
    def size_bytes(self) -> int:
        return sum(copy.nbytes for _, copy in self.copies)

    def restore(self) -> None:
        """Copy everything back to the device."""
        for memory, copy in self.copies:
            memory.copy_(copy)


def back_up(device: torch.device, models: Models, parts: dict[str, ModelPart]) -> SleepBackup:
    """Back up memory on `device` that no install restores. Call it before the sleep.

    Args:
        device: The device whose memory sleeps.
        models: The worker's models.
        parts: Recording and route of each model, by name.
    """
    found = [
        memory
        for name, model in models.items()
        for memory in (
            *not_installed(model, parts.get(name), shared_modules(models, name)),
            *(_bytes(tensor) for tensor in adapter_tensors(model)),
        )
        if memory.device.type == device.type and memory.nbytes
    ]
    distinct = {(memory.data_ptr(), memory.nbytes): memory for memory in found}.values()
    return SleepBackup(tuple((memory, memory.to("cpu", copy=True)) for memory in distinct))


def not_installed(model: torch.nn.Module, part: ModelPart | None, shared: frozenset[str] = frozenset()) -> Iterator[torch.Tensor]:
    """Yield the memory that the model reads and no install writes.

    Args:
        model: The model.
        part: Its recording and route. Without a route, all of the model's memory is yielded.
        shared: Paths of modules that belong to another model and are skipped.

    Yields:
        Storages or parts of storages, as bytes.
    """
    notes = inventory.NOTES.get(model, inventory.Notes())
    read = [f for f in inventory.reachable(model) if f.parameter or f.path in notes.constant or f.path in notes.made]
    known = [f for f in read if f.module not in shared]
    if part is None or part.recording is None or part.route is None:
        yield from (_bytes(f.tensor) for f in known)
        return
    fills = defaultdict[str, list[Piece]](list)
    for piece in part.recording.layout.pieces:
        fills[piece.local].append(piece)
    written = set()  # addresses of storages that one tensor fills and an install writes
    left = []
    for f in known:
        remade = f.module in part.route.modules and (f.parameter or f.path in notes.made)
        whole = f.tensor.nbytes == f.tensor.untyped_storage().nbytes()
        if whole and (remade or f.path in fills):
            written.add(f.tensor.untyped_storage().data_ptr())
            size = f.tensor.element_size()
            unfilled = [] if remade else gaps(fills[f.path], f.tensor.numel())
            yield from (_bytes(f.tensor)[begin * size : end * size] for begin, end in unfilled)
        elif not remade:
            left.append(f.tensor)
    yield from (_bytes(tensor) for tensor in left if tensor.untyped_storage().data_ptr() not in written)


def gaps(pieces: Iterable[Piece], length: int) -> list[tuple[int, int]]:
    """Return the (begin, end) runs of elements of a contiguous tensor that no piece fills.

    Args:
        pieces: Pieces of the tensor, without overlaps.
        length: Number of elements of the tensor.

    Returns:
        The runs; the whole tensor if there is a gap and not every piece is one run.
    """
    pieces = list(pieces)
    sizes = [box_size(piece.box) for piece in pieces]
    ends = [p.offset + sum((r.count - 1) * s for r, s in zip(p.box, p.strides, strict=True)) + 1 for p in pieces]
    if sum(sizes) == length:
        return []
    if any(end - piece.offset != size for piece, end, size in zip(pieces, ends, sizes, strict=True)):
        return [(0, length)]
    starts = sorted((piece.offset, end) for piece, end in zip(pieces, ends, strict=True))
    runs = zip([0, *(end for _, end in starts)], [*(start for start, _ in starts), length], strict=True)
    return [(begin, end) for begin, end in runs if begin < end]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's whole storage as bytes."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
