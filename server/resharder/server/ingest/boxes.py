"""Boxes of ranks in arrays. A thousand ranks have a million boxes, which would take hundreds of MiB as Python objects."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from resharder.converters.errors import LayoutError
from resharder.converters.geometry.chunking import Part, cut_chunks
from resharder.converters.geometry.layout import ITEM_SIZES, Box, TensorSpec, box_size, is_inside
from resharder.converters.geometry.piece_arrays import Ints, Ranges, pack_boxes
from resharder.converters.wire.boxes import box_from_proto
from resharder.v1 import resources_pb2


@dataclass(frozen=True)
class PackedBoxes:
    """Boxes of one rank: `boxes[i]` of the tensor with number `tensors[i]`, which has `dimensions[i]` dimensions."""

    tensors: npt.NDArray[np.uint32]
    replicas: npt.NDArray[np.bool_]
    dimensions: npt.NDArray[np.uint8]
    boxes: Ranges

    def __len__(self) -> int:
        return len(self.tensors)

    def box(self, i: int) -> Box:
        """Return box `i` as an object."""
        return self.boxes.box(i, int(self.dimensions[i]))

    def renumber(self, numbers: Sequence[int]) -> "PackedBoxes":
        """Return the same boxes with `numbers[i]` for tensor `i`."""
        return replace(self, tensors=np.array(numbers, np.uint32)[self.tensors])

    def take(self, positions: Ints) -> "PackedBoxes":
        return PackedBoxes(
            self.tensors[positions], self.replicas[positions], self.dimensions[positions], self.boxes.take(positions)
        )


def pack(boxes: Iterable[tuple[int, Box, bool]]) -> PackedBoxes:
    """Pack (number of the tensor, box, replica)."""
    rows = list(boxes)
    return PackedBoxes(
        np.array([tensor for tensor, _, _ in rows], np.uint32),
        np.array([replica for _, _, replica in rows], bool),
        np.array([len(box) for _, box, _ in rows], np.uint8),
        pack_boxes([box for _, box, _ in rows]),
    )


def read_boxes(messages: Sequence[resources_pb2.TensorBox], specs: Sequence[TensorSpec]) -> PackedBoxes:
    """Return the boxes of `messages`, which refer to `specs`. Raises LayoutError for a box outside of its tensor."""

    def read() -> Iterator[tuple[int, Box, bool]]:
        for message in messages:
            if message.tensor >= len(specs):
                raise LayoutError(f"a box names tensor {message.tensor} of {len(specs)}")
            spec, box = specs[message.tensor], box_from_proto(message.box)
            if not is_inside(box, spec.shape):
                raise LayoutError(
                    f"{spec.name}: {[tuple(r) for r in box]} (start, count, step) lies outside of {list(spec.shape)}"
                )
            yield message.tensor, box, message.replica

    return pack(read())


@dataclass(frozen=True)
class Slot:
    """Boxes that one rank sends, and their chunks: chunk `i` begins with part `first_part[i]` of box `first_box[i]`.

    The first `frozen_chunks` have all boxes of frozen tensors, `frozen_bytes`, and no others.
    """

    boxes: PackedBoxes
    item_sizes: npt.NDArray[np.uint8]
    chunk_bytes: int
    first_box: npt.NDArray[np.uint32]
    first_part: npt.NDArray[np.uint32]
    sizes: npt.NDArray[np.uint32]
    size_bytes: int
    frozen_chunks: int = 0
    frozen_bytes: int = 0

    @property
    def chunks(self) -> int:
        return len(self.sizes)

    def parts(self, chunk: int) -> list[Part]:
        """Return the parts of one chunk, as `chunking.cut_chunks` gives them for the whole slot."""
        found, size = [], 0
        position, part = int(self.first_box[chunk]), int(self.first_part[chunk])
        while size < self.sizes[chunk]:
            cut = _cut(self.boxes.box(position), int(self.item_sizes[position]), self.chunk_bytes)
            for box in cut[part:]:
                found.append(Part(position, box))
                size += box_size(box) * int(self.item_sizes[position])
                if size >= self.sizes[chunk]:
                    break
            position, part = position + 1, 0
        return found


@lru_cache(maxsize=64)
def _cut(box: Box, item_size: int, chunk_bytes: int) -> tuple[Box, ...]:
    """Return the parts of one box, in order."""
    return tuple(part.box for chunk in cut_chunks([box], [item_size], chunk_bytes) for part in chunk)


def cut_slot(boxes: PackedBoxes, specs: Sequence[TensorSpec], chunk_bytes: int, frozen: int = 0) -> Slot:
    """Cut a slot as `chunking.cut_chunks` does, storing where chunks begin instead of every part.

    The first `frozen` boxes are those of frozen tensors: they are cut apart from the others.
    """
    item_sizes = np.array([ITEM_SIZES[specs[int(t)].dtype] for t in boxes.tensors], np.uint8)
    first_box: list[int] = []
    first_part: list[int] = []
    sizes: list[int] = []
    room = frozen_chunks = frozen_bytes = 0
    for position in range(len(boxes)):
        if frozen and position == frozen:
            room, frozen_chunks, frozen_bytes = 0, len(sizes), sum(sizes)
        item_size = int(item_sizes[position])
        for ordinal, part in enumerate(_cut(boxes.box(position), item_size, chunk_bytes)):
            size = box_size(part) * item_size
            if size > room or not sizes:
                first_box.append(position)
                first_part.append(ordinal)
                sizes.append(0)
                room = chunk_bytes
            sizes[-1] += size
            room -= size
    if frozen and frozen == len(boxes):
        frozen_chunks, frozen_bytes = len(sizes), sum(sizes)
    return Slot(
        boxes,
        item_sizes,
        chunk_bytes,
        np.array(first_box, np.uint32),
        np.array(first_part, np.uint32),
        np.array(sizes, np.uint32),
        sum(sizes),
        frozen_chunks,
        frozen_bytes,
    )
