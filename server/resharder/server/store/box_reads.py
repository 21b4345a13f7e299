"""Boxes of a READY version: checked, and packed into chunks."""

from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import xxhash
from numpy.lib.array_utils import byte_bounds
from resharder.converters.errors import LayoutError
from resharder.converters.geometry.chunking import Part, cut_chunks
from resharder.converters.geometry.layout import ITEM_SIZES, Box, TensorSpec, box_index, box_size, format_box, is_inside
from resharder.converters.storage.files import Array
from resharder.converters.storage.pages import map_pages
from resharder.converters.wire.boxes import box_from_proto
from resharder.converters.wire.chunk_body import Chunk
from resharder.converters.wire.chunk_frame import ChunkHeader
from resharder.converters.wire.pieces import PieceSpan
from resharder.server.holding.part_files import box_extent
from resharder.server.state.errors import InvalidArgument
from resharder.server.store.digests import TensorBox
from resharder.server.store.manifest import Manifest
from resharder.v1 import resources_pb2, server_pb2

Reading = Callable[[Collection[PieceSpan]], AbstractContextManager[None]]
"""Function that has bytes of files in the folder meanwhile. Raises a DaemonError if they are not there."""
CHUNK_BYTES = 1 << 20
_MIN_CHUNK_BYTES, _MAX_CHUNK_BYTES = 64 << 10, 4 << 20


@dataclass(frozen=True)
class CheckedBoxes:
    """Request for boxes that was checked against its version's manifest."""

    manifest: Manifest
    boxes: tuple[TensorBox, ...]
    chunk_bytes: int

    @property
    def size(self) -> int:
        return sum(box_size(box) * ITEM_SIZES[spec.dtype] for spec, box in self.boxes)

    @cached_property
    def parts(self) -> list[list[Part]]:
        """Parts of the boxes in each chunk."""
        sizes = [ITEM_SIZES[spec.dtype] for spec, _ in self.boxes]
        return cut_chunks([box for _, box in self.boxes], sizes, self.chunk_bytes)

    def sizes(self) -> list[int]:
        """Return the bytes of data of each chunk."""
        return [sum(box_size(box) * ITEM_SIZES[self.boxes[at].spec.dtype] for at, box in parts) for parts in self.parts]


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
    known = manifest.specs
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


def spans_of(manifest: Manifest, boxes: Iterable[TensorBox]) -> list[PieceSpan]:
    """Return the bytes of files in which boxes are, from the first to the last one of each."""
    places, found = manifest.places, []
    for spec, box in boxes:
        (path, offset), (start, end) = places[spec.name], box_extent(spec, box)
        found.append(PieceSpan(path, offset + start, offset + end))
    return found


def packed_chunks(
    arrays: Mapping[str, Array], boxes: CheckedBoxes, reading: Reading | None = None
) -> Generator[Chunk, None, None]:
    """Yield the chunks of boxes. Their data are valid until the next one, and may share the memory of `arrays`.

    Args:
        arrays: Tensors of the version.
        boxes: The boxes.
        reading: Function that has bytes of files in their places meanwhile; None if all are there.
    """
    record, buffer = boxes.manifest.record, bytearray(boxes.chunk_bytes)
    for index, parts in enumerate(boxes.parts):
        needed = [TensorBox(boxes.boxes[position].spec, box) for position, box in parts] if reading is not None else []
        with reading(spans_of(boxes.manifest, needed)) if reading is not None else nullcontext():
            data = _packed(arrays, boxes, parts, buffer)
            yield ChunkHeader(record.number, record.epoch, 0, index, xxhash.xxh3_64_intdigest(data)), data
            del data


def _packed(arrays: Mapping[str, Array], boxes: CheckedBoxes, parts: Sequence[Part], buffer: bytearray) -> memoryview:
    """Return the elements of a chunk: in place if they are contiguous, else copied to `buffer`."""
    at = 0
    for position, box in parts:
        elements = np.asarray(arrays[boxes.boxes[position].spec.name][box_index(box)])
        map_pages(byte_bounds(elements))  # a fault for every few pages costs more
        if len(parts) == 1 and elements.flags.c_contiguous:
            return elements.reshape(-1).view(np.uint8).data
        np.copyto(np.frombuffer(buffer, elements.dtype, elements.size, at).reshape(elements.shape), elements)
        at += elements.nbytes
    return memoryview(buffer)[:at]
