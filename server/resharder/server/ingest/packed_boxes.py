"""Boxes of ranks in arrays. A thousand ranks have a million boxes, which would take hundreds of MiB as Python objects."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from resharder.converters.errors import LayoutError
from resharder.converters.geometry.chunking import Part, cut_chunks
from resharder.converters.geometry.layout import ITEM_SIZES, Box, Range, TensorSpec, box_size
from resharder.converters.wire.boxes import box_from_proto
from resharder.v1 import resources_pb2

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class PackedBoxes:
    """Boxes of one rank: `tensors[i]` numbers the tensor, `ranges[ends[i-1]:ends[i]]` are its (start, count, step)."""

    tensors: npt.NDArray[np.uint32]
    replicas: npt.NDArray[np.bool_]
    ends: Ints
    ranges: Ints

    def __len__(self) -> int:
        return len(self.tensors)

    def box(self, i: int) -> Box:
        """Return box `i` as ranges, one for each dimension."""
        first = int(self.ends[i - 1]) if i else 0
        return tuple(Range(*row) for row in self.ranges[first : int(self.ends[i])].tolist())

    def renumber(self, numbers: Sequence[int]) -> "PackedBoxes":
        """Return the same boxes with `numbers[i]` for tensor `i`."""
        return replace(self, tensors=np.array(numbers, np.uint32)[self.tensors])

    def take(self, positions: Sequence[int]) -> "PackedBoxes":
        """Return the boxes at these positions, in their order."""
        return pack((int(self.tensors[i]), self.box(i), bool(self.replicas[i])) for i in positions)


def pack(boxes: Iterator[tuple[int, Box, bool]]) -> PackedBoxes:
    """Pack triples of a tensor's number, its box, and whether the box is a replica."""
    tensors: list[int] = []
    replicas: list[bool] = []
    ends: list[int] = []
    flat: list[int] = []
    for tensor, box, replica in boxes:
        tensors.append(tensor)
        replicas.append(replica)
        for r in box:
            flat += r
        ends.append(len(flat) // 3)
    return PackedBoxes(
        np.array(tensors, np.uint32), np.array(replicas, bool), np.array(ends, np.int64), np.array(flat, np.int64).reshape(-1, 3)
    )


def read_boxes(messages: Sequence[resources_pb2.TensorBox], specs: Sequence[TensorSpec]) -> PackedBoxes:
    """Return the boxes of `messages`, which refer to `specs`. Raises LayoutError for a box outside of its tensor."""

    def read() -> Iterator[tuple[int, Box, bool]]:
        for message in messages:
            if message.tensor >= len(specs):
                raise LayoutError(f"a box names tensor {message.tensor} of {len(specs)}")
            spec, box = specs[message.tensor], box_from_proto(message.box)
            fits = len(box) == len(spec.shape) and all(
                r.start >= 0 and r.count >= 1 and r.step >= 1 and r.last < n for r, n in zip(box, spec.shape, strict=True)
            )
            if not fits:
                raise LayoutError(
                    f"{spec.name}: {[tuple(r) for r in box]} (start, count, step) lies outside of {list(spec.shape)}"
                )
            yield message.tensor, box, message.replica

    return pack(read())


@dataclass(frozen=True)
class Slot:
    """Boxes that one rank sends, and their chunks: chunk `i` begins with part `first_part[i]` of box `first_box[i]`."""

    boxes: PackedBoxes
    item_sizes: npt.NDArray[np.uint8]
    chunk_bytes: int
    first_box: npt.NDArray[np.uint32]
    first_part: npt.NDArray[np.uint32]
    sizes: npt.NDArray[np.uint32]
    size_bytes: int

    @property
    def chunks(self) -> int:
        """Number of chunks."""
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


def cut_slot(boxes: PackedBoxes, specs: Sequence[TensorSpec], chunk_bytes: int) -> Slot:
    """Cut a slot as `chunking.cut_chunks` does, storing where chunks begin instead of every part."""
    item_sizes = np.array([ITEM_SIZES[specs[int(t)].dtype] for t in boxes.tensors], np.uint8)
    first_box: list[int] = []
    first_part: list[int] = []
    sizes: list[int] = []
    room = 0
    for position in range(len(boxes)):
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
    return Slot(
        boxes,
        item_sizes,
        chunk_bytes,
        np.array(first_box, np.uint32),
        np.array(first_part, np.uint32),
        np.array(sizes, np.uint32),
        sum(sizes),
    )
