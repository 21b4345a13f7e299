"""Transport on the daemon's host: a rank writes its boxes into the version's files."""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from resharder.client.errors import NotFound
from resharder.client.settings import LOCAL_WORLD_SIZE
from resharder.client.transport.base import AssignedSlot, Delivered, LiveItems, Releases
from resharder.client.transport.host_buffers import PART_BYTES, HostPart, add_digest, host_batches
from resharder.converters.failpoints import failpoint
from resharder.converters.geometry.layout import Box, Range
from resharder.converters.storage.files import read_layout
from resharder.converters.storage.writable_files import WritableFiles
from resharder.v1 import resources_pb2

if TYPE_CHECKING:
    from resharder.client.transport.base import Item

WAY = "shared-memory"
_NONCE_BYTES = 64
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


def read_nonces(paths: Iterable[str]) -> list[resources_pb2.StoreAccess]:
    """Return the nonce files that this process can read, with their content."""
    found = []
    for path in paths:
        try:
            with open(path, "rb") as file:
                found.append(resources_pb2.StoreAccess(nonce_file=path, nonce=file.read(_NONCE_BYTES)))
        except OSError:
            continue
    return found


class SharedMemory:
    """Transport through the store's files. Large boxes are divided among `threads`."""

    def __init__(self, threads: int) -> None:
        self._threads = threads

    def deliver(
        self, version: resources_pb2.Version, slot: AssignedSlot, items: "Iterable[Item]", releases: Releases
    ) -> Delivered:
        """Deliver as `Transport.deliver`. Raises NotFound if the version's files are missing, as
        after a restart of the daemon.
        """
        with self.opened(version, slot, releases) as files:
            files.write(items)
            return Delivered(files.digests, WAY, mapped=True)

    @contextmanager
    def opened(self, version: resources_pb2.Version, slot: AssignedSlot, releases: Releases) -> Iterator["SlotFiles"]:
        """Open the files of a slot for items that are written one after the other. Raises as `deliver` does."""
        with self._open(version, slot) as opened, ThreadPoolExecutor(self._threads) as pool:
            failpoint("shared.write")
            yield SlotFiles(opened, slot, releases, pool, self._threads)

    def _open(self, version: resources_pb2.Version, slot: AssignedSlot) -> WritableFiles:
        folder, names = Path(version.folder), {spec.name for spec in slot.specs}
        try:
            failpoint("shared.open")
            files = [file for file in read_layout(folder) if any(t.spec.name in names for t in file.tensors)]
            if missing := names - {placed.spec.name for file in files for placed in file.tensors}:
                raise FileNotFoundError(f"{len(missing)} tensors are in no file")
            return WritableFiles(folder, files)
        except FileNotFoundError as error:
            raise NotFound(f"{version.name}: its files in {folder} cannot be opened: {error}", "VERSION_GONE") from error


class SlotFiles:
    """Open files of one slot. `digests` has the digest of each box, complete once all items are written."""

    def __init__(
        self, files: WritableFiles, slot: AssignedSlot, releases: Releases, pool: ThreadPoolExecutor, threads: int
    ) -> None:
        self._files, self._slot, self._releases, self._pool, self._threads = files, slot, releases, pool, threads
        self._cuts, self.digests = slot.cuts(PART_BYTES), [0] * len(slot.boxes)
        self._places = [files.place(spec.name) for spec in slot.specs]
        self._left = Counter[str]()  # parts that are to be written into each file
        for number, place in enumerate(self._places):
            self._left[place.path] += len(self._cuts[number])

    def write(self, items: "Iterable[Item]") -> None:
        """Write items, and release each file once all boxes in it are written."""
        lasting = isinstance(items, Sequence)
        if isinstance(items, LiveItems):  # file by file, so that each is released early
            items = map(items.__getitem__, sorted(range(len(items)), key=self._places.__getitem__))
        for batch in host_batches(items, self._slot.boxes, self._cuts, lasting=lasting):
            self._write(batch)
            for number, _, _ in batch:
                path = self._places[number].path
                self._left[path] -= 1
                if not self._left[path]:
                    self._releases.release(path, self._files.take(path).close)

    def _write(self, batch: list[HostPart]) -> None:
        """Write the parts of a batch, all threads at once."""
        share = max(_SPLIT_BYTES, sum(source.nbytes for _, _, source in batch) // self._threads)
        copies = list[tuple[int, Future[int]]]()
        for number, part, source in batch:
            spec, box = self._slot.specs[number], self._cuts[number][part]
            if self._threads == 1 or source.nbytes < _SPLIT_BYTES:
                add_digest(self.digests, number, self._files.put(spec, box, source))
            else:
                shares = _shares(box, -(-source.nbytes // share))
                copies += [(number, self._pool.submit(self._files.put, spec, each, source[rows])) for rows, each in shares]
        for number, copy in copies:
            add_digest(self.digests, number, copy.result())


def _shares(box: Box, count: int) -> list[tuple[slice, Box]]:
    """Return `count` equal parts of a box along its first dimension, each as (index in the box, box)."""
    first, rest = box[0], box[1:]
    step = max(1, -(-first.count // count))
    shares = []
    for start in range(0, first.count, step):
        count = min(step, first.count - start)
        part = Range(first.start + start * first.step, count, first.step if count > 1 else 1)
        shares.append((slice(start, start + count), (part, *rest)))
    return shares


def copy_threads(most: int = 4) -> int:
    """Return this rank's share of the available cores, at most `most`. More than four do not copy and digest faster."""
    ranks = max(1, int(LOCAL_WORLD_SIZE.text() or 1))
    return max(1, min(most, len(os.sched_getaffinity(0)) // ranks))
