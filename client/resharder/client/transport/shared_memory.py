"""Transport on the daemon's host: a rank writes its boxes into the version's files.

With huge pages (a tmpfs mounted with `huge=always`), all writes go through a map. With small pages, a fresh map costs a fault
per page, three times as much as copying the page. Contiguous boxes are then written by system call; only strided boxes go
through a map, whose pages are mapped by one call before.
"""

import os
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.lib.array_utils import byte_bounds
from resharder.client.errors import NotFound
from resharder.client.transport.base import AssignedSlot, Releases
from resharder.client.transport.host_buffers import PART_BYTES, add_digest, host_parts
from resharder.client.transport.live_items import LiveItems
from resharder.converters.failpoints import failpoint
from resharder.converters.geometry.layout import Box, Range, TensorSpec, box_index, run_start
from resharder.converters.storage.digest import copy_and_digest, digest
from resharder.converters.storage.files import Array, FileLayout, MappedFiles, read_layout
from resharder.converters.storage.pages import map_pages, small_pages
from resharder.v1 import resources_pb2

if TYPE_CHECKING:
    from resharder.client.transport.base import Item

_SPLIT_BYTES = 1 << 20  # below this, a second thread does not pay off


class NonceFile(Protocol):
    """File in the daemon's store and its content, by which a process on the same host recognises the store."""

    @property
    def nonce_file(self) -> str:
        """Path of the file; empty if the daemon offers no shared memory."""

    @property
    def nonce(self) -> bytes:
        """Content of the file."""


def shares_memory(store: NonceFile) -> bool:
    """Return whether this process can read the daemon's store.

    A nonce in a file works in containers too, where host names do not.
    """
    if not store.nonce_file or not store.nonce:
        return False
    try:
        with open(store.nonce_file, "rb") as file:
            return file.read(len(store.nonce) + 1) == store.nonce
    except OSError:
        return False


class SharedMemory:
    """Transport through the store's files. Large boxes are divided among `threads`."""

    name, reason = "shared-memory", ""
    mapped = True

    def __init__(self, threads: int) -> None:
        self._threads = threads

    def deliver(
        self, version: resources_pb2.Version, slot: AssignedSlot, items: "Iterable[Item]", releases: Releases
    ) -> list[int]:
        """Deliver as `Transport.deliver`. Raises NotFound if the version's files are missing, as
        after a restart of the daemon.
        """
        with self._open(version, slot) as opened, ThreadPoolExecutor(self._threads) as pool:
            return self._write(opened, slot, items, releases, pool)

    def _open(self, version: resources_pb2.Version, slot: AssignedSlot) -> "_WritableFiles":
        folder, names = Path(version.folder), {spec.name for spec in slot.specs}
        try:
            failpoint("shared.open")
            files = [file for file in read_layout(folder) if any(t.spec.name in names for t in file.tensors)]
            if missing := names - {placed.spec.name for file in files for placed in file.tensors}:
                raise FileNotFoundError(f"{len(missing)} tensors are in no file")
            return _WritableFiles(folder, files)
        except FileNotFoundError as error:
            raise NotFound(f"{version.name}: expected its files in {folder}, found none: {error}", "VERSION_GONE") from error

    def _write(
        self,
        files: "_WritableFiles",
        slot: AssignedSlot,
        items: "Iterable[Item]",
        releases: Releases,
        pool: ThreadPoolExecutor,
    ) -> list[int]:
        failpoint("shared.write")
        cuts, digests = slot.cuts(PART_BYTES), [0] * len(slot.boxes)
        homes = [files.home(spec.name) for spec in slot.specs]
        left = Counter[str]()
        for number, home in enumerate(homes):
            left[home.path] += len(cuts[number])
        if isinstance(items, LiveItems):  # file by file, so that each is released early
            items = map(items.__getitem__, sorted(range(len(items)), key=homes.__getitem__))
        for number, part, source in host_parts(items, slot.boxes, cuts):
            spec, box = slot.specs[number], cuts[number][part]
            if self._threads == 1 or source.nbytes < _SPLIT_BYTES:
                add_digest(digests, number, files.put(spec, box, source))
            else:
                copies = [pool.submit(files.put, spec, share, source[rows]) for rows, share in _shares(box, self._threads)]
                for copy in copies:
                    add_digest(digests, number, copy.result())
            path = homes[number].path
            left[path] -= 1
            if not left[path]:
                releases.release(path, files.take(path).close)
        return digests


class _Home(NamedTuple):
    """Place of a tensor, ordered by file and offset."""

    path: str
    offset: int


class _WritableFiles:
    """Files of a version, open for writing until they are taken or the context ends."""

    def __init__(self, folder: Path, files: list[FileLayout]) -> None:
        self._homes = {placed.spec.name: _Home(file.path, placed.offset) for file in files for placed in file.tensors}
        self._files: dict[str, _WritableFile] = {}
        try:
            for file in files:
                self._files[file.path] = _WritableFile(folder, file)
        except BaseException:
            self._close()
            raise

    def home(self, name: str) -> _Home:
        """Return the place of a tensor."""
        return self._homes[name]

    def put(self, spec: TensorSpec, box: Box, source: Array) -> int:
        """Write the elements of `box` and return the box's digest."""
        home = self._homes[spec.name]
        return self._files[home.path].put(spec, home.offset, box, source)

    def take(self, path: str) -> "_WritableFile":
        """Return a file, which the caller closes."""
        return self._files.pop(path)

    def _close(self) -> None:
        while self._files:
            self._files.popitem()[1].close()

    def __enter__(self) -> "_WritableFiles":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._close()


class _WritableFile:
    """File that is mapped and open for writing."""

    def __init__(self, folder: Path, file: FileLayout) -> None:
        self._map = MappedFiles(folder, [file], writable=True)
        self._descriptor = os.open(folder / file.path, os.O_WRONLY | os.O_CLOEXEC)
        self._small = small_pages(self._descriptor)

    def put(self, spec: TensorSpec, offset: int, box: Box, source: Array) -> int:
        """Write the elements of `box` of the tensor at `offset`, and return the box's digest."""
        start = run_start(box, spec)
        if self._small and start is not None and source.flags.c_contiguous:
            found = digest(source, box, spec.shape)
            _write_all(self._descriptor, source.reshape(-1).view(np.uint8).data, offset + start)
            return found
        array = self._map.arrays[spec.name]
        target = array[box_index(box)] if box else array  # numpy returns a scalar for an empty index
        if self._small:
            map_pages(byte_bounds(target))
        return copy_and_digest(target, source, box, spec.shape)

    def close(self) -> None:
        """Close and unmap the file."""
        os.close(self._descriptor)
        with suppress(BufferError):  # frames of an error may still reference arrays; the map ends with these
            self._map.close()


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def _shares(box: Box, threads: int) -> list[tuple[slice, Box]]:
    """Return equal parts of a box along its first dimension, each as (index in the box, box)."""
    first, rest = box[0], box[1:]
    step = max(1, -(-first.count // threads))
    shares = []
    for start in range(0, first.count, step):
        count = min(step, first.count - start)
        part = Range(first.start + start * first.step, count, first.step if count > 1 else 1)
        shares.append((slice(start, start + count), (part, *rest)))
    return shares


def copy_threads(most: int = 4) -> int:
    """Return this rank's share of the available cores, at most `most`. More than four do not copy and digest faster."""
    ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return max(1, min(most, len(os.sched_getaffinity(0)) // ranks))
