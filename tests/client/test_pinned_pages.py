"""Arrays that lie in registered pages only in part."""

import numpy as np
import pytest
import torch
from numpy.lib.array_utils import byte_bounds
from resharder.client.gpu.pinned_pages import Registered

MEMORY = np.zeros(100, np.uint8)


@pytest.mark.parametrize(
    ("begin", "end", "split"),
    [
        (0, 20, False),
        (20, 40, False),
        (25, 30, False),
        (45, 50, False),
        (90, 100, False),
        (10, 21, True),
        (39, 50, True),
        (10, 90, True),
        (55, 65, True),  # two registrations that touch
    ],
)
def test_an_array_is_split_unless_one_registration_has_all_of_it_or_none_has_any(begin: int, end: int, split: bool) -> None:
    first = byte_bounds(MEMORY)[0]
    spans = [(first + 20, first + 40), (first + 50, first + 60), (first + 60, first + 80)]
    assert Registered(spans, torch.device("cpu"), busy=lambda: False).splits(MEMORY[begin:end]) == split
