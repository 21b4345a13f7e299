"""Boxes of HF tensors and their places in processes' memory.

A *box* is a strided range in every dimension of a tensor. A *piece* places the elements of one box of one HF tensor
in one local tensor, at `offset + sum(i[d] * strides[d])` elements from its first one, with `i` counting through the box. Fused,
sliced, transposed, interleaved and stacked weights are all pieces. A *layout* has the local tensors of one process
and their pieces.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


class Range(NamedTuple):
    """Indices `start, start + step, …`, `count` of them, of one dimension; step >= 1, and 1 if count is 1."""

    start: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which is not needed
    step: int = 1

    @property
    def last(self) -> int:
        """Last index, inclusive."""
        return self.start + (self.count - 1) * self.step

    def as_slice(self) -> slice:
        """Return the slice that selects these indices from a dimension of an array or tensor."""
        return slice(self.start, self.last + 1, self.step)


Box = tuple[Range, ...]


def full_box(shape: tuple[int, ...]) -> Box:
    """Return the box of all elements of a tensor of `shape`; the empty box for a scalar."""
    return tuple(Range(0, n) for n in shape)


def is_inside(box: Box, shape: tuple[int, ...]) -> bool:
    """Return whether a box has the dimensions of a tensor of `shape`, is not empty, and lies inside the tensor."""
    return len(box) == len(shape) and all(
        r.start >= 0 and r.count >= 1 and r.step >= 1 and r.last < n for r, n in zip(box, shape, strict=True)
    )


def box_size(box: Box) -> int:
    """Return the number of elements of a box."""
    return math.prod(r.count for r in box)


def box_shape(box: Box) -> tuple[int, ...]:
    """Return the shape of a box's elements: the count in each dimension."""
    return tuple(r.count for r in box)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides, in elements, of a contiguous array of a shape."""
    strides, step = list[int](), 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def box_index(box: Box) -> tuple[slice, ...]:
    """Return the index that selects a box from its tensor, in numpy and in torch."""
    return tuple(r.as_slice() for r in box)


def format_box(box: Box) -> str:
    """Format a box like a numpy index: `[0:128, 3:64:2]`."""
    return "[" + ", ".join(f"{r.start}:{r.last + 1}" + (f":{r.step}" if r.step > 1 else "") for r in box) + "]"


def intersect_ranges(a: Range, b: Range) -> Range | None:
    """Return the common indices of two ranges, again a range; None if there are none."""
    if a.step == 1 and b.step == 1:
        low, high = max(a.start, b.start), min(a.last, b.last)
        return Range(low, high - low + 1) if low <= high else None
    gcd = math.gcd(a.step, b.step)
    if (b.start - a.start) % gcd:
        return None
    step, modulus = a.step // gcd * b.step, b.step // gcd
    k = (b.start - a.start) // gcd * pow(a.step // gcd, -1, modulus) % modulus if modulus > 1 else 0
    first, low = a.start + k * a.step, max(a.start, b.start)
    if first < low:
        first += -(-(low - first) // step) * step
    last = min(a.last, b.last)
    if first > last:
        return None
    count = (last - first) // step + 1
    return Range(first, count, step if count > 1 else 1)


def intersect(a: Box, b: Box) -> Box | None:
    """Return the common elements of two boxes of one tensor, again a box; None if there are none."""
    common = []
    for x, y in zip(a, b, strict=True):
        both = intersect_ranges(x, y)
        if both is None:
            return None
        common.append(both)
    return tuple(common)


class StridedView(NamedTuple):
    """Strided view of a local tensor, with the arguments of `torch.as_strided`, in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


class Piece(NamedTuple):
    """Place of one box of an HF tensor in a local tensor.

    Attributes:
        tensor: Name of the HF tensor.
        box: Box of the HF tensor.
        local: Name of the local tensor.
        offset: Position of the box's first element, in elements from the local tensor's first one.
        strides: Strides in the local tensor, in elements, one per HF dimension.
        replica: Whether another rank owns these elements.
        plus: HF's values are the local ones plus this constant.
    """

    tensor: str
    box: Box
    local: str
    offset: int
    strides: tuple[int, ...]
    replica: bool = False
    plus: float = 0.0

    def view(self, box: Box) -> StridedView:
        """Return the view of `box`, which must be inside this piece's box, in the local tensor."""
        offset, strides = self.offset, []
        for want, have, stride in zip(box, self.box, self.strides, strict=True):
            offset += (want.start - have.start) // have.step * stride
            strides.append(want.step // have.step * stride if want.count > 1 else stride)
        return StridedView(box_shape(box), tuple(strides), offset)

    def part(self, box: Box) -> "Piece":
        """Return the piece of `box`, which must be inside this piece's box."""
        view = self.view(box)
        return self._replace(box=box, offset=view.offset, strides=view.strides)


class TensorSpec(NamedTuple):
    """HF tensor on disk. `dtype` is safetensors' name: `BF16`, `F32`, …"""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape) * ITEM_SIZES[self.dtype]


ITEM_SIZES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "BF16": 2, "F16": 2, "I16": 2, "U16": 2, "F32": 4, "I32": 4, "U32": 4, "F64": 8, "I64": 8, "U64": 8,
}  # fmt: skip

PUBLISHABLE = ("BF16", "F16", "F32", "F64", "F8_E4M3", "F8_E8M0", "BOOL", "U8", "I8", "I16", "I32", "I64")
"""safetensors' names of the dtypes that can be published."""


def run_start(box: Box, spec: TensorSpec) -> int | None:
    """Return the byte offset in the tensor at which a contiguous box begins; None if the box is not contiguous."""
    start, stride, open_ = 0, ITEM_SIZES[spec.dtype], True
    for r, n in zip(reversed(box), reversed(spec.shape), strict=True):
        if r.count > 1 and (r.step > 1 or not open_):
            return None
        open_ = open_ and r.count == n
        start += r.start * stride
        stride *= n
    return start


def box_bytes(box: Box, spec: TensorSpec) -> tuple[int, int]:
    """Return the first byte of a box in its tensor, and the first after its last one. The box may have gaps."""
    first, last, stride = 0, 0, ITEM_SIZES[spec.dtype]
    for r, n in zip(reversed(box), reversed(spec.shape), strict=True):
        first += r.start * stride
        last += (r.start + (r.count - 1) * r.step) * stride
        stride *= n
    return first, last + ITEM_SIZES[spec.dtype]


@dataclass(frozen=True)
class Layout:
    """Local tensors of one process. `tensors` has at least the HF tensors of `pieces` by name."""

    tensors: dict[str, TensorSpec]
    pieces: tuple[Piece, ...]

    def owned(self) -> Iterator[Piece]:
        """Yield the pieces that are not replicas. Over all ranks of a trainer they cover each element once."""
        return (piece for piece in self.pieces if not piece.replica)
