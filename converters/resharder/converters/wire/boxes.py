"""Conversion of layouts to protobuf messages and back."""

from collections.abc import Iterable

import xxhash
from resharder.converters.errors import LayoutError
from resharder.converters.geometry.layout import ITEM_SIZES, Box, Range, TensorSpec
from resharder.v1 import resources_pb2

MAX_DIMENSIONS = 32  # limit of numpy 1; that of numpy 2 is 64


def box_to_proto(box: Box) -> resources_pb2.Box:
    """Return the message of a box. `step` is empty if every step is 1."""
    steps = [r.step for r in box] if any(r.step != 1 for r in box) else []
    return resources_pb2.Box(start=[r.start for r in box], count=[r.count for r in box], step=steps)


def box_from_proto(message: resources_pb2.Box) -> Box:
    """Return the box of a message. Raises LayoutError if the fields have different lengths."""
    steps = message.step or [1] * len(message.start)
    if not len(message.start) == len(message.count) == len(steps):
        raise LayoutError(
            f"expected as many counts and steps as starts in a box, got {len(message.count)}, {len(steps)}, {len(message.start)}"
        )
    return tuple(Range(s, n, t) for s, n, t in zip(message.start, message.count, steps, strict=True))


def spec_to_proto(spec: TensorSpec) -> resources_pb2.TensorSpec:
    """Return the message of a spec; its `dtype` is safetensors' name."""
    return resources_pb2.TensorSpec(name=spec.name, dtype=spec.dtype, shape=spec.shape)


def spec_from_proto(message: resources_pb2.TensorSpec) -> TensorSpec:
    """Return the spec of a message.

    Raises:
        LayoutError: An unknown dtype, a size below 1, more than `MAX_DIMENSIONS` dimensions, or a name
            that is empty or reserved by safetensors.
    """
    named = message.name not in ("", "__metadata__")
    if not named or message.dtype not in ITEM_SIZES or len(message.shape) > MAX_DIMENSIONS or any(n < 1 for n in message.shape):
        found = f"{message.name[:200]!r} {message.dtype[:20]!r} {list(message.shape[: MAX_DIMENSIONS + 1])}"
        raise LayoutError(f"expected a name, a safetensors dtype and at most {MAX_DIMENSIONS} positive sizes, got {found}")
    return TensorSpec(message.name, message.dtype, tuple(message.shape))


def fingerprint_of(specs: Iterable[TensorSpec]) -> str:
    """Return a hash of the tensors' names, dtypes and shapes, in any order."""
    lines = sorted(f"{spec.name}\0{spec.dtype}\0{[*spec.shape]}" for spec in specs)
    return xxhash.xxh3_128_hexdigest("\n".join(lines).encode())


def boxes_to_proto(boxes: Iterable[tuple[int, Box, bool]]) -> list[resources_pb2.TensorBox]:
    """Return the messages of (index of the tensor, box, replica)."""
    return [resources_pb2.TensorBox(tensor=tensor, box=box_to_proto(box), replica=replica) for tensor, box, replica in boxes]
