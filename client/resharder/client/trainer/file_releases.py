"""Release of a version's files as soon as a rank has written all of its boxes in them."""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

from resharder.client.errors import ResharderError
from resharder.client.rpc.channel import Channel
from resharder.v1 import publisher_pb2, publisher_pb2_grpc, resources_pb2

logger = logging.getLogger(__name__)
_TIMEOUT = 5.0  # seconds of a report


class FileReleases:
    """Closes files on a thread, since unmapping many small pages takes long, and reports each to the daemon.

    The daemon, or the node that has the file, digests it once all of its writers have closed it. Without a report, this happens
    after the last seal: errors are therefore ignored, and end the reports. Use it as a context, whose end does not wait.
    """

    def __init__(self, channel: Channel, version: resources_pb2.Version, rank: int) -> None:
        self._channel, self._version, self._rank = channel, version, rank
        self._stub = publisher_pb2_grpc.PublisherServiceStub(channel.grpc)
        self._thread = ThreadPoolExecutor(1, "resharder-release")
        self._reports = True

    def release(self, file: str, close: Callable[[], None]) -> None:
        """Call `close`, then report the file. Returns at once."""
        self._thread.submit(self._release, file, close)

    def _release(self, file: str, close: Callable[[], None]) -> None:
        close()
        if not self._reports:
            return
        request = publisher_pb2.ReleaseFilesRequest(
            version=self._version.name, epoch=self._version.epoch, rank=self._rank, files=[file]
        )
        try:
            self._channel.call(self._stub.ReleaseFiles, request, timeout=_TIMEOUT, patience=0)
        except ResharderError as error:  # also of a daemon without this call
            logger.debug("%s is not reported as written: %s", file, error)
            self._reports = False

    def __enter__(self) -> "FileReleases":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self._reports = False  # the version is aborted
        self._thread.shutdown(wait=False)
