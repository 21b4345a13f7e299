"""The kernels that cast against the host's cast: `TRITON_INTERPRET=1 python -m tests.converters.cast_kernels ROUNDS`."""

import sys
from typing import Any

import numpy as np
import torch
import triton.language as tl
from resharder.converters.geometry.layout import Layout, Piece, Range, TensorSpec, box_index
from resharder.converters.models.tensor_io import read_piece
from resharder.converters.quantization.cast import QuantisedTensors
from resharder.converters.quantization.scheme import Scheme
from resharder.converters.quantization.tiles import CastTiles
from triton.runtime import interpreter

NAME = "w.weight"


def pieces_of(whole: torch.Tensor, transposed: bool) -> tuple[Layout, dict[str, torch.Tensor]]:
    """Runs and interleaved rows, some of them whole tiles and some not."""
    rows = [Range(0, 64), Range(64, 3), Range(67, 40, 2), Range(68, 40, 2)]
    columns = [Range(0, 1024), Range(1024, 70), Range(1094, 6)]
    local, pieces = dict[str, torch.Tensor](), list[Piece]()
    for number, box in enumerate((row, column) for row in rows for column in columns):
        part = whole[box_index(box)]
        local[str(number)] = part.T.contiguous().T if transposed else part.contiguous()
        pieces.append(Piece(NAME, box, str(number), 0, local[str(number)].stride()))
    return Layout({NAME: TensorSpec(NAME, "BF16", tuple(whole.shape))}, tuple(pieces)), local


def the_cast_is_that_of_the_host(scheme: Scheme, transposed: bool) -> None:
    whole = torch.randn(147, 1100, generator=torch.Generator().manual_seed(1))
    whole *= torch.logspace(-8, 4, 147)[:, None]
    whole[100] = 0
    layout, local = pieces_of(whole.bfloat16(), transposed)
    host, kernels = (QuantisedTensors(layout, local, scheme) for _ in range(2))
    kernels._tiles = CastTiles(kernels.plan, local, torch.device("cpu"))
    for made in (host, kernels):
        made.cast(made.measure()[:0])
    assert torch.equal(host._maxima, kernels._maxima)
    for piece in host.plan.layout.pieces:
        here, there = (read_piece(made.tensors, piece).contiguous().view(torch.uint8) for made in (host, kernels))
        assert torch.equal(here, there), piece


def rounding(convert: Any) -> Any:
    """Triton's interpreter truncates what GPUs round to FP8."""

    def rounded(values: Any, source: Any, target: Any, mode: Any) -> Any:
        if target != tl.float8e4nv:
            return convert(values, source, target, mode)
        return torch.from_numpy(np.ascontiguousarray(values)).to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    return rounded


if __name__ == "__main__":
    interpreter._convert_float = rounding(interpreter._convert_float)
    for scheme, transposed in ((Scheme(), False), (Scheme(channels=True), True)):
        the_cast_is_that_of_the_host(scheme, transposed)
        if int(sys.argv[1]) > 1:
            the_cast_is_that_of_the_host(scheme, not transposed)
