"""What a rank's `attach` and `publish` say no to, on a Megatron model in this process and a real daemon."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import fakepg
from tests.support.megatron_models import build_model, fill_from_hf, wrap_ddp

# isort: split
import torch
from resharder.client.errors import StaleParameters
from resharder.client.operator import Operator
from resharder.client.trainer.connect import Publisher, connect
from resharder.converters.errors import LayoutError, UnsupportedModel
from transformer_engine.pytorch.float8_tensor import Float8Tensor

from tests.client.models import equal, exported
from tests.support.daemon import Daemon
from tests.support.observing import versions
from tests.support.tiny_hf import save_tokenizer, tiny_config
from tests.support.weights import random_weights

pytestmark = pytest.mark.compat("refusals")

CONFIG = tiny_config("qwen3")


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    fakepg.enter(0, 1)  # alone, because no group of more ranks moves anything here
    with Daemon() as running:
        yield running
    fakepg.leave()


@pytest.fixture
def publisher(daemon: Daemon) -> Iterator[Publisher]:
    with connect(daemon.endpoint, model="policy", job="j", rank=0, world_size=1) as connected:
        yield connected


def test_stale_parameters_are_refused_by_name_of_the_call_that_mends_it_and_gathered_with_sync(
    daemon: Daemon, publisher: Publisher, tmp_path: Path
) -> None:
    (chunk,) = build_model(CONFIG, spec="te")
    weights = random_weights(CONFIG, 1)
    fill_from_hf([chunk], CONFIG, weights)
    wrapped: Any = wrap_ddp([chunk], overlap=True)[0]
    publisher.attach(wrapped, CONFIG)
    for group in wrapped.bucket_groups:
        group.start_grad_sync()
    wrapped.finish_grad_sync()

    with pytest.raises(
        StaleParameters, match=r"0\.\S+.*start_param_sync\(force_sync=True\).*publish\(step, sync=True\)"
    ) as caught:
        publisher.publish(1)
    assert str(caught.value).startswith(f"{len(list(chunk.parameters()))} parameters are older")
    assert versions(daemon) == {}, "nothing was begun"

    publisher.publish(1, sync=True).wait_ready(60)
    assert equal(exported(daemon.endpoint, "latest", tmp_path / "out"), weights)
    publisher.publish(2).wait_ready(60)  # and they are not stale any more


def test_fp8_parameters_are_refused_before_anything_is_registered(daemon: Daemon, publisher: Publisher) -> None:
    (chunk,) = build_model(CONFIG, spec="te")
    linear: Any = chunk.decoder.layers[0].mlp.linear_fc2
    linear.weight = torch.nn.Parameter(linear.weight.detach().as_subclass(Float8Tensor))
    with pytest.raises(UnsupportedModel, match=r"linear_fc2\.weight: .* Float8Tensor: quantised \(FP8\).* not supported"):
        publisher.attach(chunk, CONFIG)
    assert publisher.epoch == 0
    with Operator(daemon.endpoint) as operator:
        assert operator.fleets() == [], "the daemon knows of no model"


def test_a_tokenizer_with_ids_in_what_the_config_makes_padding_is_refused_with_the_numbers(
    daemon: Daemon, publisher: Publisher, tmp_path: Path
) -> None:
    chunks = build_model(tiny_config("qwen3", vocab_size=1013), vocab_multiple=128)
    save_tokenizer(tmp_path, 1013)
    numbers = r"ids up to 1012, the config has vocab_size=1003, the model has 1024 rows.* rows 1003 to 1012 as padding"
    with pytest.raises(LayoutError, match=numbers):
        publisher.attach(chunks, CONFIG, tmp_path)
    assert publisher.epoch == 0
    publisher.attach(chunks, CONFIG | {"vocab_size": 1013}, tmp_path)
