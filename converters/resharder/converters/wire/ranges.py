"""HTTP ranges of a version's files: the paths of the data port, and its pieces.

A piece is an aligned part of a file, the last one of a file may be shorter. The response to a request for exactly one piece has
the header `CHECKSUM`, the xxh3_64 of its bytes as 16 hexadecimal digits. The `ETag` of every file is its version's fingerprint.

A request for one piece may name another version that the reader has, its base, by the header `BASE`. A port that has the base too
may answer 226 with the piece as a delta of the same piece there (converters/storage/delta.py), if that is smaller. It answers a
request of which it has tried that with the header, and any other one as if there were none.
"""

import re
from typing import NamedTuple

PIECE_BYTES = 16 << 20
MOST_BYTES = 4 * PIECE_BYTES
"""Upper bound on the bytes of one response."""
ENGINE_PATH = "/engine"
"""Path of a node's data port with what its transfer engine tells those of other nodes."""
CHECKSUM = "Resharder-Checksum"
BASE = "Resharder-Base"
HELD_FILE = "held"
"""Name of the file that a node keeps beside a version's files: the packed bitmap of the pieces that it holds."""
_PATH = re.compile(r"/(models/(?P<model>[A-Za-z0-9._-]{1,64})/versions/(?P<number>[0-9]{1,18}))/(?P<file>[A-Za-z0-9._-]{1,255})")
_BASE = re.compile(r"(?P<number>[0-9]{1,18}) (?P<fingerprint>[!-~]{1,128})")
_RANGE = re.compile(r"bytes=(?P<first>[0-9]{1,18})-(?P<last>[0-9]{1,18})")


class FilePart(NamedTuple):
    """Bytes `start` to `end`, exclusive, of a file of a version."""

    model: str
    number: int
    file: str
    start: int
    end: int


def path_of(version: str, file: str) -> str:
    """Return the path of a file of `models/{model}/versions/{number}`."""
    return f"/{version}/{file}"


def parse_part(path: str, range_header: str) -> FilePart:
    """Return the part that a request names. Raises ValueError for another path or more than `MOST_BYTES`."""
    named, asked = _PATH.fullmatch(path), _RANGE.fullmatch(range_header)
    if named is None:
        raise ValueError(f"expected a path /models/MODEL/versions/NUMBER/FILE, got {path[:200]!r}")
    first, last = (int(asked["first"]), int(asked["last"])) if asked else (0, -1)
    if not 0 < last + 1 - first <= MOST_BYTES:
        raise ValueError(f"expected a header Range: bytes=FIRST-LAST of 1 to {MOST_BYTES} bytes, got {range_header[:100]!r}")
    return FilePart(named["model"], int(named["number"]), named["file"], first, last + 1)


def base_header(number: int, fingerprint: str) -> str:
    """Return the header `BASE` that names a version of the same model."""
    return f"{number} {fingerprint}"


def parse_base(text: str) -> tuple[int, str] | None:
    """Return the number and the fingerprint in a header `BASE`; None for another text."""
    found = _BASE.fullmatch(text)
    return (int(found["number"]), found["fingerprint"]) if found is not None else None


def is_piece(start: int, end: int, size: int) -> bool:
    """Return whether these bytes of a file of `size` bytes are exactly one piece."""
    return start % PIECE_BYTES == 0 and end == min(start + PIECE_BYTES, size)
