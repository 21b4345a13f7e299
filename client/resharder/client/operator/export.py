"""Folders that appear whole or not at all: what `Operator.export` and `Operator.fetch_config` write."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import xxhash
from resharder.client.errors import CorruptData, UsageError
from resharder.converters.failpoints import failpoint
from resharder.v1 import operator_pb2


@contextmanager
def appearing(folder: Path) -> Iterator[Path]:
    """A new folder beside `folder` that takes its place when all went well."""
    folder = folder.absolute()
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UsageError(f"expected a new or an empty folder, {folder} is {'not empty' if folder.is_dir() else 'a file'}")
    if not folder.parent.is_dir():
        raise UsageError(f"expected a folder to write into, {folder.parent} does not exist")
    try:
        beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise UsageError(f"expected to write into {folder.parent}: {error.strerror}") from error
    try:
        yield beside
        failpoint("export.rename")
        beside.chmod(0o755)
        beside.rename(folder)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    _sync_folder(folder.parent)


def write_parts(folder: Path, parts: Iterator[operator_pb2.FilePart], progress: Callable[[int], None]) -> tuple[int, int]:
    """(files, bytes). Parts of a file come one after the other."""
    failpoint("export.write")
    sizes: dict[Path, int] = {}
    written = 0
    for part in parts:
        path = folder / plain_name(part.path)
        if xxhash.xxh3_64_intdigest(part.data) != part.checksum:
            raise CorruptData(f"{part.path}: {len(part.data)} bytes at {part.offset} arrived other than they were sent")
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
    if not path or path != Path(path).name or path.startswith("."):
        raise CorruptData(f"expected a plain file name from the daemon, got {path!r}")
    return path


def write_synced(path: Path, content: bytes) -> None:
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
