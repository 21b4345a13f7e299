"""A version that a connection of the data port reads: pinned, with its open and mapped files."""

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager

from resharder.converters.storage.files import Array, MappedFiles
from resharder.converters.wire.chunk_body import MOST_BODY_BYTES, Chunk
from resharder.server.data.versions import ServedVersion, ServedVersions
from resharder.server.infra.medium import medium_errors
from resharder.server.state.errors import InvalidArgument, ResourceNotFound, Unavailable
from resharder.server.store.box_reads import CheckedBoxes, check_boxes, packed_chunks
from resharder.server.store.manifest import Manifest
from resharder.v1 import server_pb2


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
            self._open[name] = os.open(self.served.folder / name, os.O_RDONLY | os.O_CLOEXEC)
            self._stack.callback(os.close, self._open[name])
        return self._open[name], self.served.sizes[name]

    def boxes(self, request: server_pb2.BoxesRequest, manifest: Manifest) -> CheckedBoxes:
        """Check a request for boxes, which may have `MOST_BODY_BYTES`.

        Raises InvalidArgument as `check_boxes` does, Unavailable (PIECES_ELSEWHERE) for tensors of which the store lacks bytes.
        """
        if request.version not in ("", self.served.name):
            raise InvalidArgument("BOX", f"expected boxes of {self.served.name}, got some of {request.version[:200]!r}")
        boxes = check_boxes(request, manifest)
        if not 0 < boxes.size <= MOST_BODY_BYTES:  # before they are cut: the chunks of a large version fill memory
            raise InvalidArgument("TOO_MANY_BOXES", f"expected boxes of 1 to {MOST_BODY_BYTES} bytes, got {boxes.size}")
        if self.served.partial is not None:
            self.served.partial.check_tensors({each.spec.name for each in boxes.boxes})
        return boxes

    @contextmanager
    def packed(self, boxes: CheckedBoxes) -> Iterator[Iterator[Chunk]]:
        """Yield the chunks of boxes, whose data must not outlive the context. Raises Unavailable (STORE_FAILED)."""
        with closing(packed_chunks(self._arrays(boxes.manifest), boxes)) as chunks:
            yield chunks

    @medium_errors()
    def _arrays(self, manifest: Manifest) -> Mapping[str, Array]:
        """Return the tensors, mapped until the version is unpinned: a page that one request has mapped serves later ones."""
        if self._mapped is None:
            try:
                self._mapped = self._stack.enter_context(MappedFiles(self.served.folder, manifest.files))
            except ValueError as error:
                raise Unavailable("STORE_FAILED", str(error)) from error
        return self._mapped.arrays

    def close(self) -> None:
        """Unmap and close the files, and unpin the version."""
        self._stack.close()
