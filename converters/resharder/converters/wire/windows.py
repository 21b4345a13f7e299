"""Requests for boxes of a version, each of which a data port answers with checked chunks.

A window has boxes, or parts of boxes, whose request fits into a header and whose chunks fit into memory.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from resharder.converters.geometry.chunking import Part, cut_chunks
from resharder.converters.geometry.layout import ITEM_SIZES, Box, TensorSpec, box_size
from resharder.converters.wire.boxes import boxes_to_proto
from resharder.converters.wire.chunk_body import MOST_BOXES_BYTES
from resharder.converters.wire.range_client import BoxesRequest
from resharder.v1 import server_pb2

CHUNK_BYTES = 1 << 20
"""Upper bound on the bytes of a chunk."""
WINDOW_BYTES = 16 << 20
"""Upper bound on the bytes of boxes in one request."""


class BoxPart(NamedTuple):
    """`box` of the tensor `name`, a part of the box at `position` of the requested ones."""

    position: int
    name: str
    box: Box


Window = tuple[BoxPart, ...]
"""Parts of boxes that one request asks for."""


def boxes_request(version: str, boxes: Iterable[tuple[str, Box]]) -> server_pb2.BoxesRequest:
    """Return the request for boxes of a version's tensors, given as (tensor's name, box); answers have the same order."""
    boxes = list(boxes)
    names = list(dict.fromkeys(name for name, _ in boxes))
    position = {name: i for i, name in enumerate(names)}
    return server_pb2.BoxesRequest(
        version=version,
        tensors=names,
        boxes=boxes_to_proto((position[name], box, False) for name, box in boxes),
        chunk_bytes=CHUNK_BYTES,
    )


class WindowRequest(NamedTuple):
    """The request for a window, and the parts of its boxes in each chunk of the answer, by their position in the window."""

    request: BoxesRequest
    chunks: list[list[Part]]


def window_request(version: str, fingerprint: str, window: Sequence[BoxPart], specs: Mapping[str, TensorSpec]) -> WindowRequest:
    """Return the request for a window of the version with this name and fingerprint, whose tensors have these specs."""
    sizes = [ITEM_SIZES[specs[part.name].dtype] for part in window]
    chunks = cut_chunks([part.box for part in window], sizes, CHUNK_BYTES)
    lengths = [sum(box_size(box) * sizes[position] for position, box in parts) for parts in chunks]
    request = boxes_request("", ((part.name, part.box) for part in window))
    return WindowRequest(BoxesRequest(version, fingerprint, request, lengths), chunks)


def cut_windows(boxes: Sequence[BoxPart], specs: Mapping[str, TensorSpec]) -> list[Window]:
    """Return the boxes in order, cut into windows of at most `WINDOW_BYTES` whose requests fit into a header."""
    sizes = [ITEM_SIZES[specs[name].dtype] for _, name, _ in boxes]
    windows: list[Window] = []
    for parts in cut_chunks([part.box for part in boxes], sizes, WINDOW_BYTES):
        current: list[BoxPart] = []
        names, room = set[str](), MOST_BOXES_BYTES
        for position, box in parts:
            part = boxes[position]._replace(box=box)
            needed = _encoded_size(part, part.name not in names)
            if needed > room and current:
                windows.append(tuple(current))
                names, current, room = set(), [], MOST_BOXES_BYTES
                needed = _encoded_size(part, named=True)
            names.add(part.name)
            current.append(part)
            room -= needed
        windows.append(tuple(current))
    return windows


def _encoded_size(part: BoxPart, named: bool) -> int:
    """Return an upper bound on the bytes of a part in a `BoxesRequest`; `named`: and of its tensor's name."""
    numbers = sum(max(1, -(-value.bit_length() // 7)) for r in part.box for value in r)
    return 24 + numbers + (4 + len(part.name.encode()) if named else 0)
