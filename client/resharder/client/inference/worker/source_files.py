"""The files of one version, mapped into this process, and the registration of their pages with CUDA."""

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from numpy.lib.array_utils import byte_bounds
from resharder.client.gpu.pinned_pages import Busy, Registered, box_of, register
from resharder.converters.geometry.layout import Box
from resharder.converters.storage.digest import Array
from resharder.converters.storage.files import FileLayout, MappedFiles
from resharder.converters.storage.pages import map_pages

Boxes = Sequence[tuple[str, Box]]
Register = Callable[..., Registered | None]


class SourceFiles:
    """Files of one version and their tensors in `arrays`.

    Args:
        folder: Folder of the files.
        files: The files; their paths are relative to `folder`.

    Raises:
        OSError: A file is missing.
        ValueError: A file has another size.
    """

    def __init__(self, folder: Path, files: tuple[FileLayout, ...]) -> None:
        self._files, self._mapped = files, MappedFiles(folder, files)
        self.arrays = self._mapped.arrays
        self._registered: Registered | None = None
        self._boxes: Boxes = ()  # whose pages are registered
        try:
            self._inodes = _inodes(folder, files)
            self._first = os.open(folder / files[0].path, os.O_RDONLY | os.O_CLOEXEC)
        except BaseException:
            self._unmap()
            raise

    def register(self, boxes: Boxes, device: torch.device, busy: Busy, register: Register = register) -> bool:
        """Map the pages of boxes, and register them with CUDA for kernels on `device`, unless they are.

        Args:
            boxes: HF tensors and boxes.
            device: The GPU.
            busy: Whether the server serves, here and while the pages are released. Half of the time is left to its kernels then.
            register: Function that registers the arrays.

        Returns:
            Whether CUDA registered the pages.
        """
        if self._registered is not None and boxes == self._boxes:
            return True
        self._unregister()
        arrays = [box_of(self.arrays[name], box) for name, box in boxes]
        for array in arrays:
            map_pages(byte_bounds(array))
        self._registered, self._boxes = register(arrays, device, busy), boxes
        return self._registered is not None

    def copyable(self, array: Array) -> Array:
        """Return an array in memory that CUDA copies from: itself, or a copy if only some of its pages are registered."""
        return array.copy() if self._registered is not None and self._registered.splits(array) else array

    def are_of(self, folder: Path, files: tuple[FileLayout, ...]) -> bool:
        """Return whether the files in a folder are these, with the same layout. Raises OSError if one is missing."""
        return files == self._files and _inodes(folder, files) == self._inodes

    @property
    def removed(self) -> bool:
        """Whether the files have been removed from all folders."""
        return not os.fstat(self._first).st_nlink

    def close(self) -> None:
        """Unregister and unmap the pages. A reference to an array, e.g. in a traceback, delays the unmapping."""
        self._unregister()
        os.close(self._first)
        self._unmap()

    def _unregister(self) -> None:
        if self._registered is not None:
            self._registered.close()
            self._registered, self._boxes = None, ()

    def _unmap(self) -> None:
        with contextlib.suppress(BufferError):
            self._mapped.close()


def _inodes(folder: Path, files: tuple[FileLayout, ...]) -> list[tuple[int, int]]:
    """Return device and inode of each file."""
    found = [os.stat(folder / file.path) for file in files]
    return [(each.st_dev, each.st_ino) for each in found]
