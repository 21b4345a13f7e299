"""Pages of mapped files, by system calls that release Python's global lock, unlike `mmap.close`.

`map_pages` does nothing before Linux 5.14, where pages are mapped one by one.
"""

import ctypes
import mmap
import os

_POPULATE_READ, _POPULATE_WRITE = 22, 23  # linux/mman.h; not in the mmap module
_HUGE = 2 << 20  # bytes of the smallest huge page
_libc = ctypes.CDLL(None)  # a single instance: each is several objects in a cycle
Span = tuple[int, int]  # addresses: first byte, and first byte after the last one


def map_pages(span: Span, *, write: bool = False) -> None:
    """Map pages into this process's tables at once. Without `write`, pages are mapped for reading,
    sixteen at a time; with `write`, missing pages are created.
    """
    _advise(span, _POPULATE_WRITE if write else _POPULATE_READ)


def forget_pages(span: Span) -> None:
    """Unmap pages of a shared map from this process's tables. Their content stays in the file. Of any
    other memory, the content is lost.
    """
    _advise(span, mmap.MADV_DONTNEED)


def small_pages(descriptor: int) -> bool:
    """Return whether the file's pages are small. Only a tmpfs reports their size; those of other file systems are small."""
    return os.fstat(descriptor).st_blksize < _HUGE


def _advise(span: Span, advice: int) -> None:
    begin = span[0] - span[0] % mmap.PAGESIZE
    _libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(span[1] - begin), advice)
