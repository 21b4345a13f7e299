"""A rank's frozen boxes: those that are what they were in an earlier version are not sent again.

The daemon names the version whose files of frozen tensors the new one has (`Version.frozen_from`). A rank that has sealed that
version digests its boxes in memory, and compares. If one has changed, or the rank does not know the version, it asks for files of
the new version's own (`ThawFiles`) and sends all of its frozen boxes. The digests are sealed in any case: the daemon compares
every tensor of the version with them.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from resharder.client.rpc.channel import Channel
from resharder.client.transport.at_home import PieceSubset
from resharder.client.transport.base import AssignedSlot, Delivered, LiveItems
from resharder.client.transport.host_buffers import digests_of
from resharder.client.transport.selection import home_of
from resharder.converters.geometry.layout import Layout, Piece
from resharder.converters.geometry.piece_arrays import pack
from resharder.v1 import publisher_pb2, publisher_pb2_grpc, resources_pb2

if TYPE_CHECKING:
    from resharder.client.gpu.box_digests import BoxDigests
    from resharder.client.transport.base import Releases, Transport

_KEPT = 4  # versions; the newest READY one is older than the last by those that are UPLOADING
_THAW_SECONDS = 300.0


class FrozenBoxes:
    """Digests of the frozen boxes that a rank has sealed, by version."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._stub = publisher_pb2_grpc.PublisherServiceStub(channel.grpc)
        self._sealed: OrderedDict[int, tuple[AssignedSlot, list[int]]] = OrderedDict()
        self._subsets = PieceSubset(), PieceSubset()
        self._pieces: Sequence[Piece] = ()
        self._digests: BoxDigests | None = None  # of the boxes of `_pieces`

    def deliver(
        self,
        version: resources_pb2.Version,
        slot: AssignedSlot,
        items: LiveItems,
        transports: "tuple[Transport, Transport]",
        releases: "Releases",
        keep: Callable[[], None],
    ) -> tuple[Delivered, bool]:
        """Deliver a slot with frozen boxes, and return whether these are unchanged and were not sent.

        Args:
            version: UPLOADING version.
            slot: The slot.
            items: Elements of its boxes.
            transports: For the frozen boxes, and for the others.
            releases: See `Transport.deliver`.
            keep: Called before the others are sent if the frozen boxes are not.

        Raises the errors of `errors`.
        """
        home, (frozen_way, rest_way) = home_of(version, slot), transports
        parts = slot.parted(home.gathers if home is not None else None)
        frozen = self._subsets[0].take(items, parts.frozen_boxes)
        alone = home is not None and not home.shares and bool(parts.frozen.node_boxes)
        found = self._unchanged(version, parts.frozen, frozen) if not alone else None
        if found is not None:
            keep()
            done = Delivered(found, "")
        else:
            if version.frozen_from:
                request = publisher_pb2.SlotRequest(version=version.name, epoch=version.epoch, rank=slot.rank)
                self._channel.call(self._stub.ThawFiles, request, timeout=_THAW_SECONDS)
            done = frozen_way.deliver(version, parts.frozen, frozen, releases)
        others = done._replace(digests=[])
        if parts.rest_boxes:
            others = rest_way.deliver(version, parts.rest, self._subsets[1].take(items, parts.rest_boxes), releases)
        digests = [0] * len(slot.boxes)
        for numbers, values in ((parts.frozen_boxes, done.digests), (parts.rest_boxes, others.digests)):
            for number, value in zip(numbers, values, strict=True):
                digests[number] = value
        mapped = others.mapped or done.mapped
        return Delivered(digests, others.way, others.reason, mapped), found is not None

    def _unchanged(self, version: resources_pb2.Version, slot: AssignedSlot, items: LiveItems) -> list[int] | None:
        """Return the digests of frozen boxes that are those of `version.frozen_from`; None if some are not."""
        known, sealed = self._sealed.get(version.frozen_from, (slot, []))
        if not version.frozen_from or not sealed or known != slot:
            return None
        found = self._digests_of(slot, items)
        return found if found == sealed else None

    def _digests_of(self, slot: AssignedSlot, items: LiveItems) -> list[int]:
        """Return the digest of each box of a slot, in order: by the GPU that has all of them, else by this host."""
        devices = {items.tensors[piece.local].device for piece in items.pieces}
        if {device.type for device in devices} != {"cuda"} or len(devices) > 1:
            return digests_of(slot, items)
        if self._digests is None or self._pieces is not items.pieces:
            from resharder.client.gpu.box_digests import BoxDigests

            layout = Layout({spec.name: spec for spec in slot.specs}, tuple(items.pieces))
            self._pieces, self._digests = items.pieces, BoxDigests(pack({slot.rank: layout}), devices.pop())
        return self._digests.digests(items.tensors)

    def sealed(self, version: resources_pb2.Version, slot: AssignedSlot, digests: list[int]) -> None:
        """Record the digests of a slot that the daemon has."""
        parts = slot.parted(None)
        self._sealed[version.number] = parts.frozen, [digests[number] for number in parts.frozen_boxes]
        self._sealed.move_to_end(version.number)
        while len(self._sealed) > _KEPT:
            self._sealed.popitem(last=False)
