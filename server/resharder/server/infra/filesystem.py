"""File operations beyond `pathlib`: detection of other processes' open files, and durable writes."""

import errno
import fcntl
import fnmatch
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

_ZEROS = bytes(4 << 20)


class MediumRefused(OSError):
    """Failed file operation: errno, file, operation, and the bytes that it needs (0: unknown)."""

    def __init__(self, error: OSError, path: Path, doing: str, needed: int) -> None:
        super().__init__(error.errno, error.strerror or str(error), str(path))
        self.doing, self.needed = doing, needed


@contextmanager
def touching(path: Path, doing: str, needed: int = 0) -> Iterator[None]:
    """Convert an OSError of the block to MediumRefused."""
    try:
        yield
    except MediumRefused:
        raise
    except OSError as error:
        raise MediumRefused(error, path, doing, needed) from error


def unused_elsewhere(path: Path) -> bool:
    """Return whether no process, this one included, has the file open or mapped."""
    return _leasable(path, fcntl.F_WRLCK)


def unwritten_elsewhere(path: Path) -> bool:
    """Return whether no process, this one included, has the file open or mapped for writing."""
    return _leasable(path, fcntl.F_RDLCK)


class ReadLease:
    """Lease on a file that no process has open or mapped for writing, until one opens it for writing.

    The opener waits until the lease is closed, at most for the kernel's `fs.lease-break-time`, or fails if it does not block.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @property
    def is_intact(self) -> bool:
        """Whether no process has opened the file for writing since the lease was taken."""
        try:
            return self._descriptor >= 0 and fcntl.fcntl(self._descriptor, fcntl.F_GETLEASE) == fcntl.F_RDLCK
        except OSError:  # a kernel that grants leases and does not report them
            return False

    def close(self) -> None:
        """Give the lease back. It is not intact afterwards."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            _end_lease(descriptor)


def read_lease(path: Path) -> ReadLease | None:
    """Take a lease on a file. None if a process, this one included, has the file open or mapped for writing."""
    descriptor = _leased(path, fcntl.F_RDLCK)
    return None if descriptor is None else ReadLease(descriptor)


def _leasable(path: Path, kind: int) -> bool:
    descriptor = _leased(path, kind)
    if descriptor is None:
        return False
    _end_lease(descriptor)
    return True


def _leased(path: Path, kind: int) -> int | None:
    """Return a descriptor with a lease on its file; None if the kernel does not grant it."""
    with touching(path, "opening"):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # An open by another process while the lease is held sends a signal, by default SIGIO, which kills.
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, kind)
    except OSError as error:
        os.close(descriptor)
        if error.errno in (errno.EAGAIN, errno.EACCES, errno.EINVAL, errno.ENOTSUP, errno.ENOLCK):
            return None
        raise MediumRefused(error, path, "leasing", 0) from error
    return descriptor


def _end_lease(descriptor: int) -> None:
    """End a lease and close its descriptor. Closing does not suffice while a process forked from this one has the descriptor."""
    with suppress(OSError):
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    os.close(descriptor)


def anonymous_bytes() -> int:
    """Return the anonymous resident memory of this process in bytes, without mapped files and shared memory."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    return 0


def make_folder(path: Path) -> Path:
    """Create a folder and its parents unless they exist, accessible to the owner only. Raises MediumRefused."""
    with touching(path, "making the folder"):
        if not path.is_dir():
            make_folder(path.parent)
            path.mkdir(mode=0o700, exist_ok=True)
    return path


def make_durable_folder(path: Path) -> Path:
    """Create a folder as `make_folder` does, and sync its entry in its parent, also if an earlier call could not."""
    make_folder(path)
    sync(path.parent)
    return path


def matching(folder: Path, pattern: str) -> list[Path]:
    """Return the paths in a folder whose names match a shell pattern, sorted; none in a folder that is missing.

    Raises MediumRefused for a folder that cannot be listed, which `Path.glob` takes for an empty one.
    """
    with touching(folder, "listing"):
        try:
            names = os.listdir(folder)
        except FileNotFoundError:
            return []
    return sorted(folder / name for name in fnmatch.filter(names, pattern))


def is_gone(path: Path) -> bool:
    """Return whether nothing has this path. A path that cannot be looked up is not gone."""
    try:
        path.lstat()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


def write_zeros(path: Path, header: bytes, size: int, spans: Sequence[tuple[int, int]] | None = None) -> None:
    """Create a file of `size` bytes that starts with `header`.

    Every page is allocated, so that a write to its mapping raises no SIGBUS on a full medium. Raises MediumRefused: with ENOSPC,
    before any byte is written.

    Args:
        path: The file.
        header: Its first bytes.
        size: Its length.
        spans: First byte and end of each part whose pages are allocated, the header among them; None for all.
    """
    parts = [(0, size)] if spans is None else [(start, min(end, size)) for start, end in spans]
    with touching(path, "laying out", sum(end - start for start, end in parts)):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            for start, end in parts:
                os.posix_fallocate(descriptor, start, end - start)  # fails at once on a full medium
            if spans is not None:
                os.ftruncate(descriptor, size)
            for start, end in parts:
                for at in range(start, end, len(_ZEROS)):
                    write_at(descriptor, memoryview(_ZEROS)[: end - at], at)
            write_at(descriptor, header, 0)
        finally:
            os.close(descriptor)


def write_header(path: Path, header: bytes) -> None:
    """Overwrite the first bytes of a file. Raises OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        write_at(descriptor, header, 0)
    finally:
        os.close(descriptor)


def write_at(descriptor: int, content: bytes | memoryview, at: int) -> None:
    """Write all bytes at an offset, with as many calls as the kernel needs. Raises OSError."""
    left = memoryview(content)
    while left:
        done = os.pwrite(descriptor, left, at)
        left, at = left[done:], at + done


def write_file(path: Path, content: bytes) -> None:
    """Replace a whole file atomically and durably.

    Raises MediumRefused. The file is unchanged then, unless the sync of its folder failed: it has the new content, which a power
    failure may revert.
    """
    part = path.with_name(path.name + ".part")
    try:
        with touching(path, "writing", len(content)):
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                write_at(descriptor, content, 0)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            part.rename(path)
    except OSError:
        with suppress(OSError):
            part.unlink()
        raise
    sync(path.parent)


def move(source: Path, target: Path) -> None:
    """Rename within a filesystem, without a sync. Raises MediumRefused."""
    with touching(target, "renaming to"):
        source.rename(target)


def link(source: Path, target: Path) -> None:
    """Give a file a second name, without a sync. Raises MediumRefused."""
    with touching(target, "linking"):
        os.link(source, target)


def copy_file(source: Path, target: Path) -> None:
    """Create a file with the bytes of another one, all of its pages allocated. Raises MediumRefused."""
    size = source.stat().st_size
    with touching(target, "copying", size):
        descriptor = os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)  # fails at once on a full medium
            with source.open("rb") as file:
                at = 0
                while block := file.read(len(_ZEROS)):
                    write_at(descriptor, block, at)
                    at += len(block)
        finally:
            os.close(descriptor)


def sync(path: Path) -> None:
    """Sync a file or folder. Raises MediumRefused."""
    with touching(path, "syncing"):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
