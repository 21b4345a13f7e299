"""Stage a version as a worker does, and verify it."""

from resharder.client.inference.settings import PluginSettings
from resharder.client.inference.worker.source import Sources
from resharder.client.rpc.channel import Channel
from resharder.client.versions.manifest import Needs, get_manifest
from resharder.converters.geometry.layout import box_index, full_box
from resharder.converters.storage.digest import digest
from resharder.v1 import resources_pb2


def stage(endpoint: str, version: str, needs: Needs | None = None) -> dict[str, object]:
    """Return how a version arrives on this host, and whether all boxes, by default whole tensors, have their digests."""
    with Channel(endpoint) as channel:
        manifest = get_manifest(channel, version)
        sources = Sources(channel, resources_pb2.StoreAccess(), PluginSettings(endpoint, "server"))
        needs = needs or {name: (full_box(spec.shape),) for name, spec in manifest.specs.items()}
        source = sources.open(manifest, needs)
        arrays = source.arrays
        found = {
            (name, box): digest(arrays[name][box_index(box)], box, manifest.specs[name].shape)
            for name, boxes in needs.items()
            for box in boxes
        }
        del arrays
        source.close()
        sources.close()
    return {"verified": found == source.expected, "transport": source.transport, "reason": sources.transport_reason}
