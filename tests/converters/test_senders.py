"""Replicas of boxes are distributed by one rule, so that the bytes of their holders are as even as the choice permits."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from resharder.converters.geometry.layout import full_box
from resharder.converters.geometry.piece_arrays import pack_boxes
from resharder.converters.geometry.senders import senders

Kind = tuple[frozenset[int], int, int, int]
"""Holders, elements, bytes of an element, and number of tensors."""


def loads(kinds: list[Kind], processes: int) -> list[int]:
    """Bytes that each process sends."""
    pieces, tensors = [], []
    for holders, elements, item, count in kinds:
        for _ in range(count):
            pieces += [(process, len(tensors)) for process in holders]
            tensors.append((elements, item))
    process, tensor = (np.array(column, np.int64) for column in zip(*pieces, strict=True))
    boxes = pack_boxes([full_box((tensors[each][0],)) for each in tensor])
    sent = senders(tensor, boxes, process, processes, np.array([item for _, item in tensors]))
    assert sorted(tensor[sent].tolist()) == list(range(len(tensors)))
    assert np.all(np.diff(sent) > 0)
    sizes = np.array([elements * item for elements, item in tensors])
    return np.bincount(process[sent], sizes[tensor[sent]], processes).astype(int).tolist()


@st.composite
def kinds(draw: st.DrawFn) -> list[Kind]:
    """Kinds of which each has a size of its own: the rule then determines all loads."""
    sizes = draw(st.lists(st.integers(1, 40), min_size=1, max_size=5, unique=True))
    holders = st.frozensets(st.integers(0, 7), min_size=1, max_size=8)
    found = []
    for size in sizes:
        item = draw(st.sampled_from([i for i in (1, 2, 4, 8) if size % i == 0]))
        found.append((draw(holders), size // item, item, draw(st.integers(1, 60))))
    return found


@given(kinds())
def test_copies_with_fewer_holders_then_larger_ones_go_to_the_holder_with_the_fewest_bytes_so_far(kinds: list[Kind]) -> None:
    expected = [0] * 8
    for holders, elements, item, count in sorted(kinds, key=lambda kind: (len(kind[0]), -kind[1] * kind[2])):
        for _ in range(count):
            expected[min(holders, key=lambda process: (expected[process], process))] += elements * item
    assert loads(kinds, 8) == expected


def test_many_groups_of_holders_are_each_evened_out_by_themselves() -> None:
    """One process of each pair has another tensor that it alone has; its partner sends what both have."""
    pairs = 200
    alone = [(frozenset({2 * pair + pair % 2}), 8, 4, 1) for pair in range(pairs)]
    shared = [(frozenset({2 * pair, 2 * pair + 1}), 2, 4, 3) for pair in range(pairs)]
    assert loads([*alone, *shared], 2 * pairs) == [24 if process % 4 in (1, 2) else 32 for process in range(2 * pairs)]
