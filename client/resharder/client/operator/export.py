"""Folders that are written whole or not at all, for `Operator.export` and `Operator.fetch_config`."""

import fcntl
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import xxhash
from resharder.client.errors import CorruptData, UsageError
from resharder.converters.failpoints import failpoint
from resharder.v1 import operator_pb2

_NEW = 10.0  # seconds in which a process has the lock of a folder that it made


@contextmanager
def appearing(folder: Path) -> Iterator[Path]:
    """Yield a new folder beside `folder`, which takes its place if the block succeeds and is deleted otherwise.

    Raises UsageError if `folder` is neither new nor empty, or cannot be created.
    """
    folder = folder.absolute()
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UsageError(f"expected a new or an empty folder, {folder} is {'not empty' if folder.is_dir() else 'a file'}")
    if not folder.parent.is_dir():
        raise UsageError(f"{folder.parent} does not exist: create it first")
    _remove_abandoned(folder)
    try:
        beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise UsageError(f"cannot write into {folder.parent}: {error.strerror}") from error
    try:
        with _locked(beside):
            yield beside
        failpoint("export.rename")
        beside.chmod(0o755)
        beside.rename(folder)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    _sync_folder(folder.parent)


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Hold the lock of a folder that is being written; yields whether no other process holds it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free = True
        except OSError:  # held, or not supported by the file system
            free = False
        yield free
    finally:
        os.close(descriptor)


def _remove_abandoned(folder: Path) -> None:
    """Remove the folders beside `folder` that killed processes have left."""
    made = re.compile(rf"\.{re.escape(folder.name)}\.[a-z0-9_]{{8}}")
    with suppress(OSError):
        for beside in folder.parent.iterdir():
            old = made.fullmatch(beside.name) and time.time() - beside.stat().st_mtime > _NEW
            if old and beside.is_dir() and not beside.is_symlink():
                with _locked(beside) as free:
                    if free:
                        shutil.rmtree(beside, ignore_errors=True)


def same_files(folder: Path, files: Mapping[str, bytes]) -> bool:
    """Return whether a folder has exactly these files."""
    try:
        return {path.name: path.read_bytes() for path in folder.iterdir()} == dict(files)
    except OSError:
        return False


def write_parts(folder: Path, parts: Iterator[operator_pb2.FilePart], progress: Callable[[int], None]) -> tuple[int, int]:
    """Write the parts of an export and fsync all files.

    Args:
        folder: Folder of the files.
        parts: Parts of files; those of one file come in order.
        progress: Called with the bytes so far, after every part.

    Returns:
        Number of files and their bytes.

    Raises:
        CorruptData: A checksum, a size or a file name is wrong.
    """
    failpoint("export.write")
    sizes: dict[Path, int] = {}
    written = 0
    for part in parts:
        path = folder / plain_name(part.path)
        if xxhash.xxh3_64_intdigest(part.data) != part.checksum:
            raise CorruptData(f"{part.path}: the checksum of {len(part.data)} bytes at {part.offset} is wrong; try again")
        with path.open("r+b" if path in sizes else "xb") as file:
            file.seek(part.offset)
            file.write(part.data)
        sizes[path] = part.size_bytes
        written += len(part.data)
        progress(written)
    for path, size in sizes.items():
        if path.stat().st_size != size:
            raise CorruptData(f"{path.name}: expected {size} bytes, got {path.stat().st_size}")
        with path.open("rb") as file:
            os.fsync(file.fileno())
    _sync_folder(folder)
    if written != sum(sizes.values()):
        raise CorruptData(f"expected {sum(sizes.values())} bytes in {len(sizes)} files, got {written}")
    return len(sizes), written


def plain_name(path: str) -> str:
    """Return a file name of the daemon. Raises CorruptData if it has folders or begins with a dot."""
    if not path or path != Path(path).name or path.startswith("."):
        raise CorruptData(f"expected a plain file name from the daemon, got {path!r}")
    return path


def write_synced(path: Path, content: bytes) -> None:
    """Create a file and fsync it. Raises FileExistsError if it exists."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
