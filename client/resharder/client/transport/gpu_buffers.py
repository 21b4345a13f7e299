"""Transport from a GPU on the daemon's host: all boxes of a rank go into the version's files at the speed of the link.

Digests are computed on the GPU.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from resharder.client.gpu.device_to_host import DeviceToHost
from resharder.client.gpu.pinned_pages import box_of, spans_of
from resharder.client.transport.base import AssignedSlot
from resharder.converters.geometry.layout import Layout, Piece
from resharder.converters.storage.files import MappedFiles, read_layout
from resharder.converters.storage.pages import map_pages
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
        self._copy: tuple[Layout, DeviceToHost] | None = None

    def deliver(self, version: resources_pb2.Version, slot: AssignedSlot, items: "Iterable[Item]") -> list[int]:
        """Deliver as `Transport.deliver`; a sequence of tensors that are all on the GPU in one copy."""
        if isinstance(items, Sequence) and all(tensor.device == self._device for _, tensor in items):
            return self._write(Path(version.folder), slot, {str(number): tensor for number, tensor in items})
        return self._otherwise().deliver(version, slot, items)

    def _write(self, folder: Path, slot: AssignedSlot, tensors: dict[str, torch.Tensor]) -> list[int]:
        names, began = {spec.name for spec in slot.specs}, time.monotonic()
        files = [file for file in read_layout(folder) if any(t.spec.name in names for t in file.tensors)]
        copy, maps = self._device_to_host(slot, tensors), MappedFiles(folder, files, writable=True)
        try:
            planned = time.monotonic()
            spans = spans_of(box_of(maps.arrays[spec.name], box) for spec, box in zip(slot.specs, slot.boxes, strict=True))
            with ThreadPoolExecutor(self._threads) as pool:
                list(pool.map(partial(map_pages, write=True), spans))
            mapped = time.monotonic()
            with torch.cuda.device(self._device):
                digests = copy.run(maps.arrays, tensors)
            took = planned - began, mapped - planned, time.monotonic() - mapped
            size = sum(tensor.nbytes for tensor in tensors.values())
            logger.info("wrote %d bytes: %.3f s to plan, %.3f s to map, %.3f s to copy", size, *took)
            return digests
        finally:
            # On another thread: unmapping a million pages takes long, and the trainer may be waiting.
            threading.Thread(target=_close, args=(maps,), name="resharder-unmap").start()

    def _device_to_host(self, slot: AssignedSlot, tensors: dict[str, torch.Tensor]) -> DeviceToHost:
        layout = layout_of(slot, tensors)
        if self._copy is None or self._copy[0] != layout:
            self._copy = layout, DeviceToHost(layout, self._device, self._threads)
        return self._copy[1]


def layout_of(slot: AssignedSlot, tensors: dict[str, torch.Tensor]) -> Layout:
    """Return the layout of a slot's boxes. The local tensor of each box is named by its number."""
    pieces = (
        Piece(spec.name, box, str(number), 0, tuple(tensors[str(number)].stride()))
        for number, (spec, box) in enumerate(zip(slot.specs, slot.boxes, strict=True))
    )
    return Layout({spec.name: spec for spec in slot.specs}, tuple(pieces))


def _close(maps: MappedFiles) -> None:
    with suppress(BufferError):  # frames of an error may still reference arrays; the maps end with these
        maps.close()
