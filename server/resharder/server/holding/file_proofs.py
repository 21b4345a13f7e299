"""Proofs of files that ranks have written, taken while ranks still write other files, or after the last seal.

A proof has the digests of the tensors, and on nodes the checksums of the pieces, in one pass over the bytes. It counts only if no
process had the file open for writing from before it was taken until after the last seal: a lease of the kernel is held for that
long.
"""

import os
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Executor, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import xxhash
from resharder.converters.geometry.layout import ITEM_SIZES
from resharder.converters.storage.digest import MASK, Array, digest_run
from resharder.converters.storage.files import BITS, FileLayout
from resharder.converters.wire.ranges import PIECE_BYTES
from resharder.server.holding.part_files import FileProof
from resharder.server.infra.filesystem import ReadLease, read_lease

PATIENCE = 10.0
"""Seconds to wait for the last rank to close the files."""
THREADS = max(1, min(4, os.cpu_count() or 1))
"""Threads of a verification."""
_PAUSE = 0.005
_BLOCK_BYTES = 1 << 20  # stays in a core's cache between the two sums
T = TypeVar("T")
SetProof = dict[str, FileProof]
"""Proof of each file of a set."""


class ProofFailed(Exception):
    """Files that cannot be verified. The message names the files or tensors."""


class _Begun(NamedTuple, Generic[T]):
    """A proof of a file that was begun: the lease on the file, and a function that waits for the proof."""

    lease: ReadLease
    wait: Callable[[], T]


class FileProofs(Generic[T]):
    """Proofs of a version's files, begun as each is closed. All files share the threads: none is idle while a file ends.

    Thread-safe.

    Args:
        folder: Folder of the UPLOADING version.
        files: Its files.
        begin: Function of the folder, a file and a pool of threads. It begins the file's proof there, and returns a function that
            waits for it. Both may raise OSError and ValueError; a file that was closed early is read after the last seal then.
        threads: Number of threads.
        shared: Whether other processes may have the files open.
        clock: Seconds of a monotonic clock.
    """

    def __init__(
        self,
        folder: Path,
        files: Sequence[FileLayout],
        begin: Callable[[Path, FileLayout, Executor], Callable[[], T]],
        threads: int = THREADS,
        *,
        shared: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._begin, self._threads, self._shared, self._clock = folder, begin, threads, shared, clock
        self._files = {file.path: file for file in files}
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None  # from the first file on
        self._begun: dict[str, _Begun[T]] = {}
        self._ended = False

    def begin(self, files: Sequence[str]) -> None:
        """Begin to read files, which no process should have open for writing.

        A no-op after `prove` or `drop`, or if none are shared.
        """
        with self._lock:
            for file in files if self._shared and not self._ended else ():
                lease = None
                with suppress(OSError, ValueError):  # those of an aborted version, or its verification reports them
                    lease = read_lease(self._folder / file)
                    if lease is not None:
                        self._begun[file] = _Begun(lease, self._begin_early(self._files[file]))
                if lease is not None and file not in self._begun:
                    lease.close()

    def _begin_early(self, file: FileLayout) -> Callable[[], T]:
        if not has_header(self._folder, file):
            raise ValueError(f"{file.path}: its header was overwritten")
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, "early-proofs")
        return self._begin(self._folder, file, self._pool)

    def prove(self, files: Sequence[FileLayout], patience: float = PATIENCE) -> dict[str, T]:
        """Return the proofs of files, by path: early ones, of files that no process has opened for writing since, and new ones.

        Args:
            files: The files.
            patience: Seconds to wait for other processes that have them open for writing. None opens them until the end.

        Raises ProofFailed, OSError.
        """
        self.begin([file.path for file in files if file.path not in self._begun])  # while the last early ones are read
        found = self._settle()
        rest = [file for file in files if file.path not in found]
        with ExitStack() as stack:
            leases = self._lease(rest, patience, stack) if self._shared else []
            if overwritten := [file.path for file in rest if not has_header(self._folder, file)]:
                raise ProofFailed(f"{overwritten[0]}: its header was overwritten")
            with ThreadPoolExecutor(self._threads, "proofs") as pool:
                begun = {file.path: self._begin(self._folder, file, pool) for file in rest}
                found |= {path: wait() for path, wait in begun.items()}
            if broken := [file.path for file, lease in zip(rest, leases, strict=False) if not lease.is_intact]:
                raise ProofFailed(f"a process has opened {broken[0]} for writing while it was verified")
        return {file.path: found[file.path] for file in files}

    def _lease(self, files: Sequence[FileLayout], patience: float, stack: ExitStack) -> list[ReadLease]:
        """Take a lease on every file until a stack ends. Raises ProofFailed if a process keeps one open for writing."""
        deadline = self._clock() + patience
        while True:
            leases = list[ReadLease]()
            for file in files:
                if (lease := read_lease(self._folder / file.path)) is None:
                    break
                stack.callback(lease.close)
                leases.append(lease)
            else:
                return leases
            stack.close()  # who has a file open may need another one first
            if self._clock() > deadline:
                raise ProofFailed(f"a process still has {file.path} open for writing after {patience:g} s")
            time.sleep(_PAUSE)

    def _settle(self) -> dict[str, T]:
        """Wait for the proofs of all files that were begun, and return those that count, by file."""
        with self._lock:
            self._ended = True
        found = {}
        for file, begun in self._begun.items():
            with suppress(OSError, ValueError, CancelledError):  # the last one after `drop`
                found[file] = begun.wait()
        with self._lock:
            found = {file: proof for file, proof in found.items() if self._begun[file].lease.is_intact}
            self._close()
        return found

    def forget(self, files: Iterable[str]) -> None:
        """Discard the proofs of some files, which are about to be replaced."""
        with self._lock:
            for file in files:
                if (begun := self._begun.pop(file, None)) is not None:
                    begun.lease.close()

    def drop(self) -> None:
        """Discard all proofs, so that the files may be written again."""
        with self._lock:
            self._ended = True
            self._close()

    def _close(self) -> None:
        for begun in self._begun.values():
            begun.lease.close()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


def begin_proof(folder: Path, file: FileLayout, pool: Executor) -> Callable[[], FileProof]:
    """Begin the proof of a file as it is now, on the threads of a pool, which may have others to prove.

    Returns a function that waits for it. That raises OSError; CancelledError if the pool ends before.
    """
    parts = [pool.submit(_read_part, folder, file, start) for start in range(0, file.size, PIECE_BYTES)]

    def wait() -> FileProof:
        totals, checksums = [0] * len(file.tensors), list[int]()
        for checksum, sums in (part.result() for part in parts):
            checksums.append(checksum)
            for position, value in sums.items():
                totals[position] = (totals[position] + value) & MASK
        return FileProof(tuple(totals), tuple(checksums))

    return wait


def _read_part(folder: Path, file: FileLayout, start: int) -> tuple[int, dict[int, int]]:
    """Return the checksum of a part of a file, and the digests of the parts of tensors in it, by the tensors' positions."""
    end, state, sums = min(start + PIECE_BYTES, file.size), xxhash.xxh3_64(), dict[int, int]()
    block = np.empty(min(_BLOCK_BYTES, end - start), np.uint8)
    descriptor = os.open(folder / file.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for at in range(start, end, _BLOCK_BYTES):
            data = block[: min(_BLOCK_BYTES, end - at)]
            _fill(descriptor, data.data, at, file.path)
            state.update(data.data)
            for position, value in _digests(file, at, data):
                sums[position] = sums.get(position, 0) + value
    finally:
        os.close(descriptor)
    return state.intdigest(), sums


def _digests(file: FileLayout, at: int, data: Array) -> Iterator[tuple[int, int]]:
    """Yield the digests of the parts of tensors in the bytes of a file from `at` on, by the tensors' positions.

    Elements are aligned in the file (`lay_out`), and so in no two blocks.
    """
    end = at + len(data)
    first = max(0, bisect_right(file.tensors, at, key=lambda placed: placed.offset) - 1)
    for position, placed in enumerate(file.tensors[first:], first):
        if placed.offset >= end:
            return
        begin, until = max(at, placed.offset), min(end, placed.offset + placed.spec.size)
        if begin < until:
            item = ITEM_SIZES[placed.spec.dtype]
            run = data[begin - at : until - at].view(BITS[item])
            yield position, digest_run(run, (begin - placed.offset) // item, placed.spec.shape)


def _fill(descriptor: int, data: memoryview, at: int, name: str) -> None:
    while data:
        found = os.preadv(descriptor, [data], at)
        if not found:
            raise OSError(f"{name} ends at {at}, {len(data)} bytes are missing")
        data, at = data[found:], at + found


def has_header(folder: Path, file: FileLayout, name: str = "") -> bool:
    """Return whether a file, or the one called `name`, begins with its header."""
    with (folder / (name or file.path)).open("rb") as opened:
        return opened.read(len(file.header)) == file.header
