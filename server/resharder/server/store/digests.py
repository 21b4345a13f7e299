"""Digests of many boxes of a version's files, by several threads.

Huge pages are read where they are mapped. Mapping small pages takes longer than copying them, and serialises threads; contiguous
boxes on small pages are read into a buffer of each thread instead.
"""

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.lib.array_utils import byte_bounds
from resharder.converters.geometry.chunking import Part, cut_chunks
from resharder.converters.geometry.layout import ITEM_SIZES, Box, TensorSpec, box_index, box_shape, box_size, full_box, run_start
from resharder.converters.storage.digest import MASK, Array, digest, digest_matrices
from resharder.converters.storage.files import BITS, FileLayout, MappedFiles
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
    with ThreadPoolExecutor(threads, "digest") as pool:
        return _begin(files, boxes, pool, lambda: None)()


def digest_tensors(files: MappedFiles, threads: int) -> dict[str, int]:
    """Digest every tensor of the files, by name. Raises OSError."""
    return dict(zip(files.specs, digest_boxes(files, _whole(files), threads), strict=True))


def begin_digests(folder: Path, file: FileLayout, pool: Executor) -> Callable[[], dict[str, int]]:
    """Begin to digest every tensor of a file, on the threads of a pool, which may have others to digest.

    Returns a function that waits, and returns the digests by name. It raises OSError; CancelledError if the pool ends before.
    Raises OSError, and ValueError for a file of another size.
    """
    files = MappedFiles(folder, [file])

    def close() -> None:
        with suppress(BufferError):  # frames of an error still reference arrays; the map ends with these
            files.close()

    names = list(files.specs)
    try:
        wait = _begin(files, _whole(files), pool, close)
    except OSError:
        close()
        raise
    return lambda: dict(zip(names, wait(), strict=True))


def _whole(files: MappedFiles) -> list[TensorBox]:
    return [TensorBox(spec, full_box(spec.shape)) for spec in files.specs.values()]


def _begin(files: MappedFiles, boxes: Sequence[TensorBox], pool: Executor, done: Callable[[], None]) -> Callable[[], list[int]]:
    """Begin digests. `done` is called once no thread reads the files any more, also if nobody waits for the digests."""
    shares = cut_chunks([box for _, box in boxes], [ITEM_SIZES[spec.dtype] for spec, _ in boxes], _SHARE_BYTES)
    reads = _Reads(files, boxes) if files.small_pages else None

    def share_digests(share: list[Part]) -> list[int]:
        return _digests(files, reads, [TensorBox(boxes[position].spec, box) for position, box in share])

    def ended() -> None:
        if reads is not None:
            reads.close()
        done()

    futures = [pool.submit(share_digests, share) for share in shares]
    _after(futures, ended)

    def wait() -> list[int]:
        totals = [0] * len(boxes)
        for share, future in zip(shares, futures, strict=True):
            for (position, _), value in zip(share, future.result(), strict=True):
                totals[position] = (totals[position] + value) & MASK
        return totals

    return wait


def _after(futures: Sequence[Future[list[int]]], call: Callable[[], None]) -> None:
    """Call `call` on the thread that ends the last of the futures."""
    left, lock = len(futures), threading.Lock()

    def one_ended(_: Future[list[int]]) -> None:
        nonlocal left
        with lock:
            left -= 1
            last = not left
        if last:
            call()

    for future in futures:
        future.add_done_callback(one_ended)
    if not futures:
        call()


class _Run(NamedTuple):
    """Whole rows of tensors that follow each other in a file without a gap."""

    path: Path
    begin: int
    end: int
    item: int
    """Bytes of an element of all of them."""


def _digests(files: MappedFiles, reads: "_Reads | None", boxes: Sequence[TensorBox]) -> list[int]:
    """Digest boxes: small ones that follow each other in a file together, since each call takes longer than their bytes."""
    found, run, most = [0] * len(boxes), None, _SHARE_BYTES if reads is None else _READ_BYTES
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
        if start is None or not size or size > most // 2 or (box and box[-1].count != columns) or begin % item:
            found[number] = _digest(files, reads, spec, box)
            continue
        if run is None or run[::2] != (path, begin) or run.item != item or begin + size - run.begin > most:
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
    """Reads of the files of boxes, each thread into a buffer of its own, until `close`."""

    def __init__(self, files: MappedFiles, boxes: Iterable[TensorBox]) -> None:
        """Open the files. Raises OSError; none stays open."""
        self._files, self._own = files, threading.local()
        with ExitStack() as opened:
            self._opened = {}
            for path in {files.places[spec.name][0] for spec, _ in boxes}:
                self._opened[path] = os.open(path, os.O_RDONLY)
                opened.callback(os.close, self._opened[path])
            self._all = opened.pop_all()

    def close(self) -> None:
        self._all.close()

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
