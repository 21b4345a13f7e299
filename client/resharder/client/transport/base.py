"""Interface of transports, which deliver one rank's slot box by box, and the items that they are given."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Protocol, overload

from resharder.converters.geometry.chunking import Part, cut_chunks
from resharder.converters.geometry.layout import ITEM_SIZES, Box, Piece, TensorSpec
from resharder.converters.storage.files import Array
from resharder.v1 import resources_pb2

if TYPE_CHECKING:
    import torch

    Item = tuple[int, torch.Tensor | "HostArray"]
    """Number of a box in its slot, and its elements, with any strides, on any device.

    A transport has finished with a tensor when it requests the next item of an iterator. The tensors of a sequence must not
    change until the transport returns.
    """


@dataclass(frozen=True)
class HostArray:
    """Elements on the host, for processes without torch: unsigned integers of the size of safetensors' `dtype`."""

    array: Array
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.array.nbytes

    def reshape(self, shape: tuple[int, ...]) -> "HostArray":
        """Return the same elements in another shape."""
        return HostArray(self.array.reshape(shape), self.dtype)


@dataclass(frozen=True)
class AssignedSlot:
    """Boxes that one rank sends, in the order of the assignment, and the tensor of each.

    The boxes at `frozen_boxes` are in files that versions may share: `parted` has them apart. `first_chunk` is the number of the
    first chunk of these boxes among all of the rank's.

    The boxes at `node_boxes` go into files of `node`, the node of the rank's host, in versions that have this home, and those at
    `gathered_boxes` in versions whose home gathers. Without such boxes, `node` is empty.
    """

    rank: int
    boxes: tuple[Box, ...]
    specs: tuple[TensorSpec, ...]
    chunk_bytes: int
    node: str = ""
    node_boxes: tuple[int, ...] = ()
    gathered_boxes: tuple[int, ...] = ()
    frozen_boxes: tuple[int, ...] = ()
    first_chunk: int = 0

    def parted(self, gathers: bool | None) -> "SlotParts":
        """Return the frozen boxes, whose chunks come first, and the others. `gathers`: of the version's home; None for none."""
        if gathers not in self._parted:
            self._parted[gathers] = SlotParts(self, gathers)
        return self._parted[gathers]

    @cached_property
    def _parted(self) -> "dict[bool | None, SlotParts]":
        return {}

    def take(self, numbers: Sequence[int], first_chunk: int = 0) -> "AssignedSlot":
        """Return the slot of some of the boxes, none of which is frozen any more."""
        at = {number: i for i, number in enumerate(numbers)}
        node, gathered = (tuple(at[n] for n in found if n in at) for found in (self.node_boxes, self.gathered_boxes))
        boxes, specs = tuple(self.boxes[n] for n in numbers), tuple(self.specs[n] for n in numbers)
        return AssignedSlot(self.rank, boxes, specs, self.chunk_bytes, self.node, node, gathered, first_chunk=first_chunk)

    def divided(self, *, gathers: bool) -> "DividedSlot":
        """Return the boxes that go into files of `node`, and the others. `gathers`: of the version's home."""
        return self._gathering if gathers else self._plain

    @cached_property
    def _plain(self) -> "DividedSlot":
        return DividedSlot(self, self.node_boxes)

    @cached_property
    def _gathering(self) -> "DividedSlot":
        return DividedSlot(self, tuple(sorted((*self.node_boxes, *self.gathered_boxes))))

    @cached_property
    def chunks(self) -> list[list[Part]]:
        """Chunks of the slot, as `cut_chunks` divides it."""
        return cut_chunks(self.boxes, [ITEM_SIZES[spec.dtype] for spec in self.specs], self.chunk_bytes)

    def cuts(self, limit: int) -> list[list[Box]]:
        """Return, for each box, its parts of at most `limit` bytes."""
        return [
            [part.box for chunk in cut_chunks([box], [ITEM_SIZES[spec.dtype]], limit) for part in chunk]
            for box, spec in zip(self.boxes, self.specs, strict=True)
        ]


class SlotParts:
    """A slot in two parts: `frozen` with its frozen boxes, and `rest` with the boxes at `rest_boxes`."""

    def __init__(self, slot: AssignedSlot, gathers: bool | None) -> None:
        frozen = {*slot.frozen_boxes}
        self.frozen_boxes = slot.frozen_boxes
        self.rest_boxes = tuple(number for number in range(len(slot.boxes)) if number not in frozen)
        self.frozen = slot.take(self.frozen_boxes)
        sent = self.frozen if gathers is None else self.frozen.divided(gathers=gathers).rest
        self.rest = slot.take(self.rest_boxes, len(sent.chunks))


class DividedSlot:
    """A slot in two parts: `home` with the boxes at `home_boxes`, for a node's files, and `rest` with those at `rest_boxes`."""

    def __init__(self, slot: AssignedSlot, home_boxes: tuple[int, ...]) -> None:
        at_home = {*home_boxes}
        self.home_boxes = home_boxes
        self.rest_boxes = tuple(number for number in range(len(slot.boxes)) if number not in at_home)
        self.home, self.rest = (
            AssignedSlot(
                slot.rank,
                tuple(slot.boxes[n] for n in numbers),
                tuple(slot.specs[n] for n in numbers),
                slot.chunk_bytes,
                first_chunk=slot.first_chunk,
            )
            for numbers in (self.home_boxes, self.rest_boxes)
        )


class Releases(Protocol):
    """Files that a rank has written completely."""

    def release(self, file: str, close: Callable[[], None]) -> None:
        """Call `close`, which closes and unmaps a file of the version, on another thread, and then report the file as written."""
        ...


class Delivered(NamedTuple):
    """Outcome of a delivery."""

    digests: list[int]
    """The digest of each box of the slot, in the slot's order."""
    way: str
    """The way that bytes took: `shared-memory`, `node`, `http` or `grpc`."""
    reason: str = ""
    """Why a faster way could not be used; empty if it was not to be used."""
    mapped: bool = False
    """Whether boxes were written to the version's files; `mapped` of SealSlotRequest."""


class Transport(Protocol):
    """Transport of boxes to the daemon's store."""

    def deliver(
        self, version: resources_pb2.Version, slot: AssignedSlot, items: "Iterable[Item]", releases: Releases
    ) -> Delivered:
        """Deliver boxes.

        When it returns, the store has all bytes, and the tensors may change. No memory stays mapped, apart from files that
        `releases` has yet to close; also after an error. Raises the errors of `errors`.

        Args:
            version: UPLOADING version.
            slot: Boxes to deliver.
            items: Elements of every box of the slot, in any order.
            releases: Receives each mapped file once all boxes in it are written.
        """
        ...


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
