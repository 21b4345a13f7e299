"""Weights that ranks keep in FP8: published from their memory where blocks agree, else cast from the master weights.

TransformerEngine needs CUDA. Its tensor class is `tests/support/fake_te`'s, with its attributes, layouts and formula.
"""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from tests.support import fakepg
from tests.support.fp8_optimizer import put_in_fp8, wrap_divided
from tests.support.fp8_ranks import Ranks
from tests.support.megatron_models import build_model, fill_from_hf

# isort: split
import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from resharder.converters.errors import UnsupportedModel
from resharder.converters.quantization.scheme import CHANNELS
from transformer_engine.pytorch.tensor import DType, Float8BlockwiseQTensor, quantized

from tests.client.models import equal, exported
from tests.support.daemon import Daemon
from tests.support.fp8_reference import FP8, cast
from tests.support.tiny_hf import tiny_config
from tests.support.variants import sampled
from tests.support.weights import random_weights

pytestmark = pytest.mark.compat("publish")

AGREE = {"head_dim": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 512}
HEADS_OF_64 = AGREE | {"head_dim": 64}
NARROW = AGREE | {"intermediate_size": 320}  # 160 rows for each rank
Found = dict[str, torch.Tensor]


class FP8Ranks(Ranks):
    """Two ranks whose linear layers are in FP8, as under Megatron's fp8_param_gather, with master weights beside them."""

    def build(self) -> list[Any]:
        chunks = super().build()
        for weight in put_in_fp8(chunks):
            weight.main_param = torch.empty(weight.numel())
        return chunks

    def fill(self, weights: Found) -> None:
        for rank, chunks in enumerate(self.chunks):
            fakepg.enter(rank, self.world)
            plain = build_model(self.config, **self.layout, dtype=torch.bfloat16)
            fill_from_hf(plain, self.config, weights)
            for chunk, filled in zip(chunks, plain, strict=True):
                values = dict(filled.named_parameters())
                for name, parameter in getattr(chunk, "module", chunk).named_parameters():
                    if isinstance(parameter, Float8BlockwiseQTensor):
                        parameter.quantize_(values[name])
                        if parameter.main_param is not None:
                            part = getattr(parameter, "part", slice(None))
                            parameter.main_param.copy_(values[name].detach().flatten()[part])
                    else:
                        parameter.data.copy_(values[name])


class DividedRanks(FP8Ranks):
    """The same in Megatron's DDP, whose data-parallel ranks divide the master weights as a distributed optimizer does."""

    def build(self) -> list[Any]:
        wrapped = wrap_divided(super().build())
        for buffer in (each for wrapper in wrapped for each in (*wrapper.buffers, *wrapper.expert_parallel_buffers)):
            for parameter in buffer.params:
                parameter.main_param, parameter.main_param_sharded = None, True
            (buckets,) = DistributedOptimizer._build_gbuf_range_map(buffer).values()
            for parameter, found in (each for bucket in buckets for each in bucket["param_map"].items()):
                if isinstance(parameter, Float8BlockwiseQTensor):
                    parameter.part = slice(found["param"].start, found["param"].end)
                    parameter.main_param = torch.empty(found["param"].size)
        return wrapped


def as_in_the_trainer(name: str, weight: torch.Tensor) -> Found:
    data, factors = quantized(weight)
    return {name: data, f"{name}_scale_inv": factors}


@pytest.mark.parametrize(
    ("case", "changes", "recast"),
    [
        pytest.param("agree", AGREE, (), marks=pytest.mark.full),
        pytest.param("heads-of-64", HEADS_OF_64, ("k_proj", "v_proj"), marks=pytest.mark.full),
        ("narrow", NARROW, ("gate", "up", "down")),
    ],
)
def test_fp8_weights_are_handed_over_as_they_are_or_cast_from_the_master_weights_where_blocks_differ(
    daemon: Daemon, case: str, changes: dict[str, Any], recast: tuple[str, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logger = "resharder.client.trainer.quantised"
    caplog.set_level(logging.INFO, logger)
    config = tiny_config("qwen3", hidden_size=256, **changes)
    with FP8Ranks(daemon, case, config, 2, {"tp": 2, "spec": "te"}, quantization_config=FP8) as ranks:
        said = [record.getMessage() for record in caplog.records if record.name == logger]
        assert bool(said) == bool(recast)
        assert all("cast from master weights" in message for message in said)
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


@pytest.mark.full
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


DIVIDED: dict[str, tuple[str, dict[str, Any], dict[str, Any], int]] = {
    "rows": ("qwen3", FP8, {"tp": 2}, 6),
    "experts": ("qwen3_moe", FP8, {"ep": 2}, 4),
    "replicas": ("deepseek_v3", CHANNELS, {"tp": 2}, 4),  # down-projections are whole on both ranks
}


@pytest.mark.parametrize("case", sampled(DIVIDED, ["replicas"]))
def test_ranks_of_a_distributed_optimizer_cast_and_deliver_the_parts_of_the_master_weights_that_they_have(
    daemon: Daemon, case: str, tmp_path: Path
) -> None:
    family, scheme, layout, world = DIVIDED[case]
    config = tiny_config(family, **NARROW | HEADS_OF_64 | {"hidden_size": 256} if family == "qwen3" else {})
    weights = random_weights(config, 1, torch.bfloat16)
    found = []
    for kind, ranks_of in ((DividedRanks, world), (FP8Ranks, 2)):
        model = f"divided-{kind.__name__}-{case}"
        with kind(daemon, model, config, ranks_of, layout | {"spec": "te"}, quantization_config=scheme) as ranks:
            ranks.fill(weights)
            found.append(exported(daemon.endpoint, f"models/{model}/versions/{ranks.publish(1)}", tmp_path / model))
    assert equal(*found)


def part_of_a_master(weight: Any) -> None:
    weight.main_param, weight.main_param_sharded = weight.main_param[:100], True


def columns_alone(weight: Any) -> None:
    weight._columnwise_data, weight._rowwise_data = weight._rowwise_data, None


REFUSED = {
    "no master": (
        lambda weight: vars(weight).pop("main_param"),
        r"whole master weight \(main_param\) .* found none: attach once",
    ),
    "a part of one": (part_of_a_master, r"whole master weight .* found torch\.float32 \[100\]: .* in Megatron's DDP"),
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


@pytest.mark.parametrize(("master", "found"), [(None, "none"), (torch.empty(7), r"torch\.float32 \[7\]")])
def test_a_part_of_a_master_weight_that_is_not_as_long_as_ddp_divides_it_is_refused_by_name(
    daemon: Daemon, master: torch.Tensor | None, found: str
) -> None:
    class Changed(DividedRanks):
        def build(self) -> list[Any]:
            chunks = super().build()
            chunks[0].module.decoder.layers[0].mlp.linear_fc1.weight.main_param = master
            return chunks

    config = tiny_config("qwen3", hidden_size=256, **NARROW, num_hidden_layers=2)
    expected = rf"fc1\.weight: expected a master weight of \d+ elements to cast, .* found {found}: attach once"
    with pytest.raises(UnsupportedModel, match=expected):
        Changed(daemon, "part", config, 2, {"spec": "te"}, quantization_config=FP8)


def test_without_a_quantization_config_fp8_weights_are_refused(daemon: Daemon) -> None:
    with pytest.raises(UnsupportedModel, match=r"found Float8BlockwiseQTensor: .* connect\(quantization_config=…\)"):
        FP8Ranks(daemon, "plain", tiny_config("qwen3", hidden_size=256, **AGREE), 2, {"tp": 2, "spec": "te"})
