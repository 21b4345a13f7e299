"""One connection to the data port that reads ranges and boxes of a version, opened when needed and again after a cut."""

from collections.abc import Callable, Iterator, Sequence

from resharder.client.errors import CorruptData, ResharderError
from resharder.client.rpc.channel import Backoff
from resharder.client.versions.read_plan import FileRange
from resharder.client.versions.remote import Arrived, VersionManifest, split_chunk
from resharder.converters.geometry.layout import ITEM_SIZES
from resharder.converters.storage.files import Array
from resharder.converters.wire.range_client import (
    BROKEN,
    DataAddress,
    PartRefused,
    PartRequest,
    RangeConnection,
    WrongBytes,
)
from resharder.converters.wire.windows import BoxPart, window_request

PATIENCE = 5.0  # seconds without progress on a connection until the stream takes over


class PortUnavailable(ResharderError):
    """The data port cannot be used; the gRPC stream may."""

    reason = "DATA_PORT"


class PortConnection:
    """Connection for reads of one version; after a cut, a new one reads the rest.

    Methods that read raise PortUnavailable if the port cannot be reached or refuses, and CorruptData if received bytes differ
    from their checksum twice.
    """

    def __init__(self, address: DataAddress, manifest: VersionManifest) -> None:
        self._at, self._manifest = f"{address.host}:{address.port}", manifest
        self._connection = RangeConnection(address)

    def close(self) -> None:
        """Close the connection, if it is open."""
        self._connection.close()

    def read_range(self, part: FileRange, target: Array) -> None:
        """Write the bytes of a range to `target`, which has as many bytes."""
        at, file = part.start, self._manifest.files[part.file]

        def rest() -> Iterator[None]:
            nonlocal at
            request = PartRequest(self._manifest.name, self._manifest.fingerprint, file.path, file.size, at, part.end)
            try:
                for size in self._connection.blocks(request, target[at - part.start :]) if at < part.end else ():
                    at += size
                    yield
            except WrongBytes:
                at = part.start
                raise

        self._finish(rest)

    def read_boxes(
        self, window: Sequence[BoxPart], memory: Callable[[int], memoryview], arrived: Callable[[Arrived], None]
    ) -> None:
        """Read parts of boxes.

        Args:
            window: The parts.
            memory: Returns memory of at least so many bytes for the next chunk, aligned for every dtype.
            arrived: Called with each part of a part, in order and once. The array is in the memory of its chunk.
        """
        left, specs = list(window), self._manifest.specs

        def rest() -> Iterator[None]:
            nonlocal left
            sizes = [ITEM_SIZES[specs[part.name].dtype] for part in left]
            request, chunks = window_request(self._manifest.name, self._manifest.fingerprint, left, specs)
            asked, done = left, 0
            try:
                for parts, (_, data) in zip(chunks, self._connection.chunks(request, memory), strict=True):
                    for position, box, array in split_chunk(parts, sizes, data):
                        arrived(Arrived(asked[position].position, box, array))
                    done += 1
                    yield
            finally:
                left = [asked[position]._replace(box=box) for parts in chunks[done:] for position, box in parts]

        self._finish(rest)

    def _finish(self, rest: Callable[[], Iterator[None]]) -> None:
        """Read what is left, again after an error that a new connection may mend. Each item of `rest` is progress."""
        backoff, wrong, complete = Backoff(PATIENCE), 0, False
        while not complete:
            progress = False
            try:
                for _ in rest():
                    progress = True
                complete = True
            except BROKEN as error:
                self.close()
                backoff = Backoff(PATIENCE) if progress else backoff
                if not backoff.wait():
                    raise PortUnavailable(f"{self._at}: {error or type(error).__name__}") from error
            except PartRefused as error:
                self.close()
                raise PortUnavailable(str(error)) from error
            except WrongBytes as error:
                self.close()
                wrong += 1
                if wrong > 1:
                    raise CorruptData(str(error)) from error
