"""Transport from a GPU on the daemon's host: all boxes of a rank go into the version's files at the speed of the link.

Digests are computed on the GPU. What follows from the layouts of the rank and of the files is computed once.
"""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
import torch
from resharder.client.gpu.device_to_host import BUFFER_BYTES, DeviceToHost
from resharder.client.gpu.pinned_pages import box_of, spans_of
from resharder.client.transport.base import AssignedSlot, Delivered, LiveItems, Releases
from resharder.client.transport.shared_memory import WAY
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

    Args:
        device: GPU of the model's tensors.
        threads: Threads that copy, each through a buffer of its own.
        otherwise: Creates the transport for tensors on other devices, and for items that come from an iterator.
        buffer_bytes: Size of a buffer.
    """

    def __init__(
        self, device: torch.device, threads: int, otherwise: "Callable[[], Transport]", buffer_bytes: int = BUFFER_BYTES
    ) -> None:
        self._device, self._threads, self._otherwise, self._buffer_bytes = device, threads, otherwise, buffer_bytes
        self._planned: _Planned | None = None

    def deliver(
        self, version: resources_pb2.Version, slot: AssignedSlot, items: "Iterable[Item]", releases: Releases
    ) -> Delivered:
        """Deliver as `Transport.deliver`; a model's own tensors that are all on the GPU in one copy."""
        if isinstance(items, LiveItems) and items.device == self._device:
            return Delivered(self._write(Path(version.folder), slot, items, releases), WAY, mapped=True)
        return self._otherwise().deliver(version, slot, items, releases)

    def _write(self, folder: Path, slot: AssignedSlot, items: LiveItems, releases: Releases) -> list[int]:
        names, began = {spec.name for spec in slot.specs}, time.monotonic()
        files = [file for file in read_layout(folder) if not names.isdisjoint(file.by_name)]
        with ExitStack() as stack, ThreadPoolExecutor(self._threads) as pool:
            maps = [stack.enter_context(_Map(folder, file)) for file in files]
            plan = self._plan(slot, items.pieces, files, [each.files for each in maps])
            planned, begins = time.monotonic(), [each.files.begins[0] for each in maps]
            if any(each.files.small_pages for each in maps):  # others are mapped faster by the copy's own few faults
                list(pool.map(partial(map_pages, write=True), plan.spans(begins)))
            mapped = time.monotonic()
            with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
                digests = plan.copy.run(
                    plan.targets(begins), plan.sources(items), lambda i: releases.release(files[i].path, maps[i].take().close)
                )
            took = planned - began, mapped - planned, time.monotonic() - mapped
            logger.info("wrote %d boxes: %.3f s to plan, %.3f s to map, %.3f s to copy", len(slot.boxes), *took)
            return digests

    def _plan(self, slot: AssignedSlot, pieces: Sequence[Piece], files: list[FileLayout], maps: list[MappedFiles]) -> "_Planned":
        if self._planned is None or not self._planned.is_for(pieces, files):
            self._planned = None  # its buffers are free before others are made
            copy = partial(DeviceToHost, device=self._device, threads=self._threads, buffer_bytes=self._buffer_bytes)
            self._planned = _Planned(slot, pieces, files, maps, copy)
        return self._planned


class _Planned:
    """A slot's copy into files of one layout, at any addresses."""

    def __init__(
        self,
        slot: AssignedSlot,
        pieces: Sequence[Piece],
        files: list[FileLayout],
        maps: list[MappedFiles],
        plan_copy: Callable[..., DeviceToHost],
    ) -> None:
        self._pieces, self._files = pieces, files
        self._changed = [number for number, piece in enumerate(pieces) if piece.plus]
        places = {name: (i, placed) for i, file in enumerate(files) for name, placed in file.by_name.items()}
        self.copy = plan_copy(layout_of(slot, pieces), groups={name: i for name, (i, _) in places.items()})
        at = [(i, placed.offset, placed.offset + placed.spec.size) for i, placed in map(places.__getitem__, self.copy.targets)]
        self._places = np.array(at, np.int64).reshape(-1, 3)  # file, first byte, end
        self._spans: list[tuple[int, int, int]] = []
        of_file: list[list[tuple[str, int]]] = [[] for _ in files]
        for number, spec in enumerate(slot.specs):
            of_file[places[spec.name][0]].append((spec.name, number))
        for i, each in enumerate(maps):
            arrays, begin = (box_of(each.arrays[name], slot.boxes[number]) for name, number in of_file[i]), each.begins[0]
            self._spans += [(i, first - begin, end - begin) for first, end in spans_of(arrays)]

    def is_for(self, pieces: Sequence[Piece], files: list[FileLayout]) -> bool:
        """Return whether the plan is for these pieces and layouts, the same objects as then."""
        same = len(files) == len(self._files) and all(a is b for a, b in zip(files, self._files, strict=True))
        return same and pieces is self._pieces

    def sources(self, items: LiveItems) -> dict[str, torch.Tensor]:
        """Return the local tensors, and by its number each box whose values differ from the local ones by a constant."""
        return {**items.tensors, **{str(n): read_piece(items.tensors, items.pieces[n]).contiguous() for n in self._changed}}

    def targets(self, begins: Sequence[int]) -> Ints:
        """Return the first and end address of each HF tensor. `begins` has the address of each file."""
        file, first, end = self._places.T
        at = np.array(begins, np.int64)[file]
        return np.column_stack([at + first, at + end])

    def spans(self, begins: Sequence[int]) -> list[Span]:
        """Return the pages of all boxes. `begins` has the address of each file."""
        return [(begins[file] + first, begins[file] + end) for file, first, end in self._spans]


def layout_of(slot: AssignedSlot, pieces: Sequence[Piece]) -> Layout:
    """Return the layout of a slot's boxes in local tensors. A box with a constant to add has a tensor of its own, its number."""
    found = []
    for number, piece in enumerate(pieces):
        if piece.plus:
            piece = piece._replace(local=str(number), offset=0, strides=contiguous_strides(box_shape(piece.box)), plus=0)
        found.append(piece)
    return Layout({spec.name: spec for spec in slot.specs}, tuple(found))


class _Map:
    """Writable map of a file, unmapped at the end of the context unless it was taken."""

    def __init__(self, folder: Path, file: FileLayout) -> None:
        self.files = MappedFiles(folder, [file], writable=True)
        self._taken = False

    def take(self) -> "_Map":
        """Return this map, which the caller closes."""
        self._taken = True
        return self

    def close(self) -> None:
        """Unmap the file, which takes long for small pages."""
        with suppress(BufferError):  # frames of an error may still reference arrays; the map ends with these
            self.files.close()

    def __enter__(self) -> "_Map":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not self._taken:
            self.close()
