"""Boxes packed into chunks, and sent in windows by two threads.

The caller's thread packs, with copy and digest in one pass; others send. Chunks stay in memory until the daemon has acknowledged
them. A trainer's memory is therefore read once, even if connections break. The extra memory is three windows, reused within a
publish: fresh pages would cost more than all other work on a chunk.
"""

import mmap
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import xxhash
from resharder.client.transport.base import AssignedSlot
from resharder.client.transport.host_buffers import add_digest, host_parts
from resharder.converters.geometry.layout import ITEM_SIZES, Box, box_shape, box_size
from resharder.converters.storage.digest import copy_and_digest
from resharder.converters.storage.files import BITS

if TYPE_CHECKING:
    from resharder.client.transport.base import Item

WINDOW_BYTES = 16 << 20
_WINDOWS = 2  # windows in transit, while one more is packed


@dataclass
class PackedChunk:
    """Chunk that is being packed. Its first `size` bytes are used, of which `missing` are not
    filled yet; `memory` fits the longest chunk.
    """

    index: int
    memory: memoryview
    size: int
    missing: int
    checksum: int = 0

    @property
    def data(self) -> memoryview:
        """Bytes of the chunk."""
        return self.memory[: self.size]


def send_in_windows(slot: AssignedSlot, items: "Iterable[Item]", send: Callable[[list[PackedChunk]], None]) -> list[int]:
    """Pack all boxes of a slot, and return the digest of each.

    Args:
        slot: The boxes.
        items: Their elements.
        send: Sends chunks, and returns when the daemon has them. It is called on two threads.
    """
    digests, packer = [0] * len(slot.boxes), _Packer(slot)

    def send_window(chunks: list[PackedChunk]) -> None:
        send(chunks)
        packer.free.extend(chunk.memory for chunk in chunks)

    with ThreadPoolExecutor(_WINDOWS, thread_name_prefix="resharder-upload") as senders:
        sending: deque[Future[None]] = deque()
        window: list[PackedChunk] = []
        size = 0
        for chunk in packer.pack(items, digests):
            window.append(chunk)
            size += len(chunk.memory)
            if size >= WINDOW_BYTES:
                sending.append(senders.submit(send_window, window))
                window, size = [], 0
                if len(sending) == _WINDOWS:
                    sending.popleft().result()
        send_window(window)
        for sent in sending:
            sent.result()
    return digests


class _Place(NamedTuple):
    """Place of a part of a box in a chunk; `offset` is in bytes."""

    chunk: int
    offset: int
    box: Box


class _Packer:
    """Packer of boxes, in any order, into chunks. It reuses memory that is appended to `free`."""

    def __init__(self, slot: AssignedSlot) -> None:
        self._slot = slot
        self._places: list[list[_Place]] = [[] for _ in slot.boxes]
        self._sizes: list[int] = []
        for chunk, parts in enumerate(slot.chunks):
            offset = 0
            for part in parts:
                self._places[part.position].append(_Place(chunk, offset, part.box))
                offset += box_size(part.box) * ITEM_SIZES[slot.specs[part.position].dtype]
            self._sizes.append(offset)
        self._open: dict[int, PackedChunk] = {}
        self.free: deque[memoryview] = deque()

    def pack(self, items: "Iterable[Item]", digests: list[int]) -> Iterator[PackedChunk]:
        """Yield each chunk once it is complete, and add the digests of parts to those of their boxes."""
        slot, cuts = self._slot, [[place.box for place in places] for places in self._places]
        for number, part, source in host_parts(items, slot.boxes, cuts):
            place, spec = self._places[number][part], slot.specs[number]
            chunk = self._chunk(place.chunk)
            raw = np.frombuffer(chunk.memory, dtype=np.uint8, count=source.nbytes, offset=place.offset)
            aligned = place.offset % source.itemsize == 0
            target = (
                raw.view(BITS[source.itemsize]).reshape(box_shape(place.box)) if aligned else np.empty_like(source, order="C")
            )
            add_digest(digests, number, copy_and_digest(target, source, place.box, spec.shape))
            if not aligned:
                raw[:] = target.reshape(-1).view(np.uint8)
            chunk.missing -= source.nbytes
            if not chunk.missing:
                chunk.checksum = xxhash.xxh3_64_intdigest(chunk.memory[: chunk.size])
                yield self._open.pop(place.chunk)

    def _chunk(self, index: int) -> PackedChunk:
        if index not in self._open:
            if not self.free:
                self.free.extend(_allocate(max(self._sizes)))
            size = self._sizes[index]
            self._open[index] = PackedChunk(index, self.free.popleft(), size, size)
        return self._open[index]


def _allocate(size: int) -> Iterator[memoryview]:
    """Return memory for a window of chunks of `size` bytes, in huge pages if the host has them."""
    count = max(1, WINDOW_BYTES // size)
    memory = mmap.mmap(-1, count * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(memory)
    return (view[i * size : (i + 1) * size] for i in range(count))
