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
import numpy.typing as npt
from numpy.lib.array_utils import byte_bounds
from resharder.converters.geometry.chunking import Part, cut_chunks
from resharder.converters.geometry.layout import ITEM_SIZES, Box, TensorSpec, box_index, box_shape, box_size, full_box, run_start
from resharder.converters.storage.digest import MASK, Array, digest, digest_matrices
from resharder.converters.storage.files import BITS, MappedFiles
from resharder.converters.storage.pages import forget_pages

_FORGET_BYTES = 1 << 20
_SHARE_BYTES = 16 << 20  # of work for a thread: small boxes together, large ones in parts, since digests are additive
_READ_BYTES = 4 << 20
Bytes = npt.NDArray[np.uint8]


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
            return _digests(files, reads, [TensorBox(boxes[position].spec, box) for position, box in share])

        pool = stack.enter_context(ThreadPoolExecutor(threads, "digest"))
        for share, found in zip(shares, pool.map(share_digests, shares), strict=True):
            for (position, _), value in zip(share, found, strict=True):
                totals[position] = (totals[position] + value) & MASK
    return totals


def digest_tensors(files: MappedFiles, threads: int) -> dict[str, int]:
    """Digest every tensor of the files, by name. Raises OSError."""
    boxes = [TensorBox(spec, full_box(spec.shape)) for spec in files.specs.values()]
    return dict(zip(files.specs, digest_boxes(files, boxes, threads), strict=True))


class _Run(NamedTuple):
    """Whole rows of tensors that follow each other in a file without a gap."""

    path: Path
    begin: int
    end: int
    item: int
    """Bytes of an element of all of them."""


def _digests(files: MappedFiles, reads: "_Reads | None", boxes: Sequence[TensorBox]) -> list[int]:
    """Digest boxes: small ones that follow each other in a file together, since each call takes longer than their bytes."""
    found, run = [0] * len(boxes), None
    numbers, matrices = list[int](), list[tuple[int, int, int, int]]()

    def digest_run() -> None:
        if run is not None:
            memory = _memory(files, reads, run)
            for number, value in zip(numbers, digest_matrices(memory, np.array(matrices, np.int64)).tolist(), strict=True):
                found[number] = value
        numbers.clear()
        matrices.clear()

    for number, (spec, box) in enumerate(boxes):
        item, size, start = ITEM_SIZES[spec.dtype], box_size(box) * ITEM_SIZES[spec.dtype], run_start(box, spec)
        columns = spec.shape[-1] if spec.shape else 1
        path, begin = files.places[spec.name]
        begin += start or 0
        if start is None or not size or size > _READ_BYTES // 2 or (box and box[-1].count != columns) or begin % item:
            found[number] = _digest(files, reads, spec, box)
            continue
        if run is None or run[::2] != (path, begin) or run.item != item or begin + size - run.begin > _READ_BYTES:
            digest_run()
            run = _Run(path, begin, begin, item)
        numbers.append(number)
        matrices.append(((begin - run.begin) // item, size // item // columns, columns, start // item // columns))
        run = run._replace(end=begin + size)
    digest_run()
    return found


def _memory(files: MappedFiles, reads: "_Reads | None", run: _Run) -> Array:
    """Return the elements of a run, read or mapped."""
    if reads is not None:
        return reads.read(run.path, run.begin, run.end - run.begin).view(BITS[run.item])
    return files.content(run.path)[run.begin : run.end].view(BITS[run.item])


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
    """Reads of opened files, by path, each thread into a buffer of its own."""

    def __init__(self, files: MappedFiles, opened: dict[Path, int]) -> None:
        self._files, self._opened, self._own = files, opened, threading.local()

    def digest(self, spec: TensorSpec, box: Box) -> int:
        """Digest a contiguous box."""
        total, item = 0, ITEM_SIZES[spec.dtype]
        path, begin = self._files.places[spec.name]
        for chunk in cut_chunks([box], [item], _READ_BYTES):
            for _, part in chunk:
                start = run_start(part, spec)
                assert start is not None
                data = self.read(path, begin + start, box_size(part) * item)
                total += digest(data.view(BITS[item]).reshape(box_shape(part)), part, spec.shape)
        return total & MASK

    def read(self, path: Path, begin: int, size: int) -> Bytes:
        """Read bytes of a file into the buffer of this thread. Raises OSError if the file ends early."""
        buffer = getattr(self._own, "buffer", None)
        if buffer is None or len(buffer) < size:
            buffer = self._own.buffer = np.empty(max(size, _READ_BYTES), np.uint8)
        done = 0
        while done < size:
            count = os.preadv(self._opened[path], [buffer[done:size].data], begin + done)
            if not count:
                raise OSError(f"{path.name}: the file ends {done} bytes after {begin}, expected {size} bytes")
            done += count
        return buffer[:size]


@contextmanager
def _reads(files: MappedFiles, boxes: Iterable[TensorBox]) -> Iterator[_Reads]:
    """Open the files of the boxes until the context ends."""
    opened: dict[Path, int] = {}
    try:
        for path in {files.places[spec.name][0] for spec, _ in boxes}:
            opened[path] = os.open(path, os.O_RDONLY)
        yield _Reads(files, opened)
    finally:
        for descriptor in opened.values():
            os.close(descriptor)
