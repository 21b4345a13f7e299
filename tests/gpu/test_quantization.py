"""Casts to FP8 blocks on a GPU give the bytes of those on a CPU."""

import pytest
import torch
from resharder.converters.geometry.layout import Box, Layout, Piece, Range, TensorSpec, box_index
from resharder.converters.models.tensor_io import read_piece
from resharder.converters.quantization.cast import QuantisedTensors, quantise_whole
from resharder.converters.quantization.scheme import Scheme

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

NAME = "w.weight"


def matrix(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Small and large blocks, and one of zeros."""
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))
    values[:130] *= torch.logspace(-8, 4, 130)[:, None]
    values[256:384, 128:256] = 0
    return values.to(dtype)


@pytest.mark.parametrize("scheme", [Scheme(), Scheme(channels=True)], ids=["blocks", "channels"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(4096, 3072), (4096 + 37, 3072 + 5)], ids=str)
def test_a_cast_on_a_gpu_is_that_of_a_cpu_bit_for_bit(shape: tuple[int, int], dtype: torch.dtype, scheme: Scheme) -> None:
    whole = matrix(*shape, dtype)
    for here, there in zip(quantise_whole(NAME, whole, scheme), quantise_whole(NAME, whole.cuda(), scheme), strict=True):
        assert torch.equal(here.view(torch.uint8), there.cpu().view(torch.uint8))


@pytest.mark.parametrize("transposed", [False, True])
def test_pieces_that_cut_blocks_and_interleave_rows_are_cast_in_place(transposed: bool) -> None:
    whole = matrix(512, 640, torch.bfloat16)
    rows = [Range(0, 200), Range(200, 56), Range(256, 128, 2), Range(257, 128, 2)]
    boxes: list[Box] = [(row, column) for row in rows for column in (Range(0, 256), Range(256, 100), Range(356, 284))]
    found = []
    for device in ("cpu", "cuda"):
        local, pieces = dict[str, torch.Tensor](), list[Piece]()
        for number, box in enumerate(boxes):
            part = whole[box_index(box)]
            part = (part.T.contiguous().T if transposed else part.contiguous()).to(device)
            local[str(number)] = part
            pieces.append(Piece(NAME, box, str(number), 0, part.stride()))
        made = QuantisedTensors(Layout({NAME: TensorSpec(NAME, "BF16", (512, 640))}, tuple(pieces)), local, Scheme())
        for _ in range(2):  # into the same memory
            maxima = made.measure()
            made.cast(maxima[:0])
        found.append([read_piece(made.tensors, piece).cpu().contiguous().view(torch.uint8) for piece in made.plan.layout.pieces])
    assert all(map(torch.equal, *found))


def test_a_value_that_is_not_finite_is_refused() -> None:
    whole = matrix(512, 512, torch.bfloat16).cuda()
    for value in (float("nan"), float("inf"), float("-inf")):
        whole[300, 200] = value
        with pytest.raises(ValueError, match="has an infinity or NaN"):
            quantise_whole(NAME, whole, Scheme())
