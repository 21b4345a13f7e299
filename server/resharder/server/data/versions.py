"""Versions that a data port serves, READY ones of the store or the held pieces of a node, and one that a connection reads."""

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from resharder.converters.storage.files import Array, MappedFiles
from resharder.converters.wire.chunk_body import MOST_BODY_BYTES, Chunk
from resharder.converters.wire.pieces import PieceSpan
from resharder.server.infra.medium import medium_errors
from resharder.server.state.errors import InvalidArgument, ResourceNotFound, Unavailable
from resharder.server.store.box_reads import CheckedBoxes, Reading, check_boxes, packed_chunks, spans_of
from resharder.server.store.manifest import Manifest
from resharder.server.store.reader import VersionReader
from resharder.v1 import server_pb2


def _all_there(spans: Collection[PieceSpan]) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass(frozen=True)
class ServedVersion:
    """A version in `folder`, and the sizes in bytes of its safetensors files."""

    name: str
    fingerprint: str
    sizes: Mapping[str, int]
    folder: Path
    reading: Reading = _all_there
    manifest: Manifest | None = None
    """Its manifest, for reads of boxes; None for a node, which sends pieces only."""
    checksum_of: Callable[[PieceSpan], int] | None = None
    """Returns the known checksum of a part of a piece; None where it is computed from the file."""


class ServedVersions(Protocol):
    """Source of the versions that a data port serves."""

    def pinned(self, model: str, number: int, *, replicates: bool) -> AbstractContextManager[ServedVersion]:
        """Retain a version meanwhile. Raises a DaemonError, ResourceNotFound for an unknown one.

        `replicates`: whether the reader may read one that nodes replicate before READY.
        """


class StoredVersions:
    """READY versions of the store. Reads of pieces that it lacks raise Unavailable (PIECES_ELSEWHERE)."""

    def __init__(self, reader: VersionReader) -> None:
        self._reader = reader

    @contextmanager
    def pinned(self, model: str, number: int, *, replicates: bool) -> Iterator[ServedVersion]:
        """Pin a READY version meanwhile. Of one that nodes replicate before READY, pieces alone can be read, and by nodes alone.

        Raises as `VersionReader.manifest` does.
        """
        if replicates and (verified := self._reader.waiting(model, number)) is not None:
            yield self._served(verified.manifest, verified.folder, boxes=False)
            return
        with self._reader.folder(model, number) as (manifest, folder):
            yield self._served(manifest, folder)

    def _served(self, manifest: Manifest, folder: Path, *, boxes: bool = True) -> ServedVersion:
        sizes, record = {file.path: file.size for file in manifest.files}, manifest.record
        served = ServedVersion(record.name, record.fingerprint, sizes, folder, manifest=manifest if boxes else None)
        if (partial := self._reader.partial(record.model, record.number)) is None:
            return served

        def reading(spans: Collection[PieceSpan]) -> AbstractContextManager[None]:
            return self._reader.reading(record.model, record.number, spans, patience=0.0)

        return replace(served, reading=reading, checksum_of=partial.checksum)


class PinnedVersion:
    """A version, pinned, and its files that were opened or mapped. Raises as `ServedVersions.pinned` does."""

    def __init__(self, versions: ServedVersions, model: str, number: int, replicates: bool) -> None:
        self.key = (model, number, replicates)
        self._stack = ExitStack()
        self.served: ServedVersion = self._stack.enter_context(versions.pinned(model, number, replicates=replicates))
        self._open: dict[str, int] = {}
        self._mapped: MappedFiles | None = None

    @medium_errors()
    def open(self, name: str) -> tuple[int, int]:
        """Return a descriptor and the size of a safetensors file. Raises ResourceNotFound (VERSION_UNKNOWN), Unavailable."""
        if name not in self.served.sizes:
            raise ResourceNotFound("VERSION_UNKNOWN", f"{self.served.name} has no safetensors file {name!r}")
        if name not in self._open:
            with self.served.reading(()):
                self._open[name] = os.open(self.served.folder / name, os.O_RDONLY | os.O_CLOEXEC)
            self._stack.callback(os.close, self._open[name])
        return self._open[name], self.served.sizes[name]

    def boxes(self, request: server_pb2.BoxesRequest, manifest: Manifest) -> CheckedBoxes:
        """Check a request for boxes, which may have `MOST_BODY_BYTES`.

        Raises InvalidArgument as `check_boxes` does.
        """
        if request.version not in ("", self.served.name):
            raise InvalidArgument("BOX", f"expected boxes of {self.served.name}, got some of {request.version[:200]!r}")
        boxes = check_boxes(request, manifest)
        if not 0 < boxes.size <= MOST_BODY_BYTES:  # before they are cut: the chunks of a large version fill memory
            raise InvalidArgument("TOO_MANY_BOXES", f"expected boxes of 1 to {MOST_BODY_BYTES} bytes, got {boxes.size}")
        return boxes

    @contextmanager
    def packed(self, boxes: CheckedBoxes) -> Iterator[Iterator[Chunk]]:
        """Yield the chunks of boxes, whose data must not outlive the context.

        Raises Unavailable: STORE_FAILED, PIECES_ELSEWHERE for bytes that the store lacks.
        """
        lacks = self.served.checksum_of is not None
        spans = spans_of(boxes.manifest, boxes.boxes) if lacks else ()  # once, before the response begins
        with self.served.reading(spans), closing(packed_chunks(self._arrays(boxes.manifest), boxes)) as chunks:
            yield chunks

    @medium_errors()
    def _arrays(self, manifest: Manifest) -> Mapping[str, Array]:
        """Return the tensors, mapped until the version is unpinned: a page that one request has mapped serves later ones."""
        if self._mapped is None:
            try:
                with self.served.reading(()):
                    self._mapped = self._stack.enter_context(MappedFiles(self.served.folder, manifest.files))
            except ValueError as error:
                raise Unavailable("STORE_FAILED", str(error)) from error
        return self._mapped.arrays

    def close(self) -> None:
        """Unmap and close the files, and unpin the version."""
        self._stack.close()
