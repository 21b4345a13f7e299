"""Files of a version, written box by box.

In shared memory, boxes are copied into a map and digested in one pass. With small pages, a fault per page would cost three times
as much as copying the page: the pages of a box are mapped by one call before, and unmapped after it. With system calls, digests
are a second pass, and the kernel lets one thread at a time write into a file. On disk, where each page faults once more at its
first write, contiguous boxes are written by system call, as are everywhere bytes that arrive from the network.
"""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import numpy as np
from numpy.lib.array_utils import byte_bounds
from resharder.converters.geometry.layout import Box, TensorSpec, box_index, box_shape, full_box, run_start
from resharder.converters.storage.digest import Array, copy_and_digest, digest
from resharder.converters.storage.files import BITS, FileLayout, MappedFiles
from resharder.converters.storage.pages import forget_pages, in_shared_memory, map_pages


class TensorPlace(NamedTuple):
    """Place of a tensor, ordered by file and offset."""

    path: str
    offset: int


class WritableFiles:
    """Files of a version, open for writing until they are taken or closed. Boxes may be written on several threads."""

    def __init__(self, folder: Path, files: Iterable[FileLayout]) -> None:
        files = tuple(files)
        self._places = {placed.spec.name: TensorPlace(file.path, placed.offset) for file in files for placed in file.tensors}
        self._files: dict[str, WritableFile] = {}
        try:
            for file in files:
                self._files[file.path] = WritableFile(folder, file)
        except BaseException:
            self.close()
            raise

    def add(self, folder: Path, file: FileLayout) -> None:
        """Open another file."""
        self._files[file.path] = WritableFile(folder, file)
        self._places |= {placed.spec.name: TensorPlace(file.path, placed.offset) for placed in file.tensors}

    def place(self, name: str) -> TensorPlace:
        """Return the place of a tensor."""
        return self._places[name]

    def put(self, spec: TensorSpec, box: Box, source: Array) -> int:
        """Write the elements of `box` and return the box's digest."""
        place = self._places[spec.name]
        return self._files[place.path].put(spec, place.offset, box, source)

    def put_bytes(self, spec: TensorSpec, box: Box, data: memoryview) -> None:
        """Write the elements of `box`, given as bytes in C order, which need not be aligned."""
        place = self._places[spec.name]
        self._files[place.path].put_bytes(spec, place.offset, box, data)

    def take(self, path: str) -> "WritableFile":
        """Return a file, which the caller closes."""
        return self._files.pop(path)

    def close(self) -> None:
        """Close the files that were not taken."""
        while self._files:
            self._files.popitem()[1].close()

    def __enter__(self) -> "WritableFiles":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class WritableFile:
    """File that is mapped and open for writing."""

    def __init__(self, folder: Path, file: FileLayout) -> None:
        self._map = MappedFiles(folder, [file], writable=True)
        try:
            self._descriptor = os.open(folder / file.path, os.O_WRONLY | os.O_CLOEXEC)
            self._on_disk = not in_shared_memory(self._descriptor)
        except BaseException:
            self._map.close()
            raise
        self._small = self._map.small_pages

    def put(self, spec: TensorSpec, offset: int, box: Box, source: Array) -> int:
        """Write the elements of `box` of the tensor at `offset`, and return the box's digest."""
        start = run_start(box, spec)
        if self._on_disk and start is not None and source.flags.c_contiguous:
            found = digest(source, box, spec.shape)
            _write_all(self._descriptor, source.reshape(-1).view(np.uint8).data, offset + start)
            return found
        target = self._target(spec, box)
        found = copy_and_digest(target, source, box, spec.shape)
        if self._small and start is not None:
            forget_pages(byte_bounds(target))  # here rather than at the end, where a single thread would unmap all
        return found

    def put_bytes(self, spec: TensorSpec, offset: int, box: Box, data: memoryview) -> None:
        """Write the elements of `box` of the tensor at `offset`, given as bytes in C order."""
        start = run_start(box, spec)
        if self._small and start is not None:
            _write_all(self._descriptor, data, offset + start)
            return
        if not box:
            box, spec = full_box((1,)), TensorSpec(spec.name, spec.dtype, (1,))
        target = self._target(spec, box)
        if box[-1].step == 1:  # rows are copied as bytes, since the data need not be aligned
            target = target.view(np.uint8)
            target[...] = np.frombuffer(data, np.uint8).reshape(target.shape)
        else:
            target[...] = np.frombuffer(data, BITS[target.dtype.itemsize]).reshape(box_shape(box))

    def _target(self, spec: TensorSpec, box: Box) -> Array:
        array = self._map.arrays[spec.name].reshape(spec.shape)
        target: Array = array[box_index(box)] if box else array  # numpy returns a scalar for an empty index
        if self._small:
            map_pages(byte_bounds(target))
        return target

    def close(self) -> None:
        """Close and unmap the file."""
        os.close(self._descriptor)
        with suppress(BufferError):  # frames of an error may still reference arrays; the map ends with these
            self._map.close()


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
