"""READY versions of which a store lacks pieces, and what the nodes that hold them deliver."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import xxhash
from resharder.converters.geometry.layout import full_box
from resharder.converters.storage.digest import digest
from resharder.converters.storage.files import FileLayout, MappedFiles
from resharder.converters.wire.pieces import Bitmap, PieceNumbering, number_pieces
from resharder.server.state.version import VersionRecord
from resharder.server.store.partial import MissingPieces, VerifiedVersion
from resharder.server.store.store import Store

from tests.support.store_versions import LAYOUTS, SPECS

SMALL_PIECES = 1 << 10
"""Length of pieces in tests that replace `PIECE_BYTES`."""


def contents(folder: Path, layouts: Sequence[FileLayout]) -> dict[str, bytes]:
    """The content of a version's files."""
    return {layout.path: (folder / layout.path).read_bytes() for layout in layouts}


def missing_of(
    files: dict[str, bytes], layouts: Sequence[FileLayout], lacks: Iterable[int], nodes: Iterable[str]
) -> MissingPieces:
    """The pieces of a version with this content, of which the store lacks some."""
    numbering = number_pieces(layouts)
    parts = [part for piece in range(numbering.count) for part in numbering.parts(piece)]
    checksums = tuple(xxhash.xxh3_64_intdigest(files[part.file][part.start : part.end]) for part in parts)
    held = Bitmap.full(numbering.count) - Bitmap.of(numbering.count, lacks)
    return MissingPieces(held, checksums, frozenset(nodes))


def overwrite_pieces(
    folder: Path, numbering: PieceNumbering, pieces: Iterable[int], layouts: Sequence[FileLayout], value: int = 0xEE
) -> None:
    """Overwrite pieces of a version's files, apart from headers."""
    headers = {layout.path: len(layout.header) for layout in layouts}
    for piece in pieces:
        span = numbering.span(piece)
        start = max(span.start, headers[span.file])
        with (folder / span.file).open("r+b") as file:
            file.seek(start)
            file.write(bytes([value]) * max(0, span.end - start))


def publish_partial(
    store: Store,
    epoch: int,
    step: int,
    lacks: Iterable[int],
    nodes: Iterable[str] = ("one",),
    model: str = "policy",
    before_ready: Callable[[Sequence[VerifiedVersion], dict[str, bytes]], object] = lambda versions, content: None,
) -> tuple[VersionRecord, dict[str, bytes]]:
    """Commit a version whose bytes are of value `step + 1`, of which the store lacks pieces; return it with its content.

    `before_ready` is called with the version and its content.
    """
    record, lacks = store.lifecycle.begin(model, epoch, step, "job"), list(lacks)
    folder = store.folder.path(record)
    with MappedFiles(folder, LAYOUTS, writable=True) as files:
        digests = {}
        for spec in SPECS:
            files.arrays[spec.name][...] = step + 1
            digests[spec.name] = digest(files.arrays[spec.name], full_box(spec.shape), spec.shape)
    content = contents(folder, LAYOUTS)
    missing = missing_of(content, LAYOUTS, lacks, nodes)
    overwrite_pieces(folder, number_pieces(LAYOUTS), lacks, LAYOUTS)

    def fetch(versions: Sequence[VerifiedVersion]) -> None:
        before_ready(versions, content)

    return store.lifecycle.commit(record, digests, ((0, "00"),), missing=missing, before_ready=fetch), content


def deliver_pieces(partial: VerifiedVersion, content: dict[str, bytes], pieces: Iterable[int]) -> None:
    """Write pieces as they arrive from nodes."""
    for piece in pieces:
        for part in partial.numbering.parts(piece):
            partial.write(part, np.frombuffer(content[part.file][part.start : part.end], np.uint8))
        partial.add(piece)
