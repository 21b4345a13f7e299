"""The few things only the kernel and the C library know: who has a file open, how freed memory goes back, durable writes."""

import ctypes
import errno
import fcntl
import os
import signal
from pathlib import Path

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h
_ZEROS = bytes(4 << 20)


def raise_malloc_thresholds() -> None:
    """Messages of about 1 MiB come from the heap again and again instead of from fresh pages: 2.0 -> 3.0 GB/s received. Of heaps
    there are two, not eight a core: each keeps what was freed (320 -> 190 MiB after 200 uploads at once).
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # musl
        return
    mallopt(_M_MMAP_THRESHOLD, 32 << 20)
    mallopt(_M_TRIM_THRESHOLD, 64 << 20)
    mallopt(_M_ARENA_MAX, 2)


def unused_elsewhere(path: Path) -> bool:
    """Whether nobody, this process included, has the file open or mapped."""
    return _leasable(path, fcntl.F_WRLCK)


def unwritten_elsewhere(path: Path) -> bool:
    """Whether nobody, this process included, has the file open or mapped for writing."""
    return _leasable(path, fcntl.F_RDLCK)


def _leasable(path: Path, kind: int) -> bool:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # An open by somebody else while the lease is held sends a signal, by default SIGIO, which kills.
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, kind)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES, errno.EINVAL, errno.ENOTSUP, errno.ENOLCK):
            return False
        raise
    finally:
        os.close(descriptor)
    return True


def anonymous_bytes() -> int:
    """Anonymous memory of this process: what is not files, shared memory included."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    return 0


def make_folder(path: Path) -> Path:
    """The folder, made where it is missing; it and parents that are made with it are the owner's alone."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)
    return path


def write_zeros(path: Path, header: bytes, size: int) -> None:
    """A file of `size` bytes that starts with `header`, every page there. Raises OSError (ENOSPC) where there is no room."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size)  # all or nothing, before time is spent
        os.pwrite(descriptor, header, 0)
        at = len(header)
        while at < size:
            at += os.pwrite(descriptor, memoryview(_ZEROS)[: size - at], at)
    finally:
        os.close(descriptor)


def write_file(path: Path, content: bytes) -> None:
    """The whole file, on its medium, under its name only when complete."""
    part = path.with_name(path.name + ".part")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    part.rename(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """fsync of a file or folder."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
