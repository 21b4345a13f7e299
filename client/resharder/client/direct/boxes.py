"""Boxes of memory that are read as they are: from one process's memory to another's, and the ranges that hold them."""

import numpy as np
from resharder.converters.geometry.piece_arrays import Ints


def merge_boxes(boxes: Ints, begins: tuple[Ints, Ints]) -> Ints:
    """Return the fewest boxes that read the same bytes, each within one allocation on both sides, sorted by source.

    Neighbours on both sides become one: an engine's time depends on the number of boxes more than on their bytes. A copy that
    reaches from one of CUDA's allocations into the next is refused (`CUDA error: invalid argument`), be they neighbours or not.

    Args:
        boxes: (n, 3): address in the source, address in the target, and size in bytes. They do not overlap.
        begins: (m,): addresses at which allocations begin, in the source and in the target.
    """
    if not len(boxes):
        return boxes
    boxes = boxes[np.argsort(boxes[:, 0], kind="stable")]
    ends = boxes[:-1, :2] + boxes[:-1, 2:]
    first = np.isin(boxes[1:, 0], begins[0]) | np.isin(boxes[1:, 1], begins[1])
    starts = np.flatnonzero(np.append(True, first | (ends != boxes[1:, :2]).any(axis=1)))
    return np.column_stack([boxes[starts, :2], np.add.reduceat(boxes[:, 2], starts)])


def outside(ranges: Ints, regions: Ints) -> Ints:
    """Return the ranges that do not lie in one of the regions.

    Args:
        ranges: (n, 2): address and size in bytes.
        regions: (m, 2), sorted and apart.
    """
    if not len(regions):
        return ranges
    which = np.searchsorted(regions[:, 0], ranges[:, 0], "right") - 1  # -1: before all
    found: Ints = ranges[(which < 0) | (ranges.sum(axis=1) > regions[which].sum(axis=1))]
    return found


def merge_ranges(ranges: Ints) -> Ints:
    """Return ranges with the same bytes, sorted. Overlapping ones become one; adjacent ones may be two allocations and do not.

    Args:
        ranges: (n, 2): address and size in bytes. Empty ranges are left out.
    """
    ranges = ranges[ranges[:, 1] > 0]
    if not len(ranges):
        return ranges
    ranges = ranges[np.argsort(ranges[:, 0], kind="stable")]
    reach = np.maximum.accumulate(ranges.sum(axis=1))
    starts = np.flatnonzero(np.append(True, ranges[1:, 0] >= reach[:-1]))
    return np.column_stack([ranges[starts, 0], np.append(reach[starts[1:] - 1], reach[-1]) - ranges[starts, 0]])
