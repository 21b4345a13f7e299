"""Boxes that ranks have written on other nodes' hosts, fetched into the files of their home once all ranks have sealed.

The other node packs the boxes, as the daemon does for a reader, and every chunk has a checksum. The home takes the digests of
the whole tensors afterwards, and the daemon compares them with what the ranks have declared.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from resharder.converters.geometry.layout import ITEM_SIZES, TensorSpec, box_size
from resharder.converters.storage.writable_files import WritableFiles
from resharder.converters.wire.chunk_body import ReusedMemory
from resharder.converters.wire.range_client import BROKEN, DataAddress, PartRefused, RangeConnection, WrongBytes
from resharder.converters.wire.windows import BoxPart, Window, cut_windows, window_request
from resharder.server.holding.part_files import FilesOnNode
from resharder.server.holding.piece_requests import LIMITS
from resharder.server.holding.tls import NodeTls
from resharder.server.holding.transfers import FetchFailed, ReceivedBytes, data_address
from resharder.server.infra.filesystem import MediumRefused, touching
from resharder.server.state.version import UPLOADING, VersionRecord
from resharder.server.store.manifest import Manifest

_PATIENCE = 10.0  # seconds without a window from a node
_PAUSE = 0.05  # at most, until a node that has refused is asked again: READY waits for it
_CONNECTIONS = 4


@dataclass(frozen=True)
class _Target:
    """Open files of a set, the version in them, and the specs of the tensors of which boxes are missing."""

    version: str
    tag: str
    folder: Path
    files: WritableFiles
    specs: Mapping[str, TensorSpec]


def manifest_of_parts(own: FilesOnNode, model: str, number: int) -> Manifest | None:
    """Return a manifest by which boxes of the parts of an UPLOADING version are read; None without parts."""
    if not own.parts:
        return None
    files = tuple(part.layout for part in own.parts)
    size, tensors = sum(file.size for file in files), sum(len(file.tensors) for file in files)
    record = VersionRecord(model, number, UPLOADING, 0, 0, "", size, tensors, 0.0)
    return Manifest(record, files, {}, (), whole=False)


class BoxGatherer:
    """Fetches boxes from the data ports of other nodes.

    Args:
        tls: Certificates of this node; None connects without TLS.
        received: Counter of received bytes.
    """

    def __init__(self, tls: NodeTls | None, received: ReceivedBytes) -> None:
        self._tls, self._received = tls, received

    def gather(
        self, version: str, tag: str, folder: Path, own: FilesOnNode, sources: Mapping[str, str], stopped: Callable[[], bool]
    ) -> None:
        """Fetch the boxes that a set of files lacks. No file is open afterwards.

        Args:
            version: Resource name of the UPLOADING version.
            tag: `ETag` by which the nodes name its bytes.
            folder: Folder of the set.
            own: Files of the set, and the boxes to gather.
            sources: Address of the data port of each node that has some of them, by its id.
            stopped: Returns whether the boxes are no longer of use.

        Raises:
            FetchFailed: A node delivers nothing for some seconds, or wrong bytes twice, or the boxes are no longer of use.
            OSError: They cannot be written.
        """
        if not own.gathered:
            return
        paths = {each.path for each in own.gathered}
        files = [file for file in own.files if file.path in paths]
        specs = {placed.spec.name: placed.spec for file in files for placed in file.tensors}
        windows = _windows(own, specs)
        addresses = {node: self._address(node, sources) for node in windows}
        shares = max(1, _CONNECTIONS // len(windows))
        jobs = [(node, windows[node][share::shares]) for node in windows for share in range(min(shares, len(windows[node])))]
        failed = threading.Event()
        with WritableFiles(folder, files) as opened, ThreadPoolExecutor(len(jobs), "gather") as pool:
            target = _Target(version, tag, folder, opened, specs)

            def read(job: tuple[str, Sequence[Window]]) -> None:
                try:
                    self._read(target, job[0], addresses[job[0]], job[1], lambda: failed.is_set() or stopped())
                except BaseException:
                    failed.set()
                    raise

            reads = [pool.submit(read, job) for job in jobs]
        errors = [error for each in reads if (error := each.exception()) is not None]
        if errors:
            raise next((error for error in errors if not isinstance(error, FetchFailed) or error.node), errors[0])

    def _address(self, node: str, sources: Mapping[str, str]) -> DataAddress:
        if not sources.get(node):
            raise FetchFailed(f"nodes/{node}, on whose host ranks wrote boxes, is gone", node)
        return data_address(sources[node], self._tls, LIMITS.stalled, daemon=False)

    def _read(
        self, target: _Target, node: str, address: DataAddress, windows: Sequence[Window], stopped: Callable[[], bool]
    ) -> None:
        """Read windows over one connection. A node refuses until it has the order for a sealed set, and while it is busy."""
        connection, memory, left = RangeConnection(address), ReusedMemory(), deque(windows)

        def rest() -> Iterator[None]:
            while left:
                if stopped():
                    raise FetchFailed(f"{target.version} is no longer waited for")
                self._read_window(target, connection, left[0], memory)
                left.popleft()
                yield

        try:
            connection.read_all(rest, _PATIENCE, _PAUSE, ends=lambda error: isinstance(error, MediumRefused))
        except MediumRefused:
            raise
        except (PartRefused, WrongBytes, *BROKEN) as error:
            raise FetchFailed(f"nodes/{node} does not deliver boxes: {str(error) or type(error).__name__}", node) from error
        finally:
            connection.close()

    def _read_window(self, target: _Target, connection: RangeConnection, window: Window, memory: ReusedMemory) -> None:
        request, chunks = window_request(target.version, target.tag, window, target.specs)
        for parts, (_, data) in zip(chunks, connection.chunks(request, memory), strict=True):
            with touching(target.folder, "writing", len(data)):
                at = 0
                for position, box in parts:
                    spec = target.specs[window[position].name]
                    size = box_size(box) * ITEM_SIZES[spec.dtype]
                    target.files.put_bytes(spec, box, data[at : at + size])
                    at += size
        self._received.add(sum(request.sizes), daemon=False)


def _windows(own: FilesOnNode, specs: Mapping[str, TensorSpec]) -> dict[str, list[Window]]:
    """Return the requests for the gathered boxes, by node."""
    boxes: dict[str, list[BoxPart]] = {}
    for each in own.gathered:
        some = boxes.setdefault(each.node, [])
        some += [BoxPart(len(some) + i, name, box) for i, (name, box) in enumerate(each.boxes)]
    return {node: cut_windows(some, specs) for node, some in boxes.items()}
