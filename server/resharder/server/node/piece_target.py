"""A version that pieces are fetched into."""

from collections.abc import Mapping
from typing import Protocol

from resharder.converters.storage.digest import Array
from resharder.converters.wire.pieces import Bitmap, PieceNumbering, PieceSpan
from resharder.server.node.memory import PieceClaims, VersionMemory


class PieceTarget(Protocol):
    """A version's files, and the pieces of them that are wanted and held. Thread-safe."""

    @property
    def name(self) -> str:
        """Resource name."""

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the version."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """Bytes of each file, in the order of the manifest."""

    @property
    def numbering(self) -> PieceNumbering:
        """Numbers of its pieces."""

    @property
    def claims(self) -> PieceClaims:
        """Fetches in flight."""

    @property
    def memory(self) -> VersionMemory | None:
        """The files in the memory of a transfer engine; None without one."""

    def wanted(self) -> Bitmap:
        """Return the pieces that are needed here."""

    def missing(self) -> Bitmap:
        """Return the wanted pieces that are not held yet."""

    def held(self) -> Bitmap:
        """Return the pieces that are held now."""

    def write(self, part: PieceSpan, content: Array) -> None:
        """Write checked bytes of a piece. Raises OSError."""

    def add(self, piece: int) -> None:
        """Count a piece as held, all parts of which are written. Raises OSError."""
