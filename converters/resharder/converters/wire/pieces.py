"""Pieces of a version, numbered over its files, and sets of them as bitmaps.

A piece is a range of one file: `piece_bytes` long, the last one of a file may be shorter. Piece 0 is the start of the first file
of the manifest. `piece_bytes` is `PIECE_BYTES`, doubled until a version has at most `MOST_PIECES` pieces, so that a bitmap stays
small whatever the version's size. A piece of several `PIECE_BYTES` is read in parts, each with a checksum of its own.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from resharder.converters.storage.files import FileLayout
from resharder.converters.wire.ranges import PIECE_BYTES

MOST_PIECES = 1024
"""Upper bound on the pieces of a version, apart from the last, shorter piece of each file."""
Bits = npt.NDArray[np.uint8]


class PieceSpan(NamedTuple):
    """Bytes `start` to `end`, exclusive, of the file `file`."""

    file: str
    start: int
    end: int


def piece_bytes_for(total: int) -> int:
    """Return the length of the pieces of a version of `total` bytes."""
    length = PIECE_BYTES
    while total > MOST_PIECES * length:
        length *= 2
    return length


class PieceNumbering:
    """Numbers of the pieces of a version's files.

    Args:
        files: Name and size in bytes of each file, in the order of the manifest.
        piece_bytes: Length of a piece, a multiple of `PIECE_BYTES`; by default `piece_bytes_for` all bytes.
    """

    def __init__(self, files: Iterable[tuple[str, int]], piece_bytes: int | None = None) -> None:
        self._files = tuple(files)
        self.total = sum(size for _, size in self._files)
        self.piece_bytes = piece_bytes or piece_bytes_for(self.total)
        counts = [-(-size // self.piece_bytes) for _, size in self._files]
        self._firsts = list(accumulate(counts, initial=0))  # first piece of each file, then the number of all pieces
        self._indices = {name: index for index, (name, _) in enumerate(self._files)}
        self._sizes = np.full(self.count, self.piece_bytes, np.int64)
        for (_, size), last in zip(self._files, self._firsts[1:], strict=True):
            if size % self.piece_bytes:
                self._sizes[last - 1] = size % self.piece_bytes

    @property
    def count(self) -> int:
        """Number of pieces of the version."""
        return self._firsts[-1]

    def span(self, piece: int) -> PieceSpan:
        """Return the bytes of a piece. Raises ValueError for a number that the version does not have."""
        if not 0 <= piece < self.count:
            raise ValueError(f"expected a piece of 0 to {self.count - 1}, got {piece}")
        index = bisect_right(self._firsts, piece) - 1
        name, size = self._files[index]
        start = (piece - self._firsts[index]) * self.piece_bytes
        return PieceSpan(name, start, min(start + self.piece_bytes, size))

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        return self._sizes

    def size_of(self, pieces: "Bitmap") -> int:
        """Return the bytes of some pieces."""
        return int(self._sizes[pieces.flags()].sum())

    def parts(self, piece: int) -> Iterator[PieceSpan]:
        """Yield the parts of a piece that have a checksum each: aligned ranges of at most `PIECE_BYTES`."""
        file, first, last = self.span(piece)
        for start in range(first, last, PIECE_BYTES):
            yield PieceSpan(file, start, min(start + PIECE_BYTES, last))

    def touched(self, file: str, start: int, end: int) -> range:
        """Return the pieces that contain any of some bytes of a file. Raises ValueError for an unknown file."""
        index = self._indices.get(file)
        if index is None:
            raise ValueError(f"expected one of {len(self._files)} files of the version, got {file!r}")
        first, end = self._firsts[index], min(end, self._files[index][1])
        if end <= start:
            return range(first, first)
        return range(first + start // self.piece_bytes, first + -(-end // self.piece_bytes))


def number_pieces(files: Iterable[FileLayout]) -> PieceNumbering:
    """Return the numbers of the pieces of a version's safetensors files."""
    return PieceNumbering((file.path, file.size) for file in files)


class Bitmap:
    """Set of pieces, one bit each; piece `p` is bit `p % 8` of byte `p // 8`.

    Args:
        count: Number of pieces of the version.
        bits: Packed bits, which the bitmap takes over; none are set by default.
    """

    def __init__(self, count: int, bits: Bits | None = None) -> None:
        self.count = count
        self.bits: Bits = np.zeros(bytes_of(count), np.uint8) if bits is None else bits

    @classmethod
    def full(cls, count: int) -> "Bitmap":
        return cls(count, np.packbits(np.ones(count, np.uint8), bitorder="little"))

    @classmethod
    def of(cls, count: int, pieces: Iterable[int]) -> "Bitmap":
        """Return the bitmap of some pieces."""
        made = cls(count)
        made.add(*pieces)
        return made

    @classmethod
    def from_bytes(cls, count: int, data: bytes) -> "Bitmap":
        """Return the bitmap that `to_bytes` wrote. Raises ValueError for another length, and for bits beyond the last piece."""
        if len(data) != bytes_of(count) or (count % 8 and data[-1] >> count % 8):
            raise ValueError(f"expected {bytes_of(count)} bytes with bits for {count} pieces, got {len(data)} bytes or more bits")
        return cls(count, np.frombuffer(data, np.uint8).copy())

    def to_bytes(self) -> bytes:
        """Return the packed bits."""
        return self.bits.tobytes()

    def add(self, *pieces: int) -> None:
        """Add pieces. Raises ValueError for a number that the version does not have."""
        for piece in pieces:
            if not 0 <= piece < self.count:
                raise ValueError(f"expected a piece of 0 to {self.count - 1}, got {piece}")
            self.bits[piece >> 3] |= 1 << (piece & 7)

    def __contains__(self, piece: int) -> bool:
        return bool(self.bits[piece >> 3] >> (piece & 7) & 1)

    def __len__(self) -> int:
        return int.from_bytes(self.bits.tobytes(), "little").bit_count()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Bitmap) and self.count == other.count and bool((self.bits == other.bits).all())

    __hash__ = None  # type: ignore[assignment]

    def __iter__(self) -> Iterator[int]:
        return iter(np.flatnonzero(self.flags()).tolist())

    def flags(self) -> npt.NDArray[np.bool_]:
        return unpack(self.bits, self.count)

    def whole(self) -> bool:
        """Return whether all pieces are in the set."""
        return len(self) == self.count

    def missing(self) -> "Bitmap":
        """Return the bitmap of all other pieces."""
        return Bitmap(self.count, ~self.bits & Bitmap.full(self.count).bits)

    def __and__(self, other: "Bitmap") -> "Bitmap":
        return Bitmap(self.count, self.bits & other.bits)

    def __or__(self, other: "Bitmap") -> "Bitmap":
        return Bitmap(self.count, self.bits | other.bits)

    def __sub__(self, other: "Bitmap") -> "Bitmap":
        return Bitmap(self.count, self.bits & ~other.bits)


def bytes_of(count: int) -> int:
    """Return the bytes of a bitmap of `count` pieces."""
    return -(-count // 8)


def unpack(bits: Bits, count: int) -> npt.NDArray[np.bool_]:
    """Return the flags of packed bits, along the last axis."""
    return np.unpackbits(bits, axis=-1, count=count, bitorder="little").view(np.bool_)
