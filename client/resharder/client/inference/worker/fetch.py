"""The helper process that fills a mirror: `python -m …inference.worker.fetch PARENT ENDPOINT DESCRIPTOR…`.

A process of its own does not compete for the engine's Python lock while boxes arrive. It inherits one
descriptor for each file of the version, reads a `BoxesRequest` from its standard input and writes one line
of JSON: `{"digests": […]}` or `{"error": …}`. It ends with its parent process.

Boxes come from the daemon's data port: by HTTP ranges of the files, or packed by the daemon.
"""

import json
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from resharder.client.errors import ResharderError
from resharder.client.rpc.channel import Channel
from resharder.client.runtime.parent_watch import end_with
from resharder.client.versions.manifest import get_manifest
from resharder.client.versions.port_reader import PortReader
from resharder.client.versions.read_plan import ReadPlan, plan_reads
from resharder.converters.failpoints import failpoint
from resharder.converters.geometry.layout import box_index
from resharder.converters.storage.digest import digest
from resharder.converters.storage.files import MappedFiles
from resharder.converters.wire.boxes import box_from_proto
from resharder.v1 import server_pb2

DESCRIPTORS = Path("/proc/self/fd")
"""Folder of the version's files, whose names there are their descriptors."""


def fetch(channel: Channel, descriptors: list[str], request: server_pb2.BoxesRequest) -> list[int]:
    """Download the boxes of `request` into the files, and return the digest of each box, read back from the files.

    Args:
        channel: Channel to the daemon.
        descriptors: Names in `/proc/self/fd` of the version's files, in the manifest's order.
        request: The boxes.

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

    plan = plan_reads(manifest.files, boxes)
    PortReader(channel, manifest).read(plan.jobs, mapped.contents, arrays, _Arrivals(plan, arrived))
    return [digests[position] for position in range(len(boxes))]


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
    parent, endpoint, *descriptors = sys.argv[1:]
    end_with(int(parent))
    request = server_pb2.BoxesRequest.FromString(sys.stdin.buffer.read())
    try:
        with Channel(endpoint) as channel:
            answer: dict[str, object] = {"digests": fetch(channel, descriptors, request)}
    except (ResharderError, OSError, ValueError) as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
