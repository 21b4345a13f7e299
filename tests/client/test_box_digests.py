"""What a rank says of what it sends, where it lies strided in memory, and where something is added on the way."""

import numpy as np
import pytest
import torch
from resharder.client.gpu.box_digests import BoxDigests
from resharder.converters.errors import LayoutError
from resharder.converters.geometry.layout import Layout, Piece, Range, TensorSpec, box_index
from resharder.converters.geometry.piece_arrays import pack
from resharder.converters.storage.digest import digest

CPU = torch.device("cpu")
SHAPE = (6, 8)
BOX = (Range(1, 3), Range(2, 4))


def test_digests_are_those_of_the_same_boxes_of_the_whole_tensors() -> None:
    whole = {name: torch.randn(SHAPE).to(dtype) for name, dtype in (("w", torch.bfloat16), ("norm", torch.float32))}
    tensors = {
        "transposed": whole["w"][box_index(BOX)].T.contiguous(),
        "norm": whole["norm"] - 1.0,  # as some families keep it
    }
    whole["norm"] = tensors["norm"] + 1.0
    specs = {"w": TensorSpec("w", "BF16", SHAPE), "norm": TensorSpec("norm", "F32", SHAPE)}
    pieces = (
        Piece("w", BOX, "transposed", 0, (1, 3)),
        Piece("norm", (Range(0, 6), Range(0, 8)), "norm", 0, (8, 1), plus=1.0),
    )
    wanted = []
    for piece in pieces:
        bits = whole[piece.tensor][box_index(piece.box)].contiguous()
        unsigned = bits.view(torch.int16 if bits.dtype == torch.bfloat16 else torch.int32).numpy()
        wanted.append(digest(unsigned.view(np.uint16 if unsigned.itemsize == 2 else np.uint32), piece.box, SHAPE))
    sent = BoxDigests(pack({0: Layout(specs, pieces)}), CPU)
    assert sent.digests(tensors) == wanted
    tensors["transposed"][0, 0] += 1
    found = sent.digests(tensors)
    assert (found[0] == wanted[0], found[1] == wanted[1]) == (False, True)


@pytest.mark.parametrize("tensors", [{}, {"w": torch.zeros(4, 2)}], ids=["not there", "too small"])
def test_boxes_that_are_not_in_memory_are_refused(tensors: dict[str, torch.Tensor]) -> None:
    layout = Layout({"w": TensorSpec("w", "F32", (4, 4))}, (Piece("w", (Range(0, 4), Range(0, 4)), "w", 0, (4, 1)),))
    with pytest.raises(LayoutError):
        BoxDigests(pack({0: layout}), CPU).digests(tensors)
