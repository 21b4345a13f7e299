"""The pages of mapped files, by system calls that let Python's other threads go on meanwhile; `mmap.close` does not.

Linux before 5.14 does nothing in `map_pages`, and pages come one by one.
"""

import ctypes
import mmap
import os

_POPULATE_READ, _POPULATE_WRITE = 22, 23  # linux/mman.h; mmap has no names for them
_HUGE = 2 << 20  # bytes of the smallest huge page
_libc = ctypes.CDLL(None)  # one: each is a handful of objects in a circle
Span = tuple[int, int]  # addresses, the second one of the first byte after it


def map_pages(span: Span, *, write: bool = False) -> None:
    """Puts them into this process's tables at once. Reading maps sixteen at a time, and shared memory's may be written then as
    well; with `write` those that do not exist yet are made."""
    _advise(span, _POPULATE_WRITE if write else _POPULATE_READ)


def forget_pages(span: Span) -> None:
    """Takes pages of a shared map out of this process's tables. They are the file's still: whoever reads them again maps them
    again. Of any other memory the content would be lost."""
    _advise(span, mmap.MADV_DONTNEED)


def small_pages(descriptor: int) -> bool:
    """Whether the file's pages are small. A tmpfs says how large they are; whatever other file systems say, theirs are small."""
    return os.fstat(descriptor).st_blksize < _HUGE


def _advise(span: Span, advice: int) -> None:
    begin = span[0] - span[0] % mmap.PAGESIZE
    _libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(span[1] - begin), advice)
