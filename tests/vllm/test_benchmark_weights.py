"""The weights that benchmarks make from a seed."""

import torch
from resharder.converters.geometry.layout import Range, box_shape, full_box

from benchmarks.weights import values

CPU, SHAPE = torch.device("cpu"), (256, 1024)  # powers of two


def test_a_box_has_the_elements_of_the_whole_tensor() -> None:
    whole = values("a", full_box(SHAPE), SHAPE, 1, CPU)
    box = (Range(3, 40, 2), Range(100, 200, 1))
    rows, columns = (torch.arange(r.start, r.last + 1, r.step) for r in box)
    part = values("a", box, SHAPE, 1, CPU)
    assert tuple(part.shape) == box_shape(box)
    assert torch.equal(part, whole[rows][:, columns])


def test_tensors_and_seeds_have_nothing_in_common_and_stay_small() -> None:
    one = values("a", full_box(SHAPE), SHAPE, 1, CPU)
    for other in (values("a", full_box(SHAPE), SHAPE, 2, CPU), values("b", full_box(SHAPE), SHAPE, 1, CPU), one.roll(1, 0)):
        assert abs(float(torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1])) < 0.02
        assert float((one == other).float().mean()) < 0.01
    assert float(one.abs().max()) <= 0.02
    assert len(one.bfloat16().unique()) > 500
