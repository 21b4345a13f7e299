"""Ranks that cast to FP8: what they deliver is one cast of the whole tensors, whatever the layout.

The ranks' models are real ones, each built as the rank that it is; they publish side by side in this process.
"""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.fp8_ranks import Ranks

# isort: split
import torch
from resharder.client.errors import Conflict, ConversionError, UsageError, VersionAborted
from resharder.client.operator import Operator
from resharder.client.trainer.connect import DeclaredTensor, connect
from resharder.client.trainer.delivery import DEFAULT_WAIT
from resharder.client.trainer.quantised import QuantisedModel
from resharder.converters.quantization.cast import QuantisedTensors
from transformers import AutoConfig

from tests.client.models import equal, exported
from tests.support.daemon import Daemon
from tests.support.fp8_reference import FP8, cast
from tests.support.simulated_server import SimulatedServer
from tests.support.tiny_hf import tiny_config
from tests.support.variants import sampled
from tests.support.weights import random_weights

CASES: dict[str, tuple[str, dict[str, Any], int, dict[str, Any]]] = {  # sizes whose parts are not whole blocks
    "dense": ("qwen3", {"intermediate_size": 640, "head_dim": 48}, 4, {"tp": 4}),
    "dense-on-one-rank": ("qwen3", {}, 1, {}),
    "fused": ("glm4", {"intermediate_size": 320}, 4, {"tp": 2, "pp": 2}),
    "experts": ("qwen3_moe", {"moe_intermediate_size": 160}, 4, {"tp": 2, "ep": 2}),
    "experts-of-several-ranks": ("qwen3_moe", {"moe_intermediate_size": 160}, 4, {"tp": 4, "ep": 1, "etp": 4}),
    "replicas": ("qwen3_moe", {"num_key_value_heads": 2}, 4, {"tp": 2, "ep": 2, "etp": 1}),
    "latent": ("deepseek_v3", {"moe_intermediate_size": 192}, 4, {"tp": 2, "pp": 2, "ep": 2, "spec": "te"}),
    "gated-delta": ("qwen3_next", {}, 2, {"tp": 2, "spec": "te"}),
}


def weights_of(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Weights whose blocks differ in size, some of zeros, some of tiny values."""
    made = random_weights(config, seed, torch.bfloat16)
    for name in made:  # layers for multi-token prediction have copies
        for copy, source in (
            (".embed_tokens.weight", "model.embed_tokens.weight"),
            (".shared_head.head.weight", "lm_head.weight"),
        ):
            made[name] = made[source].clone() if name.endswith(copy) else made[name]
    for tensor in made.values():
        if tensor.dim() == 2:
            tensor.mul_(torch.linspace(0.1, 9, tensor.shape[0])[:, None]).mul_(torch.linspace(1, 3, tensor.shape[1])[None, :])
            tensor[:140, :130] *= 1e-6
            tensor[130:135] = 0
    return {
        name: tensor.float() if name.endswith("e_score_correction_bias") else tensor for name, tensor in made.items()
    }  # as routers have it


@pytest.mark.parametrize("case", sampled(CASES, ["dense", "experts-of-several-ranks", "latent"]))
def test_ranks_deliver_one_cast_of_the_whole_tensors(daemon: Daemon, case: str, tmp_path: Path) -> None:
    family, changes, world, layout = CASES[case]
    config = tiny_config(family, **changes)
    with Ranks(daemon, case, config, world, layout, quantization_config=FP8) as ranks:
        for step in (1, 2):
            weights = weights_of(config, step)
            ranks.fill(weights)
            number = ranks.publish(step)
            found = exported(daemon.endpoint, f"models/{case}/versions/{number}", tmp_path / str(step))
            written = json.loads((tmp_path / str(step) / "config.json").read_text())
            assert equal(found, cast(weights, written))
            assert FP8.items() <= AutoConfig.from_pretrained(tmp_path / str(step)).quantization_config.items()
            assert sum(tensor.dtype == torch.float8_e4m3fn for tensor in found.values()) >= 10


TWO = ("qwen3", {"intermediate_size": 320}, 2, {"tp": 2})  # gate, up and down have blocks of both ranks


def two(daemon: Daemon, model: str, **options: Any) -> Ranks:
    family, changes, world, layout = TWO
    ranks = Ranks(daemon, model, tiny_config(family, **changes), world, layout, quantization_config=FP8, **options)
    ranks.fill(weights_of(ranks.config, 1))
    return ranks


FAULTS = {
    "a maximum that ranks did not exchange": (
        QuantisedModel,
        "_exchanged",
        lambda self, version, measured: self._cast._at(self._cast.plan.received.at),
    ),
    "scales left as they were": (QuantisedTensors, "_put_scales", lambda self, scales: None),
    "scales of another block": (
        QuantisedTensors,
        "_put_scales",
        lambda self, scales, put=QuantisedTensors._put_scales: put(self, scales.roll(1)),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_cast_differs_from_one_cast_of_the_whole(
    daemon: Daemon, fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = fault.replace(" ", "-")
    with two(daemon, model) as ranks:
        ranks.publish(1)
        ranks.fill(weights := weights_of(ranks.config, 2))
        monkeypatch.setattr(*FAULTS[fault])
        number = ranks.publish(2)
    found = exported(daemon.endpoint, f"models/{model}/versions/{number}", tmp_path / "out")
    assert not equal(found, cast(weights, json.loads((tmp_path / "out" / "config.json").read_text())))


class WithFrozenLayer(Ranks):
    """Ranks that train all but the first layer."""

    def build(self) -> list[Any]:
        chunks = super().build()
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                parameter.requires_grad_("layers.0." not in name)
        return chunks


def test_of_frozen_matrices_the_cast_and_its_scales_are_sent_once(daemon: Daemon, tmp_path: Path) -> None:
    """Both ranks have a part of some of their blocks."""
    family, changes, world, layout = TWO
    config = tiny_config(family, **changes)
    frozen = {name: tensor for name, tensor in weights_of(config, 1).items() if ".layers.0." in name}
    with (
        WithFrozenLayer(daemon, "frozen", config, world, layout, quantization_config=FP8) as ranks,
        Operator(daemon.endpoint) as operator,
    ):

        def published(step: int) -> tuple[dict[str, torch.Tensor], int]:
            ranks.fill(weights := weights_of(config, step) | frozen)
            number = ranks.publish(step)
            found = exported(daemon.endpoint, f"models/frozen/versions/{number}", tmp_path / str(step))
            assert equal(found, cast(weights, json.loads((tmp_path / str(step) / "config.json").read_text())))
            version = operator.version(number, model="frozen")
            return found, version.size_bytes - version.sent_bytes

        published(1)
        found, left = published(2)
        still = {name: tensor for name, tensor in found.items() if ".layers.0." in name}
        assert {tensor.dtype for tensor in still.values()} == {torch.float8_e4m3fn, torch.float32, torch.bfloat16}
        assert left == sum(tensor.nbytes for tensor in still.values())
        name = "model.layers.0.mlp.down_proj.weight"
        frozen[name] = frozen[name].clone()
        frozen[name][-1, 200] *= 1000  # of the second rank, in a block of both
        _, left = published(3)
        assert left == 0
        _, left = published(4)
        assert left == sum(tensor.nbytes for tensor in still.values())


@pytest.mark.parametrize("wait", [None, 0], ids=["default", "off"])
def test_a_trainer_that_casts_is_not_held_for_servers_that_take_ready_versions(
    daemon: Daemon, wait: float | None, tmp_path: Path
) -> None:
    model = f"held-{wait}"
    with two(daemon, model, direct_wait=wait) as ranks:
        ranks.publish(1)
        with SimulatedServer(daemon, model, model=model):
            held = []
            for step in (2, 3, 4):
                ranks.fill(weights := weights_of(ranks.config, step))
                began = time.monotonic()
                number = ranks.publish(step)
                held.append(time.monotonic() - began)
            assert min(held) < DEFAULT_WAIT, "each would last longer"
    found = exported(daemon.endpoint, f"models/{model}/versions/{number}", tmp_path / "out")
    assert equal(found, cast(weights, json.loads((tmp_path / "out" / "config.json").read_text())))


def test_a_rank_that_repeats_a_step_gets_its_version_again(daemon: Daemon) -> None:
    with two(daemon, "again") as ranks:
        number = ranks.publish(1)
        assert ranks.publishers[1].publish(1).version == number


def test_a_rank_with_other_weights_for_a_step_is_refused(daemon: Daemon) -> None:
    with two(daemon, "other") as ranks:
        ranks.publish(1)
        ranks.fill(weights_of(ranks.config, 2))
        with pytest.raises(Conflict, match="brought other maxima"):
            ranks.publishers[1].publish(1)


def test_weights_that_are_not_finite_are_refused_by_name_and_end_the_version_for_all_ranks(daemon: Daemon) -> None:
    with two(daemon, "infinite") as ranks, ThreadPoolExecutor(2) as pool:
        name = "decoder.layers.1.mlp.linear_fc2.weight"
        dict(ranks.chunks[1][0].named_parameters())[name].data[3, 5] = float("nan")
        publishing = [pool.submit(publisher.publish, 1) for publisher in ranks.publishers]
        with pytest.raises(ConversionError, match=r"model.layers.1.mlp.down_proj.weight has an infinity or NaN"):
            publishing[1].result()
        with pytest.raises(VersionAborted, match=r"rank 1: .*model.layers.1.mlp.down_proj.weight"):
            publishing[0].result()


@pytest.mark.full
def test_a_rank_that_dies_before_it_brings_its_maxima_holds_no_other_up() -> None:
    with Daemon(lease_seconds=8) as daemon, two(daemon, "dead") as ranks:
        ranks.publish(1)
        ranks.publishers[1].close()
        with pytest.raises(VersionAborted, match="rank 1 was silent"):
            ranks.publishers[0].publish(2)


def test_tensors_given_one_by_one_are_not_cast() -> None:
    publisher = connect("127.0.0.1:1", model="policy", rank=0, world_size=1, job="j", quantization_config=FP8)
    with publisher, pytest.raises(UsageError, match="quantization_config needs attach"):
        publisher.attach_tensors([DeclaredTensor("a.weight", "BF16", (128, 128))])


def test_a_format_that_is_not_supported_is_refused_with_those_that_are() -> None:
    with pytest.raises(UsageError, match=r"expected \{'quant_method': 'fp8'.*got \{'quant_method': 'awq'\}"):
        connect("127.0.0.1:1", model="policy", quantization_config={"quant_method": "awq"})


def test_tensors_that_are_quantised_already_pass_bit_for_bit_with_their_config(daemon: Daemon, tmp_path: Path) -> None:
    """MXFP8: elements in F8_E4M3 and a power of two for each 32; MXFP4: two elements in each byte."""
    generator = torch.Generator().manual_seed(1)
    config = tiny_config("qwen3") | {"quantization_config": {"quant_method": "mxfp8"}}
    shapes = {"a.weight": (64, 64), "a.weight_scale": (64, 2), "b.blocks": (4, 8, 2, 16), "b.scales": (4, 8, 2)}
    bits = {name: torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8) for name, shape in shapes.items()}
    kinds = {"a.weight": torch.float8_e4m3fn, "a.weight_scale": torch.float8_e8m0fnu}
    tensors = {name: tensor.view(kinds.get(name, torch.uint8)) for name, tensor in bits.items()}
    with connect(daemon.endpoint, model="as-it-is", job="j", rank=0, world_size=1, config=config) as publisher:
        handle = publisher.publish_tensors(1, tensors.items())
        handle.wait_ready(60)
    found = exported(daemon.endpoint, handle.name, tmp_path / "out")
    assert {name: tensor.dtype for name, tensor in found.items()} == {name: tensor.dtype for name, tensor in tensors.items()}
    assert all(torch.equal(found[name].view(torch.uint8), tensor) for name, tensor in bits.items())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"] == {"quant_method": "mxfp8"}
