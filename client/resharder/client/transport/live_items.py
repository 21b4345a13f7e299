"""Boxes of an attached model's own tensors."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, overload

from resharder.converters.geometry.layout import Piece

if TYPE_CHECKING:
    import torch
    from resharder.client.transport.base import Item


class LiveItems(Sequence["Item"]):
    """Items of a slot, numbered in order. Each is made when it is requested: a model may have many thousands."""

    def __init__(self, tensors: "Mapping[str, torch.Tensor]", pieces: Sequence[Piece]) -> None:
        """Read no tensor yet.

        Args:
            tensors: Local tensors by name.
            pieces: Place of each box in the local tensors. The same object for the same slot, from version to version.
        """
        self.tensors, self.pieces = tensors, pieces

    @property
    def device(self) -> "torch.device | None":
        """Device of all tensors; None if there are several devices or no tensors."""
        devices = {tensor.device for tensor in self.tensors.values()}
        return devices.pop() if len(devices) == 1 else None

    def __len__(self) -> int:
        return len(self.pieces)

    @overload
    def __getitem__(self, number: int) -> "Item": ...

    @overload
    def __getitem__(self, number: slice) -> "list[Item]": ...

    def __getitem__(self, number: int | slice) -> "Item | list[Item]":
        from resharder.converters.models.tensor_io import read_piece

        if isinstance(number, slice):
            return [self[i] for i in range(*number.indices(len(self)))]
        return number, read_piece(self.tensors, self.pieces[number])

    def __iter__(self) -> "Iterator[Item]":
        return (self[number] for number in range(len(self)))
