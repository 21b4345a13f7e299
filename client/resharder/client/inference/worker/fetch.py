"""The helper process that fills a mirror: `python -m resharder.client.inference.worker.fetch PARENT ENDPOINT DESCRIPTOR…`.

A process of its own does not compete for the engine's Python lock while boxes arrive. It inherits one
descriptor for each file of the version, reads a `BoxesRequest` from its standard input and writes one line
of JSON: `{"digests": […]}` or `{"error": …}`. It ends with its parent process.
"""

import json
import sys
from dataclasses import replace

from resharder.client.errors import ResharderError
from resharder.client.inference.worker.source import DESCRIPTORS
from resharder.client.rpc.channel import Channel
from resharder.client.runtime.parent_watch import end_with
from resharder.client.versions.remote import download, get_manifest
from resharder.converters.failpoints import failpoint
from resharder.converters.geometry.layout import box_index
from resharder.converters.storage.digest import digest
from resharder.converters.storage.files import MappedFiles
from resharder.converters.wire.boxes import box_from_proto
from resharder.v1 import server_pb2


def fetch(channel: Channel, descriptors: list[str], request: server_pb2.BoxesRequest) -> list[int]:
    """Download the boxes of `request` into the files.

    Args:
        channel: Channel to the daemon.
        descriptors: Names in `/proc/self/fd` of the version's files, in the manifest's order.
        request: The boxes.

    Returns:
        The digest of each box, read back from the files.

    Raises:
        ResharderError: The daemon does not deliver the boxes.
    """
    manifest = get_manifest(channel, request.version)
    files = (replace(file, path=descriptor) for file, descriptor in zip(manifest.files, descriptors, strict=True))
    failpoint("worker.fetch.write")
    arrays = MappedFiles(DESCRIPTORS, files, writable=True).arrays  # stay mapped until this process ends
    boxes = [(request.tensors[entry.tensor], box_from_proto(entry.box)) for entry in request.boxes]
    for position, box, array in download(channel, manifest, boxes):
        arrays[boxes[position][0]][box_index(box)] = array
    return [digest(arrays[name][box_index(box)], box, manifest.specs[name].shape) for name, box in boxes]


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
