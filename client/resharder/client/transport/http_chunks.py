"""Transport from other hosts: boxes packed into chunks and sent to the daemon's data port by HTTP, a window in each request.

A request costs a third of a gRPC stream's time: the kernel copies from the window, and the daemon reads into one buffer. After a
cut connection, only chunks that the daemon lacks are sent again. Once the port refuses, or cannot be reached for some seconds,
the rest of the slot goes by gRPC, whose errors are the publish's.
"""

import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from resharder.client.rpc.channel import Backoff, Channel
from resharder.client.transport.base import AssignedSlot, Releases
from resharder.client.transport.chunks import PackedChunk, send_in_windows
from resharder.client.transport.grpc_chunks import ChunkStreams
from resharder.converters.failpoints import failpoint
from resharder.converters.wire.chunk_body import body_of, chunks_path
from resharder.converters.wire.range_client import BROKEN, DataAddress, PartRefused, PortBusy, RangeConnection
from resharder.v1 import resources_pb2

if TYPE_CHECKING:
    from resharder.client.transport.base import Item

logger = logging.getLogger(__name__)
_PATIENCE = 5.0  # seconds of attempts for one window until gRPC takes over


class HttpChunks:
    """Transport of chunks to the data port at `address`. `name` and `reason` change when gRPC takes over."""

    mapped = False

    def __init__(self, channel: Channel, address: DataAddress) -> None:
        self._channel, self._address = channel, address
        self.name, self.reason = "http", ""
        self._lock, self._idle = threading.Lock(), list[RangeConnection]()

    def deliver(
        self, version: resources_pb2.Version, slot: AssignedSlot, items: "Iterable[Item]", releases: Releases
    ) -> list[int]:
        """Deliver as `Transport.deliver`."""
        streams = ChunkStreams(self._channel, version, slot.rank)
        try:
            return send_in_windows(slot, items, lambda chunks: self._send(chunks, version, streams))
        finally:
            for connection in self._idle:
                connection.close()

    def _send(self, chunks: Sequence[PackedChunk], version: resources_pb2.Version, streams: ChunkStreams) -> None:
        left, backoff = chunks, Backoff(_PATIENCE)
        while left and not self.reason:
            try:
                failpoint("chunks.put")
                size, parts = body_of((streams.header(chunk), chunk.data) for chunk in left)
                with self._connection() as connection:
                    connection.put(chunks_path(version.name), size, parts)
                return
            except (*BROKEN, PortBusy) as error:
                if not backoff.wait():
                    at = f"{self._address.host}:{self._address.port}"
                    self._give_up(version, f"{at}: {error or type(error).__name__}")
            except PartRefused as error:
                self._give_up(version, str(error))
            left = streams.missing(left)
        streams.send(left)

    def _give_up(self, version: resources_pb2.Version, reason: str) -> None:
        logger.warning("%s goes to the daemon by gRPC: %s", version.name, reason)
        self.name, self.reason = "grpc", reason

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
