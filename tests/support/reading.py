"""Read versions as a worker's helper does, in a process of its own (`tests.support.remote`)."""

import time

from resharder.client.inference.worker.fetch import fetch
from resharder.client.inference.worker.source import Mirror
from resharder.client.rpc.channel import Channel
from resharder.client.versions.manifest import get_manifest
from resharder.converters.geometry.layout import full_box
from resharder.converters.wire.windows import boxes_request


class Reader:
    """The role."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint

    def read(self, version: str) -> dict[str, object]:
        """Return in how many seconds a version came, and whether its tensors have their digests."""
        with Channel(self._endpoint) as channel:
            manifest = get_manifest(channel, version)
            boxes = [(name, full_box(spec.shape)) for name, spec in manifest.specs.items()]
            files = [file.path for file in Mirror("/dev/shm").prepare(manifest.files)]
            began = time.perf_counter()
            found = fetch(channel, files, boxes_request(manifest.name, boxes))
            seconds = time.perf_counter() - began
        return {"verified": found == list(manifest.digests.values()), "seconds": seconds}
