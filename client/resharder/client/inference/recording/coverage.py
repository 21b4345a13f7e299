"""The number of elements of a tensor that a set of writes covers."""

from collections.abc import Iterable
from math import prod

import numpy as np
from resharder.converters.geometry.layout import StridedView


def covered_elements(writes: Iterable[StridedView]) -> int:
    """Count the elements of memory that at least one write covers."""
    runs, strided = list[tuple[int, int]](), list[StridedView]()
    for write in writes:
        end = write.offset + 1 + sum((n - 1) * stride for n, stride in zip(write.shape, write.strides, strict=True))
        if end - write.offset == prod(write.shape):
            runs.append((write.offset, end))
        elif 0 not in write.shape:
            strided.append(write)
            runs.append((end, end))
    if strided:  # marked element by element, which takes a byte for each
        taken = np.zeros(max(end for _, end in runs), dtype=bool)
        for begin, end in runs:
            taken[begin:end] = True
        for write in strided:
            np.lib.stride_tricks.as_strided(taken[write.offset :], write.shape, write.strides)[...] = True
        return int(np.count_nonzero(taken))
    covered = last = 0
    for begin, end in sorted(runs):
        covered += max(0, end - max(begin, last))
        last = max(last, end)
    return covered
