"""Plan the reads for boxes of a version: HTTP ranges of its files, windows of boxes that the daemon packs, pieces of nodes.

A box is read by ranges, which the daemon's kernel sends, if few bytes between its runs come along; else its runs are packed.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from resharder.client.versions.manifest import Needs
from resharder.converters.geometry.layout import Box
from resharder.converters.geometry.rows import box_rows
from resharder.converters.storage.files import FileLayout
from resharder.converters.wire.pieces import Bitmap, number_pieces
from resharder.converters.wire.ranges import PIECE_BYTES
from resharder.converters.wire.windows import BoxPart, Window, cut_windows

MOST_GAP = 64 << 10
"""Upper bound on unneeded bytes between two parts that are fetched as one; another request costs about as much."""
LONG_RUN = 2 << 20
"""Bytes of a run from which each run of a box is read by a range of its own. By benchmarks/read_plans.py, runs of 1 MiB cost as
much as packed ones, and runs of 2 MiB less."""
MOST_UNNEEDED = 0.25
"""Upper bound on the share of unneeded bytes for which a box is read with all bytes between its runs. On the loopback, a share of
half costs as much as packed runs; a network also carries the unneeded bytes."""


class FileRange(NamedTuple):
    """Bytes `start` to `end`, exclusive, of the file at position `file`; within one piece."""

    file: int
    start: int
    end: int


@dataclass(frozen=True)
class ReadPlan:
    """Ranges in the order of the files, then windows, and for each box the numbers of the jobs that it needs."""

    jobs: tuple[FileRange | Window, ...]
    of_box: tuple[range, ...]


def plan_reads(files: Sequence[FileLayout], boxes: Sequence[tuple[str, Box]]) -> ReadPlan:
    """Return the requests for boxes, given as (tensor's name, box), of a version with these files."""
    file_of = {name: number for number, file in enumerate(files) for name in file.by_name}
    spans = [_spans(files, file_of, name, box) for name, box in boxes]
    ranges = tuple(_cut(_merged(span for found in spans for span in found)))
    packed = [BoxPart(position, *box) for position, box in enumerate(boxes) if not spans[position]]
    windows = cut_windows(packed, {name: files[file_of[name]].by_name[name].spec for _, name, _ in packed})
    starts = [(each.file, each.start) for each in ranges]
    of_box = [_within(found, starts) if found else range(0) for found in spans]
    for number, window in enumerate(windows, len(ranges)):
        for position in {part.position for part in window}:
            of_box[position] = range((of_box[position] or range(number, number)).start, number + 1)
    return ReadPlan((*ranges, *windows), tuple(of_box))


def _within(spans: Sequence[FileRange], starts: Sequence[tuple[int, int]]) -> range:
    """Return the positions of the ranges from the one with the first span's begin to the one with the last one's end."""
    first, last = spans[0], spans[-1]
    return range(bisect_right(starts, (first.file, first.start)) - 1, bisect_left(starts, (last.file, last.end)))


def _spans(files: Sequence[FileLayout], file_of: Mapping[str, int], name: str, box: Box) -> list[FileRange]:
    """Return the bytes with which a box is read by ranges; none for a box to pack."""
    spec, offset = files[file_of[name]].by_name[name]
    rows = list(box_rows(box, spec))
    start, end = rows[0].start, rows[-1].end
    if sum(row.size for row in rows) >= (1 - MOST_UNNEEDED) * (end - start):
        spans = [(start, end)]
    elif rows[0].length >= LONG_RUN:
        spans = [span for row in rows for span in row.spans(MOST_GAP)]
    else:
        spans = []
    return [FileRange(file_of[name], offset + start, offset + end) for start, end in spans]


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


def needed_pieces(files: Sequence[FileLayout], needs: Needs) -> Bitmap:
    """Return the pieces with elements of the boxes, given by HF tensor, of a version with these files."""
    numbering = number_pieces(files)
    found = Bitmap(numbering.count)
    for file in files:
        for name in file.by_name.keys() & needs.keys():
            spec, offset = file.by_name[name]
            for box in needs[name]:
                for rows in box_rows(box, spec):
                    for start, end in rows.spans(numbering.piece_bytes - 1):  # a larger gap may have a piece of its own
                        found.add(*numbering.touched(file.path, offset + start, offset + end))
    return found
