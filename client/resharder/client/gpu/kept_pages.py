"""Pages of a version's files that stay registered with CUDA while no process has the files open or mapped.

    a file is laid out  ->  its pages are registered, once  ->  a version gets it, the rank opens it  ->  copies  ->  closes it

A registration pins pages and takes as long as a copy of them, or several times that while the store lays out other files. The
store uses the same files for later versions, so it is worth keeping. CUDA writes into pinned pages by their physical addresses:
once they are registered, the map is replaced by addresses that this process cannot write to, and the kernel sees no writer any
more. It grants the daemon's leases as for any closed file.

What the leases do not show is a copy of this process's own. Hence a file is open for writing for as long as one may run.
"""

import errno
import logging
import os
import resource
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from resharder.client.gpu.pinned_pages import WRITABLE, Busy, Registered, Stop, never, pages_stay_in_place
from resharder.converters.storage.files import FileLayout
from resharder.converters.storage.pages import AddressRange, Span

_FEW_FILES = (
    "this process may open too few files to keep those of the store registered (at most %d, a quarter of `ulimit -n`; raise it)"
)
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
    """Registered pages of all files that a rank has written and that the store may use again. Not thread-safe.

    Each file takes a descriptor for as long as it is kept, and one more while it is open.

    Args:
        device: Device that writes.
        most: Most files; by default a quarter of those that this process may open.
    """

    def __init__(self, device: torch.device, most: int | None = None) -> None:
        self._device = device
        self._most = _a_quarter() if most is None else most
        self._files: dict[tuple[int, int], _KeptFile] = {}  # by device and inode
        self._refused = not pages_stay_in_place(device)

    def open(
        self, folder: Path, files: Sequence[FileLayout], spans: Sequence[Sequence[Span]], *, register: bool
    ) -> list[OpenPages] | None:
        """Open files for writing.

        Args:
            folder: Their folder.
            files: Their layouts.
            spans: For each file the pages that are written, as offsets in it.
            register: Whether to register files that are new, which takes as long as a copy of their bytes.

        Returns:
            The open files. None if one of them is new and is not to be registered, or cannot be, which the log explains once.

        Raises:
            OSError: A file cannot be opened. FileNotFoundError if it is gone. None stays open.
            ValueError: A file has another size than its layout.
        """
        self.release_deleted()
        opened: list[OpenPages] = []
        for file, some in zip(files, spans, strict=True):
            try:
                pages = None if self._refused else self._open(folder / file.path, file.size, some, register, busy=never)
            except BaseException as error:
                _close_all(opened)
                if not (isinstance(error, OSError) and error.errno == errno.EMFILE):
                    raise
                self._refuse(_FEW_FILES, self._most)
                pages = None
            if pages is None:
                _close_all(opened)
                self._close_if_refused()
                return None
            opened.append(pages)
        return opened

    def prepare(self, folder: Path, files: Sequence[FileLayout], spans: Sequence[Sequence[Span]], stop: Stop) -> bool:
        """Register files for a later `open`, one after the other, and leave half of the time to the process's other threads.

        Takes the arguments of `open`, and raises its errors.

        Args:
            stop: Asked before each file, whether to leave the rest.

        Returns:
            Whether it is done: all are registered, or cannot be.
        """
        self.release_deleted()
        for file, some in zip(files, spans, strict=True):
            if stop():
                return False
            if self._is_registered(folder / file.path, some):
                continue
            pages = None if self._refused else self._open(folder / file.path, file.size, some, True, busy=lambda: True)
            if pages is None:
                self._close_if_refused()
                return True
            pages.close()
        return True

    def release_deleted(self) -> None:
        """Release the pages of files that the store has deleted, which take memory until then."""
        for key, kept in list(self._files.items()):
            if kept.is_deleted:
                self._files.pop(key).close()

    def close(self) -> None:
        """Release all pages. No file may be open."""
        while self._files:
            self._files.popitem()[1].close()

    def _is_registered(self, path: Path, spans: Sequence[Span]) -> bool:
        found = path.stat()
        kept = self._files.get((found.st_dev, found.st_ino))
        return kept is not None and kept.spans == spans

    def _open(self, path: Path, size: int, spans: Sequence[Span], register: bool, busy: Busy) -> OpenPages | None:
        """Open a file. None if it is not registered, and is not to be or cannot be."""
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
            if kept is None and register and len(self._files) >= self._most:
                self._refuse(_FEW_FILES, self._most)
            elif kept is None and register:
                kept = self._files[key] = _KeptFile(descriptor, size, spans, self._device)
                if not kept.register(descriptor, busy):
                    self._refuse("CUDA cannot register the pages of the store's files")
                    kept = None
            if kept is not None:
                kept.show(descriptor)
                return OpenPages(kept, descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        return None

    def _refuse(self, why: str, *values: object) -> None:
        self._refused = True
        logger.warning(f"{why}: versions are copied through buffers, at about half of the speed", *values)

    def _close_if_refused(self) -> None:
        if self._refused:
            self.close()


def _a_quarter() -> int:
    """Return a quarter of the files that this process may open."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit // 4


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

    def register(self, descriptor: int, busy: Busy) -> bool:
        """Register the pages, and return whether CUDA does; otherwise the log has the reason."""
        if self._device.type != "cuda":
            return True
        spans = [(self.begin + first, self.begin + end) for first, end in self.spans]
        self._registered = Registered(spans, self._device, busy, flags=WRITABLE)
        self._addresses.map(descriptor)
        try:
            return self._registered.go_on(never)
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
