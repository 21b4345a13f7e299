"""Page tables of mapped files, changed by system calls that release Python's global lock, unlike `mmap.close`.

`map_pages` is a no-op before Linux 5.14; pages are then mapped one by one at their first access.
"""

import ctypes
import mmap
import os

_NO_RESERVE = 0x4000  # linux/mman.h, as the three after it
_FIXED = 0x10
_PROT_NONE = 0
_POPULATE_READ, _POPULATE_WRITE = 22, 23  # linux/mman.h; not in the mmap module
_HUGE = 2 << 20  # bytes of the smallest huge page
_TMPFS, _STATFS_BYTES = 0x01021994, 1024  # linux/magic.h; more than struct statfs has, whose first field is a long
_libc = ctypes.CDLL(None, use_errno=True)  # one instance: each CDLL is a cycle of objects
_libc.mmap.restype, _libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_RESERVED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
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


class AddressRange:
    """Addresses for a file of `size` bytes, from `begin` on, that stay reserved while it is not mapped."""

    def __init__(self, size: int) -> None:
        """Reserve addresses that begin with a huge page. Raises OSError."""
        self.size, self._size = size, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        self._reserved = _mapped_at(None, self._size + _HUGE, _PROT_NONE, _RESERVED, -1), self._size + _HUGE
        self.begin = -(-self._reserved[0] // _HUGE) * _HUGE

    def map(self, descriptor: int) -> None:
        """Map the file of a descriptor for writing. Raises OSError."""
        _mapped_at(self.begin, self._size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _FIXED, descriptor)

    def unmap(self) -> None:
        """Unmap the file. Its addresses read as zeros then, and nothing else is mapped there."""
        _mapped_at(self.begin, self._size, mmap.PROT_READ, _RESERVED | _FIXED, -1)

    def close(self) -> None:
        """Give the addresses back."""
        reserved, self._reserved = self._reserved, (0, 0)
        if reserved[1]:
            _libc.munmap(*reserved)


def _mapped_at(begin: int | None, size: int, access: int, flags: int, descriptor: int) -> int:
    """Call mmap. Raises OSError."""
    found = _libc.mmap(begin, size, access, flags, descriptor, 0)
    if found in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), f"mapping {size} bytes: {os.strerror(ctypes.get_errno())}")
    return int(found)


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
