"""A version's files in a folder, and the pieces of them that are wanted and held: what pieces are fetched into.

wanted --a fetch writes and checks all parts of a piece--> recorded --> held
"""

import os
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path

from resharder.converters.failpoints import FilePoint, failpoint
from resharder.converters.storage.digest import Array
from resharder.converters.storage.files import FileLayout
from resharder.converters.wire.pieces import Bitmap, PieceNumbering, PieceSpan
from resharder.server.holding.memory import PieceClaims, VersionMemory
from resharder.server.infra.filesystem import touching, write_at


class HeldFiles:
    """Files of one version. Thread-safe.

    Attributes:
        name: Resource name of the version.
        fingerprint: Its fingerprint.
        folder: Folder of the files.
        sizes: Bytes of each file, in the order of the manifest.
        numbering: Numbers of its pieces.
        claims: Fetches in flight.
        failure: Why bytes could not be written last; None if they were.

    Args:
        wanted: Pieces that are wanted at first.
        held: Pieces that the files have already.
        checksums: xxh3_64 of each part of a piece, by file and first byte; none where another process has them.
        synced: Whether each write is synced.
        point: Failpoint before each write; None for none.
    """

    def __init__(
        self,
        name: str,
        fingerprint: str,
        folder: Path,
        sizes: Mapping[str, int],
        numbering: PieceNumbering,
        *,
        wanted: Bitmap | None = None,
        held: Bitmap | None = None,
        checksums: Mapping[tuple[str, int], int] | None = None,
        synced: bool = False,
        point: FilePoint | None = None,
    ) -> None:
        self.name, self.fingerprint, self.folder, self.sizes, self.numbering = name, fingerprint, folder, sizes, numbering
        self.claims = PieceClaims()
        self.failure: OSError | None = None
        self._checksums, self._synced, self._point = checksums or {}, synced, point
        self._changed = threading.Condition()
        self._wanted, self._held = wanted or Bitmap(numbering.count), held or Bitmap(numbering.count)

    @property
    def memory(self) -> VersionMemory | None:
        """The files in the memory of a transfer engine; None without one."""
        return None

    def wanted(self) -> Bitmap:
        """Return the pieces that are needed here."""
        with self._changed:
            return self._wanted

    def want(self, pieces: Bitmap) -> None:
        """Add to the wanted pieces."""
        with self._changed:
            self._wanted = self._wanted | pieces

    def held(self) -> Bitmap:
        """Return the pieces that are held now."""
        with self._changed:
            return self._held

    def missing(self) -> Bitmap:
        """Return the wanted pieces that are not held yet."""
        with self._changed:
            return self._wanted - self._held

    def checksum(self, part: PieceSpan) -> int:
        """Return the checksum of a part of a piece. Raises KeyError."""
        return self._checksums[part.file, part.start]

    def write(self, part: PieceSpan, content: Array) -> None:
        """Write checked bytes of a piece. Raises OSError, also once the version was dropped."""
        path = self.folder / part.file
        try:
            with touching(path, "writing", len(content)):
                if self._point is not None:
                    failpoint(self._point)
                descriptor = self.open_file(part.file)
                try:
                    write_at(descriptor, content.data, part.start)
                    if self._synced:
                        os.fsync(descriptor)
                finally:
                    os.close(descriptor)
        except OSError as error:
            self.failure = error
            raise

    def open_file(self, name: str) -> int:
        """Open a file for writing. Raises OSError."""
        return os.open(self.folder / name, os.O_WRONLY | os.O_CLOEXEC)

    def add(self, piece: int) -> None:
        """Count a piece as held once all its parts are written. Raises OSError; the piece is missing then."""
        with self._changed:
            self._set_held(self._held | Bitmap.of(self._held.count, [piece]))

    def _set_held(self, held: Bitmap) -> None:
        """Replace the held pieces, recorded before. Callers hold the lock."""
        self._record(held)
        self._held = held
        self._changed.notify_all()

    def _record(self, held: Bitmap) -> None:
        """Record the held pieces outside of this process, if others read them. Raises OSError."""


def pieces_of(numbering: PieceNumbering, files: Iterable[FileLayout]) -> Bitmap:
    """Return all pieces of some files of a version."""
    return Bitmap.of(numbering.count, (n for file in files for n in numbering.touched(file.path, 0, file.size)))
