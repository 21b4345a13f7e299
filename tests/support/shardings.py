"""Random shardings of a tensor over ranks: cuts, interleavings, and both."""

from itertools import pairwise

from hypothesis import strategies as st
from resharder.converters.geometry.layout import Box, Range
from resharder.converters.geometry.tiling import Held


def _split(n: int, draw: st.DrawFn) -> list[Range]:
    """One dimension cut into consecutive runs, or dealt out in turn."""
    if draw(st.booleans()):
        step = draw(st.integers(1, min(4, n)))
        return [Range(first, count, step if count > 1 else 1) for first in range(step) if (count := len(range(first, n, step)))]
    cuts = sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=3))})
    return [Range(a, b - a) for a, b in pairwise(cuts)]


@st.composite
def sharding(draw: st.DrawFn, shape: tuple[int, ...]) -> list[list[Box]]:
    """[boxes of each rank]: together they tile the tensor."""
    boxes: list[Box] = [()]
    for n in shape:
        parts = _split(n, draw)
        boxes = [(*box, part) for box in boxes for part in parts]
    ranks = draw(st.integers(1, 4))
    held_boxes: list[list[Box]] = [[] for _ in range(ranks)]
    for box in draw(st.permutations(boxes)):
        held_boxes[draw(st.integers(0, ranks - 1))].append(box)
    return held_boxes


def held_boxes(boxes: list[list[Box]]) -> list[Held]:
    return [Held(rank, i, box, False) for rank, mine in enumerate(boxes) for i, box in enumerate(mine)]
