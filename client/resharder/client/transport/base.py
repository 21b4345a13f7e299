"""Interface of transports: delivery of one rank's slot, box by box."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from resharder.converters.geometry.chunking import Part, cut_chunks
from resharder.converters.geometry.layout import ITEM_SIZES, Box, TensorSpec
from resharder.v1 import resources_pb2

if TYPE_CHECKING:
    import torch

    Item = tuple[int, torch.Tensor]
    """Number of a box in its slot, and its elements, in any strides, on any device. A transport has
    finished with the tensor when it requests the next item; items of a sequence must not change
    until it returns.
    """


@dataclass(frozen=True)
class AssignedSlot:
    """Boxes that one rank sends, in order, and the tensor of each."""

    rank: int
    boxes: tuple[Box, ...]
    specs: tuple[TensorSpec, ...]
    chunk_bytes: int

    @cached_property
    def chunks(self) -> list[list[Part]]:
        return cut_chunks(self.boxes, [ITEM_SIZES[spec.dtype] for spec in self.specs], self.chunk_bytes)

    def cuts(self, limit: int) -> list[list[Box]]:
        """Return each box in parts of at most `limit` bytes."""
        return [
            [part.box for chunk in cut_chunks([box], [ITEM_SIZES[spec.dtype]], limit) for part in chunk]
            for box, spec in zip(self.boxes, self.specs, strict=True)
        ]


class Transport(Protocol):
    """Transport to the daemon's store."""

    name: str
    mapped: bool
    """`mapped` of SealSlotRequest."""

    def deliver(self, version: resources_pb2.Version, slot: AssignedSlot, items: "Iterable[Item]") -> list[int]:
        """Deliver `items`, in any order, and return the digest of each box of `slot`.

        When it returns, the store has all bytes, and the trainer's memory may change. Raises the errors of `errors`; no memory
        stays mapped.
        """
        ...
