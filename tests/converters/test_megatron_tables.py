"""The form of a table, on shapes that no present family has but the next ones do: transposed, interleaved, stacked."""

import numpy as np
import pytest
from resharder.converters.architectures.table import Rows, Weight, hf_shapes
from resharder.converters.errors import LayoutError
from resharder.converters.geometry.layout import Range, box_index

pytestmark = pytest.mark.compat("layouts")

EXPERTS, HIDDEN, FFN = 3, 5, 4


def interleaved(expert: int) -> Weight:
    """GPT-OSS: HF has [experts, hidden, 2 * ffn], gate and up in turn; Megatron [gate; up] by hidden."""
    gate = Rows(0, FFN, "gate_up_proj", 0, 2, expert)
    up = Rows(FFN, FFN, "gate_up_proj", 1, 2, expert)
    return Weight((2 * FFN, HIDDEN), (gate, up), transpose=True)


@pytest.mark.parametrize("expert", range(EXPERTS))
@pytest.mark.parametrize("rows", [Range(0, 8), Range(0, 2), Range(3, 2), Range(6, 1)])
@pytest.mark.parametrize("columns", [Range(0, 5), Range(2, 2)])
def test_any_part_of_a_transposed_interleaved_stacked_weight_is_found(expert: int, rows: Range, columns: Range) -> None:
    full = np.arange(EXPERTS * HIDDEN * 2 * FFN).reshape(EXPERTS, HIDDEN, 2 * FFN)
    whole = np.concatenate([full[expert, :, 0::2].T, full[expert, :, 1::2].T])
    part = np.full((rows.count, columns.count), -1)
    for row, name, box in interleaved(expert).overlaps((rows, columns)):
        assert name == "gate_up_proj"
        found = full[box_index(box)][0].T
        part[row - rows.start : row - rows.start + len(found)] = found
    assert np.array_equal(part, whole[rows.start : rows.last + 1, columns.start : columns.last + 1])


def test_a_single_row_has_one_form_whatever_the_step() -> None:
    """Boxes are compared where ranks and replicas are."""
    (overlap,) = interleaved(1).overlaps((Range(6, 1), Range(0, 5)))
    assert overlap.box == (Range(1, 1), Range(0, 5), Range(5, 1))


def test_the_shape_of_a_stacked_tensor_comes_from_all_its_lines() -> None:
    table = {"linear_fc1.weight": tuple(interleaved(expert) for expert in range(EXPERTS))}
    assert hf_shapes(table) == {"gate_up_proj": (EXPERTS, HIDDEN, 2 * FFN)}


def test_two_lines_that_differ_in_dimensions_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"w: .* 2 dimensions in one line and 1 in another"):
        hf_shapes({"a": (Weight((2, 3), (Rows(0, 2, "w"),)),), "b": (Weight((2,), (Rows(0, 2, "w"),)),)})
