"""Real models at production layouts, on the meta device: every element of every HF tensor has its place."""

from typing import Any

import pytest

from tests.support import megatron_shim  # noqa: F401

# isort: split
import torch
from resharder.client.tools.check import check
from resharder.converters.models.megatron.worlds import Parallel

from benchmarks import shapes

pytestmark = pytest.mark.compat("layouts")


@pytest.mark.parametrize(
    ("config", "tensors", "gib", "trainer", "options"),
    [
        pytest.param(
            shapes.QWEN3_235B, 36945, 437.9, Parallel(128, tp=4, pp=4, ep=8),
            {"num_layers_in_first_pipeline_stage": 23, "num_layers_in_last_pipeline_stage": 23}, id="Qwen3-235B-A22B",
            marks=pytest.mark.full,
        ),
        pytest.param(
            shapes.DEEPSEEK_V3, 46183, 1275.0, Parallel(128, tp=2, pp=4, ep=16),
            {"mtp_num_layers": 1, "num_layers_in_first_pipeline_stage": 18, "num_layers_in_last_pipeline_stage": 13},
            id="DeepSeek-V3 with MTP", marks=pytest.mark.full,
        ),
        pytest.param(
            shapes.KIMI_K2, 69975, 1911.8, Parallel(128, tp=1, pp=4, ep=16), {"num_layers_in_first_pipeline_stage": 16},
            id="Kimi-K2", marks=pytest.mark.full,
        ),
        pytest.param(
            shapes.GLM_4_5, 44691, 667.5, Parallel(64, tp=4, pp=4, ep=8), {"mtp_num_layers": 1}, id="GLM-4.5 with MTP",
            marks=pytest.mark.full,
        ),
        pytest.param(
            shapes.GPT_OSS_120B, 615, 217.6, Parallel(32, tp=1, pp=4, ep=8), {}, id="gpt-oss-120b", marks=pytest.mark.full,
        ),
        pytest.param(
            shapes.GPT_OSS_120B
            | {"num_hidden_layers": 24, "layer_types": shapes.GPT_OSS_120B["layer_types"][:24], "num_local_experts": 32},
            411, 39.0, Parallel(4, tp=1, pp=2, ep=2), {}, id="gpt-oss-20b",
        ),
    ],
)  # fmt: skip
def test_a_real_model_tiles_exactly(
    config: dict[str, Any], tensors: int, gib: float, trainer: Parallel, options: dict[str, Any]
) -> None:
    report = check(config, trainer, options={"spec": "te", "vocab_multiple": 128} | options)
    assert report.tensors == tensors
    assert report.size / 2**30 == pytest.approx(gib, abs=0.1)
    assert report.sends is not None
    assert len(report.sends.bytes_each) == trainer.world
    assert report.sends.total == report.size
    assert torch.cuda.is_available() or not torch.cuda.is_initialized()
