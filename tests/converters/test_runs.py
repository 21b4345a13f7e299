"""Which boxes of a file are one run of bytes."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from resharder.converters.geometry.layout import TensorSpec, box_index, run_start

from tests.support.shardings import sharding


@given(st.data())
def test_a_box_is_written_at_once_exactly_where_its_elements_follow_each_other_in_the_file(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=0, max_size=4)))
    boxes = [box for mine in data.draw(sharding(shape)) for box in mine] if shape else [()]
    box = data.draw(st.sampled_from(boxes))
    places = np.arange(np.prod(shape, dtype=int)).reshape(shape)[box_index(box)].reshape(-1)
    in_one_run = bool(np.all(np.diff(places) == 1))
    assert run_start(box, TensorSpec("t", "F32", shape)) == (4 * int(places[0]) if in_one_run else None)
