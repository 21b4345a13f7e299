"""Transports from other hosts: boxes packed into chunks, and sent in windows by two threads, to the data port by HTTP or by gRPC.

The caller's thread packs, with copy and digest in one pass; others send. Chunks stay in memory until the daemon has acknowledged
them. A trainer's memory is therefore read once, even if connections break. The extra memory is three windows, reused within a
publish: fresh pages would cost more than all other work on a chunk.

By HTTP, a window goes in each request, which costs a third of a gRPC stream's time: the kernel copies from the window, and the
daemon reads into one buffer. After a cut connection, only chunks that the daemon lacks are sent again. Once the port refuses, or
cannot be reached for some seconds, the rest of the slot goes by gRPC, whose errors are the publish's.
"""

import logging
import mmap
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import grpc
import numpy as np
import xxhash
from resharder.client.rpc.channel import Channel, unreachable
from resharder.client.transport.base import AssignedSlot, Delivered, Releases
from resharder.client.transport.host_buffers import add_digest, host_parts
from resharder.converters.failpoints import failpoint
from resharder.converters.geometry.layout import ITEM_SIZES, Box, box_shape, box_size
from resharder.converters.storage.digest import copy_and_digest
from resharder.converters.storage.files import BITS
from resharder.converters.wire.backoff import Backoff
from resharder.converters.wire.chunk_body import body_of, chunks_path
from resharder.converters.wire.chunk_frame import ChunkHeader, frame
from resharder.converters.wire.range_client import BROKEN, DataAddress, PartRefused, PortBusy, RangeConnection
from resharder.v1 import publisher_pb2, publisher_pb2_grpc, resources_pb2

if TYPE_CHECKING:
    from resharder.client.transport.base import Item


WINDOW_BYTES = 16 << 20
_WINDOWS = 2  # windows in transit, while one more is packed
_STREAM_SECONDS = 300.0
_PATIENCE = 5.0  # seconds of attempts for one window by HTTP until gRPC takes over
logger = logging.getLogger(__name__)


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
            self._open[index] = PackedChunk(self._slot.first_chunk + index, self.free.popleft(), size, size)
        return self._open[index]


def _allocate(size: int) -> Iterator[memoryview]:
    """Return memory for a window of chunks of `size` bytes, in huge pages if the host has them."""
    count = max(1, WINDOW_BYTES // size)
    memory = mmap.mmap(-1, count * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(memory)
    return (view[i * size : (i + 1) * size] for i in range(count))


class GrpcChunks:
    """Transport of chunks over `channel`, from any host. Each window is a stream of its own.

    After a broken stream, only chunks that the daemon lacks are sent again.

    Args:
        channel: Channel to the daemon.
        reason: Why a faster transport cannot be used; empty if this one was chosen.
    """

    def __init__(self, channel: Channel, reason: str = "") -> None:
        self._channel, self._reason = channel, reason

    def deliver(
        self, version: resources_pb2.Version, slot: AssignedSlot, items: "Iterable[Item]", releases: Releases
    ) -> Delivered:
        """Deliver as `Transport.deliver`. Broken streams are resumed for the channel's patience."""
        digests = send_in_windows(slot, items, ChunkStreams(self._channel, version, slot.rank).send)
        return Delivered(digests, "grpc", self._reason)


class ChunkStreams:
    """Streams of one slot's chunks. Thread-safe."""

    def __init__(self, channel: Channel, version: resources_pb2.Version, rank: int) -> None:
        self._channel, self._version, self._rank = channel, version, rank

    def send(self, chunks: Sequence[PackedChunk]) -> None:
        """Send chunks and return when the daemon has them. Raises the errors of `errors`."""
        backoff = Backoff(self._channel.patience)
        upload = self._channel.grpc.stream_unary(
            "/resharder.v1.PublisherService/UploadChunks", response_deserializer=publisher_pb2.UploadSummary.FromString
        )
        left = chunks
        while left:
            try:
                failpoint("chunks.upload")
                self._channel.begin(upload, self._messages(left), timeout=_STREAM_SECONDS)
                return
            except grpc.RpcError as error:
                if not (unreachable(error) and backoff.wait()):
                    raise self._channel.error(error) from error
            left = self.missing(left)

    def missing(self, chunks: Sequence[PackedChunk]) -> list[PackedChunk]:
        """Return the chunks that the daemon lacks. Raises the errors of `errors`."""
        stub = publisher_pb2_grpc.PublisherServiceStub(self._channel.grpc)
        request = publisher_pb2.SlotRequest(version=self._version.name, epoch=self._version.epoch, rank=self._rank)
        lacking = set(self._channel.call(stub.ListMissingChunks, request).indices)
        return [chunk for chunk in chunks if chunk.index in lacking]

    def header(self, chunk: PackedChunk) -> ChunkHeader:
        return ChunkHeader(self._version.number, self._version.epoch, self._rank, chunk.index, chunk.checksum)

    def _messages(self, chunks: Sequence[PackedChunk]) -> Iterator[bytes]:
        """Yield the messages of one stream. The first one names the model."""
        model = self._version.model
        for chunk in chunks:
            yield frame(self.header(chunk), chunk.data, model)
            model = ""


class HttpChunks:
    """Transport of one delivery's chunks to the data port at `address`, and by gRPC once that takes over."""

    def __init__(self, channel: Channel, address: DataAddress) -> None:
        self._channel, self._address = channel, address
        self._reason = ""  # why gRPC took over
        self._lock, self._idle = threading.Lock(), list[RangeConnection]()

    def deliver(
        self, version: resources_pb2.Version, slot: AssignedSlot, items: "Iterable[Item]", releases: Releases
    ) -> Delivered:
        """Deliver as `Transport.deliver`."""
        streams = ChunkStreams(self._channel, version, slot.rank)
        try:
            digests = send_in_windows(slot, items, lambda chunks: self._send(chunks, version, streams))
            return Delivered(digests, "grpc" if self._reason else "http", self._reason)
        finally:
            for connection in self._idle:
                connection.close()

    def _send(self, chunks: Sequence[PackedChunk], version: resources_pb2.Version, streams: ChunkStreams) -> None:
        left, backoff = chunks, Backoff(_PATIENCE)
        while left and not self._reason:
            try:
                failpoint("chunks.put")
                size, parts = body_of((streams.header(chunk), chunk.data) for chunk in left)
                with self._connection() as connection:
                    connection.put(chunks_path(version.name), size, parts)
                return
            except (*BROKEN, PortBusy) as error:
                if not backoff.wait():
                    at = f"{self._address.host}:{self._address.port}"
                    self._give_up(version, f"{at}: {str(error) or type(error).__name__}")
            except PartRefused as error:
                self._give_up(version, str(error))
            left = streams.missing(left)
        streams.send(left)

    def _give_up(self, version: resources_pb2.Version, reason: str) -> None:
        logger.warning("%s goes to the daemon by gRPC: %s", version.name, reason)
        self._reason = reason

    @contextmanager
    def _connection(self) -> Iterator[RangeConnection]:
        """Yield an idle connection or a new one, which is closed after an error."""
        with self._lock:
            connection = self._idle.pop() if self._idle else RangeConnection(self._address)
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        with self._lock:
            self._idle.append(connection)
