"""Page tables of mapped files, changed by system calls that release Python's global lock, unlike `mmap.close`.

`map_pages` is a no-op before Linux 5.14; pages are then mapped one by one at their first access.
"""

import ctypes
import mmap
import os

_POPULATE_READ, _POPULATE_WRITE = 22, 23  # linux/mman.h; not in the mmap module
_HUGE = 2 << 20  # bytes of the smallest huge page
_TMPFS, _STATFS_BYTES = 0x01021994, 1024  # linux/magic.h; more than struct statfs has, whose first field is a long
_libc = ctypes.CDLL(None, use_errno=True)  # one instance: each CDLL is a cycle of objects
Span = tuple[int, int]  # addresses: first byte, and first byte after the last one


def map_pages(span: Span, *, write: bool = False) -> None:
    """Map the pages of a span into this process's page tables at once.

    Without `write`, pages are mapped for reading, sixteen at a time. With `write`, missing pages are created.
    """
    _advise(span, _POPULATE_WRITE if write else _POPULATE_READ)


def forget_pages(span: Span) -> None:
    """Unmap the pages of a shared map from this process's page tables; their content stays in the file.

    The content of private memory is lost.
    """
    _advise(span, mmap.MADV_DONTNEED)


def small_pages(descriptor: int) -> bool:
    """Return whether the file has small pages. A tmpfs reports its page size; other file systems have small pages."""
    return os.fstat(descriptor).st_blksize < _HUGE


def in_shared_memory(descriptor: int) -> bool:
    """Return whether the file is in a tmpfs. Raises OSError."""
    found = ctypes.create_string_buffer(_STATFS_BYTES)
    if _libc.fstatfs(descriptor, found):
        raise OSError(ctypes.get_errno(), "fstatfs failed")
    return ctypes.c_long.from_buffer(found).value == _TMPFS


def _advise(span: Span, advice: int) -> None:
    begin = span[0] - span[0] % mmap.PAGESIZE
    _libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(span[1] - begin), advice)
