"""Verified versions and the pieces of them that the store holds: those that wait for READY, and READY ones that lack pieces.

    versions/<number>/    held           packed bitmap of the pieces that the store holds, as nodes write it
                          pieces.json    checksums of all pieces, and the nodes that held the missing ones at the commit
                          resharder.json in format 3

Nodes hold the pieces that the store lacks. Files have their full size and headers, and any bytes in missing pieces: those of an
earlier version, if the files were recycled.
A piece is checked, written, synced, and then added to `held`. Once all are held, the manifest is replaced by one of format 2,
which makes the version whole; only then are the other two files removed.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3
from resharder.converters.json_input import is_text, parse_json
from resharder.converters.storage.files import FileLayout
from resharder.converters.wire.pieces import Bitmap, PieceSpan, number_pieces
from resharder.converters.wire.ranges import HELD_FILE
from resharder.server.holding.held_files import HeldFiles
from resharder.server.infra.filesystem import sync, touching, write_file
from resharder.server.state.errors import DaemonError, InvalidArgument, ResourceNotFound, Unavailable
from resharder.server.state.version import VersionRecord
from resharder.server.store import manifest
from resharder.server.store.manifest import MANIFEST_FILE, BadManifest, Manifest

PIECES_FILE = "pieces.json"
_FORMAT = 1


@dataclass(frozen=True)
class MissingPieces:
    """Pieces of a version that the store lacks.

    Attributes:
        held: Pieces that its files have.
        checksums: xxh3_64 of each part of the pieces (`PieceNumbering.parts`), in order.
        nodes: Ids of the nodes that hold the others.
    """

    held: Bitmap
    checksums: tuple[int, ...]
    nodes: frozenset[str]

    def check(self, files: Sequence[FileLayout]) -> None:
        """Raise ValueError unless these are the pieces of a version with these files."""
        numbering = number_pieces(files)
        parts = sum(1 for piece in range(numbering.count) for _ in numbering.parts(piece))
        if (self.held.count, len(self.checksums)) != (numbering.count, parts):
            raise ValueError(
                f"expected {numbering.count} pieces with {parts} checksums, got {self.held.count} with {len(self.checksums)}"
            )

    def write(self, folder: Path) -> None:
        """Write the files of a version that is about to be committed, durably. Raises MediumRefused."""
        write_file(folder / PIECES_FILE, self.encode())
        write_file(folder / HELD_FILE, self.held.to_bytes())

    def encode(self) -> bytes:
        """Return the content of `pieces.json`."""
        content = {"format": _FORMAT, "nodes": sorted(self.nodes), "checksums": [f"{value:016x}" for value in self.checksums]}
        return json.dumps(content | {"blake3": _hash(content)}).encode()


def read_missing(folder: Path, files: Sequence[FileLayout]) -> MissingPieces:
    """Read the pieces of a version whose manifest is of format 3. A damaged `held` is that of a version that lacks all of them.

    Raises BadManifest for other content of `pieces.json`, or OSError.
    """
    count = number_pieces(files).count
    try:
        content: dict[str, Any] = parse_json((folder / PIECES_FILE).read_bytes())
        if content.pop("blake3") != _hash(content) or content["format"] != _FORMAT:
            raise ValueError(f"expected format {_FORMAT} and the hash of the rest, found format {content.get('format')!r}")
        if not all(is_text(node) for node in content["nodes"]):
            raise ValueError("expected the ids of nodes")
        found = MissingPieces(Bitmap(count), tuple(int(value, 16) for value in content["checksums"]), frozenset(content["nodes"]))
        found.check(files)
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadManifest(f"{folder.name}, {PIECES_FILE}: {error!r}") from error
    try:
        held = Bitmap.from_bytes(count, (folder / HELD_FILE).read_bytes())
    except (FileNotFoundError, ValueError):
        held = Bitmap(count)
    return MissingPieces(held, found.checksums, found.nodes)


def with_nodes(content: bytes, nodes: Collection[str]) -> bytes:
    """Return the content of a `pieces.json` with other nodes. Raises InvalidArgument (NODE) for other content."""
    try:
        found: dict[str, Any] = parse_json(content)
        if found.pop("blake3") != _hash(found):
            raise ValueError("expected the hash of the rest")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidArgument("NODE", f"{PIECES_FILE}: {error!r}") from error
    found["nodes"] = sorted(nodes)
    return json.dumps(found | {"blake3": _hash(found)}).encode()


def remove_leftovers(folder: Path, kept: Collection[str] = ()) -> None:
    """Remove the files about pieces of a version that is whole, but for files of its own. Raises MediumRefused."""
    for name in (HELD_FILE, PIECES_FILE):
        if name not in kept:
            with touching(folder / name, "removing"):
                (folder / name).unlink(missing_ok=True)


class VerifiedVersion(HeldFiles):
    """A version whose bytes are verified, in the store and on nodes together. From READY on, its held pieces are durable.

    Attributes:
        manifest: Its manifest, as of the READY version.
        is_partial: Whether the store lacked pieces at first, so that the manifest is of format 3 until `complete`.
        nodes: Ids of the nodes that held the pieces which the store lacked at first.

    Args:
        folder: Its folder.
        found: Its manifest.
        missing: Its pieces; None for a version of which the store has all.
        durable: Whether it is READY.
    """

    def __init__(self, folder: Path, found: Manifest, missing: MissingPieces | None = None, *, durable: bool = True) -> None:
        numbering, sizes = number_pieces(found.files), {file.path: file.size for file in found.files}
        parts = [part for piece in range(numbering.count) for part in numbering.parts(piece)] if missing is not None else []
        sums = {(part.file, part.start): value for part, value in zip(parts, missing.checksums if missing else (), strict=True)}
        held = missing.held if missing is not None else Bitmap.full(numbering.count)
        given = found.record.name, found.record.fingerprint, folder, sizes, numbering
        super().__init__(*given, held=held, checksums=sums, synced=durable, point="gather.write")
        self.manifest, self.nodes = found, missing.nodes if missing is not None else frozenset()
        self.is_partial, self._ended = missing is not None, False

    @property
    def record(self) -> VersionRecord:
        """Its record, as of the READY version."""
        return self.manifest.record

    # Pieces that arrive

    def _record(self, held: Bitmap) -> None:
        if self._synced:
            write_file(self.folder / HELD_FILE, held.to_bytes())

    def open_file(self, name: str) -> int:
        """Open a file for writing, which `moving` does not rename meanwhile."""
        with self._changed:
            return super().open_file(name)

    def make_durable(self) -> None:
        """Make the pieces durable that are held, and from now on each further one. Raises MediumRefused."""
        with self._changed:
            self._synced = True
            for name in self.sizes:
                sync(self.folder / name)
            self._record(self._held)

    @contextmanager
    def moving(self, folder: Path) -> Iterator[None]:
        """Exclude writes while the folder is renamed to `folder`."""
        with self._changed:
            yield
            self.folder = folder

    def is_whole(self) -> bool:
        """Return whether all pieces are held."""
        return self.held().whole()

    def complete(self) -> None:
        """Make the version whole, durably, after `is_whole`.

        Raises OSError; it may be whole at the next start then. Raises BadManifest if the files do not have their headers.
        """
        for name in self.sizes:
            sync(self.folder / name)
        with touching(self.folder, "reading"):
            content = manifest.load(self.folder)
            manifest.parse(self.folder, content)
        write_file(self.folder / MANIFEST_FILE, manifest.encode_whole(content))

    def await_more(self, held: Bitmap, seconds: float) -> Bitmap:
        """Wait until other pieces than `held`, the last result, are held, or for some seconds. Returns the held pieces."""
        with self._changed:
            self._changed.wait_for(lambda: self._held is not held or self._ended, seconds)
            return self._held

    def end(self) -> None:
        """Refuse waiting readers and later ones, because the version is no longer READY."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    # Reads

    def await_bytes(self, spans: Collection[PieceSpan] | None, seconds: float) -> None:
        """Wait until bytes of files are there, or with None all bytes.

        Raises Unavailable (PIECES_ELSEWHERE) once the seconds have passed, ResourceNotFound (VERSION_GONE).
        """

        def is_there() -> bool:
            if spans is None:
                return self._held.whole()
            return all(piece in self._held for span in spans for piece in self.numbering.touched(*span))

        with self._changed:
            self._changed.wait_for(lambda: self._ended or is_there(), seconds)
            if self._ended or not is_there():
                raise self._elsewhere()

    def _elsewhere(self) -> DaemonError:
        if self._ended:
            return ResourceNotFound("VERSION_GONE", f"{self.name} is no longer READY")
        held, count = len(self._held), self._held.count
        nodes = ", ".join(sorted(self.nodes)[:8]) or "none"
        return Unavailable(
            "PIECES_ELSEWHERE",
            f"{self.name}: the daemon holds {held} of {count} pieces and fetches the others; nodes that held them: {nodes}; "
            "try again",
        )


def _hash(content: Mapping[str, Any]) -> str:
    return str(blake3(json.dumps(content, sort_keys=True).encode()).hexdigest())
