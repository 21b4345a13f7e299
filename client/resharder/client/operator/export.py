"""Folders that are written whole or not at all, for `Operator.export` and `Operator.fetch_config`."""

import fcntl
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from resharder.client.errors import CorruptData, UsageError
from resharder.converters.failpoints import failpoint
from resharder.converters.wire.ranges import PIECE_BYTES

if TYPE_CHECKING:
    from resharder.client.versions.manifest import VersionManifest
    from resharder.client.versions.port_reader import PortReader

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


def write_version(
    folder: Path, files: Mapping[str, bytes], manifest: "VersionManifest", reader: "PortReader", progress: Callable[[int], None]
) -> int:
    """Write a version's files and fsync all of them.

    Args:
        folder: Folder of the files.
        files: Contents of all files but the weights, by name.
        manifest: The version's manifest.
        reader: Reader of its weights, whose pieces each have a checksum.
        progress: Called with the bytes so far, after every piece.

    Returns:
        The bytes of all files.

    Raises:
        CorruptData: A checksum or a file name is wrong.
        DaemonUnreachable: The daemon, or its data port, cannot be reached.
    """
    import numpy as np
    from resharder.client.versions.read_plan import FileRange

    failpoint("export.write")
    for name, content in files.items():
        write_synced(folder / plain_name(name), content)
    jobs = [
        FileRange(number, start, min(start + PIECE_BYTES, file.size))
        for number, file in enumerate(manifest.files)
        for start in range(0, file.size, PIECE_BYTES)
    ]
    written, lock = sum(map(len, files.values())), threading.Lock()

    def arrived(position: int) -> None:
        nonlocal written
        with lock:
            written += jobs[position].end - jobs[position].start
            progress(written)

    with ExitStack() as opened:
        weights = [opened.enter_context((folder / plain_name(file.path)).open("x+b")) for file in manifest.files]
        for file, layout in zip(weights, manifest.files, strict=True):
            os.posix_fallocate(file.fileno(), 0, layout.size)  # a full disk is an error here, not a signal at a page
        reader.read(jobs, [np.memmap(file, np.uint8, "r+") for file in weights], {}, arrived)
        for file in weights:
            os.fsync(file.fileno())
    _sync_folder(folder)
    return written


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
