"""Records of an archive: `archived.json` of a version, the pieces of its files, and `latest.json` of a model.

Format 1 (0.1.0) has the files beside its archived.json, and no pieces.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from blake3 import blake3
from resharder.converters.json_input import is_count, is_file_name, is_number, is_text, parse_json
from resharder.converters.storage.delta import PIECE, StoredPiece

MARKER = "archived.json"
PIECES_FILE = "pieces.json"
LATEST = "latest.json"
DELTA = ".delta"
FORMAT, _FIRST_FORMAT = 2, 1

Pieces = Mapping[str, tuple[StoredPiece, ...]]


class File(NamedTuple):
    """Size in bytes and hash of a file or object."""

    size: int
    xxh3: str  # xxh3_128, hexadecimal


class BaseVersion(NamedTuple):
    """Version that a delta is a delta of. Another version of the same number is not it."""

    number: int
    fingerprint: str


@dataclass(frozen=True)
class Archived:
    """Version in the archive. `size_bytes` counts its safetensors files; `archive_time` is in seconds since 1970."""

    model: str
    number: int
    url: str
    size_bytes: int
    fingerprint: str
    archive_time: float
    epoch: int
    files: dict[str, File]
    folder: str = ""
    """Folder of the objects within the version's; none in format 1."""
    objects: dict[str, File] = field(default_factory=dict)
    """Objects by name: the files, their deltas, or both, and the pieces of each."""
    base: BaseVersion | None = None
    """Base of the deltas; None if it is stored in full alone."""
    full: bool = True
    """Whether it is stored in full, perhaps beside its deltas."""
    depth: int = 0
    """Number of deltas from a full version to this one; 0 if it is stored in full."""
    skipped: bool = False
    """Whether LATEST skips it."""
    lineage: str = ""
    """Random name of all versions of the model in this archive; empty in format 1."""

    @property
    def name(self) -> str:
        """Resource name, `models/{model}/versions/{number}`."""
        return f"models/{self.model}/versions/{self.number}"

    @property
    def place(self) -> str:
        """Folder of the objects, relative to the archive."""
        return f"{place_of(self.model, self.number)}/{self.folder}".rstrip("/")

    def object_of(self, file: str, *, delta: bool) -> str:
        """Return the path of the object that has a file's bytes, or with `delta` its delta, relative to the archive."""
        return f"{self.place}/{file}{DELTA if delta else ''}"

    def stored_bytes(self, *, delta: bool) -> int:
        """Return the bytes of all files, or with `delta` of their deltas, with the pieces."""
        found = (f"{name}{DELTA if delta else ''}" for name in (*self.files, PIECES_FILE))
        return sum(self.objects[name].size for name in found if name in self.objects)


def place_of(model: str, number: int) -> str:
    """Return the folder of a version, relative to the archive."""
    return f"{model}/{number:08}"


def encode(archived: Archived) -> bytes:
    """Return the content of archived.json, in format 2."""
    base = archived.base
    content: dict[str, Any] = {
        "format": FORMAT,
        "model": archived.model,
        "version": archived.number,
        "epoch": archived.epoch,
        "fingerprint": archived.fingerprint,
        "archive_time": archived.archive_time,
        "files": _encoded(archived.files),
        "folder": archived.folder,
        "objects": _encoded(archived.objects),
        "base": None if base is None else {"version": base.number, "fingerprint": base.fingerprint},
        "full": archived.full,
        "depth": archived.depth,
        "skipped": archived.skipped,
        "lineage": archived.lineage,
    }
    return json.dumps(content | {"blake3": hash_of(content)}, indent=1).encode()


def decode(content: bytes, url: str) -> Archived:
    """Decode archived.json of a folder at `url`. Raises ValueError, KeyError, TypeError or AttributeError for other content."""
    fields = parse_json(content)
    if fields.pop("blake3") != hash_of(fields) or fields["format"] not in (FORMAT, _FIRST_FORMAT):
        raise ValueError(f"expected format {FORMAT} and the hash of the rest, found format {fields.get('format')!r}")
    files, objects, folder, base, full, depth, skipped, lineage = _files(fields["files"]), None, "", None, True, 0, False, ""
    if fields["format"] == FORMAT:
        objects, folder, full, depth = _files(fields["objects"]), fields["folder"], fields["full"], fields["depth"]
        if not isinstance(skipped := fields["skipped"], bool) or not is_text(lineage := fields["lineage"]):
            raise ValueError(f"expected whether it is skipped, and a lineage, found {skipped!r} and {fields['lineage']!r}")
        if fields["base"] is not None:
            base = BaseVersion(fields["base"]["version"], fields["base"]["fingerprint"])
        if not (isinstance(folder, str) and is_file_name(folder)) or not is_count(depth) or full is not (depth == 0):
            raise ValueError("expected a plain folder, and a depth unless it is stored in full")
        if base is None and not full:
            raise ValueError("expected a base, or a version in full")
        if base is not None and not (is_count(base.number) and is_text(base.fingerprint) and base.number != fields["version"]):
            raise ValueError("expected a base of another number")
        suffixes = ([""] if full else []) + ([DELTA] if base is not None else [])
        if {f"{name}{suffix}" for name in (*files, PIECES_FILE) for suffix in suffixes} != objects.keys():
            raise ValueError("expected an object for each file, and the pieces")
    size = sum(file.size for name, file in files.items() if name.endswith(".safetensors"))
    archived = Archived(
        fields["model"],
        fields["version"],
        f"{url}/{folder}".rstrip("/"),
        size,
        fields["fingerprint"],
        fields["archive_time"],
        fields["epoch"],
        files,
        folder,
        files if objects is None else objects,
        base,
        full,
        depth,
        skipped,
        lineage,
    )
    numbers = is_count(archived.number) and is_count(archived.epoch) and is_number(archived.archive_time)
    if not (numbers and is_text(archived.model) and is_text(archived.fingerprint)):
        raise ValueError("expected a name, numbers and a fingerprint")
    return archived


class Latest(NamedTuple):
    """Newest archived version of a model that LATEST does not skip.

    `lineage`: of `Archived`. `archive_time`: in seconds since 1970.
    """

    model: str
    number: int
    fingerprint: str
    lineage: str
    archive_time: float


def encode_latest(latest: Latest) -> bytes:
    """Return the content of latest.json."""
    content = {"format": 1, **latest._asdict()}
    return json.dumps(content | {"blake3": hash_of(content)}, indent=1).encode()


def decode_latest(content: bytes) -> Latest:
    """Decode latest.json. Raises ValueError, KeyError, TypeError or AttributeError for other content."""
    fields = parse_json(content)
    if fields.pop("blake3") != hash_of(fields) or fields.pop("format") != 1:
        raise ValueError("expected format 1 and the hash of the rest")
    latest = Latest(**fields)
    texts = (latest.model, latest.fingerprint, latest.lineage)
    if not (is_count(latest.number) and is_number(latest.archive_time) and all(map(is_text, texts))):
        raise ValueError("expected a name, a number, a fingerprint, a lineage and a time")
    return latest


def encode_pieces(pieces: Pieces) -> bytes:
    """Return the content of pieces.json."""
    return json.dumps({name: [list(piece) for piece in pieces[name]] for name in sorted(pieces)}).encode()


def decode_pieces(content: bytes, files: Mapping[str, File]) -> Pieces:
    """Decode pieces.json. Raises ValueError, KeyError, TypeError or AttributeError unless it has the pieces of these files."""
    found = {name: tuple(StoredPiece(*piece) for piece in pieces) for name, pieces in parse_json(content).items()}
    if {name: len(pieces) for name, pieces in found.items()} != {name: -(-file.size // PIECE) for name, file in files.items()}:
        raise ValueError("expected the pieces of each file")
    for piece in (piece for pieces in found.values() for piece in pieces):
        if not (piece.how in ("xor", "whole") and is_count(piece.size) and is_text(piece.checksum)):
            raise ValueError(f"expected a piece, found {piece}")
    return found


def hash_of(content: Mapping[str, Any]) -> str:
    """Return the hash of all other fields of archived.json."""
    return str(blake3(json.dumps(content, sort_keys=True).encode()).hexdigest())


def _encoded(files: Mapping[str, File]) -> dict[str, Any]:
    return {name: {"size": file.size, "xxh3_128": file.xxh3} for name, file in sorted(files.items())}


def _files(content: Mapping[str, Any]) -> dict[str, File]:
    files = {name: File(file["size"], file["xxh3_128"]) for name, file in content.items()}
    if not all(is_count(file.size) and is_text(file.xxh3) for file in files.values()):
        raise ValueError("expected the sizes and hashes of files")
    if strange := [name for name in files if name != Path(name).name or name.startswith(".")]:
        raise ValueError(f"expected plain file names, found {strange[:4]}")
    return files
