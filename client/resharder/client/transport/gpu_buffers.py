"""Transport from a GPU on the daemon's host: all boxes of a rank go into the version's files at the speed of the link.

Digests are computed on the GPU. What follows from the layouts of the rank and of the files is computed once.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from resharder.client.gpu.device_to_host import DeviceToHost
from resharder.client.gpu.pinned_pages import box_of, spans_of
from resharder.client.transport.base import AssignedSlot
from resharder.client.transport.live_items import LiveItems
from resharder.converters.geometry.layout import Layout, Piece, box_shape, contiguous_strides
from resharder.converters.geometry.piece_arrays import Ints
from resharder.converters.models.tensor_io import read_piece
from resharder.converters.storage.files import FileLayout, MappedFiles, read_layout
from resharder.converters.storage.pages import Span, map_pages
from resharder.v1 import resources_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable

    from resharder.client.transport.base import Item, Transport

logger = logging.getLogger(__name__)


class FromGpu:
    """Transport for one attached model.

    `otherwise` creates the transport for tensors on other devices, and for items that come from an iterator.
    """

    name = "shared-memory"
    mapped = True

    def __init__(self, device: torch.device, threads: int, otherwise: "Callable[[], Transport]") -> None:
        self._device, self._threads, self._otherwise = device, threads, otherwise
        self._planned: _Planned | None = None

    def deliver(self, version: resources_pb2.Version, slot: AssignedSlot, items: "Iterable[Item]") -> list[int]:
        """Deliver as `Transport.deliver`; a model's own tensors that are all on the GPU in one copy."""
        if isinstance(items, LiveItems) and items.device == self._device:
            return self._write(Path(version.folder), slot, items)
        return self._otherwise().deliver(version, slot, items)

    def _write(self, folder: Path, slot: AssignedSlot, items: LiveItems) -> list[int]:
        names, began = {spec.name for spec in slot.specs}, time.monotonic()
        files = [file for file in read_layout(folder) if not names.isdisjoint(file.by_name)]
        maps = MappedFiles(folder, files, writable=True)
        try:
            plan = self._plan(slot, items.pieces, files, maps)
            planned = time.monotonic()
            with ThreadPoolExecutor(self._threads) as pool:
                list(pool.map(partial(map_pages, write=True), plan.spans(maps)))
            mapped = time.monotonic()
            with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
                digests = plan.copy.run(plan.targets(maps), plan.sources(items))
            took = planned - began, mapped - planned, time.monotonic() - mapped
            logger.info("wrote %d boxes: %.3f s to plan, %.3f s to map, %.3f s to copy", len(slot.boxes), *took)
            return digests
        finally:
            # On another thread: unmapping a million pages takes long, and the trainer may be waiting.
            threading.Thread(target=_close, args=(maps,), name="resharder-unmap").start()

    def _plan(self, slot: AssignedSlot, pieces: Sequence[Piece], files: list[FileLayout], maps: MappedFiles) -> "_Planned":
        if self._planned is None or not self._planned.is_for(pieces, files):
            self._planned = _Planned(slot, pieces, files, maps, self._device, self._threads)
        return self._planned


class _Planned:
    """A slot's copy into files of one layout, at any addresses."""

    def __init__(
        self,
        slot: AssignedSlot,
        pieces: Sequence[Piece],
        files: list[FileLayout],
        maps: MappedFiles,
        device: torch.device,
        threads: int,
    ) -> None:
        self._pieces, self._files = pieces, files
        self._changed = [number for number, piece in enumerate(pieces) if piece.plus]
        self.copy = DeviceToHost(layout_of(slot, pieces), device, threads)
        homes = {name: (i, placed) for i, file in enumerate(files) for name, placed in file.by_name.items()}
        at = [(i, placed.offset, placed.offset + placed.spec.size) for i, placed in map(homes.__getitem__, self.copy.targets)]
        self._places = np.array(at, np.int64).reshape(-1, 3)  # file, first byte, end
        self._spans: list[tuple[int, int, int]] = []
        of_file: list[list[tuple[str, int]]] = [[] for _ in files]
        for number, spec in enumerate(slot.specs):
            of_file[homes[spec.name][0]].append((spec.name, number))
        for i, begin in enumerate(maps.begins):
            arrays = (box_of(maps.arrays[name], slot.boxes[number]) for name, number in of_file[i])
            self._spans += [(i, first - begin, end - begin) for first, end in spans_of(arrays)]

    def is_for(self, pieces: Sequence[Piece], files: list[FileLayout]) -> bool:
        """Return whether the plan is for these pieces and layouts, the same objects as then."""
        same = len(files) == len(self._files) and all(a is b for a, b in zip(files, self._files, strict=True))
        return same and pieces is self._pieces

    def sources(self, items: LiveItems) -> dict[str, torch.Tensor]:
        """Return the local tensors, and by its number each box whose values differ from the local ones by a constant."""
        return {**items.tensors, **{str(n): read_piece(items.tensors, items.pieces[n]).contiguous() for n in self._changed}}

    def targets(self, maps: MappedFiles) -> Ints:
        """Return the first and end address of each HF tensor."""
        file, first, end = self._places.T
        begins = np.array(maps.begins, np.int64)[file]
        return np.column_stack([begins + first, begins + end])

    def spans(self, maps: MappedFiles) -> list[Span]:
        """Return the pages of all boxes."""
        begins = maps.begins
        return [(begins[file] + first, begins[file] + end) for file, first, end in self._spans]


def layout_of(slot: AssignedSlot, pieces: Sequence[Piece]) -> Layout:
    """Return the layout of a slot's boxes in local tensors. A box with a constant to add has a tensor of its own, its number."""
    found = []
    for number, piece in enumerate(pieces):
        if piece.plus:
            piece = piece._replace(local=str(number), offset=0, strides=contiguous_strides(box_shape(piece.box)), plus=0)
        found.append(piece)
    return Layout({spec.name: spec for spec in slot.specs}, tuple(found))


def _close(maps: MappedFiles) -> None:
    with suppress(BufferError):  # frames of an error may still reference arrays; the maps end with these
        maps.close()
