"""Versions in the shared memory of a node's host: their files, and which pieces of them are held.

    <root>/nonce                             identifies the folder to workers on this host
           versions/<model>/<number>-<nonce>/    the safetensors files of a version, with the store's names
                                       whole   there once all pieces are held

A file is as long as the version's from the start, and its pages come with the pieces. Workers map files that are whole. A version
that is dropped is unlinked, never overwritten, so that a worker which has mapped it keeps it.
"""

import os
import secrets
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from resharder.converters.failpoints import failpoint
from resharder.converters.storage.digest import Array
from resharder.converters.storage.files import FileLayout
from resharder.converters.wire.ranges import WHOLE_FILE, FilePart
from resharder.server.data.versions import ServedVersion
from resharder.server.infra.filesystem import make_folder, matching, unused_elsewhere, write_at
from resharder.server.node.pieces import Bitmap, PieceSpan, number_pieces
from resharder.server.state.errors import ResourceExhausted, ResourceNotFound


class HeldVersion:
    """A version's files, and the pieces of them that are held. Thread-safe."""

    def __init__(self, name: str, fingerprint: str, folder: Path, files: Sequence[FileLayout]) -> None:
        self.name, self.fingerprint, self.folder = name, fingerprint, folder
        self.sizes = {file.path: file.size for file in files}
        self.numbering = number_pieces(files)
        self._lock, self._held = threading.Lock(), Bitmap(self.numbering.count)

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return self.numbering.total

    def held(self) -> Bitmap:
        """Return the pieces that are held now."""
        with self._lock:
            return Bitmap(self._held.count, self._held.bits.copy())

    def write(self, part: PieceSpan, content: Array) -> None:
        """Write checked bytes of a piece. Raises OSError, also for a version that was dropped in the meantime."""
        failpoint("node.write")
        descriptor = os.open(self.folder / part.file, os.O_WRONLY | os.O_CLOEXEC)
        try:
            write_at(descriptor, content.data, part.start)
        finally:
            os.close(descriptor)

    def add(self, piece: int) -> None:
        """Count a piece as held: all its parts are written. With the last one, tell the workers on this host."""
        with self._lock:
            self._held.add(piece)
            whole = self._held.whole()
        if whole:
            with suppress(FileNotFoundError):  # dropped in the meantime
                (self.folder / WHOLE_FILE).touch(mode=0o600)

    def lacks(self, part: FilePart) -> str:
        """Return why a part of a file cannot be read; empty if it can."""
        with self._lock:
            missing = [piece for piece in self.numbering.touched(part.file, part.start, part.end) if piece not in self._held]
        return f"this node does not hold piece {missing[0]} of {self.name} yet" if missing else ""


class NodeCopies:
    """All versions of a node. Thread-safe. The constructor removes what an earlier process has left.

    Args:
        root: Folder of the node, locked by the caller.
        limit_bytes: Bound on the bytes of versions.
    """

    def __init__(self, root: Path, limit_bytes: int) -> None:
        self._root, self.limit_bytes = make_folder(root / "versions"), limit_bytes
        self._lock = threading.Lock()
        self._by_name: dict[str, HeldVersion] = {}
        for left in matching(self._root, "*"):
            shutil.rmtree(left)

    def all(self) -> list[HeldVersion]:
        """Return the versions."""
        with self._lock:
            return list(self._by_name.values())

    def get(self, name: str) -> HeldVersion | None:
        """Return a version, or None."""
        with self._lock:
            return self._by_name.get(name)

    def used_bytes(self) -> int:
        """Return the bytes of all versions, whether their pieces have arrived or not."""
        return sum(version.size_bytes for version in self.all())

    def add(self, name: str, fingerprint: str, files: Sequence[FileLayout]) -> HeldVersion:
        """Create the files of a version. Raises ResourceExhausted (STORE_FULL), OSError."""
        model, number = name.split("/")[1::2]
        # Never an earlier path: a worker with the path of an earlier copy must not map one that is not whole.
        folder = self._root / model / f"{int(number):08}-{secrets.token_hex(4)}"
        version = HeldVersion(name, fingerprint, folder, files)
        self._check_capacity(version)
        failpoint("node.layout")
        make_folder(folder)
        for path, size in version.sizes.items():
            descriptor = os.open(folder / path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.ftruncate(descriptor, size)
            finally:
                os.close(descriptor)
        with self._lock:
            self._by_name[name] = version
        return version

    def _check_capacity(self, version: HeldVersion) -> None:
        found, used = os.statvfs(self._root), self.used_bytes()
        promised = sum(other.numbering.piece_bytes * len(other.held().missing()) for other in self.all())
        free = min(self.limit_bytes - used, found.f_bavail * found.f_frsize - promised)
        if version.size_bytes > free:
            raise ResourceExhausted(
                "STORE_FULL", f"memory full: it needs {version.size_bytes} bytes, {max(0, free)} of {self.limit_bytes} are free"
            )

    def drop(self, name: str) -> bool:
        """Unlink a version, unless a process has a file of it open or mapped. Returns whether it is gone. Raises OSError."""
        version = self.get(name)
        if version is None:
            return True
        failpoint("node.drop")
        if not all(unused_elsewhere(version.folder / path) for path in version.sizes):
            return False
        with self._lock:
            del self._by_name[name]
        shutil.rmtree(version.folder)
        return True

    @contextmanager
    def pinned(self, model: str, number: int) -> Iterator[ServedVersion]:
        """Yield a version for the data port, which keeps its files open. Raises ResourceNotFound (VERSION_UNKNOWN)."""
        version = self.get(f"models/{model}/versions/{number}")
        if version is None:
            raise ResourceNotFound("VERSION_UNKNOWN", f"this node does not hold models/{model}/versions/{number}")
        yield ServedVersion(version.name, version.fingerprint, version.sizes, version.folder, version.lacks)
