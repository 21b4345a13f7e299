"""Transport on a node's host: a rank writes into the node's files the boxes that have their home there, and sends the others.

The others are boxes of tensors of which ranks on a host without a node send parts, or a node that is no home of the version.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from resharder.client.transport.base import AssignedSlot, Delivered, DividedSlot, LiveItems, Releases
from resharder.client.transport.shared_memory import SharedMemory, copy_threads
from resharder.converters.geometry.layout import Piece
from resharder.v1 import resources_pb2

if TYPE_CHECKING:
    from resharder.client.transport.base import Item, Transport


class PieceSubset:
    """Some pieces of a model, the same object for the same pieces: a transport plans its copies once for each."""

    def __init__(self) -> None:
        self._of: Sequence[Piece] = ()
        self._numbers: Sequence[int] = ()
        self._pieces: list[Piece] = []

    def take(self, items: LiveItems, numbers: Sequence[int]) -> LiveItems:
        """Return the items at `numbers`, numbered in order."""
        if self._of is not items.pieces or self._numbers != numbers:
            self._of, self._numbers, self._pieces = items.pieces, numbers, [items.pieces[number] for number in numbers]
        return LiveItems(items.tensors, self._pieces)


class AtHome:
    """Transport of one delivery.

    Args:
        folder: Folder of the node's files.
        divided: The slot's boxes that go there, and the others.
        memory: Transport into them.
        rest: Transport of the other boxes to the daemon; None if there are none.
        subsets: Pieces of either part, kept between deliveries.
    """

    def __init__(
        self,
        folder: str,
        divided: DividedSlot,
        memory: "Transport",
        rest: "Transport | None",
        subsets: tuple[PieceSubset, PieceSubset],
    ) -> None:
        self._folder, self._divided, self._memory, self._rest, self._subsets = folder, divided, memory, rest, subsets

    def deliver(
        self, version: resources_pb2.Version, slot: AssignedSlot, items: "Iterable[Item]", releases: Releases
    ) -> Delivered:
        """Deliver as `Transport.deliver`. Raises NotFound if the node's files are missing."""
        there, parts = resources_pb2.Version(), self._divided
        there.CopyFrom(version)
        there.folder, there.name = self._folder, ""  # the daemon knows no next files of a node
        if self._rest is None:
            return Delivered(self._memory.deliver(there, parts.home, items, releases).digests, "node")
        if isinstance(items, LiveItems):
            home, rest = (s.take(items, n) for s, n in zip(self._subsets, (parts.home_boxes, parts.rest_boxes), strict=True))
            found = self._memory.deliver(there, parts.home, home, releases).digests
            others = self._rest.deliver(version, parts.rest, rest, releases)
        else:
            found, others = self._divide(there, version, items, releases)
        digests = [0] * len(slot.boxes)
        for numbers, values in ((parts.home_boxes, found), (parts.rest_boxes, others.digests)):
            for number, value in zip(numbers, values, strict=True):
                digests[number] = value
        return Delivered(digests, "node", others.reason, others.mapped)

    def _divide(
        self,
        there: resources_pb2.Version,
        version: resources_pb2.Version,
        items: "Iterable[Item]",
        releases: Releases,
    ) -> tuple[list[int], Delivered]:
        """Write and send items as they come: an iterator is read once."""
        assert self._rest is not None
        at_home = {number: i for i, number in enumerate(self._divided.home_boxes)}
        other = {number: i for i, number in enumerate(self._divided.rest_boxes)}
        with SharedMemory(copy_threads()).opened(there, self._divided.home, releases) as files:

            def others() -> "Iterator[Item]":
                for number, tensor in items:
                    if number in at_home:
                        files.write([(at_home[number], tensor)])
                    else:
                        yield other[number], tensor

            return files.digests, self._rest.deliver(version, self._divided.rest, others(), releases)
