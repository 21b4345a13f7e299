"""Digests of many boxes of a version's files, by several threads.

Huge pages are read where they are mapped. Mapping small pages takes longer than copying them, and serialises threads; contiguous
boxes on small pages are read into a buffer of each thread instead.
"""

import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.lib.array_utils import byte_bounds
from resharder.converters.geometry.chunking import Part, cut_chunks
from resharder.converters.geometry.layout import ITEM_SIZES, Box, TensorSpec, box_index, box_shape, box_size, full_box, run_start
from resharder.converters.storage.digest import MASK, digest
from resharder.converters.storage.files import BITS, MappedFiles
from resharder.converters.storage.pages import forget_pages

_FORGET_BYTES = 1 << 20
_SHARE_BYTES = 16 << 20  # of work for a thread: small boxes together, large ones in parts, since digests are additive
_READ_BYTES = 4 << 20


class TensorBox(NamedTuple):
    """Box of a tensor in a version's files; the empty box is a scalar."""

    spec: TensorSpec
    box: Box


def digest_boxes(files: MappedFiles, boxes: Sequence[TensorBox], threads: int) -> list[int]:
    """Digest boxes with `threads` threads, in the order of the boxes. Raises OSError."""
    shares = cut_chunks([box for _, box in boxes], [ITEM_SIZES[spec.dtype] for spec, _ in boxes], _SHARE_BYTES)
    totals = [0] * len(boxes)
    with ExitStack() as stack:
        reads = stack.enter_context(_reads(files, boxes)) if files.small_pages else None

        def share_digests(share: list[Part]) -> list[int]:
            return [_digest(files, reads, boxes[position].spec, box) for position, box in share]

        pool = stack.enter_context(ThreadPoolExecutor(threads, "digest"))
        for share, found in zip(shares, pool.map(share_digests, shares), strict=True):
            for (position, _), value in zip(share, found, strict=True):
                totals[position] = (totals[position] + value) & MASK
    return totals


def digest_tensors(files: MappedFiles, threads: int) -> dict[str, int]:
    """Digest every tensor of the files, by name. Raises OSError."""
    boxes = [TensorBox(spec, full_box(spec.shape)) for spec in files.specs.values()]
    return dict(zip(files.specs, digest_boxes(files, boxes, threads), strict=True))


def _digest(files: MappedFiles, reads: "_Reads | None", spec: TensorSpec, box: Box) -> int:
    """Digest one box. Unmaps small pages incrementally, to avoid one long munmap."""
    if reads is not None and run_start(box, spec) is not None:
        return reads.digest(spec, box)
    part = files.arrays[spec.name][box_index(box)] if box else files.arrays[spec.name]
    found = digest(part, box, spec.shape)
    if files.small_pages and part.nbytes >= _FORGET_BYTES:
        forget_pages(byte_bounds(part))
    return found


class _Reads:
    """Reads of contiguous boxes. `opened` has the file descriptor and first byte of each tensor."""

    def __init__(self, opened: dict[str, tuple[int, int]]) -> None:
        self._opened, self._own = opened, threading.local()

    def digest(self, spec: TensorSpec, box: Box) -> int:
        """Digest a contiguous box."""
        total, item = 0, ITEM_SIZES[spec.dtype]
        for chunk in cut_chunks([box], [item], _READ_BYTES):
            for _, part in chunk:
                data = self._read(spec, part, box_size(part) * item)
                total += digest(data.view(BITS[item]).reshape(box_shape(part)), part, spec.shape)
        return total & MASK

    def _read(self, spec: TensorSpec, part: Box, size: int) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
        """Read a contiguous box into the buffer of this thread. Raises OSError if the file ends early."""
        buffer = getattr(self._own, "buffer", None)
        if buffer is None or len(buffer) < size:
            buffer = self._own.buffer = np.empty(max(size, _READ_BYTES), np.uint8)
        (descriptor, begin), start, done = self._opened[spec.name], run_start(part, spec), 0
        assert start is not None
        while done < size:
            count = os.preadv(descriptor, [buffer[done:size].data], begin + start + done)
            if not count:
                raise OSError(f"{spec.name}: the file ends {done} bytes after {begin + start}, expected {size} bytes")
            done += count
        return buffer[:size]


@contextmanager
def _reads(files: MappedFiles, boxes: Iterable[TensorBox]) -> Iterator[_Reads]:
    """Open the files of the boxes until the context ends."""
    opened: dict[Path, int] = {}
    try:
        for path in {files.places[spec.name][0] for spec, _ in boxes}:
            opened[path] = os.open(path, os.O_RDONLY)
        yield _Reads({name: (opened[path], begin) for name, (path, begin) in files.places.items() if path in opened})
    finally:
        for descriptor in opened.values():
            os.close(descriptor)
