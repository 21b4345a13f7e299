"""Elements that are computed before they are sent: those to which a constant is added."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from resharder.converters.geometry.copy_table import Copies
from resharder.converters.geometry.layout import StridedView
from resharder.converters.geometry.piece_arrays import Ints
from resharder.converters.models.tensor_io import view_of


class Ready(NamedTuple):
    """Elements to compute before sending: those of `view` of source `local`, plus `plus`, go to byte `at` of a buffer."""

    local: int
    view: StridedView
    plus: float
    at: int


def ready_of(copies: Copies, rank: int) -> tuple[tuple[Ready, ...], Ints]:
    """Return the elements to compute before sending, and the start of each copy in the buffer for them."""
    mine = (copies.plus != 0) & (copies.source == rank)
    sizes = np.where(mine, copies.made, 0)
    at = np.cumsum(sizes) - sizes
    ready = [
        Ready(
            int(copies.source_local[i]),
            StridedView(
                tuple(copies.counts[i].tolist()),
                tuple((copies.source_strides[i] // copies.item[i]).tolist()),
                int(copies.source_offset[i] // copies.item[i]),
            ),
            float(copies.plus[i]),
            int(at[i]),
        )
        for i in np.flatnonzero(mine)
    ]
    return tuple(ready), at


def fill_ready(ready: Sequence[Ready], names: Sequence[str], sources: Mapping[str, torch.Tensor], buffer: torch.Tensor) -> None:
    """Compute elements into `buffer`, of uint8, on the current stream. `names` are those of the local tensors."""
    for local, view, plus, at in ready:
        values = view_of(sources[names[local]], view) + plus
        size = values.numel() * values.element_size()
        buffer[at : at + size].view(values.dtype).view(values.shape).copy_(values)
