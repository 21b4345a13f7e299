"""Conversion of layouts and copies of the direct path to protobuf messages and back.

Messages of other processes are checked for their form here. The process that owns the memory checks that copies stay inside it.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from resharder.converters.errors import LayoutError
from resharder.converters.geometry.copy_table import Copies
from resharder.converters.geometry.piece_arrays import Ints, Pieces, Ranges
from resharder.converters.wire.boxes import spec_from_proto, spec_to_proto
from resharder.v1 import direct_pb2

MAX_PIECES = 1 << 22
_MAX_DIMENSIONS = 16
_RANGES = ("start", "count", "step")
_COPY_VECTORS = ("source", "target", "source_local", "target_local", "source_offset", "target_offset", "item")
_COPY_MATRICES = ("counts", "source_strides", "target_strides")


def layout_to_proto(pieces: Pieces[Any]) -> direct_pb2.MemoryLayout:
    """Return the message of one process's layout."""
    return direct_pb2.MemoryLayout(
        tensors=[spec_to_proto(spec) for spec in pieces.specs],
        locals=pieces.locals,
        dimensions=pieces.strides.shape[1],
        tensor=_bytes(pieces.tensor),
        local=_bytes(pieces.local),
        offset=_bytes(pieces.offset),
        strides=_bytes(pieces.strides),
        plus=_bytes(pieces.plus),
        **{name: _bytes(part) for name, part in zip(_RANGES, pieces.boxes, strict=True)},
    )


def layout_from_proto(message: direct_pb2.MemoryLayout, process: int) -> Pieces[int]:
    """Return the layout of a message, as that of process number `process`.

    Raises:
        LayoutError: Arrays of wrong lengths, boxes outside of their tensors, or more than `MAX_PIECES`
            boxes.
    """
    specs = tuple(spec_from_proto(spec) for spec in message.tensors)
    if len({spec.name for spec in specs}) < len(specs):
        raise LayoutError("a tensor is given twice")
    n, d = len(message.tensor) // 8, message.dimensions
    if n > MAX_PIECES or not 1 <= d <= _MAX_DIMENSIONS or any(len(spec.shape) > d for spec in specs):
        raise LayoutError(f"expected at most {MAX_PIECES} boxes of at most {_MAX_DIMENSIONS} dimensions, got {n} of {d}")
    tensor, local, offset = (_ints(message, name, n) for name in ("tensor", "local", "offset"))
    boxes = Ranges(*(_ints(message, name, n, d) for name in _RANGES))
    strides, plus = _ints(message, "strides", n, d), _floats(message, "plus", n)
    _check_numbers("tensor", tensor, len(specs))
    _check_numbers("local", local, len(message.locals))
    shapes = np.array([(*spec.shape, *[1] * (d - len(spec.shape))) for spec in specs], np.int64).reshape(-1, d)
    inside = (boxes.start >= 0) & (boxes.count >= 1) & (boxes.step >= 1)
    inside &= (boxes.start < 1 << 48) & (boxes.count < 1 << 48) & (boxes.step < 1 << 48)
    small = Ranges(*(np.where(inside, part, 1) for part in boxes))
    inside &= small.start.astype(float) + (small.count - 1.0) * small.step < shapes[tensor]
    for i in np.flatnonzero(~inside.all(axis=1))[:1]:
        name = specs[tensor[i]].name
        raise LayoutError(
            f"{name}: expected a box inside of {list(specs[tensor[i]].shape)}, got {[p[i].tolist() for p in boxes]}"
        )
    if (offset < 0).any() or (strides < 0).any():
        raise LayoutError("expected offsets and strides of 0 or more")
    return Pieces(specs, (process,), tuple(message.locals), tensor, np.zeros(n, np.int64), local, boxes, offset, strides, plus)


def copies_to_proto(copies: Copies) -> direct_pb2.DirectCopies:
    """Return the message of copies. Arrays are little-endian with 8 bytes per number: int64, and float64 for `plus`.

    `frozen` has one byte per copy, or none if no copy is.
    """
    arrays = {name: _bytes(getattr(copies, name)) for name in (*_COPY_VECTORS, *_COPY_MATRICES, "plus")}
    return direct_pb2.DirectCopies(
        source_locals=copies.source_locals,
        target_locals=copies.target_locals,
        dimensions=copies.counts.shape[1],
        frozen=copies.frozen.tobytes() if copies.frozen.any() else b"",
        **arrays,
    )


def copies_from_proto(message: direct_pb2.DirectCopies) -> Copies:
    """Return the copies of a message. Raises LayoutError for arrays of wrong lengths and numbers out of range."""
    n, d = len(message.source) // 8, message.dimensions
    if not 1 <= d <= _MAX_DIMENSIONS:
        raise LayoutError(f"expected at most {_MAX_DIMENSIONS} dimensions, got {d}")
    vectors = {name: _ints(message, name, n) for name in _COPY_VECTORS}
    matrices = {name: _ints(message, name, n, d) for name in _COPY_MATRICES}
    _check_numbers("source_local", vectors["source_local"], len(message.source_locals))
    _check_numbers("target_local", vectors["target_local"], len(message.target_locals))
    negative = [name for name, array in (vectors | matrices).items() if (array < 0).any()]
    if negative or (matrices["counts"] < 1).any() or (vectors["item"] < 1).any():
        raise LayoutError(f"expected counts and items of 1 or more and nothing below 0, got less in {negative or 'counts'}")
    return Copies(
        source_locals=tuple(message.source_locals),
        target_locals=tuple(message.target_locals),
        plus=_floats(message, "plus", n),
        frozen=_flags(message.frozen, n),
        **vectors,
        **matrices,
    )


def _flags(data: bytes, n: int) -> npt.NDArray[np.bool_]:
    if len(data) not in (0, n):
        raise LayoutError(f"frozen: expected {n} bytes or none, got {len(data)}")
    return np.frombuffer(data, np.uint8) != 0 if data else np.zeros(n, np.bool_)


def _bytes(array: npt.NDArray[Any]) -> bytes:
    return array.astype(array.dtype.newbyteorder("<")).tobytes()


def _ints(message: Any, name: str, *shape: int) -> Ints:
    return _array(message, name, "<i8", shape).astype(np.int64)


def _floats(message: Any, name: str, *shape: int) -> npt.NDArray[np.float64]:
    return _array(message, name, "<f8", shape).astype(np.float64)


def _array(message: Any, name: str, kind: str, shape: Sequence[int]) -> npt.NDArray[Any]:
    data, expected = getattr(message, name), int(np.prod(shape)) * 8
    if len(data) != expected:
        raise LayoutError(f"{name}: expected {expected} bytes for {list(shape)} elements, got {len(data)}")
    return np.frombuffer(data, kind).reshape(shape)


def _check_numbers(what: str, numbers: Ints, below: int) -> None:
    if ((numbers < 0) | (numbers >= below)).any():
        raise LayoutError(f"expected numbers of a {what} below {below}, got {numbers.min()} to {numbers.max()}")
