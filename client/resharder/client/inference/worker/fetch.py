"""The helper process that fills a mirror: `python -m …inference.worker.fetch PARENT ENDPOINT TRANSPORT DESCRIPTOR…`.

A process of its own does not compete for the engine's Python lock while boxes arrive. It inherits one
descriptor for each file of the version, reads a `BoxesRequest` from its standard input and writes one line
of JSON: `{"digests": […], "transport": …, "reason": …}` or `{"error": …}`. It ends with its parent process.

With the transport `http`, boxes come from the daemon's data port: by HTTP ranges of the files, or packed by the daemon. Boxes
that the port does not deliver come by the gRPC stream.
"""

import json
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from resharder.client.errors import ResharderError
from resharder.client.rpc.channel import Channel
from resharder.client.runtime.parent_watch import end_with
from resharder.client.settings import GRPC, HTTP
from resharder.client.versions.port_reader import PortReader, PortUnavailable
from resharder.client.versions.read_plan import ReadPlan, plan_reads
from resharder.client.versions.remote import VersionManifest, download, get_manifest
from resharder.converters.failpoints import failpoint
from resharder.converters.geometry.layout import Box, box_index
from resharder.converters.storage.digest import digest
from resharder.converters.storage.files import MappedFiles
from resharder.converters.wire.boxes import box_from_proto
from resharder.v1 import server_pb2

DESCRIPTORS = Path("/proc/self/fd")
"""Folder of the version's files, whose names there are their descriptors."""


@dataclass(frozen=True)
class Fetched:
    """Boxes that were fetched."""

    digests: list[int]
    """The digest of each box, read back from the files."""
    transport: str
    """`http` if all boxes came from the data port, else `grpc`."""
    reason: str
    """Reason for the stream in place of the data port; empty if there is none."""


def fetch(channel: Channel, descriptors: list[str], request: server_pb2.BoxesRequest, transport: str = GRPC) -> Fetched:
    """Download the boxes of `request` into the files.

    Args:
        channel: Channel to the daemon.
        descriptors: Names in `/proc/self/fd` of the version's files, in the manifest's order.
        request: The boxes.
        transport: `http` or `grpc`.

    Raises:
        ResharderError: The daemon does not deliver the boxes.
    """
    manifest = get_manifest(channel, request.version)
    files = (replace(file, path=descriptor) for file, descriptor in zip(manifest.files, descriptors, strict=True))
    failpoint("worker.fetch.write")
    mapped = MappedFiles(DESCRIPTORS, files, writable=True)  # until this process ends
    arrays = mapped.arrays
    boxes = [(request.tensors[entry.tensor], box_from_proto(entry.box)) for entry in request.boxes]
    digests: dict[int, int] = {}

    def arrived(position: int) -> None:
        name, box = boxes[position]
        array = arrays[name][box_index(box)] if box else arrays[name]
        digests[position] = digest(array, box, manifest.specs[name].shape)

    reason = _by_port(channel, manifest, mapped, boxes, arrived) if transport == HTTP else ""
    left = [position for position in range(len(boxes)) if position not in digests]
    for position, box, array in download(channel, manifest, [boxes[position] for position in left]):
        arrays[boxes[left[position]][0]][box_index(box)] = array
    for position in left:
        arrived(position)
    return Fetched([digests[position] for position in range(len(boxes))], GRPC if left or transport == GRPC else HTTP, reason)


def _by_port(
    channel: Channel,
    manifest: VersionManifest,
    mapped: MappedFiles,
    boxes: Sequence[tuple[str, Box]],
    arrived: Callable[[int], None],
) -> str:
    """Read boxes from the data port, and return why some or all of them did not arrive; empty without a reason.

    Raises CorruptData.
    """
    plan = plan_reads(manifest.files, boxes)
    try:
        PortReader(channel, manifest).read(plan.jobs, mapped.contents, mapped.arrays, _Arrivals(plan, arrived))
    except PortUnavailable as error:
        return str(error)
    return ""


class _Arrivals:
    """Jobs of a plan that have arrived: calls `arrived` with the position of each box that is complete. Thread-safe."""

    def __init__(self, plan: ReadPlan, arrived: Callable[[int], None]) -> None:
        self._arrived, self._lock = arrived, threading.Lock()
        self._missing = [len(needed) for needed in plan.of_box]
        self._boxes: list[list[int]] = [[] for _ in plan.jobs]
        for position, needed in enumerate(plan.of_box):
            for number in needed:
                self._boxes[number].append(position)

    def __call__(self, number: int) -> None:
        with self._lock:
            for position in self._boxes[number]:
                self._missing[position] -= 1
            complete = [position for position in self._boxes[number] if not self._missing[position]]
        for position in complete:
            self._arrived(position)


def main() -> int:
    """Run the helper process."""
    parent, endpoint, transport, *descriptors = sys.argv[1:]
    end_with(int(parent))
    request = server_pb2.BoxesRequest.FromString(sys.stdin.buffer.read())
    try:
        with Channel(endpoint) as channel:
            answer: dict[str, object] = asdict(fetch(channel, descriptors, request, transport))
    except (ResharderError, OSError, ValueError) as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
