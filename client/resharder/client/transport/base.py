"""What every transport takes and gives: one rank's part of a version, box by box."""

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
    """The number of a box in its slot, and its elements, in any strides, on any device. A transport is done with the tensor when
    it asks for the next item; those of a sequence lie still until it returns."""


@dataclass(frozen=True)
class AssignedSlot:
    """What one rank has to send: its assigned boxes, in order, and the tensor that each is part of."""

    rank: int
    boxes: tuple[Box, ...]
    specs: tuple[TensorSpec, ...]
    chunk_bytes: int

    @cached_property
    def chunks(self) -> list[list[Part]]:
        return cut_chunks(self.boxes, [ITEM_SIZES[spec.dtype] for spec in self.specs], self.chunk_bytes)

    def cuts(self, limit: int) -> list[list[Box]]:
        """Each box in parts of at most `limit` bytes."""
        return [
            [part.box for chunk in cut_chunks([box], [ITEM_SIZES[spec.dtype]], limit) for part in chunk]
            for box, spec in zip(self.boxes, self.specs, strict=True)
        ]


class Transport(Protocol):
    """A way to the daemon's store."""

    name: str
    mapped: bool
    """As SealSlotRequest has it."""

    def deliver(self, version: resources_pb2.Version, slot: AssignedSlot, items: "Iterable[Item]") -> list[int]:
        """Hands over `items`, in any order, and returns the digest of each box of `slot`. When it returns, nothing of the
        trainer's memory is needed any more and the store has everything. Raises what `errors` lists; no memory is mapped
        afterwards."""
        ...
