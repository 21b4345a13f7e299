"""Proofs of files that ranks have written, taken while ranks still write other files, or after the last seal.

A proof has the digests of the tensors, and on nodes the checksums of the pieces, in one pass over the bytes. It counts only if no
process had the file open for writing from before it was taken until after the last seal: a lease of the kernel is held for that
long.
"""

import os
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
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


class ProofRefused(Exception):
    """Files that cannot be verified. The message has the reason."""


class _Begun(NamedTuple, Generic[T]):
    """Digests of a file that were begun: the lease on it, and a function that waits for them."""

    lease: ReadLease
    wait: Callable[[], T]


class EarlyDigests(Generic[T]):
    """Digests of closed files. All files share the threads, so that none is idle while another file ends. Thread-safe.

    Args:
        folder: Folder of the UPLOADING version.
        files: Its files.
        begin: Function of the folder, a file and a pool of threads. It begins the digests there, and returns a function that
            waits for them. Both may raise OSError and ValueError; the file is digested after the last seal then.
        threads: Number of threads.
    """

    def __init__(
        self,
        folder: Path,
        files: Sequence[FileLayout],
        begin: Callable[[Path, FileLayout, Executor], Callable[[], T]],
        threads: int,
    ) -> None:
        self._folder, self._begin, self._threads = folder, begin, threads
        self._files = {file.path: file for file in files}
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None  # from the first file on
        self._begun: dict[str, _Begun[T]] = {}
        self._ended = False

    def begin(self, files: Sequence[str]) -> None:
        """Begin to digest files, which no process should have open for writing. A no-op after `settle` or `drop`."""
        with self._lock:
            for file in files if not self._ended else ():
                lease = read_lease(self._folder / file)
                if lease is None:
                    continue
                try:
                    self._begun[file] = _Begun(lease, self._digests(self._files[file]))
                except (OSError, ValueError):  # those of an aborted version, or its verification reports them
                    lease.close()

    def _digests(self, file: FileLayout) -> Callable[[], T]:
        if not has_header(self._folder, file):
            raise ValueError(f"{file.path}: its header was overwritten")
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, "early-digests")
        return self._begin(self._folder, file, self._pool)

    def settle(self) -> dict[str, T]:
        """Wait for the digests of all files that were begun, and return the digests that count, by file."""
        with self._lock:
            self._ended = True
        found = {}
        for file, begun in self._begun.items():
            with suppress(OSError, ValueError, CancelledError):  # the last one after `drop`
                found[file] = begun.wait()
        with self._lock:
            found = {file: digests for file, digests in found.items() if self._begun[file].lease.is_intact}
            self._close()
        return found

    def drop(self) -> None:
        """Discard all digests, so that the files may be written again."""
        with self._lock:
            self._ended = True
            self._close()

    def _close(self) -> None:
        for begun in self._begun.values():
            begun.lease.close()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


def prove_files(
    folder: Path, files: Sequence[FileLayout], patience: float = PATIENCE, clock: Callable[[], float] = time.monotonic
) -> SetProof:
    """Digest files once no process has them open for writing, none of which opens them until the end.

    Args:
        folder: Folder of the files.
        files: Their layouts.
        patience: Seconds to wait for other processes that have the files open for writing.
        clock: Monotonic clock in seconds.

    Raises ProofRefused, OSError.
    """
    with ExitStack() as stack:
        leases = _leases(folder, files, clock() + patience, patience, clock)
        for lease in leases:
            stack.callback(lease.close)
        if overwritten := [file.path for file in files if not has_header(folder, file)]:
            raise ProofRefused(f"{overwritten[0]}: its header was overwritten")
        found = read_proofs(folder, files)
        if broken := [file.path for file, lease in zip(files, leases, strict=True) if not lease.is_intact]:
            raise ProofRefused(f"a process has opened {broken[0]} for writing while it was verified")
    return found


def read_proofs(folder: Path, files: Sequence[FileLayout], threads: int = THREADS) -> SetProof:
    """Return the proofs of files as they are now, each of their bytes read once. Raises OSError."""
    with ThreadPoolExecutor(threads, "verify") as pool:
        begun = {file.path: begin_proof(folder, file, pool) for file in files}
        return {path: wait() for path, wait in begun.items()}


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


def _leases(
    folder: Path, files: Sequence[FileLayout], deadline: float, patience: float, clock: Callable[[], float]
) -> list[ReadLease]:
    """Take a lease on every file. Raises ProofRefused if a process still has one open for writing at the deadline."""
    leases = list[ReadLease]()
    for file in files:
        while (lease := read_lease(folder / file.path)) is None:
            if clock() > deadline:
                for taken in leases:
                    taken.close()
                raise ProofRefused(f"a process still has {file.path} open for writing after {patience:g} s")
            time.sleep(_PAUSE)
        leases.append(lease)
    return leases


def has_header(folder: Path, file: FileLayout) -> bool:
    """Return whether a file still begins with its header."""
    with (folder / file.path).open("rb") as opened:
        return opened.read(len(file.header)) == file.header
