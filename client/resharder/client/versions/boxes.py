"""Boxes of a version from the daemon, in order: by its data port, or by the gRPC stream where that cannot be used."""

import logging
from collections.abc import Iterator, Sequence

from resharder.client.rpc.channel import Channel
from resharder.client.versions.port_connection import PortUnavailable
from resharder.client.versions.port_reads import PortReader
from resharder.client.versions.remote import Arrived, VersionManifest, download
from resharder.converters.geometry.layout import Box
from resharder.converters.wire.windows import BoxPart, cut_windows

logger = logging.getLogger(__name__)


def read_boxes(channel: Channel, manifest: VersionManifest, boxes: Sequence[tuple[str, Box]]) -> Iterator[Arrived]:
    """Yield boxes, given as (tensor's name, box), in parts and in order.

    Every chunk has a checksum, and the version is pinned until the last one.

    Raises:
        CorruptData: A checksum is wrong.
        ResharderError: The daemon does not deliver the boxes, by neither way.
    """
    windows, done = cut_windows([BoxPart(i, *box) for i, box in enumerate(boxes)], manifest.specs), 0
    try:
        for parts in PortReader(channel, manifest).windows(windows):
            yield from parts
            done += 1
        return
    except PortUnavailable as error:
        if manifest.data_address:
            logger.warning("%s is read by gRPC: %s", manifest.name, error)
    left = [part for window in windows[done:] for part in window]
    for position, box, array in download(channel, manifest, [(part.name, part.box) for part in left]):
        yield Arrived(left[position].position, box, array)
