"""Boxes as rows of bytes of their tensor: equal runs at equal distances."""

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from resharder.converters.geometry.layout import ITEM_SIZES, Box, TensorSpec


class ByteRows(NamedTuple):
    """`count` runs of `length` bytes, the first at the byte `start`, each `stride` bytes after the one before."""

    start: int
    length: int
    stride: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which is not needed

    @property
    def end(self) -> int:
        """Byte after the last run."""
        return self.start + (self.count - 1) * self.stride + self.length

    @property
    def size(self) -> int:
        """Bytes of all runs."""
        return self.count * self.length

    def spans(self, most_gap: int) -> list[tuple[int, int]]:
        """Return the bytes of each run, or of all together if the gap between two runs is at most `most_gap`."""
        if self.stride - self.length <= most_gap:
            return [(self.start, self.end)]
        return [(at, at + self.length) for at in range(self.start, self.end, self.stride)]


def box_rows(box: Box, spec: TensorSpec) -> Iterator[ByteRows]:
    """Yield the rows whose runs are the elements of a box, in the box's order: as few as possible, one for most boxes."""
    start, length, stride, count = 0, ITEM_SIZES[spec.dtype], 0, 1
    outer: list[range] = []
    size = length  # bytes from one index of a dimension to the next
    for r, n in zip(reversed(box), reversed(spec.shape), strict=True):
        start += r.start * size
        step = r.step * size
        if r.count > 1 and count == 1 and step == length:
            length *= r.count
        elif r.count > 1 and count == 1:
            stride, count = step, r.count
        elif r.count > 1 and not outer and step == stride * count:
            count *= r.count
        elif r.count > 1:
            outer.append(range(0, r.count * step, step))
        size *= n
    for offsets in product(*reversed(outer)):
        yield ByteRows(start + sum(offsets), length, stride or length, count)
