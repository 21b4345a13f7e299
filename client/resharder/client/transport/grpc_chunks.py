"""Transport from any host: boxes packed into chunks and streamed over gRPC.

Each window of chunks is a stream of its own. After a broken stream, only chunks that the daemon lacks are sent again.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import grpc
from resharder.client.rpc.channel import Backoff, Channel, unreachable
from resharder.client.transport.base import AssignedSlot, Releases
from resharder.client.transport.chunks import PackedChunk, send_in_windows
from resharder.converters.failpoints import failpoint
from resharder.converters.wire.chunk_frame import ChunkHeader, frame
from resharder.v1 import publisher_pb2, publisher_pb2_grpc, resources_pb2

if TYPE_CHECKING:
    from resharder.client.transport.base import Item

_STREAM_SECONDS = 300.0


class GrpcChunks:
    """Transport of chunks over `channel`.

    Args:
        channel: Channel to the daemon.
        reason: Why a faster transport cannot be used; empty if this one was chosen.
    """

    name = "grpc"
    mapped = False

    def __init__(self, channel: Channel, reason: str = "") -> None:
        self._channel, self.reason = channel, reason

    def deliver(
        self, version: resources_pb2.Version, slot: AssignedSlot, items: "Iterable[Item]", releases: Releases
    ) -> list[int]:
        """Deliver as `Transport.deliver`. Broken streams are resumed for the channel's patience."""
        return send_in_windows(slot, items, ChunkStreams(self._channel, version, slot.rank).send)


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
        """Return the header of a chunk."""
        return ChunkHeader(self._version.number, self._version.epoch, self._rank, chunk.index, chunk.checksum)

    def _messages(self, chunks: Sequence[PackedChunk]) -> Iterator[bytes]:
        """Yield the messages of one stream. The first one names the model."""
        model = self._version.model
        for chunk in chunks:
            yield frame(self.header(chunk), chunk.data, model)
            model = ""
