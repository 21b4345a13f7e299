"""Two formats of one training from one publish: READY both, or neither."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.fp8_ranks import Ranks

# isort: split
import torch
from resharder.client import connect
from resharder.client.errors import ConversionError, UsageError
from resharder.client.operator import Operator

from tests.client.models import equal, exported, together
from tests.failpoints.roles import CONFIG, PATIENCE, weights
from tests.support.daemon import Daemon
from tests.support.fp8_reference import FP8, cast
from tests.support.observing import wait_until
from tests.support.remote import Gone, Remote
from tests.support.tiny_hf import tiny_config
from tests.support.variants import sampled
from tests.support.weights import random_weights

FAMILY = tiny_config("qwen3", intermediate_size=320)  # gate, up and down have blocks of both ranks


@pytest.mark.parametrize("direct_wait", sampled([0.0, 30.0], [0.0]))
def test_the_trainers_tensors_and_their_cast_are_ready_together(daemon: Daemon, direct_wait: float, tmp_path: Path) -> None:
    models = f"keep-{direct_wait:g}", f"serve-{direct_wait:g}", f"again-{direct_wait:g}"
    options: dict[str, Any] = {"direct_wait": direct_wait, "also": {models[1]: FP8, models[2]: None}}
    with Ranks(daemon, models[0], FAMILY, 2, {"tp": 2}, **options) as ranks:
        for step in (1, 2):
            made = random_weights(FAMILY, step, torch.bfloat16)
            ranks.fill(made)
            first, second = together(lambda rank, step=step: ranks.publishers[rank].publish(step), 2)
            assert first.also.keys() == second.also.keys() == set(models[1:])
            first.wait_ready(60)
            assert {handle.progress().state for handle in first.also.values()} == {"READY"}
            found = [
                exported(daemon.endpoint, h.name, tmp_path / f"{step}-{i}") for i, h in enumerate([first, *first.also.values()])
            ]
            assert equal(found[0], made)
            assert equal(found[2], made)
            assert equal(found[1], cast(made, json.loads((tmp_path / f"{step}-1" / "config.json").read_text())))


def test_a_rank_that_cannot_cast_leaves_neither(daemon: Daemon) -> None:
    with Ranks(daemon, "kept", FAMILY, 1, {}, also={"cast": FP8}) as ranks:
        ranks.fill(random_weights(FAMILY, 1, torch.bfloat16))
        ranks.publish(1)
        name = "decoder.layers.1.mlp.linear_fc2.weight"
        dict(ranks.chunks[0][0].named_parameters())[name].data[3, 5] = float("nan")
        with pytest.raises(ConversionError, match="has an infinity or NaN"):
            ranks.publishers[0].publish(2)
        ranks.fill(random_weights(FAMILY, 3, torch.bfloat16))
        ranks.publish(3)
    assert ready(daemon, "kept") == ready(daemon, "cast") == {1, 3}


def ready(daemon: Daemon, model: str) -> set[int]:
    return {step for step, state in states(daemon, model) if state == "READY"}


def states(daemon: Daemon, model: str) -> list[tuple[int, str]]:
    with Operator(daemon.endpoint) as operator:
        return [(version.step, version.state.name) for version in operator.versions(model)]


def test_models_of_the_same_name_and_tensors_given_one_by_one_are_refused() -> None:
    with pytest.raises(UsageError, match="also names 'policy'"):
        connect("127.0.0.1:1", model="policy", rank=0, world_size=1, job="j", also={"policy": FP8})
    with (
        connect("127.0.0.1:1", model="policy", rank=0, world_size=1, job="j", also={"other": None}) as publisher,
        pytest.raises(UsageError, match="one by one are published as one model"),
    ):
        publisher.publish_tensors(1, [])


class Pair:
    """A rank that publishes two models, in a process of its own."""

    preloaded = ("tests.support.fp8_ranks", "tests.failpoints.roles")  # Megatron, which this module needs

    def __init__(self, endpoint: str, job: str) -> None:
        self._model = {name: tensor.clone() for name, tensor in weights(0).items()}
        self._publisher = connect(endpoint, model=f"{job}-a", job=job, rank=0, world_size=1, also={f"{job}-b": None})
        self._publisher.attach(self._model, CONFIG)

    def publish(self, step: int) -> None:
        for name, tensor in weights(step).items():
            self._model[name].copy_(tensor)
        self._publisher.publish(step).wait_ready(PATIENCE)


KILLED = {  # the rank dies while it publishes step 2 -> whether it is READY afterwards
    "deliver.begun@3": False,
    "deliver.seal@3": False,
    "deliver.sealed@3": False,
    "deliver.begin@4": False,
    "deliver.begun@4": False,
    "shared.write@4": False,
    "deliver.seal@4": False,
    "deliver.sealed@4": True,
}


@pytest.mark.full
def test_after_a_kill_of_the_rank_at_any_step_both_versions_are_ready_or_neither() -> None:
    with Daemon(lease_seconds=8) as daemon:
        actors = {point: start(daemon, point) for point in KILLED}
        for actor in actors.values():
            actor.call("publish", 1)
            with pytest.raises(Gone):
                actor.call("publish", 2)
            actor.close()
        for point, complete in KILLED.items():
            for model in (f"{job_of(point)}-a", f"{job_of(point)}-b"):
                wait_until(lambda model=model: "UPLOADING" not in dict(states(daemon, model)).values(), f"{model} is settled")
                assert ready(daemon, model) == ({1, 2} if complete else {1}), point
        again = start(daemon, "deliver.sealed@3", armed=False)
        again.call("publish", 2)
        again.call("publish", 3)
        again.close()
        assert ready(daemon, "deliver.sealed-3-a") == ready(daemon, "deliver.sealed-3-b") == {1, 2, 3}


def job_of(point: str) -> str:
    return point.replace("@", "-")


def start(daemon: Daemon, point: str, armed: bool = True) -> Remote:
    environment = {"RESHARDER_FAILPOINT": f"{point}=kill" if armed else ""}
    return Remote(Pair, daemon.endpoint, job_of(point), environment=environment)
