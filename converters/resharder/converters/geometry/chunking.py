"""Division of boxes into chunks. Sender and receiver compute it independently."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from resharder.converters.geometry.layout import Box, Range, box_size


class Part(NamedTuple):
    """Part of a chunk: `box` is inside the box at `position` of the list from which the chunks are cut."""

    position: int
    box: Box


def cut_chunks(boxes: Sequence[Box], item_sizes: Sequence[int], chunk_bytes: int) -> list[list[Part]]:
    """Divide boxes into chunks of at most `chunk_bytes`, by the rule of proto `Chunk`.

    Args:
        boxes: Boxes in the order in which they are sent.
        item_sizes: Bytes of an element of each box.
        chunk_bytes: Bound on a chunk. A single element that is larger has a chunk of its own.
    """
    chunks: list[list[Part]] = []
    room = 0
    for position, (box, item_size) in enumerate(zip(boxes, item_sizes, strict=True)):
        for part in _cut(box, item_size, chunk_bytes):
            size = box_size(part) * item_size
            if size > room or not chunks:
                chunks.append([])
                room = chunk_bytes
            chunks[-1].append(Part(position, part))
            room -= size
    return chunks


def _cut(box: Box, item_size: int, limit: int) -> Iterable[Box]:
    if box_size(box) == 1 or box_size(box) * item_size <= limit:
        return [box]
    axis = next(i for i, r in enumerate(box) if r.count > 1)
    row = box_size(box[axis + 1 :]) * item_size
    rows = max(1, limit // row)
    parts: list[Box] = []
    whole = box[axis]
    for first in range(0, whole.count, rows):
        count = min(rows, whole.count - first)
        piece = Range(whole.start + first * whole.step, count, whole.step if count > 1 else 1)
        parts += _cut((*box[:axis], piece, *box[axis + 1 :]), item_size, limit)
    return parts
