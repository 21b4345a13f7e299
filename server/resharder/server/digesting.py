"""Digests of many boxes of a version's files, by several threads."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from numpy.lib.array_utils import byte_bounds
from resharder.converters.cut import Part, cut_chunks
from resharder.converters.digest import MASK, Array, digest
from resharder.converters.layout import ITEM_SIZES, Box, TensorSpec, box_index, full_box
from resharder.converters.pages import forget_pages

_FORGET_BYTES = 1 << 20
_SHARE_BYTES = 16 << 20  # small boxes together, large ones in parts: digests add up


class TensorBox(NamedTuple):
    spec: TensorSpec
    box: Box


def digest_boxes(arrays: Mapping[str, Array], boxes: Sequence[TensorBox], threads: int, *, forget: bool = True) -> list[int]:
    """In the order of the boxes. `arrays`: by the tensors' names, whole, of mapped files. `forget`: pages leave this process's
    tables by the way; small ones, all together in the end, would keep one thread busy for long, huge ones take a third of the
    time for it."""
    shares = cut_chunks([box for _, box in boxes], [ITEM_SIZES[spec.dtype] for spec, _ in boxes], _SHARE_BYTES)

    def share_digests(share: list[Part]) -> list[int]:
        return [_digest(arrays, boxes[position].spec, box, forget) for position, box in share]

    totals = [0] * len(boxes)
    with ThreadPoolExecutor(threads, "digest") as pool:
        for share, found in zip(shares, pool.map(share_digests, shares), strict=True):
            for (position, _), value in zip(share, found, strict=True):
                totals[position] = (totals[position] + value) & MASK
    return totals


def digest_tensors(
    arrays: Mapping[str, Array], specs: Mapping[str, TensorSpec], threads: int, *, forget: bool = True
) -> dict[str, int]:
    """Of all of them, whole, as `digest_boxes` has it."""
    boxes = [TensorBox(spec, full_box(spec.shape)) for spec in specs.values()]
    return dict(zip(specs, digest_boxes(arrays, boxes, threads, forget=forget), strict=True))


def _digest(arrays: Mapping[str, Array], spec: TensorSpec, box: Box, forget: bool) -> int:
    part = arrays[spec.name][box_index(box)] if box else arrays[spec.name]
    found = digest(part, box, spec.shape)
    if forget and part.nbytes >= _FORGET_BYTES:
        forget_pages(byte_bounds(part))
    return found
