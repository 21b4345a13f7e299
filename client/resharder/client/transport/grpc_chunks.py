"""Transport from any host: boxes packed into chunks and streamed over gRPC.

The caller's thread packs, with copy and digest in one pass; others send. Chunks are sent in windows, each a stream of its own,
two at a time. They stay in memory until the daemon has acknowledged them; after a broken stream, only chunks that the daemon
lacks are sent again. A trainer's memory is therefore read once, even if connections break. The extra memory is three windows,
reused within a publish: fresh pages would cost more than all other work on a chunk.
"""

import mmap
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import grpc
import numpy as np
import xxhash
from resharder.client.rpc.channel import Backoff, Channel, unreachable
from resharder.client.transport.base import AssignedSlot, Releases
from resharder.client.transport.host_buffers import add_digest, host_parts
from resharder.converters.failpoints import failpoint
from resharder.converters.geometry.layout import ITEM_SIZES, Box, box_shape, box_size
from resharder.converters.storage.digest import copy_and_digest
from resharder.converters.storage.files import BITS
from resharder.converters.wire.chunk_frame import ChunkHeader, frame
from resharder.v1 import publisher_pb2, publisher_pb2_grpc, resources_pb2

if TYPE_CHECKING:
    from resharder.client.transport.base import Item

WINDOW_BYTES = 16 << 20
_WINDOWS = 2  # windows in transit, while one more is packed
_STREAM_SECONDS = 300.0


class GrpcChunks:
    """Transport of chunks over `channel`."""

    name = "grpc"
    mapped = False

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def deliver(
        self, version: resources_pb2.Version, slot: AssignedSlot, items: "Iterable[Item]", releases: Releases
    ) -> list[int]:
        """Deliver as `Transport.deliver`. Broken streams are resumed for the channel's patience."""
        digests, packer = [0] * len(slot.boxes), _Packer(slot)
        with ThreadPoolExecutor(_WINDOWS, thread_name_prefix="resharder-upload") as senders:
            sending: deque[Future[None]] = deque()
            window = _Window(self._channel, version, slot.rank, packer.free)
            for chunk in packer.pack(items, digests):
                window.add(chunk)
                if window.size >= WINDOW_BYTES:
                    sending.append(senders.submit(window.send))
                    window = _Window(self._channel, version, slot.rank, packer.free)
                    if len(sending) == _WINDOWS:
                        sending.popleft().result()
            window.send()
            for sent in sending:
                sent.result()
        return digests


@dataclass
class _Chunk:
    """Chunk that is being packed. Its first `size` bytes are used, of which `missing` are not
    filled yet; `memory` fits the longest chunk.
    """

    index: int
    memory: memoryview
    size: int
    missing: int
    checksum: int = 0


class _Window:
    """Chunks in transit. When the daemon has acknowledged them, their memory returns to `free`."""

    def __init__(self, channel: Channel, version: resources_pb2.Version, rank: int, free: "deque[memoryview]") -> None:
        self._channel, self._version, self._rank, self._free = channel, version, rank, free
        self._chunks: list[_Chunk] = []
        self.size = 0

    def add(self, chunk: _Chunk) -> None:
        self._chunks.append(chunk)
        self.size += len(chunk.memory)

    def send(self) -> None:
        """Send all chunks and return when the daemon has them. Raises the errors of `errors`."""
        backoff = Backoff(self._channel.patience)
        upload = self._channel.grpc.stream_unary(
            "/resharder.v1.PublisherService/UploadChunks", response_deserializer=publisher_pb2.UploadSummary.FromString
        )
        left = self._chunks
        while left:
            try:
                failpoint("chunks.upload")
                upload(self._messages(left), timeout=_STREAM_SECONDS)
                break
            except grpc.RpcError as error:
                if not (unreachable(error) and backoff.wait()):
                    raise self._channel.error(error) from error
            missing = self._missing()
            left = [chunk for chunk in left if chunk.index in missing]
        self._free.extend(chunk.memory for chunk in self._chunks)

    def _messages(self, chunks: list[_Chunk]) -> Iterator[bytes]:
        """Yield the messages of one stream. The first one names the model."""
        model, version = self._version.model, self._version
        for chunk in chunks:
            header = ChunkHeader(version.number, version.epoch, self._rank, chunk.index, chunk.checksum)
            yield frame(header, chunk.memory[: chunk.size], model)
            model = ""

    def _missing(self) -> set[int]:
        stub = publisher_pb2_grpc.PublisherServiceStub(self._channel.grpc)
        request = publisher_pb2.SlotRequest(version=self._version.name, epoch=self._version.epoch, rank=self._rank)
        return set(self._channel.call(stub.ListMissingChunks, request).indices)


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
        self._open: dict[int, _Chunk] = {}
        self.free: deque[memoryview] = deque()

    def pack(self, items: "Iterable[Item]", digests: list[int]) -> Iterator[_Chunk]:
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

    def _chunk(self, index: int) -> _Chunk:
        if index not in self._open:
            if not self.free:
                self.free.extend(_allocate(max(self._sizes)))
            size = self._sizes[index]
            self._open[index] = _Chunk(index, self.free.popleft(), size, size)
        return self._open[index]


def _allocate(size: int) -> Iterator[memoryview]:
    """Return memory for a window of chunks of `size` bytes, in huge pages if the host has them."""
    count = max(1, WINDOW_BYTES // size)
    memory = mmap.mmap(-1, count * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(memory)
    return (view[i * size : (i + 1) * size] for i in range(count))
