"""Weights that ranks keep in FP8: published from their memory where blocks agree, else cast from the master weights.

TransformerEngine needs CUDA. Its tensor class is `tests/support/fake_te`'s, with its attributes, layouts and formula.
"""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import fakepg
from tests.support.fp8_ranks import Ranks
from tests.support.megatron_models import build_model, fill_from_hf

# isort: split
import torch
from resharder.converters.errors import UnsupportedModel
from resharder.converters.quantization.scheme import CHANNELS
from transformer_engine.pytorch.tensor import DType, Float8BlockwiseQTensor, quantized

from tests.client.models import equal, exported
from tests.support.daemon import Daemon
from tests.support.fp8_reference import FP8, cast
from tests.support.tiny_hf import tiny_config
from tests.support.weights import random_weights

AGREE = {"head_dim": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 512}
HEADS_OF_64 = AGREE | {"head_dim": 64}
NARROW = AGREE | {"intermediate_size": 320}  # 160 rows for each rank
Found = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon() as running:
        yield running


class FP8Ranks(Ranks):
    """Two ranks whose linear layers are in FP8, as under Megatron's fp8_param_gather, with master weights beside them."""

    def build(self) -> list[Any]:
        chunks = super().build()
        for chunk in chunks:
            for name, module in list(chunk.named_modules()):
                weight = getattr(module, "weight", None)
                if ".linear_" in name and weight is not None and weight.dim() == 2:
                    module.weight = torch.nn.Parameter(Float8BlockwiseQTensor(weight.detach()), requires_grad=False)
                    module.weight.main_param = torch.empty(weight.numel())
        return chunks

    def fill(self, weights: Found) -> None:
        for rank, chunks in enumerate(self.chunks):
            fakepg.enter(rank, self.world)
            plain = build_model(self.config, **self.layout, dtype=torch.bfloat16)
            fill_from_hf(plain, self.config, weights)
            for chunk, filled in zip(chunks, plain, strict=True):
                values = dict(filled.named_parameters())
                for name, parameter in chunk.named_parameters():
                    if isinstance(parameter, Float8BlockwiseQTensor):
                        parameter.quantize_(values[name])
                        parameter.main_param.copy_(values[name].detach().flatten())
                    else:
                        parameter.data.copy_(values[name])


def as_in_the_trainer(name: str, weight: torch.Tensor) -> Found:
    data, factors = quantized(weight)
    return {name: data, f"{name}_scale_inv": factors}


@pytest.mark.parametrize(
    ("case", "changes", "recast"),
    [("agree", AGREE, ()), ("heads-of-64", HEADS_OF_64, ("k_proj", "v_proj")), ("narrow", NARROW, ("gate", "up", "down"))],
)
def test_fp8_weights_are_handed_over_as_they_are_or_cast_from_the_master_weights_where_blocks_differ(
    daemon: Daemon, case: str, changes: dict[str, Any], recast: tuple[str, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "resharder.client.trainer.quantised")
    config = tiny_config("qwen3", hidden_size=256, **changes)
    with FP8Ranks(daemon, case, config, 2, {"tp": 2, "spec": "te"}, quantization_config=FP8) as ranks:
        assert bool(caplog.records) == bool(recast)
        assert all("cast from master weights" in record.getMessage() for record in caplog.records)
        for step in (1, 2):
            weights = random_weights(config, step, torch.bfloat16)
            ranks.fill(weights)
            number = ranks.publish(step)
            found = exported(daemon.endpoint, f"models/{case}/versions/{number}", tmp_path / str(step))
            expected = cast(weights, json.loads((tmp_path / str(step) / "config.json").read_text()))
            taken = [name for name in weights if name.endswith("_proj.weight") and not any(part in name for part in recast)]
            for name in taken:
                expected |= as_in_the_trainer(name, weights[name])
            assert taken
            assert equal(found, expected)


def test_by_channel_all_fp8_weights_are_cast_from_the_master_weights(daemon: Daemon, tmp_path: Path) -> None:
    config = tiny_config("qwen3", hidden_size=256, **AGREE)
    weights = random_weights(config, 1, torch.bfloat16)
    found = []
    for kind in (FP8Ranks, Ranks):
        model = f"channels-{kind.__name__}"
        with kind(daemon, model, config, 2, {"tp": 2, "spec": "te"}, quantization_config=CHANNELS) as ranks:
            ranks.fill(weights)
            found.append(exported(daemon.endpoint, f"models/{model}/versions/{ranks.publish(1)}", tmp_path / model))
    assert equal(*found)


def part_of_a_master(weight: Any) -> None:
    weight.main_param = weight.main_param[:100]


def columns_alone(weight: Any) -> None:
    weight._columnwise_data, weight._rowwise_data = weight._rowwise_data, None


REFUSED = {
    "no master": (
        lambda weight: vars(weight).pop("main_param"),
        r"whole master weight \(main_param\) .* found none: attach once",
    ),
    "a part of one": (part_of_a_master, r"whole master weight .* found torch\.float32 \[100\]: .* data-parallel ranks"),
    "rows of 128": (
        lambda weight: setattr(weight, "_is_2D_scaled", False),
        "blocks of 128 by 128, found kFloat8E4M3, rows of 128",
    ),
    "E5M2": (lambda weight: setattr(weight, "_fp8_dtype", DType.kFloat8E5M2), "found kFloat8E5M2, 128 by 128"),
    "columns alone": (columns_alone, r"expected rowwise FP8 data of .* found none"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_fp8_weights_that_cannot_be_taken_are_refused_by_name(daemon: Daemon, why: str) -> None:
    change, message = REFUSED[why]

    class Changed(FP8Ranks):
        def build(self) -> list[Any]:
            chunks = super().build()
            change(chunks[0].decoder.layers[0].mlp.linear_fc1.weight)
            return chunks

    config = tiny_config("qwen3", hidden_size=256, **NARROW | ({"intermediate_size": 512} if why == "columns alone" else {}))
    with pytest.raises(UnsupportedModel, match=r"0\.decoder\.layers\.0\.mlp\.linear_fc1\.weight: .*" + message):
        Changed(daemon, "refused", config, 2, {"tp": 2, "spec": "te"}, quantization_config=FP8)


def test_without_a_quantization_config_fp8_weights_are_refused(daemon: Daemon) -> None:
    with pytest.raises(UnsupportedModel, match=r"found Float8BlockwiseQTensor: .* connect\(quantization_config=…\)"):
        FP8Ranks(daemon, "plain", tiny_config("qwen3", hidden_size=256, **AGREE), 2, {"tp": 2, "spec": "te"})
