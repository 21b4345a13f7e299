"""Pages of a version's files that stay registered with CUDA while no process has the files open or mapped.

    the rank opens a file  ->  its pages are registered, at the first time  ->  copies  ->  the rank closes the file

A registration pins pages and takes as long as a copy of them. The store uses the same files for later versions, so it is worth
keeping. CUDA writes into pinned pages by their physical addresses: once they are registered, the map is replaced by addresses
that this process cannot write to, and the kernel sees no writer any more. It grants the daemon's leases as for any closed file.

What the leases do not show is a copy of this process's own. Hence a file is open for writing for as long as one may run.
"""

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from resharder.client.gpu.pinned_pages import WRITABLE, Registered, never, pages_stay_in_place
from resharder.converters.storage.files import FileLayout
from resharder.converters.storage.pages import AddressRange, Span

logger = logging.getLogger(__name__)


class OpenPages:
    """A file that is open for writing, with pages at `begin` that the device can write. Any thread may close it, once."""

    def __init__(self, kept: "_KeptFile", descriptor: int) -> None:
        self._kept, self._descriptor, self.begin = kept, descriptor, kept.begin

    def close(self) -> None:
        """Close the file: nothing writes into it from now on."""
        self._kept.hide()
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class KeptPages:
    """Registered pages of all files that a rank has written and that the store may use again. Not thread-safe."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._files: dict[tuple[int, int], _KeptFile] = {}  # by device and inode
        self._refused = not pages_stay_in_place(device)

    def open(self, folder: Path, files: Sequence[FileLayout], spans: Sequence[Sequence[Span]]) -> list[OpenPages] | None:
        """Open files for writing, and register those that are new.

        Args:
            folder: Their folder.
            files: Their layouts.
            spans: For each file the pages that are written, as offsets in it.

        Returns:
            The open files; None if CUDA cannot register them, which the log explains once.

        Raises:
            OSError: A file cannot be opened. FileNotFoundError if it is gone. None stays open.
            ValueError: A file has another size than its layout.
        """
        self.release_deleted()
        if self._refused:
            return None
        opened: list[OpenPages] = []
        try:
            for file, some in zip(files, spans, strict=True):
                opened.append(self._open(folder / file.path, file.size, some))
        except BaseException as error:
            _close_all(opened)
            if not isinstance(error, _RefusedByCuda):
                raise
            self._refused = True
            self.close()
            logger.warning(
                "CUDA cannot register the pages of the store's files: versions are copied through buffers, "
                "at about half of the speed"
            )
            return None
        return opened

    def release_deleted(self) -> None:
        """Release the pages of files that the store has deleted, which take memory until then."""
        for key, kept in list(self._files.items()):
            if kept.is_deleted:
                self._files.pop(key).close()

    def close(self) -> None:
        """Release all pages. No file may be open."""
        while self._files:
            self._files.popitem()[1].close()

    def _open(self, path: Path, size: int, spans: Sequence[Span]) -> OpenPages:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            found = os.fstat(descriptor)
            if found.st_size != size:
                raise ValueError(f"{path}: expected {size} bytes, found {found.st_size}")
            key = found.st_dev, found.st_ino
            kept = self._files.get(key)
            if kept is not None and kept.spans != spans:
                self._files.pop(key).close()
                kept = None
            if kept is None:
                kept = self._files[key] = _KeptFile(descriptor, size, spans, self._device)
                kept.register(descriptor)
            kept.show(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        return OpenPages(kept, descriptor)


class _RefusedByCuda(Exception):
    """CUDA does not register a file's pages."""


class _KeptFile:
    """Addresses of one file, whose pages in `spans` are registered. On a CPU they are mapped while the file is open."""

    def __init__(self, descriptor: int, size: int, spans: Sequence[Span], device: torch.device) -> None:
        self.spans, self._device = spans, device
        # Keeps the inode, so that no other file can have its number; no lease takes it for a reader or a writer.
        self._same = os.open(f"/proc/self/fd/{descriptor}", os.O_PATH | os.O_CLOEXEC)
        self._addresses = AddressRange(size)
        self.begin = self._addresses.begin
        self._registered: Registered | None = None

    @property
    def is_deleted(self) -> bool:
        return os.fstat(self._same).st_nlink == 0

    def register(self, descriptor: int) -> None:
        """Register the pages. Raises _RefusedByCuda; the log has the reason."""
        if self._device.type != "cuda":
            return
        spans = [(self.begin + first, self.begin + end) for first, end in self.spans]
        self._registered = Registered(spans, self._device, busy=lambda: False, flags=WRITABLE)
        self._addresses.map(descriptor)
        try:
            if not self._registered.go_on(never):
                raise _RefusedByCuda
        finally:
            self._addresses.unmap()

    def show(self, descriptor: int) -> None:
        if self._device.type != "cuda":
            self._addresses.map(descriptor)

    def hide(self) -> None:
        if self._device.type != "cuda":
            self._addresses.unmap()

    def close(self) -> None:
        if self._registered is not None:
            self._registered.close()
        self._addresses.close()
        os.close(self._same)


def _close_all(opened: list[OpenPages]) -> None:
    while opened:
        opened.pop().close()
