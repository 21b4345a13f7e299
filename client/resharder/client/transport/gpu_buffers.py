"""Transport from a GPU on the daemon's host: all boxes of a rank go into the version's files at the speed of the link.

Into pages that stay registered they go straight, else through buffers. Digests are computed on the GPU. What follows from the
layouts of the rank and of the files is computed once.
"""

import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext, suppress
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from resharder.client.errors import ResharderError
from resharder.client.gpu.device_to_host import BUFFER_BYTES, DeviceToHost
from resharder.client.gpu.device_to_pages import DeviceToPages
from resharder.client.gpu.kept_pages import KeptPages
from resharder.client.gpu.pinned_pages import Stop, pages_of
from resharder.client.transport.base import AssignedSlot, Delivered, LiveItems, Releases
from resharder.client.transport.shared_memory import WAY
from resharder.converters.geometry.layout import Layout, Piece, box_bytes, box_shape, contiguous_strides
from resharder.converters.geometry.piece_arrays import Ints
from resharder.converters.models.tensor_io import read_piece
from resharder.converters.storage.files import FileLayout, MappedFiles, read_layout
from resharder.converters.storage.pages import map_pages
from resharder.v1 import resources_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable

    from resharder.client.transport.base import Item, Transport

_ASK_SECONDS = 0.25  # between queries for the next files
_GAP = 16 << 20  # bytes between boxes that are registered with them: fewer calls
logger = logging.getLogger(__name__)
NextFiles = Callable[[str], Path | None]


class FromGpu:
    """Transport for one attached model.

    Args:
        device: GPU of the model's tensors.
        threads: Threads that copy through buffers, each through one of its own.
        otherwise: Creates the transport for tensors on other devices, and for items that come from an iterator.
        next_files: Returns the folder of the files that are laid out for the version after the one of this name; None if there
            are none now. They are registered on a thread between versions, and stay so. Without it, all go through buffers.
        buffer_bytes: Size of a buffer.

    A version without a name is in a node's files, which nobody lays out by name: they are registered when it is delivered.
    """

    def __init__(
        self,
        device: torch.device,
        threads: int,
        otherwise: "Callable[[], Transport]",
        *,
        next_files: "NextFiles | None" = None,
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:
        self._device, self._threads, self._otherwise, self._buffer_bytes = device, threads, otherwise, buffer_bytes
        self._next_files, self._kept = next_files, None if next_files is None else KeptPages(device)
        self._planned: _Planned | None = None
        self._preparation: _Preparation | None = None

    def deliver(
        self, version: resources_pb2.Version, slot: AssignedSlot, items: "Iterable[Item]", releases: Releases
    ) -> Delivered:
        """Deliver as `Transport.deliver`; a model's own tensors that are all on the GPU in one copy."""
        if isinstance(items, LiveItems) and items.device == self._device:
            self.stop_preparation()
            plan, digests = self._write(Path(version.folder), slot, items, releases, register=not version.name)
            if version.name:
                self._prepare(plan, version.name)
            return Delivered(digests, WAY, mapped=True)
        return self._otherwise().deliver(version, slot, items, releases)

    def close(self) -> None:
        """Release the pages of the store's files. No delivery may be under way."""
        self.stop_preparation()
        if self._kept is not None:
            self._kept.close()

    def stop_preparation(self) -> None:
        """Stop to register files: kernels that a version waits for are about to be launched."""
        preparation, self._preparation = self._preparation, None
        if preparation is not None:
            preparation.end()

    def wait_prepared(self, timeout: float) -> bool:
        """Wait until files for the next version are registered, or cannot be. Returns False after `timeout` seconds."""
        return self._preparation is None or self._preparation.wait(timeout)

    def _prepare(self, plan: "_Planned", name: str) -> None:
        """Begin to register files for the version after the one of this name."""
        kept = self._kept
        if kept is not None and self._next_files is not None:

            def register(folder: Path, stop: Stop) -> bool:
                return kept.prepare(folder, plan.files, plan.registered, stop)

            self._preparation = _Preparation(partial(self._next_files, name), register)

    def _write(
        self, folder: Path, slot: AssignedSlot, items: LiveItems, releases: Releases, *, register: bool
    ) -> "tuple[_Planned, list[int]]":
        names, began = {spec.name for spec in slot.specs}, time.monotonic()
        files = [file for file in read_layout(folder) if not names.isdisjoint(file.by_name)]
        opened: dict[int, _Writable] = {}
        with ExitStack() as stack:
            stack.callback(_close_all, opened)
            stack.enter_context(torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext())
            plan = self._plan(slot, items.pieces, files)
            planned, copy = time.monotonic(), self._open(plan, folder, files, opened, register)
            begins, mapped = [each.begin for each in opened.values()], time.monotonic()
            digests = copy.run(
                plan.targets(copy.targets, begins),
                plan.sources(items),
                lambda i: releases.release(files[i].path, opened.pop(i).close),
            )
            took = planned - began, mapped - planned, time.monotonic() - mapped
            logger.info("wrote %d boxes: %.3f s to plan, %.3f s to map, %.3f s to copy", len(slot.boxes), *took)
            return plan, digests

    def _open(
        self, plan: "_Planned", folder: Path, files: list[FileLayout], opened: "dict[int, _Writable]", register: bool
    ) -> "_Copy":
        """Open the files into `opened`, in order, and return the copy into such files."""
        kept = None if self._kept is None else self._kept.open(folder, files, plan.registered, register=register)
        if kept is not None:
            opened |= enumerate(kept)
            return plan.straight
        small = False
        for i, file in enumerate(files):
            mapped = opened[i] = _Map(folder, file)
            small |= mapped.small_pages
        if small:  # others are mapped faster by the copy's own few faults
            begins = (each.begin for each in opened.values())
            spans = [(at + first, at + end) for at, some in zip(begins, plan.mapped, strict=True) for first, end in some]
            with ThreadPoolExecutor(self._threads) as pool:
                list(pool.map(partial(map_pages, write=True), spans))
        return plan.through_buffers

    def _plan(self, slot: AssignedSlot, pieces: Sequence[Piece], files: list[FileLayout]) -> "_Planned":
        if self._planned is None or not self._planned.is_for(pieces, files):
            self._planned = None  # its buffers are free before others are made
            self._planned = _Planned(slot, pieces, files, self._device, self._threads, self._buffer_bytes)
        return self._planned


class _Preparation:
    """Registration of the next version's files, on a thread of its own.

    Args:
        ask: Returns their folder; None if none are laid out now. Raises ResharderError.
        register: Function of a folder and of one that says whether to stop. It returns whether it is done.
    """

    def __init__(self, ask: Callable[[], Path | None], register: Callable[[Path, Stop], bool]) -> None:
        self._ask, self._register, self._ended = ask, register, threading.Event()
        self._thread = threading.Thread(target=self._run, name="resharder-next-files", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop, and return once nothing is registered any more."""
        self._ended.set()
        self._thread.join()

    def wait(self, timeout: float) -> bool:
        """Wait until it is done. Returns False after `timeout` seconds."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self._ended.wait(_ASK_SECONDS):
                with suppress(FileNotFoundError):  # a version has got them, or the store has removed them
                    folder = self._ask()
                    if folder is not None and self._register(folder, self._ended.is_set):
                        return
        except (ResharderError, OSError, ValueError, RuntimeError) as error:
            logger.info("cannot prepare the files of the next version: %s", error)


class _Copy(Protocol):
    """Copy into files at any addresses; see `DeviceToPages`."""

    targets: tuple[str, ...]

    def run(self, target: Ints, tensors: Mapping[str, torch.Tensor], complete: Callable[[int], None]) -> list[int]: ...


class _Writable(Protocol):
    """File that is open for writing, with its bytes at `begin`."""

    @property
    def begin(self) -> int: ...

    def close(self) -> None: ...


def _close_all(opened: dict[int, _Writable]) -> None:
    while opened:
        opened.popitem()[1].close()


class _Planned:
    """A slot's copies into files of one layout, at any addresses.

    For each file, `mapped` has the pages of the slot's boxes as offsets in it, and `registered` those to be registered: with gaps
    among them, and never a box in two parts.
    """

    def __init__(
        self,
        slot: AssignedSlot,
        pieces: Sequence[Piece],
        files: list[FileLayout],
        device: torch.device,
        threads: int,
        buffer_bytes: int,
    ) -> None:
        self._pieces, self.files, self._device = pieces, files, device
        self._threads, self._buffer_bytes = threads, buffer_bytes
        self._changed = [number for number, piece in enumerate(pieces) if piece.plus]
        self._places = {name: (i, placed) for i, file in enumerate(files) for name, placed in file.by_name.items()}
        self._layout, self._groups = layout_of(slot, pieces), {name: i for name, (i, _) in self._places.items()}
        bounds: list[list[tuple[int, int, int]]] = [[] for _ in files]
        for spec, box in zip(slot.specs, slot.boxes, strict=True):
            i, placed = self._places[spec.name]
            first, end = box_bytes(box, spec)
            bounds[i].append((placed.offset + first, placed.offset + end, i))
        self.mapped = [pages_of(each) for each in bounds]
        self.registered = [pages_of(each, _GAP, sys.maxsize) for each in bounds]

    @cached_property
    def straight(self) -> DeviceToPages:
        """Copy into registered pages."""
        return DeviceToPages(self._layout, self._device, self._groups)

    @cached_property
    def through_buffers(self) -> DeviceToHost:
        """Copy into any mapped pages."""
        return DeviceToHost(self._layout, self._device, self._threads, self._groups, self._buffer_bytes)

    def is_for(self, pieces: Sequence[Piece], files: list[FileLayout]) -> bool:
        """Return whether the plan is for these pieces and layouts, the same objects as then."""
        same = len(files) == len(self.files) and all(a is b for a, b in zip(files, self.files, strict=True))
        return same and pieces is self._pieces

    def sources(self, items: LiveItems) -> dict[str, torch.Tensor]:
        """Return the local tensors, and by its number each box whose values differ from the local ones by a constant."""
        return {**items.tensors, **{str(n): read_piece(items.tensors, items.pieces[n]).contiguous() for n in self._changed}}

    def targets(self, names: Sequence[str], begins: Sequence[int]) -> Ints:
        """Return the first and end address of HF tensors. `begins` has the address of each file."""
        at = [(begins[i] + placed.offset, placed.spec.size) for i, placed in map(self._places.__getitem__, names)]
        first, size = np.array(at, np.int64).reshape(-1, 2).T
        return np.column_stack([first, first + size])


def layout_of(slot: AssignedSlot, pieces: Sequence[Piece]) -> Layout:
    """Return the layout of a slot's boxes in local tensors. A box with a constant to add has a tensor of its own, its number."""
    found = []
    for number, piece in enumerate(pieces):
        if piece.plus:
            piece = piece._replace(local=str(number), offset=0, strides=contiguous_strides(box_shape(piece.box)), plus=0)
        found.append(piece)
    return Layout({spec.name: spec for spec in slot.specs}, tuple(found))


class _Map:
    """Writable map of a file."""

    def __init__(self, folder: Path, file: FileLayout) -> None:
        self._files = MappedFiles(folder, [file], writable=True)

    @property
    def small_pages(self) -> bool:
        return self._files.small_pages

    @property
    def begin(self) -> int:
        return self._files.begins[0]

    def close(self) -> None:
        """Unmap the file, which takes long for small pages."""
        with suppress(BufferError):  # frames of an error may still reference arrays; the map ends with these
            self._files.close()
