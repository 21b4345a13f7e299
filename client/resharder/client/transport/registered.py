"""The daemon's own host, from a GPU: a kernel writes all of a rank's boxes into the version's pages, which are registered with
CUDA for that long, and the digests are taken on the GPU. The host touches nothing but the pages' tables.

Fresh pages are what takes time: they are mapped by several threads before.
"""

import ctypes
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from resharder.client.direct.host_copy import HostCopy
from resharder.client.direct.pages import Registered, box_of, register, spans_of
from resharder.client.transport.base import Slot
from resharder.converters.files import MappedFiles, read_layout
from resharder.converters.layout import Layout, Piece
from resharder.converters.pages import map_pages
from resharder.v1 import resources_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable

    from resharder.client.transport.base import Item, Transport

_TMPFS_MAGIC = 0x01021994


class RegisteredMemory:
    """Of one attached model. `otherwise` is the transport where pages cannot be registered, or items come one by one."""

    name = "shared-memory"
    mapped = True

    def __init__(self, device: torch.device, threads: int, otherwise: "Callable[[], Transport]") -> None:
        self._device, self._threads, self._otherwise = device, threads, otherwise
        self._copy: tuple[Layout, HostCopy] | None = None

    def deliver(self, version: resources_pb2.Version, slot: Slot, items: "Iterable[Item]") -> list[int]:
        digests = None
        if isinstance(items, Sequence) and all(tensor.device == self._device for _, tensor in items):
            digests = self._write(Path(version.folder), slot, dict(items))
        return self._otherwise().deliver(version, slot, items) if digests is None else digests

    def _write(self, folder: Path, slot: Slot, tensors: dict[int, torch.Tensor]) -> list[int] | None:
        """None where pages cannot be registered."""
        if not is_tmpfs(folder):  # writes by a GPU do not make a disk's pages dirty
            return None
        names = {spec.name for spec in slot.specs}
        files = [file for file in read_layout(folder) if any(t.spec.name in names for t in file.tensors)]
        maps, registered = MappedFiles(folder, files, writable=True), None
        try:
            boxes = [box_of(maps.arrays[spec.name], box) for spec, box in zip(slot.specs, slot.boxes, strict=True)]
            with ThreadPoolExecutor(self._threads) as pool:
                list(pool.map(partial(map_pages, write=True), spans_of(boxes)))
            registered = register(boxes, self._device, writable=True)
            if registered is None:
                return None
            return self._copied(slot, maps, {str(number): tensor for number, tensor in tensors.items()})
        finally:
            boxes = []
            # Unmapping a million pages takes its time, and the trainer may be waiting.
            threading.Thread(target=_let_go, args=(maps, registered), name="resharder-unmap").start()

    def _copied(self, slot: Slot, maps: MappedFiles, tensors: dict[str, torch.Tensor]) -> list[int]:
        layout = layout_of(slot, tensors)
        if self._copy is None or self._copy[0] != layout:
            self._copy = layout, HostCopy(layout, self._device)
        with torch.cuda.device(self._device):
            return self._copy[1].place(maps.arrays, tensors, to_host=True).run()


def layout_of(slot: Slot, tensors: dict[str, torch.Tensor]) -> Layout:
    """Of a slot's boxes, each in a local tensor that is called by its number."""
    pieces = (
        Piece(spec.name, box, str(number), 0, tuple(tensors[str(number)].stride()))
        for number, (spec, box) in enumerate(zip(slot.specs, slot.boxes, strict=True))
    )
    return Layout({spec.name: spec for spec in slot.specs}, tuple(pieces))


def is_tmpfs(folder: Path) -> bool:
    found = ctypes.create_string_buffer(256)  # struct statfs begins with the kind, a long
    failed = ctypes.CDLL(None).statfs(str(folder).encode(), found)
    return not failed and ctypes.c_long.from_buffer(found).value == _TMPFS_MAGIC


def _let_go(maps: MappedFiles, registered: Registered | None) -> None:
    if registered is not None:
        registered.close()
    with suppress(BufferError):  # an error's own frames may still hold arrays; the maps go with them
        maps.close()
