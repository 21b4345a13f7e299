"""Boxes of a READY version: checked, digested, sent as chunks."""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import xxhash
from resharder.converters.errors import LayoutError
from resharder.converters.geometry.chunking import Part, cut_chunks
from resharder.converters.geometry.layout import ITEM_SIZES, Box, TensorSpec, box_index, box_size, format_box, full_box, is_inside
from resharder.converters.storage.files import Array
from resharder.converters.wire.boxes import box_from_proto
from resharder.converters.wire.chunk_frame import ChunkHeader, frame
from resharder.server.state.errors import InvalidArgument
from resharder.server.store.digests import TensorBox, digest_boxes
from resharder.server.store.manifest import Manifest
from resharder.server.store.reader import VersionReader
from resharder.v1 import resources_pb2, server_pb2

CHUNK_BYTES = 1 << 20
_MIN_CHUNK_BYTES, _MAX_CHUNK_BYTES = 64 << 10, 4 << 20
_CACHED_DIGESTS = 1 << 21  # 8 bytes each
_CACHED_REQUESTS = 256


@dataclass(frozen=True)
class CheckedBoxes:
    """Request for boxes that was checked against its version's manifest."""

    manifest: Manifest
    boxes: tuple[TensorBox, ...]
    chunk_bytes: int


def check_boxes(request: server_pb2.BoxesRequest, manifest: Manifest) -> CheckedBoxes:
    """Check a request for boxes. Raises InvalidArgument (CHUNK_BYTES, UNKNOWN_TENSOR, BOX, TOO_MANY_BOXES)."""
    version = manifest.record.name
    chunk_bytes = request.chunk_bytes or CHUNK_BYTES
    if not _MIN_CHUNK_BYTES <= chunk_bytes <= _MAX_CHUNK_BYTES:
        raise InvalidArgument(
            "CHUNK_BYTES", f"expected {_MIN_CHUNK_BYTES} to {_MAX_CHUNK_BYTES} bytes a chunk, got {chunk_bytes}"
        )
    specs = _named(request.tensors, manifest)
    boxes, total = [], 0
    for i, message in enumerate(request.boxes):
        if message.tensor >= len(specs):
            raise InvalidArgument("BOX", f"box {i} is of tensor {message.tensor}, the request names {len(specs)}")
        spec = specs[message.tensor]
        box = _inside(spec, message, i)
        boxes.append(TensorBox(spec, box))
        total += box_size(box) * ITEM_SIZES[spec.dtype]
        if total > 2 * manifest.record.size_bytes:  # before more of them are read
            raise InvalidArgument(
                "TOO_MANY_BOXES", f"{len(boxes)} of the boxes have {total} bytes, {version} has {manifest.record.size_bytes}"
            )
    return CheckedBoxes(manifest, tuple(boxes), chunk_bytes)


def _named(names: Sequence[str], manifest: Manifest) -> list[TensorSpec]:
    known = {placed.spec.name: placed.spec for file in manifest.files for placed in file.tensors}
    missing = [name for name in names if name not in known]
    if missing:
        shown = ", ".join(name[:200] for name in missing[:4])
        raise InvalidArgument("UNKNOWN_TENSOR", f"{manifest.record.name} has {len(known)} tensors, and none called {shown}")
    return [known[name] for name in names]


def _inside(spec: TensorSpec, message: resources_pb2.TensorBox, i: int) -> Box:
    try:
        box = box_from_proto(message.box)
    except LayoutError as error:
        raise InvalidArgument("BOX", f"box {i} of {spec.name}: {error}") from None
    if not is_inside(box, spec.shape):
        raise InvalidArgument("BOX", f"box {i} of {spec.name}: {format_box(box)[:200]} is not inside of {list(spec.shape)}")
    return box


class BoxDigester:
    """Digests of boxes in the store. Thread-safe.

    The last 256 answers are cached, because workers of a fleet request the same boxes. Concurrent requests divide the threads.
    """

    def __init__(self, reader: VersionReader, threads: int) -> None:
        self._reader, self._threads = reader, threads
        self._lock, self._asking = threading.Lock(), 0
        self._known: OrderedDict[tuple[str, bytes], Array] = OrderedDict()

    def digests(self, boxes: CheckedBoxes) -> list[int]:
        """Return the digests, in the order of the boxes. Raises as `VersionReader.open` does."""
        record = boxes.manifest.record
        # by fingerprint, because numbers restart with a new store
        key = (record.fingerprint, hashlib.sha256(repr([(b.spec.name, b.box) for b in boxes.boxes]).encode()).digest())
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
        if known is None:
            with self._share() as threads:
                known = np.array(self._compute(boxes, threads), dtype=np.uint64)
            self._keep(key, known)
        return [int(value) for value in known]

    @contextmanager
    def _share(self) -> Iterator[int]:
        with self._lock:
            self._asking += 1
            threads = max(1, self._threads // self._asking)
        try:
            yield threads
        finally:
            with self._lock:
                self._asking -= 1

    def _compute(self, boxes: CheckedBoxes, threads: int) -> list[int]:
        record, whole = boxes.manifest.record, boxes.manifest.digests
        parts = [each for each in boxes.boxes if each.box != full_box(each.spec.shape)]
        with self._reader.open(record.model, record.number) as files:
            found = iter(digest_boxes(files, parts, threads))
        return [whole[spec.name] if box == full_box(spec.shape) else next(found) for spec, box in boxes.boxes]

    def _keep(self, key: tuple[str, bytes], values: Array) -> None:
        with self._lock:
            self._known[key] = values
            while len(self._known) > _CACHED_REQUESTS or sum(v.size for v in self._known.values()) > _CACHED_DIGESTS:
                self._known.popitem(last=False)


def chunks(reader: VersionReader, boxes: CheckedBoxes) -> Iterator[bytes]:
    """Yield the wire bytes of each Chunk. The version is pinned until the last one, or until the generator is closed."""
    record = boxes.manifest.record
    sizes = [ITEM_SIZES[spec.dtype] for spec, _ in boxes.boxes]
    parts = cut_chunks([box for _, box in boxes.boxes], sizes, boxes.chunk_bytes)
    with reader.open(record.model, record.number) as files:
        for index, chunk in enumerate(parts):
            header = ChunkHeader(record.number, record.epoch, 0, index, 0)
            yield _chunk(files.arrays, boxes, chunk, header, record.model if index == 0 else "")


def _chunk(arrays: Mapping[str, Array], boxes: CheckedBoxes, parts: Sequence[Part], header: ChunkHeader, model: str) -> bytes:
    """Return one chunk. A separate function, so that no reference to a mapped array remains when the files are closed."""
    pieces = [
        np.ascontiguousarray(arrays[boxes.boxes[position].spec.name][box_index(box)]).reshape(-1).view(np.uint8)
        for position, box in parts
    ]
    data = pieces[0].data if len(pieces) == 1 else b"".join(piece.data for piece in pieces)
    return frame(header._replace(checksum=xxhash.xxh3_64_intdigest(data)), data, model)
