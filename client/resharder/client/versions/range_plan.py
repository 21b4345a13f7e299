"""The HTTP ranges that boxes need: coalesced, cut at the pieces of the files, and what remains for the gRPC stream.

A box is read by ranges if its elements are contiguous in its file. The daemon packs other boxes, which the stream carries
without the elements between them.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from resharder.converters.geometry.layout import ITEM_SIZES, Box, box_size, run_start
from resharder.converters.storage.files import FileLayout
from resharder.converters.wire.ranges import PIECE_BYTES

MOST_GAP = 64 << 10
"""Upper bound on unneeded bytes between two parts that are fetched as one; another request costs about as much."""


class FileRange(NamedTuple):
    """Bytes `start` to `end`, exclusive, of the file at position `file`; within one piece."""

    file: int
    start: int
    end: int


@dataclass(frozen=True)
class RangePlan:
    """Ranges in the order of the files, and for each box the positions of its ranges; none for a box of the stream."""

    ranges: tuple[FileRange, ...]
    of_box: tuple[range, ...]

    @property
    def streamed(self) -> list[int]:
        """Positions of the boxes that remain for the stream."""
        return [position for position, needed in enumerate(self.of_box) if not needed]


def plan_ranges(files: Sequence[FileLayout], boxes: Sequence[tuple[str, Box]]) -> RangePlan:
    """Return the ranges for boxes, given as (tensor's name, box), of a version with these files."""
    homes = {name: number for number, file in enumerate(files) for name in file.by_name}
    spans = [_span(files, homes, name, box) for name, box in boxes]
    ranges = tuple(_cut(_merged(span for span in spans if span is not None)))
    starts = [(each.file, each.start) for each in ranges]
    return RangePlan(ranges, tuple(range(0) if span is None else _within(span, starts) for span in spans))


def _within(span: FileRange, starts: Sequence[tuple[int, int]]) -> range:
    """Return the positions of the ranges that cover a span."""
    return range(bisect_right(starts, (span.file, span.start)) - 1, bisect_left(starts, (span.file, span.end)))


def _span(files: Sequence[FileLayout], homes: Mapping[str, int], name: str, box: Box) -> FileRange | None:
    """Return the bytes of a contiguous box; None for another one."""
    spec, offset = files[homes[name]].by_name[name]
    start = run_start(box, spec)
    if start is None:
        return None
    return FileRange(homes[name], offset + start, offset + start + box_size(box) * ITEM_SIZES[spec.dtype])


def _merged(spans: Iterable[FileRange]) -> Iterator[FileRange]:
    current: FileRange | None = None
    for span in sorted(spans):
        if current is not None and span.file == current.file and span.start <= current.end + MOST_GAP:
            current = current._replace(end=max(current.end, span.end))
            continue
        if current is not None:
            yield current
        current = span
    if current is not None:
        yield current


def _cut(spans: Iterable[FileRange]) -> Iterator[FileRange]:
    for file, start, end in spans:
        while start < end:
            cut = min(end, (start // PIECE_BYTES + 1) * PIECE_BYTES)
            yield FileRange(file, start, cut)
            start = cut
