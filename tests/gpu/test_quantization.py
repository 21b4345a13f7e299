"""Casts to FP8 blocks on a GPU give the bytes of those on a CPU."""

import pytest
import torch
from resharder.converters.quantization.cast import quantise_whole
from resharder.converters.quantization.scheme import Scheme

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_cast_on_a_gpu_is_that_of_a_cpu_bit_for_bit(dtype: torch.dtype) -> None:
    values = torch.randn(4096 + 37, 3072 + 5, generator=torch.Generator().manual_seed(1))
    values[:130] *= torch.logspace(-8, 4, 130)[:, None]  # small and large blocks
    values[256:384, 128:256] = 0
    whole = values.to(dtype)
    for here, there in zip(
        quantise_whole("w.weight", whole, Scheme()), quantise_whole("w.weight", whole.cuda(), Scheme()), strict=True
    ):
        assert torch.equal(here.view(torch.uint8), there.cpu().view(torch.uint8))
