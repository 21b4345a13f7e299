"""Read a version as a worker's helper does, and print a line of JSON: `… -m tests.support.reading_process ENDPOINT VERSION`."""

import json
import sys
import time

from resharder.client.inference.worker.fetch import fetch
from resharder.client.inference.worker.source import Mirror
from resharder.client.rpc.channel import Channel
from resharder.client.versions.remote import get_manifest
from resharder.converters.geometry.layout import full_box
from resharder.converters.wire.windows import boxes_request


def main() -> None:
    endpoint, version = sys.argv[1:]
    with Channel(endpoint) as channel:
        manifest = get_manifest(channel, version)
        boxes = [(name, full_box(spec.shape)) for name, spec in manifest.specs.items()]
        files = [file.path for file in Mirror("/dev/shm").prepare(manifest.files)]
        began = time.perf_counter()
        found = fetch(channel, files, boxes_request(manifest.name, boxes), "http")
        seconds = time.perf_counter() - began
    verified = found.digests == list(manifest.digests.values())
    print(json.dumps({"verified": verified, "transport": found.transport, "reason": found.reason, "seconds": seconds}))


if __name__ == "__main__":
    main()
